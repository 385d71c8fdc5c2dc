#include "engine/gguf.h"
#include "engine/tokenizer_impl.h"

#include <stdlib.h>
#include <string.h>

/* What dn_tok_gguf borrows while the tokenizer is built. */
struct arrays {
    struct dn_tok_str *token, *merge;
    int32_t *type;
    float *score;
    char *model, *pre;
};

static int read_strings(const struct dn_gguf *g, const char *key, bool *found, struct dn_tok_str **out, size_t *n,
                        struct dn_err *err)
{
    const struct dn_gguf_value *v = NULL;
    int rc = dn_gguf_array(g, key, DN_GGUF_STRING, 0, &v, found, err);
    if (rc || v == NULL)
        return rc;
    const uint8_t *cursor = v->data;
    *out = dn_alloc0(v->n, sizeof **out);
    *n = v->n;
    for (size_t i = 0; i < v->n; i++) {
        struct dn_gguf_str s = dn_gguf_next_string(&cursor);
        (*out)[i] = (struct dn_tok_str){s.data, s.len};
    }
    return 0;
}

static int read_name(const struct dn_gguf *g, const char *key, bool *found, char **out, struct dn_err *err)
{
    struct dn_gguf_str s = {0};
    int rc = dn_gguf_string(g, key, &s, found, err);
    if (rc == 0 && s.data)
        *out = dn_strndup(s.data, s.len);
    return rc;
}

static int read_id(const struct dn_gguf *g, const char *key, int32_t *out, struct dn_err *err)
{
    bool found = false;
    uint64_t id = 0;
    int rc = dn_gguf_u64(g, key, 0, DN_TOK_MAX_VOCAB, &id, &found, err);
    if (rc == 0)
        *out = found ? (int32_t)id : -1;
    return rc;
}

static int read_flag(const struct dn_gguf *g, const char *key, int *out, struct dn_err *err)
{
    bool found = false, value = false;
    int rc = dn_gguf_bool(g, key, &value, &found, err);
    if (rc == 0)
        *out = found ? value : -1;
    return rc;
}

static int read_numbers(const struct dn_gguf *g, struct arrays *a, size_t n_token, struct dn_err *err)
{
    const struct dn_gguf_value *type = NULL, *score = NULL;
    bool found;
    int rc = dn_gguf_array(g, "tokenizer.ggml.token_type", DN_GGUF_I32, n_token, &type, &found, err);
    if (rc == 0)
        rc = dn_gguf_array(g, "tokenizer.ggml.scores", DN_GGUF_F32, n_token, &score, &found, err);
    if (rc)
        return rc;
    if (type) {
        a->type = dn_alloc0(n_token, sizeof *a->type);
        for (size_t i = 0; i < n_token; i++) {
            int64_t v = dn_gguf_int_at(type, i);
            a->type[i] = v >= 0 && v < INT32_MAX ? (int32_t)v : -1;
        }
    }
    if (score) {
        a->score = dn_alloc0(n_token, sizeof *a->score);
        for (size_t i = 0; i < n_token; i++)
            a->score[i] = dn_gguf_f32_at(score, i);
    }
    return 0;
}

/* Some converters call each token normal, or name no types: the ids that begin and end a text are control tokens all
 * the same, so that a template can write them and a user's text can't. A token that does not look like one stays what
 * the file says, and the model is refused. */
static int mark_ends(const struct dn_gguf *g, struct arrays *a, size_t n_token, struct dn_err *err)
{
    enum { NORMAL = 1, CONTROL = 3 };
    static const char *const key[] = {"tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id",
                                      "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"};
    for (size_t i = 0; i < sizeof key / sizeof *key; i++) {
        int32_t id;
        int rc = read_id(g, key[i], &id, err);
        if (rc)
            return rc;
        if (id < 0 || (size_t)id >= n_token || (a->type && a->type[id] != NORMAL))
            continue;
        const struct dn_tok_str *s = &a->token[id];
        char first = s->len > 2 ? s->data[0] : 0, last = s->len > 2 ? s->data[s->len - 1] : 0;
        if (!(first == '<' && last == '>') && !(first == '[' && last == ']'))
            continue;
        if (!a->type) {
            a->type = dn_alloc(n_token * sizeof *a->type);
            for (size_t k = 0; k < n_token; k++)
                a->type[k] = NORMAL;
        }
        a->type[id] = CONTROL;
    }
    return 0;
}

static int read_all(const struct dn_gguf *g, struct arrays *a, struct dn_tok_gguf *k, struct dn_err *err)
{
    bool found;
    int rc;
    if ((rc = read_strings(g, "tokenizer.ggml.tokens", NULL, &a->token, &k->n_token, err)) ||
        (rc = read_strings(g, "tokenizer.ggml.merges", &found, &a->merge, &k->n_merge, err)) ||
        (rc = read_name(g, "tokenizer.ggml.model", NULL, &a->model, err)) ||
        (rc = read_name(g, "tokenizer.ggml.pre", &found, &a->pre, err)) || (rc = read_numbers(g, a, k->n_token, err)) ||
        (rc = mark_ends(g, a, k->n_token, err)) || (rc = read_id(g, "tokenizer.ggml.bos_token_id", &k->bos, err)) ||
        (rc = read_id(g, "tokenizer.ggml.eos_token_id", &k->eos, err)) ||
        (rc = read_id(g, "tokenizer.ggml.padding_token_id", &k->pad, err)) ||
        (rc = read_id(g, "tokenizer.ggml.unknown_token_id", &k->unk, err)) ||
        (rc = read_flag(g, "tokenizer.ggml.add_bos_token", &k->add_bos, err)) ||
        (rc = read_flag(g, "tokenizer.ggml.add_space_prefix", &k->add_space_prefix, err)))
        return rc;
    k->token = a->token;
    k->merge = a->merge;
    k->type = a->type;
    k->score = a->score;
    k->model = a->model;
    k->pre = a->pre;
    return 0;
}

int dn_tokenizer_read_gguf(struct dn_tokenizer **out, const struct dn_gguf *g, struct dn_err *err)
{
    struct arrays a = {0};
    struct dn_tok_gguf k = {0};
    int rc = read_all(g, &a, &k, err);
    if (rc == 0)
        rc = dn_tokenizer_open_gguf(out, &k, err);
    free(a.token);
    free(a.merge);
    free(a.type);
    free(a.score);
    free(a.model);
    free(a.pre);
    return rc;
}
