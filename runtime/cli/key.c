#include "base/buf.h"
#include "base/json.h"
#include "cli/args.h"
#include "cli/cli.h"
#include "script/keys.h"

#include <stdio.h>
#include <string.h>

static void print_table(const struct dn_keys *keys)
{
    printf("%-20s %-20s %s\n", "ID", "TENANT", "LABELS");
    for (size_t i = 0; i < keys->n; i++) {
        const struct dn_key *key = &keys->item[i];
        printf("%-20s %-20s", key->id, key->tenant);
        for (size_t k = 0; k < key->n_labels; k++)
            printf(" %s=%s", key->label[k].name, key->label[k].value ? key->label[k].value : "true");
        putchar('\n');
    }
}

static void print_json(const struct dn_keys *keys)
{
    struct dn_buf b = {0};
    struct dn_json_writer w = dn_json_writer(&b);
    dn_json_begin_array(&w);
    for (size_t i = 0; i < keys->n; i++) {
        const struct dn_key *key = &keys->item[i];
        dn_json_begin_object(&w);
        dn_json_key(&w, "id");
        dn_json_string(&w, key->id);
        dn_json_key(&w, "tenant");
        dn_json_string(&w, key->tenant);
        dn_json_key(&w, "labels");
        dn_json_begin_object(&w);
        for (size_t k = 0; k < key->n_labels; k++) {
            dn_json_key(&w, key->label[k].name);
            dn_json_string(&w, key->label[k].value ? key->label[k].value : "true");
        }
        dn_json_end_object(&w);
        dn_json_end_object(&w);
    }
    dn_json_end_array(&w);
    puts(dn_buf_str(&b));
    dn_buf_release(&b);
}

int dn_cmd_key(int argc, char **argv)
{
    static const char usage[] = "dunlin key add NAME [--tenant T]   make an API key; shown once, never stored\n"
                                "dunlin key list FILE               the keys of a file: id, tenant, labels\n"
                                "\n"
                                "The key goes to stdout with the entry for the keys file (conf/keys.lua) behind it, "
                                "which holds its hash alone.\n";
    const char *tenant = NULL;
    bool json = false;
    const struct dn_flag flag[] = {{"json", NULL, "list: one JSON document", NULL, &json},
                                   {"tenant", "T", "whose key it is [NAME]", &tenant, NULL},
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
        if (json)
            print_json(&keys);
        else
            print_table(&keys);
        dn_keys_release(&keys);
        return DN_EXIT_OK;
    }
    fprintf(stderr, "dunlin: expected add NAME or list FILE; dunlin key --help\n");
    return DN_EXIT_USAGE;
}
