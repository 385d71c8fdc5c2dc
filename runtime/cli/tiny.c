#include "engine/tiny.h"
#include "cli/args.h"
#include "cli/cli.h"

#include <stdio.h>

int dn_cmd_tiny(int argc, char **argv)
{
    static const char usage[] =
        "dunlin tiny FILE   write the tiny random model that tests use (about 300 kB)\n"
        "\n"
        "It answers with words in no order: it shows that the machinery works and knows nothing.\n";
    const struct dn_flag flag[] = {{NULL, NULL, NULL, NULL, NULL}};
    struct dn_args args;
    struct dn_err err = {0};
    bool help;
    if (dn_args_parse(argc, argv, usage, flag, &args, &help, &err) == 0) {
        if (help)
            return DN_EXIT_OK;
        if (args.n_positional == 1) {
            if (dn_tiny_write(args.positional[0], &err) == 0)
                return DN_EXIT_OK;
            fprintf(stderr, "dunlin: %s\n", err.text);
            return DN_EXIT_FAILED;
        }
        dn_err_set(&err, DN_CONFIG, "expected one FILE; dunlin tiny --help");
    }
    fprintf(stderr, "dunlin: %s\n", err.text);
    return DN_EXIT_USAGE;
}
