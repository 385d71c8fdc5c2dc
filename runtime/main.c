#include "cli/args.h"
#include "cli/cli.h"

#include <stdio.h>
#include <string.h>

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
} command[] = {
    {"serve", dn_cmd_serve}, {"chat", dn_cmd_chat},     {"generate", dn_cmd_generate}, {"bench", dn_cmd_bench},
    {"show", dn_cmd_show},   {"policy", dn_cmd_policy}, {"key", dn_cmd_key},           {"doctor", dn_cmd_doctor},
    {"tiny", dn_cmd_tiny},   {"help", dn_cmd_help},
};
enum { N_COMMANDS = sizeof command / sizeof *command };

int main(int argc, char **argv)
{
    if (argc < 2 || strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)
        return dn_cmd_help(1, argv);
    if (strcmp(argv[1], "--version") == 0) {
        puts("dunlin " DN_VERSION);
        return DN_EXIT_OK;
    }
    const char *known[N_COMMANDS];
    for (size_t i = 0; i < N_COMMANDS; i++) {
        known[i] = command[i].name;
        if (strcmp(argv[1], command[i].name) == 0)
            return command[i].run(argc - 1, argv + 1);
    }
    const char *near = dn_nearest(argv[1], known, N_COMMANDS);
    fprintf(stderr, "dunlin: unknown command \"%s\"%s%s%s; dunlin help lists them\n", argv[1],
            near ? " (did you mean \"" : "", near ? near : "", near ? "\"?)" : "");
    return DN_EXIT_USAGE;
}
