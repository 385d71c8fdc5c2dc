/* Whether a checkpoint holds numbers: one NaN or infinity in a scale or a norm makes every answer fail, hours later and
 * without a hint. All bytes pass through here on their way to the packing, and are in the cache when that reads them.
 */
#include "engine/weights_impl.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

enum { FP8_BLOCK = 128, CHECKED = 512 };

enum kind { KIND_F32, KIND_F16, KIND_BF16, KIND_E4M3 };

/* Of each kind: one number's bits without its sign, and what carries into the sign's place if the exponent (of E4M3 all
 * the rest) is all ones. Both over again in 64 bits: numbers that lie side by side are tested by the word. */
static const struct {
    uint64_t rest, carry, sign;
    uint32_t bytes;
} KIND[] = {[KIND_F32] = {0x7fffffff7fffffff, 0x0080000000800000, 0x8000000080000000, 4},
            [KIND_F16] = {0x7fff7fff7fff7fff, 0x0400040004000400, 0x8000800080008000, 2},
            [KIND_BF16] = {0x7fff7fff7fff7fff, 0x0080008000800080, 0x8000800080008000, 2},
            [KIND_E4M3] = {0x7f7f7f7f7f7f7f7f, 0x0101010101010101, 0x8080808080808080, 1}};

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
    return (struct span){t, kind, KIND[kind].bytes, 0, 1, per_row, "value"};
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

static uint64_t bits_at(const struct span *s, uint64_t i)
{
    const uint8_t *p = s->t->data + s->offset + i * s->stride;
    uint64_t bits = 0;
    memcpy(&bits, p, KIND[s->kind].bytes);
    return bits;
}

/* Whether one number, or one of those side by side, is none. */
static bool is_bad(enum kind kind, uint64_t bits)
{
    return (((bits & KIND[kind].rest) + KIND[kind].carry) & KIND[kind].sign) != 0;
}

/* Of one that is bad: the exponent alone, or a NaN's bits behind it. E4M3 has no infinity. */
static bool is_infinite(enum kind kind, uint64_t bits)
{
    uint64_t one = (1ull << 8 * KIND[kind].bytes) - 1, exponent = KIND[kind].sign - KIND[kind].carry;
    return kind != KIND_E4M3 && (bits & KIND[kind].rest & one) == (exponent & one);
}

/* The first of n from `at` on that is no number, at + n if there is none. */
static uint64_t first_bad(const struct span *s, uint64_t at, uint64_t n)
{
    for (uint64_t i = at; i < at + n; i++)
        if (is_bad(s->kind, bits_at(s, i)))
            return i;
    return at + n;
}

/* CHECKED bytes of numbers that lie side by side. */
static bool bytes_are_bad(enum kind kind, const uint8_t *p)
{
    const uint64_t rest = KIND[kind].rest, carry = KIND[kind].carry;
    uint64_t seen[4] = {0};
    for (size_t i = 0; i < CHECKED; i += 32) {
        uint64_t w[4];
        memcpy(w, p + i, 32);
        for (int k = 0; k < 4; k++)
            seen[k] |= (w[k] & rest) + carry;
    }
    return ((seen[0] | seen[1] | seen[2] | seen[3]) & KIND[kind].sign) != 0;
}

static bool are_numbers(const struct span *s, uint64_t at, uint64_t n)
{
    uint64_t end = at + n, step = CHECKED / KIND[s->kind].bytes;
    for (; s->stride == KIND[s->kind].bytes && at + step <= end; at += step)
        if (bytes_are_bad(s->kind, s->t->data + at * s->stride))
            return false;
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
                              is_infinite(s->kind, bits_at(s, at)) ? "infinite" : "NaN");
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
