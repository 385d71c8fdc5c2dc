#include "engine/tokenizer_impl.h"

#include <stdlib.h>
#include <string.h>

enum gguf_type { TYPE_NORMAL = 1, TYPE_UNKNOWN, TYPE_CONTROL, TYPE_USER_DEFINED, TYPE_UNUSED, TYPE_BYTE };

static int set_tokens(struct dn_tokenizer *t, const struct dn_tok_gguf *g, struct dn_err *err)
{
    for (size_t i = 0; i < g->n_token; i++) {
        const struct dn_tok_str *s = &g->token[i];
        int32_t type = g->type ? g->type[i] : TYPE_NORMAL;
        int rc;
        switch (type) {
        case TYPE_NORMAL:
        case TYPE_BYTE:
            rc = dn_tok_build_vocab(t, (int64_t)i, s->data, s->len, err);
            break;
        case TYPE_UNKNOWN:
        case TYPE_UNUSED:
            rc = dn_tok_build_set(t, (int64_t)i, s->data, s->len, 0, false, err);
            break;
        case TYPE_CONTROL:
        case TYPE_USER_DEFINED:
            /* First as part of the vocabulary, since merges may name it. */
            rc = s->len ? dn_tok_build_vocab(t, (int64_t)i, s->data, s->len, err) : 0;
            if (rc == 0)
                rc = dn_tok_build_added(t, (int64_t)i, s->data, s->len, (struct dn_tok_added){0}, type == TYPE_CONTROL,
                                        err);
            break;
        default:
            rc = dn_err_set(err, DN_MODEL_FILE, "token type %d: expected 1 to 6", type);
        }
        if (rc)
            return dn_err_prefix(err, "tokenizer.ggml.tokens[%zu]", i);
    }
    return 0;
}

static int set_merges(struct dn_tokenizer *t, const struct dn_tok_gguf *g, struct dn_err *err)
{
    if (g->n_merge == 0)
        return dn_err_set(err, DN_MODEL_FILE, "tokenizer.ggml.merges is missing; byte-level BPE needs it");
    for (size_t i = 0; i < g->n_merge; i++) {
        const struct dn_tok_str *m = &g->merge[i];
        const char *space = m->len > 2 ? memchr(m->data + 1, ' ', m->len - 1) : NULL;
        if (space == NULL)
            return dn_err_set(err, DN_MODEL_FILE, "tokenizer.ggml.merges[%zu]: expected \"left right\"", i);
        size_t left = (size_t)(space - m->data);
        int rc = dn_tok_build_merge_text(t, m->data, left, space + 1, m->len - left - 1, err);
        if (rc)
            return dn_err_prefix(err, "tokenizer.ggml.merges");
    }
    return 0;
}

struct scored {
    float score;
    uint32_t id;
};

static int by_score(const void *a, const void *b)
{
    const struct scored *x = a, *y = b;
    return x->score > y->score ? -1 : x->score < y->score ? 1 : 0;
}

/* SentencePiece merges whatever gives the token of the highest score; equal scores are equal ranks. */
static int set_ranks(struct dn_tokenizer *t, const struct dn_tok_gguf *g, struct dn_err *err)
{
    if (g->score == NULL)
        return dn_err_set(err, DN_MODEL_FILE,
                          "tokenizer.ggml.scores is missing; tokenizer.ggml.model \"llama\" needs it");
    struct scored *s = dn_alloc0(g->n_token, sizeof *s);
    uint32_t *rank = dn_alloc0(g->n_token, sizeof *rank);
    for (size_t i = 0; i < g->n_token; i++) {
        if (g->score[i] != g->score[i]) {
            free(s);
            free(rank);
            return dn_err_set(err, DN_MODEL_FILE, "tokenizer.ggml.scores[%zu] is not a number", i);
        }
        s[i] = (struct scored){g->score[i], (uint32_t)i};
    }
    qsort(s, g->n_token, sizeof *s, by_score);
    uint32_t current = 0;
    for (size_t i = 0; i < g->n_token; i++) {
        if (i && s[i].score != s[i - 1].score)
            current++;
        rank[s[i].id] = current;
    }
    free(s);
    return dn_tok_build_merges_from_vocab(t, rank, err);
}

static int check_id(const char *key, int32_t id, const struct dn_tok_gguf *g, struct dn_err *err)
{
    if (id >= -1 && (id < 0 || (size_t)id < g->n_token))
        return 0;
    return dn_err_set(err, DN_MODEL_FILE, "tokenizer.ggml.%s is %d, but there are %zu tokens", key, id, g->n_token);
}

static int build(struct dn_tokenizer *t, const struct dn_tok_gguf *g, struct dn_err *err)
{
    int rc = 0;
    if (g->n_token == 0 || g->token == NULL)
        return dn_err_set(err, DN_MODEL_FILE, "tokenizer.ggml.tokens is missing");
    if ((rc = check_id("bos_token_id", g->bos, g, err)) || (rc = check_id("eos_token_id", g->eos, g, err)) ||
        (rc = check_id("padding_token_id", g->pad, g, err)) || (rc = check_id("unknown_token_id", g->unk, g, err)))
        return rc;
    t->bos = g->bos;
    t->eos = g->eos;
    t->pad = g->pad;
    t->is_spm = g->model && strcmp(g->model, "llama") == 0;
    if (!t->is_spm && (g->model == NULL || strcmp(g->model, "gpt2") != 0))
        return dn_err_set(err, DN_MODEL_FILE, "tokenizer.ggml.model \"%.64s\" is not supported; expected gpt2 or llama",
                          g->model ? g->model : "");
    if (t->is_spm) {
        t->unk = g->unk >= 0 ? g->unk : 0;
        t->space_prefix = g->add_space_prefix != 0;
    } else {
        if (g->pre == NULL)
            return dn_err_set(err, DN_MODEL_FILE, "tokenizer.ggml.pre is missing; known are %s",
                              dn_tokenizer_pre_names());
        rc = dn_tok_pre_add_named(t, g->pre, err);
        if (rc)
            return dn_err_prefix(err, "tokenizer.ggml.pre");
        t->space_prefix = g->add_space_prefix == 1;
    }
    rc = set_tokens(t, g, err);
    if (rc == 0)
        rc = t->is_spm ? set_ranks(t, g, err) : set_merges(t, g, err);
    /* Where the key is absent: SentencePiece models and Llama 3 put BOS in front, the others do not. */
    bool adds_by_default = t->is_spm || (g->pre && (strcmp(g->pre, "llama-bpe") == 0 || strcmp(g->pre, "llama3") == 0));
    if (rc == 0 && g->bos >= 0 && (g->add_bos == 1 || (g->add_bos < 0 && adds_by_default)))
        t->prefix[t->n_prefix++] = g->bos;
    if (rc == 0)
        rc = dn_tok_build_finish(t, err);
    return rc;
}

int dn_tokenizer_open_gguf(struct dn_tokenizer **out, const struct dn_tok_gguf *g, struct dn_err *err)
{
    struct dn_tokenizer *t = dn_alloc(sizeof *t);
    dn_tok_build_init(t);
    int rc = build(t, g, err);
    if (rc) {
        dn_tokenizer_close(t);
        return rc;
    }
    *out = t;
    return 0;
}
