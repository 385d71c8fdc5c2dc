#include "engine/tokenizer_config.h"
#include "engine/tokenizer_impl.h"

#include <stdio.h>
#include <string.h>

enum { MAX_FILE = 256 << 20, MAX_RESERVED = 1 << 16 };

static int base64_value(char c)
{
    if (c >= 'A' && c <= 'Z')
        return c - 'A';
    if (c >= 'a' && c <= 'z')
        return c - 'a' + 26;
    if (c >= '0' && c <= '9')
        return c - '0' + 52;
    return c == '+' ? 62 : c == '/' ? 63 : -1;
}

/* Strict base64 with padding; false when it is not. */
static bool decode_base64(const char *text, size_t n, struct dn_buf *out)
{
    if (n == 0 || n % 4 != 0)
        return false;
    size_t pad = text[n - 1] != '=' ? 0 : text[n - 2] != '=' ? 1 : 2;
    uint32_t bits = 0;
    for (size_t i = 0; i < n - pad; i++) {
        int v = base64_value(text[i]);
        if (v < 0)
            return false;
        bits = bits << 6 | (uint32_t)v;
        if (i % 4 == 1)
            dn_buf_putc(out, (char)(bits >> 4));
        else if (i % 4 == 2)
            dn_buf_putc(out, (char)(bits >> 2));
        else if (i % 4 == 3)
            dn_buf_putc(out, (char)bits);
    }
    return true;
}

/* "IQ== 0" */
static int parse_line(struct dn_tokenizer *t, const char *line, size_t n, struct dn_buf *bytes, struct dn_err *err)
{
    const char *space = memchr(line, ' ', n);
    size_t n_digit = space ? n - (size_t)(space - line) - 1 : 0;
    if (n_digit == 0 || n_digit > 8)
        return dn_err_set(err, DN_MODEL_FILE, "expected base64, a space and a rank");
    int64_t rank = 0;
    for (size_t i = 1; i <= n_digit; i++) {
        if (space[i] < '0' || space[i] > '9')
            return dn_err_set(err, DN_MODEL_FILE, "the rank is not a number");
        rank = rank * 10 + (space[i] - '0');
    }
    dn_buf_clear(bytes);
    if (!decode_base64(line, (size_t)(space - line), bytes))
        return dn_err_set(err, DN_MODEL_FILE, "the token is not base64");
    if (dn_tok_map_find(t, bytes->data, bytes->len) != DN_TOK_NONE)
        return dn_err_set(err, DN_MODEL_FILE, "the token is there twice");
    return dn_tok_build_set(t, rank, bytes->data, bytes->len, 0, true, err);
}

static int parse_ranks(struct dn_tokenizer *t, const char *text, size_t n, struct dn_err *err)
{
    struct dn_buf bytes = {0};
    size_t line = 0, n_rank = 0;
    int rc = 0;
    for (size_t at = 0; rc == 0 && at < n;) {
        const char *end = memchr(text + at, '\n', n - at);
        size_t len = end ? (size_t)(end - text) - at : n - at;
        line++;
        size_t content = len && text[at + len - 1] == '\r' ? len - 1 : len;
        if (content) {
            rc = parse_line(t, text + at, content, &bytes, err);
            if (rc)
                dn_err_prefix(err, "line %zu", line);
            n_rank++;
        }
        at += len + 1;
    }
    dn_buf_release(&bytes);
    if (rc)
        return rc;
    if (n_rank != t->n_vocab)
        return dn_err_set(err, DN_MODEL_FILE, "%zu ranks, but the highest is %zu", n_rank, t->n_vocab - 1);
    for (int b = 0; b < 256; b++) {
        char c = (char)b;
        if (dn_tok_map_find(t, &c, 1) == DN_TOK_NONE)
            return dn_err_set(err, DN_MODEL_FILE, "the byte 0x%02x has no rank", (unsigned)b);
    }
    return 0;
}

/* Ids that no file names are reserved and special. */
static int fill_reserved(struct dn_tokenizer *t, size_t n_rank, struct dn_err *err)
{
    size_t n = t->n_vocab;
    if (n - n_rank > MAX_RESERVED)
        return dn_err_set(err, DN_MODEL_FILE, "added token %zu lies far behind the %zu ranks", n - 1, n_rank);
    for (size_t id = n_rank; id < n; id++) {
        if (t->piece[id].flags & DN_PIECE_PRESENT)
            continue;
        char name[48];
        int len = snprintf(name, sizeof name, "<|reserved_token_%zu|>", id);
        int rc = dn_tok_build_added(t, (int64_t)id, name, (size_t)len, (struct dn_tok_added){0}, true, err);
        if (rc)
            return rc;
    }
    return 0;
}

static int build(struct dn_tokenizer *t, const char *ranks, size_t n_ranks, const char *config, size_t n_config,
                 const char *pre, struct dn_err *err)
{
    int rc = dn_tok_pre_add_named(t, pre, err);
    t->ignore_merges = true; /* tiktoken takes a whole piece that is a token, always */
    t->has_nfc = false;
    if (rc == 0)
        rc = parse_ranks(t, ranks, n_ranks, err);
    size_t n_rank = t->n_vocab;
    if (rc == 0)
        rc = dn_tok_build_merges_from_vocab(t, NULL, err);
    if (rc == 0 && n_config)
        rc = dn_tok_config_apply(t, config, n_config, true, err);
    if (rc == 0)
        rc = fill_reserved(t, n_rank, err);
    return rc ? rc : dn_tok_build_finish(t, err);
}

int dn_tokenizer_parse_tiktoken(struct dn_tokenizer **out, const char *ranks, size_t n_ranks, const char *config,
                                size_t n_config, const char *pre, struct dn_err *err)
{
    struct dn_tokenizer *t = dn_alloc(sizeof *t);
    dn_tok_build_init(t);
    int rc = build(t, ranks, n_ranks, config, n_config, pre, err);
    if (rc) {
        dn_tokenizer_close(t);
        return rc;
    }
    *out = t;
    return 0;
}

int dn_tokenizer_open_tiktoken(struct dn_tokenizer **out, const char *path, const char *config_path, const char *pre,
                               struct dn_err *err)
{
    struct dn_buf ranks = {0}, config = {0};
    int rc = dn_tok_read_file(path, MAX_FILE, &ranks, err);
    if (rc == 0 && config_path)
        rc = dn_tok_read_file(config_path, MAX_FILE, &config, err);
    if (rc == 0) {
        rc = dn_tokenizer_parse_tiktoken(out, ranks.data, ranks.len, config.data, config.len, pre, err);
        if (rc)
            dn_err_prefix(err, "%s", path);
    }
    dn_buf_release(&ranks);
    dn_buf_release(&config);
    return rc;
}
