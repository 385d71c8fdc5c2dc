#include "engine/weights.h"

#include "engine/gguf_write.h"
#include "unit/engine/engine_fixture.h"
#include "unit/engine/tiny_checkpoint.h"

/* A Llama of one layer in GGUF whose matrices have the types that a test wants; block data are drawn, scales are plain.
 */
enum { DIM = 256, FF = 512, HEADS = 4, KV = 2, HEAD = 64, VOCAB = 160 };

static void put_matrix(struct dn_gguf_writer *w, const char *name, enum dn_tensor_type t, uint32_t n_out, uint32_t n_in)
{
    size_t bytes = (size_t)(n_out * dn_tensor_row_bytes(t, n_in)), block = dn_tensor_type_info(t)->block_bytes;
    uint8_t *data = dn_alloc(bytes);
    for (size_t i = 0; i < bytes; i++)
        data[i] = (uint8_t)(tiny_draw(n_out, i) + 128);
    for (size_t at = 0; at < bytes; at += block) {
        float scale = (float)(tiny_draw(7, at) + 200) * 1e-4f;
        uint16_t h = dn_f32_to_f16(scale), b = dn_f32_to_bf16(scale);
        if (t == DN_TT_F32)
            memcpy(data + at, &scale, 4);
        else if (t == DN_TT_BF16)
            memcpy(data + at, &b, 2);
        else
            memcpy(data + at + (t == DN_TT_Q6_K ? 208 : 0), &h, 2);
        if (t == DN_TT_Q4_1 || t == DN_TT_Q4_K)
            memcpy(data + at + 2, &h, 2);
    }
    dn_gguf_write_tensor(w, name, t, n_out, n_in, data);
    free(data);
}

static void put_norm(struct dn_gguf_writer *w, const char *name)
{
    float v[DIM];
    for (int i = 0; i < DIM; i++)
        v[i] = 1;
    dn_gguf_write_tensor(w, name, DN_TT_F32, 0, DIM, v);
}

/* q, k, v, the rest of the layer, the tied embedding. */
static const char *write_model(const enum dn_tensor_type type[5])
{
    static char path[64];
    struct dn_err err = {0};
    struct dn_gguf_writer w = {0};
    snprintf(path, sizeof path, "/tmp/dn_weights_test.%ld.gguf", (long)getpid());
    dn_gguf_write_string(&w, "general.architecture", "llama");
    dn_gguf_write_u32(&w, "llama.block_count", 1);
    dn_gguf_write_u32(&w, "llama.context_length", 512);
    dn_gguf_write_u32(&w, "llama.embedding_length", DIM);
    dn_gguf_write_u32(&w, "llama.feed_forward_length", FF);
    dn_gguf_write_u32(&w, "llama.attention.head_count", HEADS);
    dn_gguf_write_u32(&w, "llama.attention.head_count_kv", KV);
    dn_gguf_write_f32(&w, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    put_matrix(&w, "token_embd.weight", type[4], VOCAB, DIM);
    put_norm(&w, "output_norm.weight");
    put_norm(&w, "blk.0.attn_norm.weight");
    put_norm(&w, "blk.0.ffn_norm.weight");
    put_matrix(&w, "blk.0.attn_q.weight", type[0], HEADS * HEAD, DIM);
    put_matrix(&w, "blk.0.attn_k.weight", type[1], KV * HEAD, DIM);
    put_matrix(&w, "blk.0.attn_v.weight", type[2], KV * HEAD, DIM);
    put_matrix(&w, "blk.0.attn_output.weight", type[3], DIM, DIM);
    put_matrix(&w, "blk.0.ffn_gate.weight", type[3], FF, DIM);
    put_matrix(&w, "blk.0.ffn_up.weight", type[3], FF, DIM);
    put_matrix(&w, "blk.0.ffn_down.weight", type[3], DIM, FF);
    cr_assert_eq(dn_gguf_write_finish(&w, path, &err), 0, "%s", err.text);
    dn_gguf_write_release(&w);
    return path;
}

/* Rows of a packed matrix as the device sees them, by multiplying with the columns of the identity. */
static void unpack(struct fixture *f, const struct dn_matrix *m, float *out)
{
    const struct dn_kernels *ops = f->device->ops;
    struct dn_step *s = dn_runner_arrays(f->runner);
    float *a = ops->alloc(f->device, 64 * m->n_in * sizeof *a), *y = ops->alloc(f->device, 64 * m->n_out * sizeof *y);
    float *host = dn_alloc0(64 * (size_t)m->n_out, sizeof *host);
    for (uint32_t k0 = 0; k0 < m->n_in; k0 += 64) {
        memset(a, 0, 64 * m->n_in * sizeof *a);
        for (uint32_t i = 0; i < 64; i++)
            a[i * m->n_in + k0 + i] = 127; /* rounds to 8 bits without loss */
        struct sequence q = {.format = DN_KV_BF16};
        int32_t id[64] = {0};
        f->next_slab = 0;
        step_clear(f);
        step_add(f, &q, id, 64, ROWS_NONE);
        cr_assert_eq(s->n_tokens, 64);
        ops->step_begin(f->device, 1);
        ops->matmul(f->device, &(struct dn_matmul){.a = a, .w = m, .out = y});
        ops->step_end(f->device);
        ops->step_wait(f->device, NULL);
        ops->download(f->device, host, y, 64 * m->n_out * sizeof *y);
        for (uint32_t i = 0; i < 64; i++)
            for (uint32_t r = 0; r < m->n_out; r++)
                out[(size_t)r * m->n_in + k0 + i] = host[(size_t)i * m->n_out + r] / 127;
    }
    ops->free(f->device, a);
    ops->free(f->device, y);
    free(host);
}

static double relative_error(const float *is, const struct dn_tensor *t, uint32_t n_in)
{
    float *want = dn_alloc0(n_in, sizeof *want);
    double error = 0, size = 0;
    for (uint64_t r = 0; r < t->dim[0]; r++) {
        dn_tensor_row_f32(t->type, t->data + r * dn_tensor_row_bytes(t->type, n_in), n_in, want);
        for (uint32_t k = 0; k < n_in; k++) {
            double d = (double)is[r * n_in + k] - (double)want[k];
            error += d * d;
            size += (double)want[k] * (double)want[k];
        }
    }
    free(want);
    return sqrt(error / size);
}

static bool has_note(const struct dn_weights *w, const char *text)
{
    for (size_t i = 0; i < w->n_notes; i++)
        if (strstr(w->note[i], text) != NULL)
            return true;
    return false;
}

static void open_types(struct fixture *f, const enum dn_tensor_type type[5], int format, unsigned n_threads)
{
    const char *path = write_model(type);
    fixture_open(f, path, format, n_threads, 64);
    unlink(path);
}

/* q|k|v and gate|up lie behind each other, and hold what the file says. */
static void check_values(struct fixture *f, double qkv_bound, double rest_bound)
{
    const struct dn_layer_weights *w = &f->weights->layer[0];
    const struct dn_model *m = f->model;
    static float out[2 * FF * DIM];
    unpack(f, &w->qkv, out);
    cr_expect_lt(relative_error(out, dn_model_tensor(m, DN_T_Q, 0), DIM), qkv_bound);
    cr_expect_lt(relative_error(out + HEADS * HEAD * DIM, dn_model_tensor(m, DN_T_K, 0), DIM), qkv_bound);
    cr_expect_lt(relative_error(out + (HEADS + KV) * HEAD * DIM, dn_model_tensor(m, DN_T_V, 0), DIM), qkv_bound);
    unpack(f, &w->gate_up, out);
    cr_expect_lt(relative_error(out, dn_model_tensor(m, DN_T_GATE, 0), DIM), rest_bound);
    cr_expect_lt(relative_error(out + FF * DIM, dn_model_tensor(m, DN_T_UP, 0), DIM), rest_bound);
    unpack(f, &w->down, out);
    cr_expect_lt(relative_error(out, dn_model_tensor(m, DN_T_DOWN, 0), FF), rest_bound);
    unpack(f, &w->o, out);
    cr_expect_lt(relative_error(out, dn_model_tensor(m, DN_T_O, 0), DIM), rest_bound);
}

Test(weights, auto_takes_the_nearest_format_and_loses_nothing)
{
    static const struct {
        enum dn_tensor_type type[5];
        enum dn_weight_format qkv, rest, embed;
        bool symmetric;
        double qkv_bound, rest_bound;
        const char *note;
    } c[] = {
        {{DN_TT_Q4_0, DN_TT_Q4_0, DN_TT_Q4_0, DN_TT_Q4_0, DN_TT_Q8_0},
         DN_W_INT4,
         DN_W_INT4,
         DN_W_INT8,
         true,
         1e-6,
         1e-6,
         NULL},
        {{DN_TT_Q4_1, DN_TT_Q4_1, DN_TT_Q4_1, DN_TT_Q4_1, DN_TT_Q8_0},
         DN_W_INT4,
         DN_W_INT4,
         DN_W_INT8,
         false,
         1e-6,
         1e-6,
         NULL},
        {{DN_TT_Q4_0, DN_TT_Q4_1, DN_TT_Q4_0, DN_TT_Q8_0, DN_TT_BF16},
         DN_W_INT4,
         DN_W_INT8,
         DN_W_BF16,
         false,
         1e-6,
         1e-6,
         NULL},
        {{DN_TT_BF16, DN_TT_BF16, DN_TT_BF16, DN_TT_BF16, DN_TT_Q4_0},
         DN_W_BF16,
         DN_W_BF16,
         DN_W_INT4,
         true,
         1e-6,
         1e-6,
         NULL},
        {{DN_TT_Q4_K, DN_TT_Q4_K, DN_TT_Q4_K, DN_TT_Q4_K, DN_TT_Q6_K},
         DN_W_INT4,
         DN_W_INT4,
         DN_W_INT8,
         false,
         1e-3,
         1e-3,
         "7 tensors of type Q4_K: scales rounded to f16 for int4, values exact"},
        {{DN_TT_Q4_K, DN_TT_Q4_K, DN_TT_Q6_K, DN_TT_Q6_K, DN_TT_Q8_0},
         DN_W_INT8,
         DN_W_INT8,
         DN_W_INT8,
         false,
         9e-3,
         9e-3,
         "5 tensors of type Q6_K: rounded to int8"},
        {{DN_TT_F32, DN_TT_Q8_0, DN_TT_Q4_0, DN_TT_Q8_0, DN_TT_Q8_0},
         DN_W_BF16,
         DN_W_INT8,
         DN_W_INT8,
         false,
         3e-3,
         1e-6,
         "1 tensor of type F32: rounded to bf16"},
    };
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        struct fixture f;
        open_types(&f, c[i].type, DN_WEIGHTS_AUTO, 2);
        cr_expect_eq(f.weights->layer[0].qkv.format, c[i].qkv, "case %zu", i);
        cr_expect_eq(f.weights->layer[0].down.format, c[i].rest, "case %zu", i);
        cr_expect_eq(f.weights->embed.format, c[i].embed, "case %zu", i);
        cr_expect_eq(f.weights->layer[0].qkv.symmetric, c[i].symmetric && c[i].qkv == DN_W_INT4, "case %zu", i);
        cr_expect(c[i].note == NULL ? f.weights->n_notes == 0 : has_note(f.weights, c[i].note), "case %zu: %s", i,
                  f.weights->n_notes ? f.weights->note[0] : "no note");
        cr_expect_eq(f.weights->head, &f.weights->embed);
        check_values(&f, c[i].qkv_bound, c[i].rest_bound);
        fixture_close(&f);
    }
}

/* Formats asked for by name, from every type: the error is that of the format. */
Test(weights, a_format_by_name_goes_for_every_type)
{
    static const enum dn_tensor_type from[] = {DN_TT_F32,  DN_TT_F16,  DN_TT_BF16, DN_TT_Q8_0,
                                               DN_TT_Q4_0, DN_TT_Q4_1, DN_TT_Q4_K, DN_TT_Q6_K};
    static const double bound[DN_W_FORMATS] = {
        [DN_W_BF16] = 3e-3, [DN_W_FP8] = 0.04, [DN_W_INT8] = 0.01, [DN_W_INT4] = 0.13};
    for (size_t t = 0; t < sizeof from / sizeof *from; t++) {
        for (int format = 0; format < DN_W_FORMATS; format++) {
            const enum dn_tensor_type type[5] = {from[t], from[t], from[t], from[t], from[t]};
            struct fixture f;
            open_types(&f, type, format, 2);
            cr_expect_eq(f.weights->layer[0].qkv.format, (enum dn_weight_format)format);
            cr_expect_eq(f.weights->embed.format, format == DN_W_INT4 ? DN_W_INT8 : (enum dn_weight_format)format);
            check_values(&f, bound[format], bound[format]);
            fixture_close(&f);
        }
    }
}

/* BF16, F16 and F32 files of the same values give the same weights. */
Test(weights, float_files_of_equal_values_are_equal)
{
    static const enum dn_tensor_type type[] = {DN_TT_BF16, DN_TT_F16, DN_TT_F32};
    static float first[40 * 256], logits[40 * 256];
    int32_t id[40];
    for (int i = 0; i < 40; i++)
        id[i] = tiny_id(i);
    for (int format = -1; format < DN_W_FORMATS; format++) {
        for (int t = 0; t < 3; t++) {
            const char *folder = tiny_checkpoint(&TINY_KIND[2], 1 + (unsigned)t % 2, type[t], "");
            struct fixture f;
            struct sequence q = {.format = DN_KV_BF16};
            fixture_open(&f, folder, format, 2, 64);
            run_tokens(&f, &q, id, 40, 64, t == 0 ? first : logits);
            cr_expect(t == 0 || memcmp(first, logits, sizeof first) == 0, "format %d, type %d", format, t);
            fixture_close(&f);
            tiny_remove(folder);
        }
    }
}

Test(weights, threads_pack_the_same_bits)
{
    const enum dn_tensor_type type[5] = {DN_TT_Q4_1, DN_TT_Q8_0, DN_TT_Q4_0, DN_TT_Q6_K, DN_TT_Q4_K};
    for (int format = -1; format < DN_W_FORMATS; format++) {
        struct fixture one, many;
        open_types(&one, type, format, 1);
        open_types(&many, type, format, 4);
        const struct dn_matrix *a = &one.weights->layer[0].qkv, *b = &many.weights->layer[0].qkv;
        cr_assert_eq(a->bytes, b->bytes);
        cr_expect_eq(memcmp(a->data, b->data, a->bytes), 0, "format %d", format);
        cr_expect_eq(memcmp(one.weights->embed.data, many.weights->embed.data, one.weights->embed.bytes), 0,
                     "format %d", format);
        fixture_close(&one);
        fixture_close(&many);
    }
}

struct seen {
    uint64_t done, total;
    int calls;
    bool went_back;
};

static void on_progress(void *ctx, uint64_t done, uint64_t total)
{
    struct seen *s = ctx;
    s->went_back = s->went_back || done < s->done;
    *s = (struct seen){done, total, s->calls + 1, s->went_back};
}

Test(weights, progress_ends_at_the_total_and_the_plan_knows_it_all)
{
    const enum dn_tensor_type type[5] = {DN_TT_Q4_1, DN_TT_Q4_1, DN_TT_Q4_1, DN_TT_Q4_1, DN_TT_Q8_0};
    struct fixture f;
    struct seen seen = {0};
    struct dn_err err = {0};
    struct dn_weights *w;
    struct dn_plan plan;
    open_types(&f, type, DN_WEIGHTS_AUTO, 1);
    struct dn_weights_conf conf = {
        .format = DN_WEIGHTS_AUTO, .n_threads = 2, .progress = on_progress, .progress_ctx = &seen};
    cr_assert_eq(dn_weights_open(f.device, f.model, &conf, &w, &err), 0, "%s", err.text);
    cr_assert(seen.calls > 1 && seen.done == seen.total && !seen.went_back);
    cr_assert_eq(seen.total, f.model->file_bytes - 3 * DIM * 4);
    const struct dn_runner_conf *rc = &f.runner->conf;
    cr_assert_eq(dn_weights_plan(f.device->ops, f.model, DN_WEIGHTS_AUTO, &rc->limits, rc->context_tokens, &plan, &err),
                 0);
    cr_assert_eq(plan.weight_bytes, w->bytes);
    cr_assert_eq(plan.activation_bytes, f.runner->activation_bytes);
    cr_assert_eq(plan.rope_bytes, 512u * HEAD * 4);
    cr_assert_eq(plan.kv_token_bytes[DN_KV_BF16], 2u * KV * HEAD * 2);
    dn_weights_close(w);
    fixture_close(&f);
}

/* A width of 48 has no groups of 32: the matrix stays in bf16, and a note says so. */
Test(weights, an_odd_width_stays_in_bf16_with_a_note)
{
    struct tiny_kind k = TINY_KIND[0];
    k.head_dim = 16; /* o: [96][48] */
    const char *folder = tiny_checkpoint(&k, 1, DN_TT_BF16, "");
    struct fixture f;
    fixture_open(&f, folder, DN_W_INT4, 1, 64);
    cr_expect_eq(f.weights->layer[0].o.format, DN_W_BF16);
    cr_expect_eq(f.weights->layer[0].qkv.format, DN_W_INT4);
    cr_expect(
        has_note(f.weights, "2 matrices kept in bf16: a width that is not a multiple of 32 has no integer format"));
    fixture_close(&f);
    tiny_remove(folder);
}

/* ---- Too large --------------------------------------------------------------------------------------------------- */

static uint64_t fake_free, fake_total;

static void fake_memory(struct dn_device *d, uint64_t *free_bytes, uint64_t *total_bytes)
{
    *free_bytes = fake_free;
    *total_bytes = fake_total;
}

static void *no_memory(struct dn_device *d, size_t bytes)
{
    return NULL;
}

/* A GPU that has less than the weights need: how much, and what would fit instead. */
Test(weights, what_would_fit_is_said)
{
    const enum dn_tensor_type type[5] = {DN_TT_BF16, DN_TT_BF16, DN_TT_BF16, DN_TT_BF16, DN_TT_BF16};
    struct fixture f;
    struct dn_err err;
    struct dn_weights *w = NULL;
    open_types(&f, type, DN_WEIGHTS_AUTO, 1);
    const struct dn_kernels *right = f.device->ops;
    struct dn_kernels ops = *right;
    ops.memory = fake_memory;
    fake_total = 3 << 20;
    struct dn_weights_conf conf = {.format = DN_WEIGHTS_AUTO, .n_threads = 1};
    f.device->ops = &ops;
    const struct {
        uint64_t free_bytes;
        const char *text;
    } c[] = {{f.weights->bytes - 1, ": --weights int8 would need 0.0 GiB; or take another GPU (--device cuda:N) or "
                                    "--device cpu"},
             {f.weights->bytes / 3 + 4096, ": --weights int4 would need 0.0 GiB; or take another GPU"},
             {1000, ", too little even for int4 (0.0 GiB); or take another GPU"}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        fake_free = c[i].free_bytes;
        cr_expect_eq(dn_weights_open(f.device, f.model, &conf, &w, &err), -DN_NO_MEMORY);
        cr_expect(strstr(err.text, ": the weights need 0.0 GiB as bf16, and the GPU has 0.0 of 0.0 GiB free") != NULL &&
                      strstr(err.text, c[i].text) != NULL,
                  "case %zu: %s", i, err.text);
    }
    fake_free = f.weights->bytes;
    cr_expect_eq(dn_weights_open(f.device, f.model, &conf, &w, &err), 0, "%s", err.text);
    dn_weights_close(w);
    ops.alloc = no_memory; /* others were quicker */
    cr_expect_eq(dn_weights_open(f.device, f.model, &conf, &w, &err), -DN_NO_MEMORY);
    cr_expect(strstr(err.text, "the GPU has ") != NULL, "%s", err.text);
    ops = *right; /* the host's memory, and malloc's word for it */
    ops.alloc = no_memory;
    cr_expect_eq(dn_weights_open(f.device, f.model, &conf, &w, &err), -DN_NO_MEMORY);
    cr_expect(strstr(err.text, " GiB as bf16, and this ") != NULL && strstr(err.text, "another GPU") == NULL, "%s",
              err.text);
    f.device->ops = right;
    fixture_close(&f);
}
