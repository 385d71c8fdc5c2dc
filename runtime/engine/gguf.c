#include "engine/gguf.h"

#include "base/buf.h"
#include "engine/mapfile.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* A key or tensor with its key's bytes ahead; the smallest possible sizes bound the counts by the file's length. */
enum { MIN_KV_BYTES = 8 + 4 + 1, MIN_TENSOR_BYTES = 8 + 4 + 4 + 8, MAX_ALIGNMENT = 1 << 20, MAX_NAME_BYTES = 512 };
/* A file with holes is as long as it likes: these bound what its counts make us allocate and walk through. */
enum { MAX_VALUES = 1 << 20, MAX_TENSORS = 1 << 20, MAX_STRINGS = 1 << 24 };

/* Values and tensors in the order of their names: finds by halving, and no choice of names makes it slow. */
struct dn_gguf_index {
    struct dn_mapfile map; /* data NULL when the caller keeps the bytes */
    const struct dn_gguf_value **value;
    const struct dn_tensor **tensor;
};

struct reader {
    const uint8_t *data;
    uint64_t bytes, pos;
};

static const struct {
    const char *name;
    uint32_t bytes; /* 0: string, array */
} TYPE[DN_GGUF_TYPES] = {
    [DN_GGUF_U8] = {"u8", 1},       [DN_GGUF_I8] = {"i8", 1},     [DN_GGUF_U16] = {"u16", 2},
    [DN_GGUF_I16] = {"i16", 2},     [DN_GGUF_U32] = {"u32", 4},   [DN_GGUF_I32] = {"i32", 4},
    [DN_GGUF_F32] = {"f32", 4},     [DN_GGUF_BOOL] = {"bool", 1}, [DN_GGUF_STRING] = {"string", 0},
    [DN_GGUF_ARRAY] = {"array", 0}, [DN_GGUF_U64] = {"u64", 8},   [DN_GGUF_I64] = {"i64", 8},
    [DN_GGUF_F64] = {"f64", 8},
};

/* ggml's numbers for tensor types; the gaps are types that were removed or that we have no name for. */
static const struct {
    uint32_t ggml;
    enum dn_tensor_type type;
} GGML_TYPE[] = {
    {0, DN_TT_F32},   {1, DN_TT_F16},   {2, DN_TT_Q4_0},  {3, DN_TT_Q4_1},  {6, DN_TT_Q5_0},
    {7, DN_TT_Q5_1},  {8, DN_TT_Q8_0},  {9, DN_TT_Q8_1},  {10, DN_TT_Q2_K}, {11, DN_TT_Q3_K},
    {12, DN_TT_Q4_K}, {13, DN_TT_Q5_K}, {14, DN_TT_Q6_K}, {15, DN_TT_Q8_K}, {24, DN_TT_I8},
    {25, DN_TT_I16},  {26, DN_TT_I32},  {27, DN_TT_I64},  {28, DN_TT_F64},  {30, DN_TT_BF16},
};

const char *dn_gguf_type_name(enum dn_gguf_type t)
{
    return (unsigned)t < DN_GGUF_TYPES ? TYPE[t].name : "unknown";
}

uint32_t dn_gguf_tensor_type_number(enum dn_tensor_type t)
{
    for (size_t i = 0; i < sizeof GGML_TYPE / sizeof *GGML_TYPE; i++)
        if (GGML_TYPE[i].type == t)
            return GGML_TYPE[i].ggml;
    DN_BUG_ON(true && "no GGUF number for this type");
    return 0;
}

static uint64_t left(const struct reader *r)
{
    return r->bytes - r->pos;
}

static int need(const struct reader *r, uint64_t n, const char *what, struct dn_err *err)
{
    if (n > left(r))
        return dn_err_set(err, DN_MODEL_FILE,
                          "%s at byte %" PRIu64 " needs %" PRIu64 " bytes, but the file ends at %" PRIu64, what, r->pos,
                          n, r->bytes);
    return 0;
}

static uint32_t load_u32(const uint8_t *p)
{
    uint32_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

static uint64_t load_u64(const uint8_t *p)
{
    uint64_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

static int read_u32(struct reader *r, const char *what, uint32_t *out, struct dn_err *err)
{
    int code = need(r, 4, what, err);
    if (code == 0) {
        *out = load_u32(r->data + r->pos);
        r->pos += 4;
    }
    return code;
}

static int read_u64(struct reader *r, const char *what, uint64_t *out, struct dn_err *err)
{
    int code = need(r, 8, what, err);
    if (code == 0) {
        *out = load_u64(r->data + r->pos);
        r->pos += 8;
    }
    return code;
}

static int read_string(struct reader *r, const char *what, struct dn_gguf_str *out, struct dn_err *err)
{
    uint64_t n;
    int code = read_u64(r, what, &n, err);
    if (code == 0)
        code = need(r, n, what, err);
    if (code == 0) {
        *out = (struct dn_gguf_str){(const char *)r->data + r->pos, (size_t)n};
        r->pos += n;
    }
    return code;
}

/* A name as it may be shown: control bytes replaced, cut at 80. */
static const char *show(struct dn_gguf_str s, char text[96])
{
    size_t n = s.len < 80 ? s.len : 80;
    for (size_t i = 0; i < n; i++)
        text[i] = (uint8_t)s.data[i] < 0x20 || (uint8_t)s.data[i] >= 0x7f ? '?' : s.data[i];
    memcpy(text + n, s.len > 80 ? "..." : "", s.len > 80 ? 4 : 1);
    return text;
}

static int parse_array(struct reader *r, struct dn_gguf_value *v, struct dn_err *err)
{
    uint32_t elem;
    int code = read_u32(r, "array type", &elem, err);
    if (code == 0)
        code = read_u64(r, "array length", &v->n, err);
    if (code != 0)
        return code;
    if (elem >= DN_GGUF_TYPES)
        return dn_err_set(err, DN_MODEL_FILE, "array of unknown type %" PRIu32, elem);
    if (elem == DN_GGUF_ARRAY)
        return dn_err_set(err, DN_MODEL_FILE, "array of arrays, which no model uses");
    v->elem_type = (enum dn_gguf_type)elem;
    uint32_t size = elem == DN_GGUF_STRING ? 8 : TYPE[elem].bytes;
    if (v->n > left(r) / size || (elem == DN_GGUF_STRING && v->n > MAX_STRINGS))
        return dn_err_set(err, DN_MODEL_FILE, "array of %" PRIu64 " elements of type %s in a file of %" PRIu64 " bytes",
                          v->n, TYPE[elem].name, r->bytes);
    v->data = r->data + r->pos;
    uint64_t begin = r->pos;
    if (elem == DN_GGUF_STRING) {
        struct dn_gguf_str s;
        for (uint64_t i = 0; i < v->n; i++) {
            code = read_string(r, "string", &s, err);
            if (code != 0)
                return dn_err_prefix(err, "element %" PRIu64, i);
        }
    } else {
        r->pos += v->n * size;
    }
    v->bytes = r->pos - begin;
    return 0;
}

static int parse_value(struct reader *r, struct dn_gguf_value *v, struct dn_err *err)
{
    uint32_t type;
    int code = read_u32(r, "type", &type, err);
    if (code != 0)
        return code;
    if (type >= DN_GGUF_TYPES)
        return dn_err_set(err, DN_MODEL_FILE, "unknown value type %" PRIu32, type);
    v->type = (enum dn_gguf_type)type;
    v->n = 1;
    if (type == DN_GGUF_ARRAY)
        return parse_array(r, v, err);
    if (type == DN_GGUF_STRING) {
        struct dn_gguf_str s;
        code = read_string(r, "string", &s, err);
        if (code != 0)
            return code;
        v->data = (const uint8_t *)s.data;
        v->bytes = s.len;
        return 0;
    }
    code = need(r, TYPE[type].bytes, TYPE[type].name, err);
    if (code != 0)
        return code;
    v->data = r->data + r->pos;
    v->bytes = TYPE[type].bytes;
    r->pos += v->bytes;
    if (type == DN_GGUF_BOOL && *v->data > 1)
        return dn_err_set(err, DN_MODEL_FILE, "bool of value %u, expected 0 or 1", *v->data);
    return 0;
}

static int compare_str(struct dn_gguf_str a, struct dn_gguf_str b)
{
    int order = memcmp(a.data, b.data, a.len < b.len ? a.len : b.len);
    return order ? order : a.len < b.len ? -1 : a.len > b.len;
}

static int by_key(const void *a, const void *b)
{
    return compare_str((*(const struct dn_gguf_value *const *)a)->key, (*(const struct dn_gguf_value *const *)b)->key);
}

static int by_name(const void *a, const void *b)
{
    return strcmp((*(const struct dn_tensor *const *)a)->name, (*(const struct dn_tensor *const *)b)->name);
}

static int index_values(struct dn_gguf *g, struct dn_err *err)
{
    const struct dn_gguf_value **order = dn_alloc0(g->n_values, sizeof *order);
    for (size_t i = 0; i < g->n_values; i++)
        order[i] = &g->value[i];
    qsort(order, g->n_values, sizeof *order, by_key);
    g->index->value = order;
    for (size_t i = 1; i < g->n_values; i++) {
        char text[96];
        if (by_key(&order[i - 1], &order[i]) == 0)
            return dn_err_set(err, DN_MODEL_FILE, "key \"%s\" appears twice", show(order[i]->key, text));
    }
    return 0;
}

static int index_tensors(struct dn_gguf *g, struct dn_err *err)
{
    const struct dn_tensor **order = dn_alloc0(g->n_tensors, sizeof *order);
    for (size_t i = 0; i < g->n_tensors; i++)
        order[i] = &g->tensor[i];
    qsort(order, g->n_tensors, sizeof *order, by_name);
    g->index->tensor = order;
    for (size_t i = 1; i < g->n_tensors; i++) {
        char text[96];
        if (by_name(&order[i - 1], &order[i]) == 0)
            return dn_err_set(err, DN_MODEL_FILE, "tensor \"%s\" appears twice",
                              show((struct dn_gguf_str){order[i]->name, strlen(order[i]->name)}, text));
    }
    return 0;
}

static int parse_values(struct dn_gguf *g, struct reader *r, uint64_t n, struct dn_err *err)
{
    if (n > MAX_VALUES || n > left(r) / MIN_KV_BYTES)
        return dn_err_set(err, DN_MODEL_FILE, "%" PRIu64 " metadata keys in a file of %" PRIu64 " bytes", n, r->bytes);
    g->value = dn_alloc0((size_t)n, sizeof *g->value);
    for (uint64_t i = 0; i < n; i++) {
        struct dn_gguf_value v = {0};
        int code = read_string(r, "key", &v.key, err);
        if (code != 0)
            return dn_err_prefix(err, "metadata key %" PRIu64 " of %" PRIu64, i, n);
        char text[96];
        show(v.key, text);
        if (v.key.len == 0 || v.key.len > 65535 || memchr(v.key.data, '\0', v.key.len) != NULL)
            return dn_err_set(err, DN_MODEL_FILE, "metadata key %" PRIu64 " (\"%s\") is %s", i, text,
                              v.key.len == 0      ? "empty"
                              : v.key.len > 65535 ? "longer than 65535 bytes"
                                                  : "cut by a NUL");
        code = parse_value(r, &v, err);
        if (code != 0)
            return dn_err_prefix(err, "key \"%s\"", text);
        g->value[g->n_values++] = v;
    }
    return index_values(g, err);
}

static int parse_dims(struct reader *r, struct dn_tensor *t, uint64_t *n_values, struct dn_err *err)
{
    int code = read_u32(r, "number of dimensions", &t->n_dims, err);
    if (code != 0)
        return code;
    if (t->n_dims > 4)
        return dn_err_set(err, DN_MODEL_FILE, "%" PRIu32 " dimensions, at most 4 are possible", t->n_dims);
    *n_values = 1;
    for (uint32_t i = 0; i < t->n_dims; i++) {
        uint64_t d;
        code = read_u64(r, "dimension", &d, err);
        if (code != 0)
            return code;
        /* ggml keeps sizes in int64: a product beyond it can't be a real tensor. */
        if (d == 0 || __builtin_mul_overflow(*n_values, d, n_values) || *n_values > INT64_MAX)
            return dn_err_set(err, DN_MODEL_FILE, "dimension %" PRIu32 " is %" PRIu64 "%s", i, d,
                              d == 0 ? ", expected at least 1" : ": the number of values overflows");
        t->dim[t->n_dims - 1 - i] = d;
    }
    return 0;
}

static int parse_type(struct dn_tensor *t, uint32_t ggml, uint64_t n_values, struct dn_err *err)
{
    size_t i = 0;
    while (i < sizeof GGML_TYPE / sizeof *GGML_TYPE && GGML_TYPE[i].ggml != ggml)
        i++;
    if (i == sizeof GGML_TYPE / sizeof *GGML_TYPE)
        return dn_err_set(err, DN_MODEL_FILE, "unknown or removed tensor type %" PRIu32, ggml);
    t->type = GGML_TYPE[i].type;
    const struct dn_tensor_type_info *info = dn_tensor_type_info(t->type);
    uint64_t row = t->n_dims ? t->dim[t->n_dims - 1] : 1;
    if (row % info->block_values != 0)
        return dn_err_set(err, DN_MODEL_FILE, "rows of %" PRIu64 " values, expected a multiple of %" PRIu32 " for %s",
                          row, info->block_values, info->name);
    if (__builtin_mul_overflow(n_values / info->block_values, (uint64_t)info->block_bytes, &t->bytes))
        return dn_err_set(err, DN_MODEL_FILE, "%" PRIu64 " values of %s overflow 64 bits of bytes", n_values,
                          info->name);
    return 0;
}

/* Reads one tensor's entry; its data pointer stays an offset until the data section is known. */
static int parse_tensor(struct dn_gguf *g, struct reader *r, uint64_t *offset, struct dn_err *err)
{
    struct dn_tensor *t = &g->tensor[g->n_tensors];
    struct dn_gguf_str name;
    int code = read_string(r, "name", &name, err);
    if (code != 0)
        return code;
    char text[96];
    show(name, text);
    if (name.len == 0 || name.len > MAX_NAME_BYTES || memchr(name.data, '\0', name.len) != NULL)
        return dn_err_set(err, DN_MODEL_FILE, "name \"%s\" of %zu bytes, expected 1 to %d without NUL", text, name.len,
                          MAX_NAME_BYTES);
    uint64_t n_values = 0;
    uint32_t ggml = 0;
    code = parse_dims(r, t, &n_values, err);
    if (code == 0)
        code = read_u32(r, "type", &ggml, err);
    if (code == 0)
        code = parse_type(t, ggml, n_values, err);
    if (code == 0)
        code = read_u64(r, "offset", offset, err);
    if (code == 0 && *offset % g->alignment != 0)
        code = dn_err_set(err, DN_MODEL_FILE, "offset %" PRIu64 " is not a multiple of the alignment %" PRIu32, *offset,
                          g->alignment);
    if (code != 0)
        return dn_err_prefix(err, "tensor \"%s\"", text);
    t->name = dn_strndup(name.data, name.len);
    g->n_tensors++;
    return 0;
}

static int by_data(const void *a, const void *b)
{
    const struct dn_tensor *x = *(const struct dn_tensor *const *)a, *y = *(const struct dn_tensor *const *)b;
    return x->data < y->data ? -1 : x->data > y->data;
}

static int check_overlap(const struct dn_gguf *g, struct dn_err *err)
{
    const struct dn_tensor **order = dn_alloc0(g->n_tensors, sizeof *order);
    int code = 0;
    for (size_t i = 0; i < g->n_tensors; i++)
        order[i] = &g->tensor[i];
    qsort(order, g->n_tensors, sizeof *order, by_data);
    for (size_t i = 1; i < g->n_tensors && code == 0; i++)
        if (order[i - 1]->data + order[i - 1]->bytes > order[i]->data)
            code =
                dn_err_set(err, DN_MODEL_FILE, "tensors \"%s\" and \"%s\" overlap", order[i - 1]->name, order[i]->name);
    free(order);
    return code;
}

static int parse_tensors(struct dn_gguf *g, struct reader *r, uint64_t n, struct dn_err *err)
{
    if (n > MAX_TENSORS || n > left(r) / MIN_TENSOR_BYTES)
        return dn_err_set(err, DN_MODEL_FILE, "%" PRIu64 " tensors in a file of %" PRIu64 " bytes", n, r->bytes);
    g->tensor = dn_alloc0((size_t)n, sizeof *g->tensor);
    uint64_t *offset = dn_alloc0((size_t)n, sizeof *offset);
    int code = 0;
    for (uint64_t i = 0; i < n && code == 0; i++) {
        code = parse_tensor(g, r, &offset[i], err);
        if (code != 0)
            code = dn_err_prefix(err, "tensor %" PRIu64 " of %" PRIu64, i, n);
    }
    if (code == 0)
        code = index_tensors(g, err);
    uint64_t base = r->pos;
    base += (g->alignment - base % g->alignment) % g->alignment;
    for (uint64_t i = 0; i < n && code == 0; i++) {
        struct dn_tensor *t = &g->tensor[i];
        if (base > r->bytes || offset[i] > r->bytes - base || t->bytes > r->bytes - base - offset[i])
            code = dn_err_set(err, DN_MODEL_FILE,
                              "tensor \"%s\": %" PRIu64 " bytes at offset %" PRIu64
                              " of the data, which begins at %" PRIu64 ", reach past the end of the file (%" PRIu64 ")",
                              t->name, t->bytes, offset[i], base, r->bytes);
        else
            t->data = r->data + base + offset[i];
        g->tensor_bytes += t->bytes;
    }
    free(offset);
    return code == 0 ? check_overlap(g, err) : code;
}

static int parse_alignment(struct dn_gguf *g, struct dn_err *err)
{
    uint64_t alignment = 32;
    bool found;
    const struct dn_gguf_value *v = dn_gguf_find(g, "general.alignment");
    if (v != NULL && v->type != DN_GGUF_U32)
        return dn_err_set(err, DN_MODEL_FILE, "key \"general.alignment\": type %s, expected u32",
                          dn_gguf_type_name(v->type));
    int code = dn_gguf_u64(g, "general.alignment", 1, MAX_ALIGNMENT, &alignment, &found, err);
    if (code == 0 && (alignment & (alignment - 1)) != 0)
        code = dn_err_set(err, DN_MODEL_FILE, "key \"general.alignment\": %" PRIu64 ", expected a power of two",
                          alignment);
    g->alignment = (uint32_t)alignment;
    return code;
}

static int parse(struct dn_gguf *g, struct reader *r, struct dn_err *err)
{
    static const char magic[4] = {'G', 'G', 'U', 'F'};
    if (r->bytes < 4 || memcmp(r->data, magic, 4) != 0)
        return dn_err_set(err, DN_MODEL_FILE,
                          "%" PRIu64 " bytes long, not a GGUF file (it does not begin with \"GGUF\")", r->bytes);
    r->pos = 4;
    uint64_t n_tensors = 0, n_values = 0;
    int code = read_u32(r, "version", &g->version, err);
    if (code == 0 && g->version != 2 && g->version != 3) {
        uint32_t swapped = __builtin_bswap32(g->version);
        if (swapped >= 1 && swapped <= 16)
            return dn_err_set(err, DN_MODEL_FILE, "big-endian GGUF (version %" PRIu32 "), expected little-endian",
                              swapped);
        return dn_err_set(err, DN_MODEL_FILE, "GGUF version %" PRIu32 ", expected 2 or 3", g->version);
    }
    if (code == 0)
        code = read_u64(r, "tensor count", &n_tensors, err);
    if (code == 0)
        code = read_u64(r, "key count", &n_values, err);
    if (code == 0)
        code = parse_values(g, r, n_values, err);
    if (code == 0)
        code = parse_alignment(g, err);
    if (code == 0)
        code = parse_tensors(g, r, n_tensors, err);
    return code;
}

int dn_gguf_open_memory(const uint8_t *data, uint64_t bytes, struct dn_gguf **out, struct dn_err *err)
{
    struct dn_gguf *g = dn_alloc0(1, sizeof *g);
    g->index = dn_alloc0(1, sizeof *g->index);
    struct reader r = {data, bytes, 0};
    int code = parse(g, &r, err);
    if (code != 0) {
        dn_gguf_close(g);
        return code;
    }
    *out = g;
    return 0;
}

int dn_gguf_open(const char *path, struct dn_gguf **out, struct dn_err *err)
{
    struct dn_mapfile map;
    int code = dn_mapfile_init(&map, path, err);
    if (code != 0)
        return code;
    struct dn_gguf *g;
    code = dn_gguf_open_memory(map.data, map.bytes, &g, err);
    if (code != 0) {
        dn_mapfile_release(&map);
        return dn_err_prefix(err, "%s", path);
    }
    g->index->map = map;
    g->path = dn_strdup(path);
    *out = g;
    return 0;
}

void dn_gguf_close(struct dn_gguf *g)
{
    if (g == NULL)
        return;
    for (size_t i = 0; i < g->n_tensors; i++)
        free((void *)(uintptr_t)g->tensor[i].name);
    free(g->tensor);
    free(g->value);
    free(g->index->value);
    free(g->index->tensor);
    dn_mapfile_release(&g->index->map);
    free(g->index);
    free(g->path);
    free(g);
}

const struct dn_gguf_value *dn_gguf_find(const struct dn_gguf *g, const char *key)
{
    struct dn_gguf_value probe = {.key = {key, strlen(key)}};
    const struct dn_gguf_value *p = &probe, **at = bsearch(&p, g->index->value, g->n_values, sizeof *at, by_key);
    return at != NULL ? *at : NULL;
}

const struct dn_tensor *dn_gguf_find_tensor(const struct dn_gguf *g, const char *name)
{
    struct dn_tensor probe = {.name = name};
    const struct dn_tensor *p = &probe, **at = bsearch(&p, g->index->tensor, g->n_tensors, sizeof *at, by_name);
    return at != NULL ? *at : NULL;
}

/* The value of a key, or what to return when it is absent (*out NULL) or of another type. */
static int typed(const struct dn_gguf *g, const char *key, bool ok[DN_GGUF_TYPES], const char *expected,
                 const struct dn_gguf_value **out, bool *found, struct dn_err *err)
{
    const struct dn_gguf_value *v = dn_gguf_find(g, key);
    *out = v;
    if (found != NULL)
        *found = v != NULL;
    if (v == NULL)
        return found != NULL ? 0 : dn_err_set(err, DN_MODEL_FILE, "key \"%s\" is missing", key);
    if (!ok[v->type])
        return dn_err_set(err, DN_MODEL_FILE, "key \"%s\": type %s, expected %s", key, dn_gguf_type_name(v->type),
                          expected);
    return 0;
}

int dn_gguf_u64(const struct dn_gguf *g, const char *key, uint64_t min, uint64_t max, uint64_t *out, bool *found,
                struct dn_err *err)
{
    bool ok[DN_GGUF_TYPES] = {[DN_GGUF_U8] = true,  [DN_GGUF_I8] = true,  [DN_GGUF_U16] = true, [DN_GGUF_I16] = true,
                              [DN_GGUF_U32] = true, [DN_GGUF_I32] = true, [DN_GGUF_U64] = true, [DN_GGUF_I64] = true};
    const struct dn_gguf_value *v;
    int code = typed(g, key, ok, "an integer", &v, found, err);
    if (code != 0 || v == NULL)
        return code;
    int64_t i = dn_gguf_int_at(v, 0);
    uint64_t u = v->type == DN_GGUF_U64 ? load_u64(v->data) : (uint64_t)i;
    if ((v->type != DN_GGUF_U64 && i < 0) || u < min || u > max) {
        if (v->type != DN_GGUF_U64)
            return dn_err_set(err, DN_MODEL_FILE, "key \"%s\": %" PRId64 ", expected %" PRIu64 " to %" PRIu64, key, i,
                              min, max);
        return dn_err_set(err, DN_MODEL_FILE, "key \"%s\": %" PRIu64 ", expected %" PRIu64 " to %" PRIu64, key, u, min,
                          max);
    }
    *out = u;
    return 0;
}

int dn_gguf_f64(const struct dn_gguf *g, const char *key, double min, double max, double *out, bool *found,
                struct dn_err *err)
{
    bool ok[DN_GGUF_TYPES] = {[DN_GGUF_F32] = true, [DN_GGUF_F64] = true};
    const struct dn_gguf_value *v;
    int code = typed(g, key, ok, "f32", &v, found, err);
    if (code != 0 || v == NULL)
        return code;
    double d;
    if (v->type == DN_GGUF_F32)
        d = (double)dn_gguf_f32_at(v, 0);
    else
        memcpy(&d, v->data, sizeof d);
    if (!(d >= min && d <= max))
        return dn_err_set(err, DN_MODEL_FILE, "key \"%s\": %g, expected %g to %g", key, d, min, max);
    *out = d;
    return 0;
}

int dn_gguf_bool(const struct dn_gguf *g, const char *key, bool *out, bool *found, struct dn_err *err)
{
    bool ok[DN_GGUF_TYPES] = {[DN_GGUF_BOOL] = true};
    const struct dn_gguf_value *v;
    int code = typed(g, key, ok, "bool", &v, found, err);
    if (code == 0 && v != NULL)
        *out = *v->data != 0;
    return code;
}

int dn_gguf_string(const struct dn_gguf *g, const char *key, struct dn_gguf_str *out, bool *found, struct dn_err *err)
{
    bool ok[DN_GGUF_TYPES] = {[DN_GGUF_STRING] = true};
    const struct dn_gguf_value *v;
    int code = typed(g, key, ok, "string", &v, found, err);
    if (code == 0 && v != NULL)
        *out = (struct dn_gguf_str){(const char *)v->data, (size_t)v->bytes};
    return code;
}

int dn_gguf_array(const struct dn_gguf *g, const char *key, enum dn_gguf_type elem_type, uint64_t n_expected,
                  const struct dn_gguf_value **out, bool *found, struct dn_err *err)
{
    bool ok[DN_GGUF_TYPES] = {[DN_GGUF_ARRAY] = true};
    const struct dn_gguf_value *v;
    int code = typed(g, key, ok, "array", &v, found, err);
    if (code != 0 || v == NULL)
        return code;
    if (v->elem_type != elem_type)
        return dn_err_set(err, DN_MODEL_FILE, "key \"%s\": array of %s, expected of %s", key,
                          dn_gguf_type_name(v->elem_type), dn_gguf_type_name(elem_type));
    if (n_expected != 0 && v->n != n_expected)
        return dn_err_set(err, DN_MODEL_FILE, "key \"%s\": %" PRIu64 " elements, expected %" PRIu64, key, v->n,
                          n_expected);
    *out = v;
    return 0;
}

int64_t dn_gguf_int_at(const struct dn_gguf_value *v, uint64_t i)
{
    enum dn_gguf_type t = v->type == DN_GGUF_ARRAY ? v->elem_type : v->type;
    DN_BUG_ON(i >= v->n || TYPE[t].bytes == 0);
    const uint8_t *p = v->data + i * TYPE[t].bytes;
    uint16_t u16;
    switch (t) {
    case DN_GGUF_U8:
    case DN_GGUF_BOOL:
        return *p;
    case DN_GGUF_I8:
        return (int8_t)*p;
    case DN_GGUF_U16:
        memcpy(&u16, p, 2);
        return u16;
    case DN_GGUF_I16:
        memcpy(&u16, p, 2);
        return (int16_t)u16;
    case DN_GGUF_U32:
        return load_u32(p);
    case DN_GGUF_I32:
        return (int32_t)load_u32(p);
    case DN_GGUF_U64:
        return load_u64(p) > INT64_MAX ? INT64_MAX : (int64_t)load_u64(p);
    case DN_GGUF_I64:
        return (int64_t)load_u64(p);
    default:
        DN_BUG_ON(true && "not an integer type");
    }
    return 0;
}

float dn_gguf_f32_at(const struct dn_gguf_value *v, uint64_t i)
{
    DN_BUG_ON(i >= v->n || (v->type == DN_GGUF_ARRAY ? v->elem_type : v->type) != DN_GGUF_F32);
    float f;
    memcpy(&f, v->data + 4 * i, sizeof f);
    return f;
}

struct dn_gguf_str dn_gguf_next_string(const uint8_t **cursor)
{
    uint64_t n = load_u64(*cursor);
    struct dn_gguf_str s = {(const char *)*cursor + 8, (size_t)n};
    *cursor += 8 + n;
    return s;
}
