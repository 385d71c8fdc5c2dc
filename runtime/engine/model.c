#include "engine/model.h"

#include "base/buf.h"
#include "engine/gguf.h"
#include "engine/mapfile.h"
#include "engine/model_impl.h"
#include "engine/safetensors.h"
#include "engine/synthetic.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_INDEX_BYTES = 100000000 };

int dn_model_add_eos(struct dn_model *m, int64_t id, struct dn_err *err)
{
    for (size_t i = 0; i < m->n_eos; i++)
        if (m->eos_id[i] == id)
            return 0;
    if (m->n_eos == DN_MODEL_MAX_EOS)
        return dn_err_set(err, DN_MODEL_FILE, "end-of-text id %" PRId64 " is one too many, expected at most %d", id,
                          DN_MODEL_MAX_EOS);
    m->eos_id[m->n_eos++] = (int32_t)id; /* within the vocabulary: check_ids() */
    return 0;
}

void dn_model_add_note(struct dn_model *m, const char *text)
{
    struct dn_buf b = {0};
    dn_buf_printf(&b, "%s%s%s", m->note ? m->note : "", m->note ? "; " : "", text);
    free(m->note);
    m->note = dn_strdup(dn_buf_str(&b));
    dn_buf_release(&b);
}

int dn_model_take_template(struct dn_model *m, char *text, size_t len, const char *from, struct dn_err *err)
{
    if (memchr(text, '\0', len) != NULL) {
        free(text);
        return dn_err_set(err, DN_MODEL_FILE, "%s: has a NUL in it", from);
    }
    free(m->chat_template);
    m->chat_template = text;
    m->chat_template_len = len;
    m->chat_template_from = from;
    return 0;
}

static char *name_from_path(const char *path)
{
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/')
        n--;
    size_t begin = n;
    while (begin > 0 && path[begin - 1] != '/')
        begin--;
    if ((n - begin == 1 && path[begin] == '.') || (n - begin == 2 && memcmp(path + begin, "..", 2) == 0)) {
        char *whole = realpath(path, NULL);
        char *name = whole != NULL && strlen(whole) > 1 ? name_from_path(whole) : dn_strdup("model");
        free(whole);
        return name;
    }
    if (n - begin > 5 && memcmp(path + n - 5, ".gguf", 5) == 0)
        n -= 5;
    return n > begin ? dn_strndup(path + begin, n - begin) : dn_strdup("model");
}

/* A folder may hold both forms. The index decides, as for other readers, and what it leaves out may be another model.
 */
static void note_left_out(struct dn_model *m, const char *index)
{
    static const char name[] = "model.safetensors";
    struct dn_buf path = {0};
    char *text;
    size_t len;
    dn_buf_printf(&path, "%s/%s", m->path, name);
    if (access(dn_buf_str(&path), F_OK) == 0 && dn_mapfile_read_text(index, MAX_INDEX_BYTES, &text, &len, NULL) == 0) {
        if (memmem(text, len, "\"model.safetensors\"", sizeof name + 1) == NULL)
            dn_model_add_note(m, "model.safetensors is not used: model.safetensors.index.json names other files");
        free(text);
    }
    dn_buf_release(&path);
}

static int open_hf_tensors(struct dn_model *m, struct dn_err *err)
{
    struct dn_buf path = {0};
    dn_buf_printf(&path, "%s/model.safetensors.index.json", m->path);
    int code;
    if (access(dn_buf_str(&path), F_OK) == 0) {
        code = dn_safetensors_open_index(dn_buf_str(&path), &m->safetensors, err);
        if (code == 0)
            note_left_out(m, dn_buf_str(&path));
    } else {
        dn_buf_clear(&path);
        dn_buf_printf(&path, "%s/model.safetensors", m->path);
        code = dn_safetensors_open(dn_buf_str(&path), &m->safetensors, err);
    }
    dn_buf_release(&path);
    return code;
}

static int check_ids(const struct dn_model *m, struct dn_err *err)
{
    for (size_t i = 0; i < m->n_eos; i++)
        if ((uint32_t)m->eos_id[i] >= m->hyper.n_vocab)
            return dn_err_set(err, DN_MODEL_FILE, "end-of-text id %" PRId32 " outside the vocabulary of %" PRIu32,
                              m->eos_id[i], m->hyper.n_vocab);
    if (m->bos_id >= 0 && (uint32_t)m->bos_id >= m->hyper.n_vocab)
        return dn_err_set(err, DN_MODEL_FILE, "begin-of-text id %" PRId32 " outside the vocabulary of %" PRIu32,
                          m->bos_id, m->hyper.n_vocab);
    return 0;
}

int dn_model_open(const char *path, struct dn_model **out, struct dn_err *err)
{
    struct stat st;
    struct dn_model *m = dn_alloc0(1, sizeof *m);
    m->path = dn_strdup(path);
    m->name = name_from_path(path);
    m->bos_id = -1;
    m->prefix = "";
    m->source = stat(path, &st) == 0 && S_ISDIR(st.st_mode) ? DN_MODEL_HF : DN_MODEL_GGUF;
    int code;
    if (m->source == DN_MODEL_GGUF) {
        code = dn_gguf_open(path, &m->gguf, err); /* puts the path in front itself */
        if (code == 0) {
            code = dn_model_read_gguf(m, err);
            if (code == 0)
                code = dn_model_find_tensors(m, err);
            if (code == 0)
                code = check_ids(m, err);
            if (code != 0)
                dn_err_prefix(err, "%s", path);
        }
    } else {
        code = dn_model_read_hf(m, err);
        if (code == 0)
            code = open_hf_tensors(m, err);
        if (code == 0) {
            code = dn_model_find_tensors(m, err);
            if (code == 0)
                code = check_ids(m, err);
            if (code != 0)
                dn_err_prefix(err, "%s", path);
        }
    }
    if (code != 0) {
        dn_model_close(m);
        return code;
    }
    if (m->title == NULL)
        m->title = dn_strdup(m->name);
    *out = m;
    return 0;
}

void dn_model_close(struct dn_model *m)
{
    if (m == NULL)
        return;
    dn_gguf_close(m->gguf);
    dn_safetensors_close(m->safetensors);
    dn_synthetic_release(m->synthetic);
    free(m->layer);
    for (uint32_t l = 0; m->expert != NULL && l < m->hyper.n_layers; l++)
        free(m->expert[l]);
    free(m->expert);
    free(m->note);
    free(m->path);
    free(m->name);
    free(m->title);
    free(m->type_text);
    free(m->tokenizer_json);
    free(m->tokenizer_tiktoken);
    free(m->tokenizer_config);
    free(m->chat_template);
    free(m);
}

struct dn_linear dn_model_linear(const struct dn_model *m, enum dn_tensor_role role, uint32_t layer)
{
    DN_BUG_ON(role >= DN_T_ROLES || (role >= DN_T_ATTN_NORM && layer >= m->hyper.n_layers));
    return role < DN_T_ATTN_NORM ? m->global[role] : m->layer[layer][role - DN_T_ATTN_NORM];
}

const struct dn_tensor *dn_model_tensor(const struct dn_model *m, enum dn_tensor_role role, uint32_t layer)
{
    return dn_model_linear(m, role, layer).values;
}

struct dn_linear dn_model_expert(const struct dn_model *m, uint32_t layer, uint32_t expert, enum dn_expert_part part)
{
    DN_BUG_ON(layer >= m->hyper.n_layers || m->expert[layer] == NULL || expert >= m->hyper.n_experts);
    return m->expert[layer][expert][part];
}

uint64_t dn_model_kv_bytes(const struct dn_model *m, bool fp8)
{
    const struct dn_hyper *h = &m->hyper;
    if (h->latent_dim > 0) /* one latent and one rope key a token and layer; in FP8 the rope key stays bf16 */
        return h->n_layers * (fp8 ? h->latent_dim + sizeof(float) + 2 * (uint64_t)h->rope_dim
                                  : 2 * ((uint64_t)h->latent_dim + h->rope_dim));
    return (uint64_t)h->n_layers * 2 * h->n_kv_heads * (fp8 ? h->head_dim + sizeof(float) : 2 * (uint64_t)h->head_dim);
}

void dn_model_rope_freqs(const struct dn_model *m, double *inv_freq)
{
    const struct dn_hyper *h = &m->hyper;
    const struct dn_tensor *t = m->global[DN_T_ROPE_FREQS].values;
    for (uint32_t i = 0; i < h->rotary_dim / 2; i++)
        inv_freq[i] = dn_hyper_rope_freq(h, i);
    if (t == NULL)
        return;
    float *divisor = dn_alloc0(h->rotary_dim / 2, sizeof *divisor);
    dn_tensor_row_f32(t->type, t->data, h->rotary_dim / 2, divisor);
    for (uint32_t i = 0; i < h->rotary_dim / 2; i++)
        inv_freq[i] /= (double)divisor[i];
    free(divisor);
}
