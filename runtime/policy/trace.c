#include "policy/trace.h"

#include <string.h>

#define N(array) (sizeof(array) / sizeof *(array))

const char *dn_policy_hook_name(enum dn_policy_hook h)
{
    static const char *const names[DN_HOOK_COUNT] = {"init", "admit", "route", "finish"};
    return (unsigned)h < N(names) ? names[h] : "unknown";
}

/* Appends text from `from` on as printable ASCII. */
static void make_printable(struct dn_buf *out, size_t from)
{
    for (size_t i = from; i < out->len; i++)
        if (out->data[i] < 32 || out->data[i] > 126)
            out->data[i] = '?';
}

void dn_policy_trace_print(const struct dn_policy_trace *t, const struct dn_decision *d, struct dn_buf *out)
{
    size_t start = out->len;
    for (int f = 0; f < DN_DECIDE_COUNT; f++) {
        enum dn_decision_field field = (enum dn_decision_field)f;
        if (!dn_decision_has(d, field) || f == DN_DECIDE_HEADERS || f == DN_DECIDE_CACHE_SALT)
            continue;
        const char *quote = f == DN_DECIDE_REASON ? "\"" : "";
        dn_buf_printf(out, "%s%s=%s", out->len > start ? " " : "", dn_decision_field_name(field), quote);
        dn_decision_print_field(d, field, out);
        dn_buf_puts(out, quote);
        if (t->by[f][0])
            dn_buf_printf(out, "(%s)", t->by[f]);
    }
    make_printable(out, start);
}

/* The fields of a step: with the value where it is still this policy's, the name alone where a later one changed it. */
static void print_fields(const struct dn_policy_step *s, const struct dn_policy_trace *t, const struct dn_decision *d,
                         struct dn_buf *out)
{
    for (uint32_t left = s->fields; left; left &= left - 1) {
        enum dn_decision_field f = (enum dn_decision_field)__builtin_ctz(left);
        dn_buf_printf(out, "%s%s", left == s->fields ? "" : "  ", dn_decision_field_name(f));
        if (s->is_shadow || strcmp(t->by[f], s->policy) != 0)
            continue;
        dn_buf_putc(out, ' ');
        size_t from = out->len;
        dn_decision_print_field(d, f, out);
        make_printable(out, from);
    }
}

void dn_policy_trace_table(const struct dn_policy_trace *t, const struct dn_decision *d, struct dn_buf *out)
{
    static const char *const outcome[] = {"-", "", "rejected", "failed", "skipped: breaker open"};
    for (unsigned i = 0; i < t->n_steps; i++) {
        const struct dn_policy_step *s = &t->step[i];
        size_t start = out->len;
        dn_buf_printf(out, "%-6s %-14s %s%s", dn_policy_hook_name((enum dn_policy_hook)s->hook), s->policy,
                      s->is_shadow ? "(shadow) " : "", s->outcome < N(outcome) ? outcome[s->outcome] : "?");
        print_fields(s, t, d, out);
        while (out->len - start < 78)
            dn_buf_putc(out, ' ');
        dn_buf_printf(out, " %6.1f us\n", (double)s->ns / 1000);
    }
    dn_buf_puts(out, "=      ");
    size_t before = out->len;
    dn_policy_trace_print(t, d, out);
    dn_buf_puts(out, out->len > before ? "\n" : "no opinion: the configuration decides\n");
}
