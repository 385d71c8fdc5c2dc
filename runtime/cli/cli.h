/* The subcommands. Each takes its own argv (argv[0] is its name) and returns an exit code (args.h): 0 done, 1 failed, 2
 * usage or configuration, 3 not ready or unreachable. stdout is the answer, stderr the chatter.
 */
#ifndef DN_CLI_CLI_H
#define DN_CLI_CLI_H

int dn_cmd_serve(int argc, char **argv);
int dn_cmd_chat(int argc, char **argv);
int dn_cmd_generate(int argc, char **argv);
int dn_cmd_bench(int argc, char **argv);
int dn_cmd_show(int argc, char **argv);
int dn_cmd_policy(int argc, char **argv);
int dn_cmd_key(int argc, char **argv);
int dn_cmd_doctor(int argc, char **argv);
int dn_cmd_tiny(int argc, char **argv);
int dn_cmd_help(int argc, char **argv);

#endif
