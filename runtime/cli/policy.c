#include "cli/args.h"
#include "cli/cli.h"
#include "policy/check.h"

#include "base/buf.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char usage[] =
    "dunlin policy check FILE...              prove policies as the node would at start; errors with file:line\n"
    "dunlin policy show FILE...               their order, hooks and parameters\n"
    "dunlin policy explain FILE... REQUEST    what they would do with a request: a JSON object or the file of one,\n"
    "                                         {\"tenant\": \"acme\", \"labels\": {\"tier\": \"gold\"}, \"node\": "
    "{\"kv_free_ratio\": 0.1}}\n";

static int explain(const struct dn_policy_config *config, const char *request, struct dn_buf *out)
{
    if (request[0] == '{')
        return dn_policy_explain(config, request, strlen(request), out);
    FILE *f = fopen(request, "r");
    if (!f) {
        dn_buf_printf(out, "%s: cannot be read\n", request);
        return DN_EXIT_USAGE;
    }
    char *text = dn_alloc(1 << 20);
    size_t n = fread(text, 1, 1 << 20, f);
    fclose(f);
    int exit_code = dn_policy_explain(config, text, n, out);
    free(text);
    return exit_code;
}

int dn_cmd_policy(int argc, char **argv)
{
    bool json = false, help;
    const struct dn_flag flag[] = {{"json", NULL, "one JSON document (check, show)", NULL, &json},
                                   {NULL, NULL, NULL, NULL, NULL}};
    struct dn_args args;
    struct dn_err err = {0};
    if (dn_args_parse(argc, argv, usage, flag, &args, &help, &err) != 0) {
        fprintf(stderr, "dunlin: %s\n", err.text);
        return DN_EXIT_USAGE;
    }
    if (help)
        return DN_EXIT_OK;
    const char *what = args.n_positional ? args.positional[0] : "";
    bool is_explain = strcmp(what, "explain") == 0;
    size_t n_files = args.n_positional > 0 ? args.n_positional - 1 : 0;
    if (is_explain && n_files > 0)
        n_files--;
    if (n_files == 0 || n_files > DN_POLICY_MAX ||
        (!is_explain && strcmp(what, "check") != 0 && strcmp(what, "show") != 0)) {
        fprintf(stderr, "dunlin: expected check, show or explain with 1 to %d files; dunlin policy --help\n",
                DN_POLICY_MAX);
        return DN_EXIT_USAGE;
    }
    struct dn_policy_item item[DN_POLICY_MAX] = {0};
    for (size_t i = 0; i < n_files; i++)
        item[i].file = args.positional[1 + i];
    const struct dn_policy_config config = {.item = item, .n_items = n_files};
    struct dn_buf out = {0};
    int exit_code = is_explain                   ? explain(&config, args.positional[args.n_positional - 1], &out)
                    : strcmp(what, "check") == 0 ? dn_policy_check(&config, json, &out)
                                                 : dn_policy_show(&config, json, &out);
    fputs(dn_buf_str(&out), exit_code == DN_EXIT_OK || json ? stdout : stderr);
    dn_buf_release(&out);
    return exit_code;
}
