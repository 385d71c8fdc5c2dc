/* Whether a checkpoint holds numbers: one NaN or infinity in a scale or a norm makes every answer fail, hours later and
 * without a hint. All bytes pass through here on their way to the packing, so that they are in the cache: blocks of the
 * 16-bit kinds are tested by their maximum, which compilers make vector instructions of. */
#include "engine/weights_impl.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

enum { FP8_BLOCK = 128, CHECKED = 256 };

enum kind { KIND_F32, KIND_F16, KIND_BF16, KIND_E4M3 };

/* Numbers of one kind in a tensor: `per_row` of them for each `row_div` rows of its matrix. */
struct span {
    const struct dn_tensor *t;
    enum kind kind;
    uint32_t stride, offset; /* bytes from one to the next; of the first */
    uint32_t row_div;
    uint64_t per_row;
    const char *what; /* "value", "scale" */
};

static struct span plain(const struct dn_tensor *t, enum kind kind, uint64_t per_row)
{
    static const uint8_t bytes[] = {[KIND_F32] = 4, [KIND_F16] = 2, [KIND_BF16] = 2, [KIND_E4M3] = 1};
    return (struct span){t, kind, bytes[kind], 0, 1, per_row, "value"};
}

/* All that a matrix has; returns how many spans. */
static int spans_of(const struct dn_linear *l, struct span out[2])
{
    enum dn_tensor_type type = l->values->type;
    const struct dn_tensor_type_info *info = dn_tensor_type_info(type);
    uint64_t blocks = (l->n_in + FP8_BLOCK - 1) / FP8_BLOCK;
    switch (type) {
    case DN_TT_F32:
        out[0] = plain(l->values, KIND_F32, l->n_in);
        return 1;
    case DN_TT_F16:
        out[0] = plain(l->values, KIND_F16, l->n_in);
        return 1;
    case DN_TT_BF16:
        out[0] = plain(l->values, KIND_BF16, l->n_in);
        return 1;
    case DN_TT_F8_E4M3:
        out[0] = plain(l->scale, KIND_F32, blocks);
        out[0].row_div = FP8_BLOCK;
        out[1] = plain(l->values, KIND_E4M3, l->n_in);
        return 2;
    case DN_TT_I32:
        out[0] = plain(l->scale, KIND_BF16, l->n_in / DN_INT_GROUP);
        return 1;
    default: /* blocks of GGUF begin with a scale, or end with it; some have an offset behind it */
        out[0] = (struct span){l->values,
                               KIND_F16,
                               info->block_bytes,
                               type == DN_TT_Q6_K ? 208 : 0,
                               1,
                               l->n_in / info->block_values,
                               "scale of the block at"};
        out[1] = out[0];
        out[1].offset = 2;
        out[1].what = "offset of the block at";
        return type == DN_TT_Q4_1 || type == DN_TT_Q4_K ? 2 : 1;
    }
}

static float number_at(const struct span *s, uint64_t i)
{
    const uint8_t *p = s->t->data + s->offset + i * s->stride;
    uint16_t h;
    float f;
    if (s->kind == KIND_E4M3)
        return (*p & 0x7f) == 0x7f ? NAN : 0;
    if (s->kind == KIND_F32) {
        memcpy(&f, p, sizeof f);
        return f;
    }
    memcpy(&h, p, sizeof h);
    return s->kind == KIND_F16 ? dn_f16_to_f32(h) : dn_bf16_to_f32(h);
}

/* The first of n from `at` on that is no number, at + n if there is none. */
static uint64_t first_bad(const struct span *s, uint64_t at, uint64_t n)
{
    for (uint64_t i = at; i < at + n; i++)
        if (!isfinite(number_at(s, i)))
            return i;
    return at + n;
}

/* CHECKED numbers that lie side by side. */
static bool bad_16(const uint8_t *p, int16_t exponent)
{
    int16_t most = 0;
    for (size_t i = 0; i < CHECKED; i++) {
        int16_t v;
        memcpy(&v, p + 2 * i, 2);
        v &= 0x7fff;
        most = v > most ? v : most;
    }
    return most >= exponent;
}

static bool bad_8(const uint8_t *p)
{
    uint8_t most = 0;
    for (size_t i = 0; i < CHECKED; i++) {
        uint8_t v = p[i] & 0x7f;
        most = v > most ? v : most;
    }
    return most == 0x7f;
}

static bool are_numbers(const struct span *s, uint64_t at, uint64_t n)
{
    uint64_t end = at + n;
    bool beside = s->kind == KIND_E4M3 ? s->stride == 1 : s->kind != KIND_F32 && s->stride == 2;
    for (; beside && at + CHECKED <= end; at += CHECKED) {
        const uint8_t *p = s->t->data + at * s->stride;
        if (s->kind == KIND_E4M3 ? bad_8(p) : bad_16(p, s->kind == KIND_F16 ? 0x7c00 : 0x7f80))
            return false;
    }
    return first_bad(s, at, end - at) == end;
}

bool dn_weights_are_numbers(const struct dn_linear *l, uint64_t row, uint64_t n)
{
    struct span span[2];
    int n_spans = spans_of(l, span);
    for (int i = 0; i < n_spans; i++) {
        uint64_t first = row / span[i].row_div, last = (row + n - 1) / span[i].row_div;
        if (!are_numbers(&span[i], first * span[i].per_row, (last - first + 1) * span[i].per_row))
            return false;
    }
    return true;
}

int dn_weights_name_bad(const struct dn_model *m, const struct dn_linear *l, struct dn_err *err)
{
    struct span span[2];
    int n_spans = spans_of(l, span);
    for (int i = 0; i < n_spans; i++) {
        const struct span *s = &span[i];
        uint64_t n = (l->n_out + s->row_div - 1) / s->row_div * s->per_row, at = first_bad(s, 0, n);
        uint64_t width = s->t == l->values && s->per_row ? l->n_in / s->per_row : 1; /* values a number stands for */
        if (at < n)
            return dn_err_set(err, DN_MODEL_FILE,
                              "%s: tensor \"%.200s\": %s [%" PRIu64 "][%" PRIu64 "] is %s, expected a number", m->path,
                              s->t->name, s->what, at / s->per_row, at % s->per_row * width,
                              isnan(number_at(s, at)) ? "NaN" : "infinite");
    }
    return 0;
}

int dn_weights_check_vector(const struct dn_model *m, const struct dn_tensor *t, const float *value, struct dn_err *err)
{
    for (uint64_t i = 0; i < t->dim[0]; i++)
        if (!isfinite(value[i]))
            return dn_err_set(err, DN_MODEL_FILE, "%s: tensor \"%.200s\": value [%" PRIu64 "] is %s, expected a number",
                              m->path, t->name, i, isnan(value[i]) ? "NaN" : "infinite");
    return 0;
}
