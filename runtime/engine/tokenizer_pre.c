#include "engine/tokenizer_impl.h"

#include <stdlib.h>

/* PCRE2's JIT keeps back-tracking points on a stack of its own. The known patterns need a few hundred bytes whatever
 * the text, since their repeats are over single characters; the rest is for patterns that come with a model. */
enum { JIT_STACK_START = 32 << 10, JIT_STACK_MAX = 8 << 20, MATCH_LIMIT = 50000000, HEAP_LIMIT_KIB = 64 << 10 };

int dn_tok_scratch_init(struct dn_tok_scratch *s, struct dn_tokens *out, struct dn_err *err)
{
    *s = (struct dn_tok_scratch){.out = out, .err = err};
    s->match = pcre2_match_data_create(1, NULL);
    s->context = pcre2_match_context_create(NULL);
    s->stack = pcre2_jit_stack_create(JIT_STACK_START, JIT_STACK_MAX, NULL);
    if (s->match == NULL || s->context == NULL || s->stack == NULL) {
        dn_tok_scratch_release(s);
        return dn_err_set(err, DN_NO_MEMORY, "no memory to tokenize");
    }
    pcre2_jit_stack_assign(s->context, NULL, s->stack);
    pcre2_set_match_limit(s->context, MATCH_LIMIT);
    pcre2_set_heap_limit(s->context, HEAP_LIMIT_KIB);
    return 0;
}

void dn_tok_scratch_release(struct dn_tok_scratch *s)
{
    pcre2_match_data_free(s->match);
    pcre2_match_context_free(s->context);
    pcre2_jit_stack_free(s->stack);
    free(s->range[0]);
    free(s->range[1]);
    free(s->symbol);
    free(s->next);
    free(s->heap);
    dn_buf_release(&s->text);
    dn_buf_release(&s->normal);
    dn_buf_release(&s->probe);
    dn_buf_release(&s->prefixed);
    *s = (struct dn_tok_scratch){0};
}

static void message(int code, const char *pattern, struct dn_err *err)
{
    char text[128] = "unknown error";
    pcre2_get_error_message(code, (PCRE2_UCHAR *)text, sizeof text);
    dn_err_set(err, DN_MODEL_FILE, "pattern \"%.64s\": %s", pattern, text);
}

int dn_tok_pre_add(struct dn_tokenizer *t, const char *pattern, bool keep_match, bool keep_rest, struct dn_err *err)
{
    if (t->n_step == DN_TOK_MAX_STEPS)
        return dn_err_set(err, DN_MODEL_FILE, "pre-tokenizer: more than %d steps", DN_TOK_MAX_STEPS);
    struct dn_buf translated = {0};
    int rc = dn_tok_regex_translate(pattern, &translated, err);
    if (rc == 0) {
        int code;
        PCRE2_SIZE at;
        pcre2_compile_context *context = pcre2_compile_context_create(NULL);
        pcre2_set_newline(context, PCRE2_NEWLINE_LF);
        pcre2_code *re =
            pcre2_compile((PCRE2_SPTR)dn_buf_str(&translated), translated.len,
                          PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C, &code, &at, context);
        pcre2_compile_context_free(context);
        if (re == NULL) {
            message(code, pattern, err);
            rc = -DN_MODEL_FILE;
        } else {
            bool has_jit = pcre2_jit_compile(re, PCRE2_JIT_COMPLETE) == 0;
            t->step[t->n_step++] = (struct dn_tok_step){re, keep_match, keep_rest, has_jit};
        }
    }
    dn_buf_release(&translated);
    return rc;
}

static void put_range(struct dn_tok_scratch *s, int which, size_t start, size_t end)
{
    if (start == end)
        return;
    if (s->n_range[which] == s->cap_range[which]) {
        s->cap_range[which] = s->cap_range[which] ? s->cap_range[which] * 2 : 256;
        s->range[which] = dn_realloc(s->range[which], s->cap_range[which], sizeof **s->range);
    }
    s->range[which][s->n_range[which]++] = (struct dn_tok_range){start, end};
}

/* The next match in text[at..end) as seen from `start`; 1 found, 0 none, else an error. The text is known to be UTF-8,
 * so that PCRE2 need not check all of it again for each piece, which would be quadratic. */
static int find(const struct dn_tok_step *step, const char *text, size_t at, size_t end, struct dn_tok_scratch *s)
{
    int rc = step->has_jit
                 ? pcre2_jit_match(step->code, (PCRE2_SPTR)text, end, at, 0, s->match, s->context)
                 : pcre2_match(step->code, (PCRE2_SPTR)text, end, at, PCRE2_NO_UTF_CHECK, s->match, s->context);
    if (rc >= 0)
        return 1;
    if (rc == PCRE2_ERROR_NOMATCH)
        return 0;
    char why[128] = "unknown error";
    pcre2_get_error_message(rc, (PCRE2_UCHAR *)why, sizeof why);
    return dn_err_set(s->err, DN_INVALID_VALUE, "the text is too complex for the model's pre-tokenizer: %s", why);
}

/* One step on one piece. Patterns see the piece alone, as if it were the whole text. */
static int split_piece(const struct dn_tok_step *step, const char *text, struct dn_tok_range piece, int to,
                       struct dn_tok_scratch *s)
{
    const char *base = text + piece.start;
    size_t n = piece.end - piece.start, done = 0, at = 0;
    while (at < n) {
        int rc = find(step, base, at, n, s);
        if (rc < 0)
            return rc;
        if (rc == 0)
            break;
        const PCRE2_SIZE *found = pcre2_get_ovector_pointer(s->match);
        if (found[1] <= found[0]) { /* an empty match splits nothing: go on behind the next character */
            at = found[0];
            at += dn_tok_utf8_len((const unsigned char *)base + at, n - at);
            if (at <= found[0])
                break;
            continue;
        }
        if (step->keep_rest)
            put_range(s, to, piece.start + done, piece.start + found[0]);
        if (step->keep_match)
            put_range(s, to, piece.start + found[0], piece.start + found[1]);
        done = at = found[1];
    }
    if (step->keep_rest)
        put_range(s, to, piece.start + done, piece.end);
    return 0;
}

int dn_tok_pre_split(const struct dn_tokenizer *t, const char *text, size_t n, struct dn_tok_scratch *s)
{
    s->n_range[0] = 0;
    put_range(s, 0, 0, n);
    for (size_t i = 0; i < t->n_step; i++) {
        s->n_range[1] = 0;
        for (size_t j = 0; j < s->n_range[0]; j++) {
            int rc = split_piece(&t->step[i], text, s->range[0][j], 1, s);
            if (rc)
                return rc;
        }
        struct dn_tok_range *range = s->range[0];
        size_t cap = s->cap_range[0];
        s->range[0] = s->range[1];
        s->cap_range[0] = s->cap_range[1];
        s->n_range[0] = s->n_range[1];
        s->range[1] = range;
        s->cap_range[1] = cap;
    }
    return 0;
}
