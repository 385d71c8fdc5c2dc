#include "cli/load.h"

#include "engine/mapfile.h"

#include <stdlib.h>

/* The text of a special token; "" if there is none. The buffer holds it. */
static const char *token_text(const struct dn_loaded *l, int32_t id, struct dn_buf *buf)
{
    struct dn_tok_str piece = dn_tokenizer_piece(l->tokenizer, id);
    dn_buf_put(buf, piece.data, piece.len);
    return dn_buf_str(buf);
}

static int open_template(struct dn_loaded *l, const char *source, size_t n, struct dn_err *err)
{
    struct dn_buf bos = {0}, eos = {0};
    int32_t eos_id = dn_tokenizer_eos(l->tokenizer);
    if (eos_id < 0 && l->model->n_eos > 0)
        eos_id = l->model->eos_id[0];
    const struct dn_template_var var[] = {
        {"bos_token", token_text(l, dn_tokenizer_bos(l->tokenizer), &bos)},
        {"eos_token", token_text(l, eos_id, &eos)},
    };
    int rc = dn_template_open(&l->chat_template, source, n, var, 2, err);
    dn_buf_release(&bos);
    dn_buf_release(&eos);
    return rc;
}

int dn_load_model(const char *path, const char *template_file, struct dn_loaded *out, struct dn_err *err)
{
    *out = (struct dn_loaded){0};
    int rc = dn_model_open(path, &out->model, err);
    if (rc != 0)
        return rc;
    rc = dn_model_open_tokenizer(out->model, &out->tokenizer, err);
    if (rc != 0) {
        dn_load_release(out);
        return rc;
    }
    if (template_file && template_file[0]) {
        char *text;
        size_t n;
        rc = dn_mapfile_read_text(template_file, 1 << 20, &text, &n, err);
        if (rc == 0) {
            rc = open_template(out, text, n, err);
            free(text);
        }
    } else if (out->model->chat_template) {
        rc = open_template(out, out->model->chat_template, out->model->chat_template_len, err);
    }
    if (rc != 0) {
        dn_err_prefix(err, "%s", path);
        dn_load_release(out);
    }
    return rc;
}

int dn_load_pool(struct dn_loaded *l, const struct dn_pool_conf *conf, struct dn_err *err)
{
    struct dn_pool_conf c = *conf;
    c.n_valid = (uint32_t)dn_tokenizer_n_vocab(l->tokenizer);
    return dn_pool_open(&c, l->model, &l->pool, err);
}

void dn_load_release(struct dn_loaded *l)
{
    dn_pool_close(l->pool);
    dn_template_close(l->chat_template);
    dn_tokenizer_close(l->tokenizer);
    dn_model_close(l->model);
    *l = (struct dn_loaded){0};
}
