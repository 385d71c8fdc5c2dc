#include "base/buf.h"
#include "cli/args.h"
#include "cli/cli.h"
#include "script/keys.h"

#include <stdio.h>
#include <string.h>

int dn_cmd_key(int argc, char **argv)
{
    static const char usage[] = "dunlin key add NAME [--tenant T]   make an API key; shown once, never stored\n"
                                "dunlin key list FILE               the keys of a file: id, tenant, labels\n"
                                "\n"
                                "The key goes to stdout with the entry for the keys file (conf/keys.lua) behind it, "
                                "which holds its hash alone.\n";
    const char *tenant = NULL;
    const struct dn_flag flag[] = {{"tenant", "T", "whose key it is [NAME]", &tenant, NULL},
                                   {NULL, NULL, NULL, NULL, NULL}};
    struct dn_args args;
    struct dn_err err = {0};
    bool help;
    if (dn_args_parse(argc, argv, usage, flag, &args, &help, &err) != 0) {
        fprintf(stderr, "dunlin: %s\n", err.text);
        return DN_EXIT_USAGE;
    }
    if (help)
        return DN_EXIT_OK;
    if (args.n_positional == 2 && strcmp(args.positional[0], "add") == 0) {
        char key[48];
        struct dn_buf entry = {0};
        dn_keys_new(tenant ? tenant : args.positional[1], args.positional[1], key, &entry);
        printf("%s\n\n%s\n", key, dn_buf_str(&entry));
        fprintf(stderr, "the first line is the key: give it to its user, it is not shown again\n"
                        "the rest goes into the list of the keys file (serve --keys FILE)\n");
        dn_buf_release(&entry);
        explicit_bzero(key, sizeof key);
        return DN_EXIT_OK;
    }
    if (args.n_positional == 2 && strcmp(args.positional[0], "list") == 0) {
        struct dn_keys keys = {0};
        struct dn_conf_errors errors = {0};
        if (dn_keys_read(&keys, args.positional[1], &errors) != 0) {
            struct dn_buf b = {0};
            dn_conf_errors_print(&errors, &b);
            fputs(dn_buf_str(&b), stderr);
            dn_buf_release(&b);
            dn_conf_errors_release(&errors);
            return DN_EXIT_USAGE;
        }
        printf("%-20s %-20s %s\n", "ID", "TENANT", "LABELS");
        for (size_t i = 0; i < keys.n; i++) {
            printf("%-20s %-20s", keys.item[i].id, keys.item[i].tenant);
            for (size_t k = 0; k < keys.item[i].n_labels; k++)
                printf(" %s=%s", keys.item[i].label[k].name,
                       keys.item[i].label[k].value ? keys.item[i].label[k].value : "true");
            putchar('\n');
        }
        dn_keys_release(&keys);
        return DN_EXIT_OK;
    }
    fprintf(stderr, "dunlin: expected add NAME or list FILE; dunlin key --help\n");
    return DN_EXIT_USAGE;
}
