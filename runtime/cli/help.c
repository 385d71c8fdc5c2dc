#include "base/err.h"
#include "cli/args.h"
#include "cli/cli.h"
#include "script/conf.h"

#include <stdio.h>
#include <string.h>

static const char overview[] =
    "dunlin " DN_VERSION "  serves open models from one node, OpenAI API over HTTPS and HTTP/2\n"
    "\n"
    "  serve [MODEL]      the node\n"
    "  chat MODEL         talk to a model in this process\n"
    "  generate MODEL     continue a text in this process\n"
    "  bench MODEL        tokens a second; bench decode, prefill and kernels look closer\n"
    "  show MODEL         what a model file holds; show config: every setting\n"
    "  policy WHAT FILES  check policies, show them, explain what they do\n"
    "  doctor             what this machine has for serving\n"
    "  key add NAME       make an API key\n"
    "  tiny FILE          write the tiny model that tests use\n"
    "  help TOPIC         conf, errors\n"
    "\n"
    "Each takes --help. stdout is the answer, stderr the chatter.\n"
    "Exit codes: 0 done, 1 failed, 2 usage or configuration, 3 not ready or unreachable.\n";

static void print_errors(void)
{
    printf("%-24s %-4s %s\n", "CODE", "HTTP", "MEANING");
    for (int c = 1; c < DN_CODE_COUNT; c++) {
        const struct dn_code_info *i = dn_code_info(c);
        printf("%-24s %-4d %s\n", i->code, i->status, i->help);
    }
}

int dn_cmd_help(int argc, char **argv)
{
    if (argc < 2) {
        fputs(overview, stdout);
        return DN_EXIT_OK;
    }
    if (strcmp(argv[1], "errors") == 0) {
        print_errors();
        return DN_EXIT_OK;
    }
    if (strcmp(argv[1], "conf") == 0) {
        struct dn_buf b = {0};
        dn_conf_print_help(&b);
        fputs(dn_buf_str(&b), stdout);
        dn_buf_release(&b);
        return DN_EXIT_OK;
    }
    fprintf(stderr, "dunlin: no help on \"%s\"; there is: conf, errors\n", argv[1]);
    return DN_EXIT_USAGE;
}
