/* Test material of the tokenizers: unpacked into the build folder, never copied into the project. */
#ifndef TOK_DATA_H
#define TOK_DATA_H

#include "engine/gguf.h"
#include "engine/tokenizer.h"

#include <criterion/criterion.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* Unpacks shared/data/<name>.tar.gz once; false, with the reason printed, when it is not there. Tests are processes of
 * their own and may get here at the same time, so the folder appears by a rename. */
static inline bool tok_unpack(const char *name)
{
    char archive[512], dir[512], tmp[600], command[2048];
    snprintf(archive, sizeof archive, "%s/%s.tar.gz", DN_SHARED_DATA, name);
    snprintf(dir, sizeof dir, "%s/testdata/%s", DN_BUILD_DIR, name);
    snprintf(tmp, sizeof tmp, "%s.%d", dir, (int)getpid());
    if (access(dir, R_OK) == 0)
        return true;
    if (access(archive, R_OK) != 0) {
        printf("SKIPPED: %s is not there\n", archive);
        return false;
    }
    snprintf(command, sizeof command, "mkdir -p '%s' && tar -xzf '%s' -C '%s'", tmp, archive, tmp);
    cr_assert_eq(system(command), 0, "%s", command);
    char inner[700];
    snprintf(inner, sizeof inner, "%s/%s", tmp, name);
    if (rename(inner, dir) != 0)
        cr_assert_eq(access(dir, R_OK), 0, "can't make %s", dir);
    snprintf(command, sizeof command, "rm -rf '%s'", tmp);
    cr_assert_eq(system(command), 0);
    return true;
}

static inline const char *tok_path(const char *name)
{
    static char path[4][700];
    static unsigned turn;
    char *p = path[turn++ % 4];
    snprintf(p, sizeof *path, "%s/testdata/%s", DN_BUILD_DIR, name);
    return p;
}

static inline struct dn_buf tok_read(const char *path)
{
    struct dn_buf b = {0};
    FILE *f = fopen(path, "rb");
    cr_assert_not_null(f, "%s", path);
    char block[1 << 16];
    size_t n;
    while ((n = fread(block, 1, sizeof block, f)) > 0)
        dn_buf_put(&b, block, n);
    fclose(f);
    dn_buf_str(&b);
    return b;
}

/* "1, 2, 3" or "1 2 3" up to the end of the line; *p moves behind it. */
static inline void tok_read_ids(const char **p, struct dn_tokens *out)
{
    out->len = 0;
    while (**p && **p != '\n') {
        if (**p >= '0' && **p <= '9')
            dn_tokens_put(out, (int32_t)strtol(*p, (char **)p, 10));
        else
            (*p)++;
    }
    if (**p)
        (*p)++;
}

static inline void tok_expect(const struct dn_tokens *got, const struct dn_tokens *want, const char *where, size_t line)
{
    size_t n = got->len < want->len ? got->len : want->len, i = 0;
    while (i < n && got->data[i] == want->data[i])
        i++;
    cr_expect(got->len == want->len && i == n, "%s, input %zu: %zu ids, expected %zu; first difference at %zu: %d / %d",
              where, line, got->len, want->len, i, i < got->len ? got->data[i] : -1,
              i < want->len ? want->data[i] : -1);
}

static inline void tok_encode(const struct dn_tokenizer *t, const char *text, size_t n, unsigned flags,
                              struct dn_tokens *out)
{
    struct dn_err err = {0};
    out->len = 0;
    cr_assert_eq(dn_tokenizer_encode(t, text, n, flags, out, &err), 0, "%s", err.text);
}

/* decode(encode(text)) == text */
static inline void tok_round_trip(const struct dn_tokenizer *t, const char *text, size_t n)
{
    struct dn_tokens ids = {0};
    struct dn_buf back = {0};
    tok_encode(t, text, n, 0, &ids);
    dn_tokenizer_decode(t, ids.data, ids.len, false, &back);
    cr_expect(back.len == n && (n == 0 || memcmp(back.data, text, n) == 0), "\"%.40s\" comes back as \"%.*s\"", text,
              back.len > 40 ? 40 : (int)back.len, back.data ? back.data : "");
    for (size_t i = 0; i < ids.len; i++)
        cr_assert(!dn_tokenizer_is_special(t, ids.data[i]));
    dn_tokens_release(&ids);
    dn_buf_release(&back);
}

/* A tokenizer_config.json out of {"special": {text: id}}. */
static inline struct dn_buf tok_config_of(const char *path)
{
    static const char *const not_special[] = {"<think>",
                                              "</think>",
                                              "<|tool_calls_section_begin|>",
                                              "<|tool_calls_section_end|>",
                                              "<|tool_call_begin|>",
                                              "<|tool_call_argument_begin|>",
                                              "<|tool_call_end|>"};
    json_t *root = json_load_file(path, 0, NULL), *decoder = json_object();
    cr_assert_not_null(root, "%s", path);
    const char *key;
    json_t *id;
    json_object_foreach(json_object_get(root, "special"), key, id)
    {
        char number[32];
        bool special = true;
        for (size_t i = 0; i < sizeof not_special / sizeof *not_special; i++)
            special = special && strcmp(key, not_special[i]) != 0;
        snprintf(number, sizeof number, "%lld", (long long)json_integer_value(id));
        json_object_set_new(decoder, number, json_pack("{s:s, s:b}", "content", key, "special", special));
    }
    json_t *config =
        json_pack("{s:o, s:s, s:s}", "added_tokens_decoder", decoder, "bos_token", "[BOS]", "eos_token", "[EOS]");
    char *text = json_dumps(config, 0);
    struct dn_buf b = {0};
    dn_buf_puts(&b, text);
    free(text);
    json_decref(config);
    json_decref(root);
    return b;
}

static inline struct dn_tokenizer *tok_open_kimi(void)
{
    struct dn_buf config = tok_config_of(tok_path("tokenizers/kimi_k2/special_tokens.json"));
    struct dn_buf ranks = tok_read(tok_path("tokenizers/kimi_k2/tiktoken.model"));
    struct dn_tokenizer *t = NULL;
    struct dn_err err = {0};
    cr_assert_eq(dn_tokenizer_parse_tiktoken(&t, ranks.data, ranks.len, config.data, config.len, "kimi-k2", &err), 0,
                 "%s", err.text);
    dn_buf_release(&config);
    dn_buf_release(&ranks);
    return t;
}

static inline double tok_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

#endif
