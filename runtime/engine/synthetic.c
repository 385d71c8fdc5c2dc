#include "engine/synthetic.h"

#include "base/buf.h"
#include "engine/model_impl.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Bytes of noise; a multiple of any page size, and no multiple of a matrix's rows, so that rows differ. Tensors begin
 * at places of their own in it: multiples of PLACE. */
enum { NOISE_BYTES = 16 << 20, PLACE = 4096, FP8_BLOCK = 128, INT4_GROUP = 32, NIBBLES = 8 };

/* What a tensor's values are. */
enum content { MATRIX, NIBBLE, NIBBLE_SCALE, CODE, CODE_SCALE, ONES, ZEROS, CONTENTS };

struct dn_synthetic {
    struct dn_tensor *tensor;
    size_t n;
    struct noise {
        int fd;
        uint8_t *data; /* the noise over and over */
        size_t bytes;  /* of the longest tensor, rounded up */
        enum dn_tensor_type type;
    } noise[CONTENTS];
};

static uint64_t next_random(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

/* Roughly normal, variance 1. */
static float next_normal(uint64_t *state)
{
    uint64_t r = next_random(state);
    int64_t sum = (int64_t)((r & 0xffff) + (r >> 16 & 0xffff) + (r >> 32 & 0xffff) + (r >> 48)) - 2 * 0xffff;
    return (float)sum * (1.7320508f / 65536.0f);
}

/* scale: what makes a matrix's values 1 / sqrt(hidden size) on average. */
static void fill(uint8_t *p, enum content what, float scale)
{
    uint64_t state = (uint64_t)what + 1;
    uint16_t *h = (uint16_t *)(void *)p;
    float *f = (float *)(void *)p;
    switch (what) {
    case MATRIX:
        for (size_t i = 0; i < NOISE_BYTES / sizeof *h; i++)
            h[i] = dn_f32_to_bf16(scale * next_normal(&state));
        break;
    case NIBBLE_SCALE: /* nibbles have a deviation of 4.3 from 8 */
        for (size_t i = 0; i < NOISE_BYTES / sizeof *h; i++)
            h[i] = dn_f32_to_bf16(scale / 4.3f * (0.5f + (float)(next_random(&state) >> 40) * 0x1p-24f));
        break;
    case CODE_SCALE: /* e4m3 codes up to 1.875, see below */
        for (size_t i = 0; i < NOISE_BYTES / sizeof *f; i++)
            f[i] = scale * (0.5f + (float)(next_random(&state) >> 40) * 0x1p-24f);
        break;
    case NIBBLE: /* 0 becomes 8, value 0: uniform ones are -0.5 on average, which makes all tokens alike in some layers
                  */
        for (size_t i = 0; i < NOISE_BYTES; i += sizeof state) {
            uint64_t r = next_random(&state), any = r | r >> 1;
            any = (any | any >> 2) & 0x1111111111111111ull; /* nibbles that are not 0 */
            r |= (any ^ 0x1111111111111111ull) << 3;
            memcpy(p + i, &r, sizeof r);
        }
        break;
    case CODE: /* no exponent above 7: never NaN */
        for (size_t i = 0; i < NOISE_BYTES; i += sizeof state) {
            uint64_t r = next_random(&state) & 0xbfbfbfbfbfbfbfbfull;
            memcpy(p + i, &r, sizeof r);
        }
        break;
    default:
        for (size_t i = 0; i < NOISE_BYTES / sizeof *f; i++)
            f[i] = what == ONES ? 1.0f : 0.0f;
    }
}

static enum dn_tensor_type type_of(enum content what)
{
    static const enum dn_tensor_type type[CONTENTS] = {
        [MATRIX] = DN_TT_BF16,    [NIBBLE] = DN_TT_I32, [NIBBLE_SCALE] = DN_TT_BF16, [CODE] = DN_TT_F8_E4M3,
        [CODE_SCALE] = DN_TT_F32, [ONES] = DN_TT_F32,   [ZEROS] = DN_TT_F32};
    return type[what];
}

/* A tensor whose data are set when all sizes are known: until then data == NULL and dim[2] says which noise. */
static const struct dn_tensor *new_tensor(struct dn_synthetic *s, enum content what, uint64_t rows, uint64_t columns)
{
    static const char *const name[CONTENTS] = {"synthetic matrix", "synthetic int4",       "synthetic int4 scales",
                                               "synthetic fp8",    "synthetic fp8 scales", "synthetic norm",
                                               "synthetic bias"};
    struct dn_tensor *t = &s->tensor[s->n++];
    *t = (struct dn_tensor){
        .name = name[what], .type = type_of(what), .n_dims = columns ? 2 : 1, .dim = {rows, columns}};
    t->bytes = rows * (columns ? columns : 1) * dn_tensor_type_info(t->type)->block_bytes;
    t->dim[2] = (uint64_t)what;
    struct noise *n = &s->noise[what];
    n->bytes = t->bytes > n->bytes ? t->bytes : n->bytes;
    return t;
}

static struct dn_linear new_linear(struct dn_synthetic *s, enum dn_weight_format f, uint64_t n_out, uint64_t n_in)
{
    struct dn_linear l = {.n_out = n_out, .n_in = n_in};
    if (f == DN_W_INT4 && n_in % INT4_GROUP == 0) {
        l.values = new_tensor(s, NIBBLE, n_out, n_in / NIBBLES);
        l.scale = new_tensor(s, NIBBLE_SCALE, n_out, n_in / INT4_GROUP);
    } else if (f == DN_W_FP8) {
        l.values = new_tensor(s, CODE, n_out, n_in);
        l.scale = new_tensor(s, CODE_SCALE, (n_out + FP8_BLOCK - 1) / FP8_BLOCK, (n_in + FP8_BLOCK - 1) / FP8_BLOCK);
    } else {
        l.values = new_tensor(s, MATRIX, n_out, n_in);
    }
    return l;
}

static void make_role(struct dn_model *m, enum dn_tensor_role role, uint32_t layer, enum dn_weight_format f)
{
    uint64_t dim[2];
    if (!dn_model_needs(&m->hyper, role, layer))
        return;
    bool is_matrix = dn_model_expected_shape(&m->hyper, role, dim) == 2;
    struct dn_linear *out = role < DN_T_ATTN_NORM ? &m->global[role] : &m->layer[layer][role - DN_T_ATTN_NORM];
    if (!is_matrix) {
        bool zero = role == DN_T_ROUTER_BIAS || role == DN_T_Q_BIAS || role == DN_T_K_BIAS || role == DN_T_V_BIAS;
        *out = (struct dn_linear){
            .values = new_tensor(m->synthetic, zero ? ZEROS : ONES, dim[0], 0), .n_out = dim[0], .n_in = 1};
        return;
    }
    bool quantised = f == DN_W_FP8 && dn_model_may_be_quantised(m, role);
    *out = new_linear(m->synthetic, quantised ? f : DN_W_BF16, dim[0], dim[1]);
}

static void make_tensors(struct dn_model *m, enum dn_weight_format f)
{
    const struct dn_hyper *h = &m->hyper;
    size_t most = DN_T_ROLES + (size_t)h->n_layers * (2 * DN_T_LAYER_ROLES + 2 * DN_EXPERT_PARTS * h->n_experts);
    m->synthetic->tensor = dn_alloc0(most, sizeof *m->synthetic->tensor);
    m->layer = dn_alloc0(h->n_layers, sizeof *m->layer);
    m->expert = dn_alloc0(h->n_layers, sizeof *m->expert);
    for (int role = 0; role < DN_T_ATTN_NORM; role++)
        make_role(m, (enum dn_tensor_role)role, 0, f);
    for (uint32_t l = 0; l < h->n_layers; l++) {
        for (int role = DN_T_ATTN_NORM; role < DN_T_ROLES; role++)
            make_role(m, (enum dn_tensor_role)role, l, f);
        if (!dn_hyper_has_experts(h, l))
            continue;
        m->expert[l] = dn_alloc0(h->n_experts, sizeof *m->expert[l]);
        for (uint32_t e = 0; e < h->n_experts; e++)
            for (int p = 0; p < DN_EXPERT_PARTS; p++)
                m->expert[l][e][p] = p == DN_EXPERT_DOWN ? new_linear(m->synthetic, f, h->dim, h->expert_ff)
                                                         : new_linear(m->synthetic, f, h->expert_ff, h->dim);
    }
}

/* The noise in a file of its own, mapped behind itself: what weights.c tells the system about files it has read
 * (forget these pages) holds for it as well. */
static int map_noise(struct noise *n, enum content what, float scale, struct dn_err *err)
{
    size_t bytes = (n->bytes + 2 * NOISE_BYTES - 1) / NOISE_BYTES * NOISE_BYTES; /* wherever a tensor begins */
    n->fd = memfd_create("dunlin-noise", MFD_CLOEXEC);
    uint8_t *first = MAP_FAILED;
    if (n->fd >= 0 && ftruncate(n->fd, NOISE_BYTES) == 0)
        first = mmap(NULL, NOISE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, n->fd, 0);
    if (first == MAP_FAILED)
        return dn_err_set(err, DN_NO_MEMORY, "no memory for synthetic weights");
    fill(first, what, scale);
    munmap(first, NOISE_BYTES);
    uint8_t *p = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        return dn_err_set(err, DN_NO_MEMORY, "no room for %zu bytes of synthetic weights", bytes);
    n->data = p;
    n->bytes = bytes;
    for (size_t at = 0; at < bytes; at += NOISE_BYTES)
        if (mmap(p + at, NOISE_BYTES, PROT_READ, MAP_SHARED | MAP_FIXED, n->fd, 0) == MAP_FAILED)
            return dn_err_set(err, DN_NO_MEMORY, "no room for %zu bytes of synthetic weights", bytes);
    return 0;
}

static int make_noise(struct dn_model *m, struct dn_err *err)
{
    struct dn_synthetic *s = m->synthetic;
    float scale = 1.0f / sqrtf((float)m->hyper.dim);
    int code = 0;
    for (int what = 0; what < CONTENTS && code == 0; what++)
        if (s->noise[what].bytes > 0)
            code = map_noise(&s->noise[what], (enum content)what, scale, err);
    for (size_t i = 0; i < s->n && code == 0; i++) {
        struct dn_tensor *t = &s->tensor[i];
        t->data = s->noise[t->dim[2]].data + i * 2654435761u % (NOISE_BYTES / PLACE) * PLACE;
        t->dim[2] = 0;
    }
    return code;
}

void dn_synthetic_release(struct dn_synthetic *s)
{
    if (s == NULL)
        return;
    for (int what = 0; what < CONTENTS; what++) {
        if (s->noise[what].data != NULL)
            munmap(s->noise[what].data, s->noise[what].bytes);
        if (s->noise[what].fd >= 0)
            close(s->noise[what].fd);
    }
    free(s->tensor);
    free(s);
}

static int cut_layers(struct dn_model *m, uint32_t n_layers, enum dn_weight_format format, struct dn_err *err)
{
    struct dn_hyper *h = &m->hyper;
    if (n_layers > h->n_layers)
        return dn_err_set(err, DN_CONFIG, "%" PRIu32 " layers, but the model has %" PRIu32, n_layers, h->n_layers);
    if (format == DN_W_INT8)
        return dn_err_set(err, DN_CONFIG, "a synthetic model's weights are int4, fp8 or bf16, not int8");
    h->n_layers = n_layers ? n_layers : h->n_layers;
    m->n_extra_layers = 0;
    return 0;
}

int dn_synthetic_open(const char *config_path, uint32_t n_layers, enum dn_weight_format format, struct dn_model **out,
                      struct dn_err *err)
{
    struct dn_model *m = dn_alloc0(1, sizeof *m);
    m->path = dn_strdup(config_path);
    m->name = dn_strdup("synthetic");
    m->title = dn_strdup("synthetic");
    m->bos_id = -1;
    m->prefix = "";
    m->source = DN_MODEL_HF;
    m->synthetic = dn_alloc0(1, sizeof *m->synthetic);
    for (int what = 0; what < CONTENTS; what++)
        m->synthetic->noise[what].fd = -1;
    int code = dn_model_read_config(m, config_path, err);
    if (code == 0)
        code = cut_layers(m, n_layers, format, err);
    if (code == 0) {
        make_tensors(m, m->hyper.arch == DN_ARCH_KIMI ? format : DN_W_BF16);
        code = make_noise(m, err);
    }
    if (code != 0) {
        dn_model_close(m);
        return code;
    }
    dn_model_describe(m, "synthetic");
    *out = m;
    return 0;
}
