/* One tensor of a model file, whatever the file: name, type, shape and a pointer into the mapping; and the decoders of
 * its values.
 *
 * For: gguf.h and safetensors.h produce these, model.c checks their shapes, weights.c decodes them. A tensor belongs to
 * the file that it came from. Plain functions without state: any thread.
 */
#ifndef DN_ENGINE_TENSOR_H
#define DN_ENGINE_TENSOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { DN_TENSOR_MAX_DIMS = 8 };

/* Types of both file formats. Those without a decoder (dn_tensor_type_info.decodes) can be listed but not loaded. */
enum dn_tensor_type {
    DN_TT_F32,
    DN_TT_F16,
    DN_TT_BF16,
    DN_TT_F64,
    DN_TT_Q4_0,
    DN_TT_Q4_1,
    DN_TT_Q5_0,
    DN_TT_Q5_1,
    DN_TT_Q8_0,
    DN_TT_Q8_1,
    DN_TT_Q2_K,
    DN_TT_Q3_K,
    DN_TT_Q4_K,
    DN_TT_Q5_K,
    DN_TT_Q6_K,
    DN_TT_Q8_K,
    DN_TT_F8_E4M3,
    DN_TT_F8_E5M2,
    DN_TT_F8_E8M0,
    DN_TT_I8,
    DN_TT_I16,
    DN_TT_I32,
    DN_TT_I64,
    DN_TT_U8,
    DN_TT_U16,
    DN_TT_U32,
    DN_TT_U64,
    DN_TT_BOOL,
    DN_TT_COUNT
};

struct dn_tensor_type_info {
    const char *name;      /* "Q4_1", "BF16" */
    uint32_t block_values; /* values a block (1, 32, 256) */
    uint32_t block_bytes;
    bool decodes; /* dn_tensor_row_f32() knows it */
};
const struct dn_tensor_type_info *dn_tensor_type_info(enum dn_tensor_type t);

struct dn_tensor {
    const char *name; /* terminated; owned by the file */
    enum dn_tensor_type type;
    uint32_t n_dims;                  /* 0 = a scalar */
    uint64_t dim[DN_TENSOR_MAX_DIMS]; /* outermost first: [n_out][n_in], in both file formats */
    const uint8_t *data;              /* not aligned */
    uint64_t bytes;                   /* checked: dims times the size of the type, inside the file */
};

/* "[576][1536]" into text; returns text. */
char *dn_tensor_shape_text(const struct dn_tensor *t, char *text, size_t n);

/* Bytes of a row of n values (n a multiple of block_values). */
uint64_t dn_tensor_row_bytes(enum dn_tensor_type t, uint64_t n);

/* Decodes n values (a multiple of the type's block) to f32, by the definitions of ggml for its block types. */
void dn_tensor_row_f32(enum dn_tensor_type t, const uint8_t *row, size_t n, float *out);

/* Rows of 4-bit types to struct dn_rows' form, without loss for Q4_0 and Q4_1: nibbles [n/2] (column 2b low), scales
 * and offsets f16 [n/32]. Q4_0's offset is -8 * scale. Q4_K's products of scale and sub-scale are rounded to f16.
 * Returns false if a scale does not fit f16 (then decode to f32 instead). */
bool dn_tensor_row_q4(enum dn_tensor_type t, const uint8_t *row, size_t n, uint8_t *q4, uint16_t *scale,
                      uint16_t *offset);

/* A row of Q8_0 as int8 [n] and f16 scales [n/32]. */
void dn_tensor_row_q8(const uint8_t *row, size_t n, int8_t *q8, uint16_t *scale);

float dn_f16_to_f32(uint16_t h);
uint16_t dn_f32_to_f16(float f);  /* round to nearest even; out of range gives infinity */
uint16_t dn_f32_to_bf16(float f); /* round to nearest even; NaN stays NaN */
static inline float dn_bf16_to_f32(uint16_t h)
{
    union {
        uint32_t u;
        float f;
    } v = {(uint32_t)h << 16};
    return v.f;
}

#endif
