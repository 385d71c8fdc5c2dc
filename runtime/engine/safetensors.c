#include "engine/safetensors.h"

#include "base/buf.h"
#include "base/json.h"
#include "engine/mapfile.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_HEADER_BYTES = 100000000, MAX_INDEX_BYTES = 100000000, MAX_SHARDS = 4096 };

static const struct {
    const char *name;
    enum dn_tensor_type type;
} DTYPE[] = {
    {"F32", DN_TT_F32},         {"F16", DN_TT_F16},         {"BF16", DN_TT_BF16},       {"F64", DN_TT_F64},
    {"F8_E4M3", DN_TT_F8_E4M3}, {"F8_E5M2", DN_TT_F8_E5M2}, {"F8_E8M0", DN_TT_F8_E8M0}, {"I8", DN_TT_I8},
    {"I16", DN_TT_I16},         {"I32", DN_TT_I32},         {"I64", DN_TT_I64},         {"U8", DN_TT_U8},
    {"U16", DN_TT_U16},         {"U32", DN_TT_U32},         {"U64", DN_TT_U64},         {"BOOL", DN_TT_BOOL},
};

/* One shard's data section, and where the reader is in its list of tensors. */
struct shard {
    const uint8_t *data;
    uint64_t bytes;
};

static int parse_dtype(struct dn_tensor *t, const json_t *dtype, struct dn_err *err)
{
    if (!json_is_string(dtype))
        return dn_err_set(err, DN_MODEL_FILE, "\"dtype\" is %s, expected a string",
                          dtype == NULL ? "missing" : "not a string");
    const char *name = json_string_value(dtype);
    for (size_t i = 0; i < sizeof DTYPE / sizeof *DTYPE; i++) {
        if (strcmp(DTYPE[i].name, name) == 0) {
            t->type = DTYPE[i].type;
            return 0;
        }
    }
    return dn_err_set(err, DN_MODEL_FILE, "unknown dtype \"%.40s\"", name);
}

static int parse_shape(struct dn_tensor *t, const json_t *shape, struct dn_err *err)
{
    if (!json_is_array(shape) || json_array_size(shape) > DN_TENSOR_MAX_DIMS)
        return dn_err_set(err, DN_MODEL_FILE, "\"shape\" is not an array of at most %d sizes", DN_TENSOR_MAX_DIMS);
    t->n_dims = (uint32_t)json_array_size(shape);
    uint64_t bytes = dn_tensor_type_info(t->type)->block_bytes;
    for (uint32_t i = 0; i < t->n_dims; i++) {
        const json_t *d = json_array_get(shape, i);
        if (!json_is_integer(d) || json_integer_value(d) < 0)
            return dn_err_set(err, DN_MODEL_FILE, "\"shape\"[%" PRIu32 "] is not a size", i);
        t->dim[i] = (uint64_t)json_integer_value(d);
        if (__builtin_mul_overflow(bytes, t->dim[i], &bytes))
            return dn_err_set(err, DN_MODEL_FILE, "\"shape\" overflows 64 bits of bytes");
    }
    t->bytes = bytes;
    return 0;
}

static int parse_offsets(struct dn_tensor *t, const json_t *offsets, const struct shard *s, struct dn_err *err)
{
    const json_t *b = json_array_get(offsets, 0), *e = json_array_get(offsets, 1);
    if (json_array_size(offsets) != 2 || !json_is_integer(b) || !json_is_integer(e) || json_integer_value(b) < 0 ||
        json_integer_value(e) < json_integer_value(b))
        return dn_err_set(err, DN_MODEL_FILE, "\"data_offsets\" is not [begin, end] with 0 <= begin <= end");
    uint64_t begin = (uint64_t)json_integer_value(b), end = (uint64_t)json_integer_value(e);
    if (end > s->bytes)
        return dn_err_set(err, DN_MODEL_FILE, "ends at byte %" PRIu64 " of the data, which are %" PRIu64 " bytes", end,
                          s->bytes);
    if (end - begin != t->bytes) {
        char shape[200];
        return dn_err_set(err, DN_MODEL_FILE, "%" PRIu64 " bytes long, expected %" PRIu64 " for %s %s", end - begin,
                          t->bytes, dn_tensor_type_info(t->type)->name, dn_tensor_shape_text(t, shape, sizeof shape));
    }
    t->data = s->data + begin;
    return 0;
}

static int parse_tensor(struct dn_tensor *t, const json_t *entry, const struct shard *s, struct dn_err *err)
{
    if (!json_is_object(entry))
        return dn_err_set(err, DN_MODEL_FILE, "not an object with dtype, shape and data_offsets");
    int code = parse_dtype(t, json_object_get(entry, "dtype"), err);
    if (code == 0)
        code = parse_shape(t, json_object_get(entry, "shape"), err);
    if (code == 0)
        code = parse_offsets(t, json_object_get(entry, "data_offsets"), s, err);
    return code;
}

static int check_metadata(const json_t *metadata, struct dn_err *err)
{
    const char *key;
    json_t *value;
    if (!json_is_object(metadata))
        return dn_err_set(err, DN_MODEL_FILE, "\"__metadata__\" is not an object");
    json_object_foreach((json_t *)(uintptr_t)metadata, key, value)
    {
        if (!json_is_string(value))
            return dn_err_set(err, DN_MODEL_FILE, "\"__metadata__\": \"%.60s\" is not a string", key);
    }
    return 0;
}

static int by_data(const void *a, const void *b)
{
    const struct dn_tensor *x = a, *y = b;
    if (x->data != y->data)
        return x->data < y->data ? -1 : 1;
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct dn_tensor *)a)->name, ((const struct dn_tensor *)b)->name);
}

/* The tensors of one shard (sorted by place here) must cover its data exactly. */
static int check_cover(struct dn_tensor *t, size_t n, const struct shard *s, struct dn_err *err)
{
    qsort(t, n, sizeof *t, by_data);
    uint64_t at = 0;
    for (size_t i = 0; i < n; i++) {
        uint64_t begin = (uint64_t)(t[i].data - s->data);
        if (begin < at)
            return dn_err_set(err, DN_MODEL_FILE, "tensors \"%.100s\" and \"%.100s\" overlap", t[i - 1].name,
                              t[i].name);
        if (begin > at)
            return dn_err_set(err, DN_MODEL_FILE, "%" PRIu64 " bytes before tensor \"%.100s\" belong to no tensor",
                              begin - at, t[i].name);
        at += t[i].bytes;
    }
    if (at != s->bytes)
        return dn_err_set(err, DN_MODEL_FILE, "%" PRIu64 " bytes behind the last tensor", s->bytes - at);
    return 0;
}

/* Reads the entries of a parsed header behind st->tensor[st->n_tensors]. */
static int parse_entries(struct dn_safetensors *st, json_t *header, const struct shard *s, struct dn_err *err)
{
    size_t first = st->n_tensors;
    st->tensor = dn_realloc(st->tensor, first + json_object_size(header), sizeof *st->tensor);
    const char *key;
    json_t *value;
    json_object_foreach(header, key, value)
    {
        int code;
        if (strcmp(key, "__metadata__") == 0) {
            code = check_metadata(value, err);
            if (code != 0)
                return code;
            continue;
        }
        struct dn_tensor t = {0};
        code = parse_tensor(&t, value, s, err);
        if (code != 0)
            return dn_err_prefix(err, "tensor \"%.200s\"", key);
        t.name = dn_strdup(key);
        st->tensor[st->n_tensors++] = t;
        st->tensor_bytes += t.bytes;
    }
    return check_cover(st->tensor + first, st->n_tensors - first, s, err);
}

/* As dn_json_parse(), but a fault is the file's and the value must be an object. */
static int parse_json(const char *text, uint64_t n, json_t **out, struct dn_err *err)
{
    struct dn_err why = {0};
    json_t *json;
    if (dn_json_parse(text, (size_t)n, &json, &why) != 0)
        return dn_err_set(err, DN_MODEL_FILE, "%s", why.text);
    if (!json_is_object(json)) {
        json_decref(json);
        return dn_err_set(err, DN_MODEL_FILE, "not a JSON object");
    }
    *out = json;
    return 0;
}

static int parse_shard(struct dn_safetensors *st, const uint8_t *data, uint64_t bytes, struct dn_err *err)
{
    if (bytes < 8)
        return dn_err_set(err, DN_MODEL_FILE, "%" PRIu64 " bytes long, not a safetensors file", bytes);
    uint64_t n;
    memcpy(&n, data, sizeof n);
    if (n > MAX_HEADER_BYTES || n > bytes - 8)
        return dn_err_set(err, DN_MODEL_FILE,
                          "header of %" PRIu64 " bytes in a file of %" PRIu64 " (at most %d are possible)", n, bytes,
                          MAX_HEADER_BYTES);
    const char *text = (const char *)data + 8;
    if (n == 0 || text[0] != '{')
        return dn_err_set(err, DN_MODEL_FILE, "not a safetensors file (its header does not begin with \"{\")");
    while (n > 0 && text[n - 1] == ' ')
        n--;
    json_t *header;
    int code = parse_json(text, n, &header, err);
    if (code != 0)
        return dn_err_prefix(err, "header");
    uint64_t header_bytes;
    memcpy(&header_bytes, data, sizeof header_bytes);
    struct shard s = {data + 8 + header_bytes, bytes - 8 - header_bytes};
    code = parse_entries(st, header, &s, err);
    json_decref(header);
    return code;
}

/* Sorts by name, and refuses a name that two shards have. */
static int finish(struct dn_safetensors *st, struct dn_err *err)
{
    if (st->n_tensors > 0)
        qsort(st->tensor, st->n_tensors, sizeof *st->tensor, by_name);
    for (size_t i = 1; i < st->n_tensors; i++)
        if (strcmp(st->tensor[i - 1].name, st->tensor[i].name) == 0)
            return dn_err_set(err, DN_MODEL_FILE, "tensor \"%.200s\" is in two shards", st->tensor[i].name);
    return 0;
}

int dn_safetensors_open_memory(const uint8_t *data, uint64_t bytes, struct dn_safetensors **out, struct dn_err *err)
{
    struct dn_safetensors *st = dn_alloc0(1, sizeof *st);
    int code = parse_shard(st, data, bytes, err);
    if (code == 0)
        code = finish(st, err);
    if (code != 0) {
        dn_safetensors_close(st);
        return code;
    }
    *out = st;
    return 0;
}

static int open_shard(struct dn_safetensors *st, const char *path, struct dn_err *err)
{
    struct dn_mapfile map;
    int code = dn_mapfile_init(&map, path, err);
    if (code != 0)
        return code;
    st->map = dn_realloc(st->map, st->n_maps + 1, sizeof *st->map);
    st->map[st->n_maps++] = map;
    code = parse_shard(st, map.data, map.bytes, err);
    return code == 0 ? 0 : dn_err_prefix(err, "%s", path);
}

int dn_safetensors_open(const char *path, struct dn_safetensors **out, struct dn_err *err)
{
    struct dn_safetensors *st = dn_alloc0(1, sizeof *st);
    int code = open_shard(st, path, err);
    if (code == 0)
        code = finish(st, err);
    if (code != 0) {
        dn_safetensors_close(st);
        return code;
    }
    *out = st;
    return 0;
}

static bool is_plain_name(const char *name)
{
    return name[0] != '\0' && name[0] != '.' && strchr(name, '/') == NULL && strlen(name) < 200;
}

/* Opens each file of the map once, in the order of first mention. `opened` is a set of their names. */
static int open_shards(struct dn_safetensors *st, const json_t *map, const char *dir, json_t *opened,
                       struct dn_err *err)
{
    const char *tensor;
    json_t *file;
    json_object_foreach((json_t *)(uintptr_t)map, tensor, file)
    {
        const char *name = json_string_value(file);
        if (name == NULL || !is_plain_name(name))
            return dn_err_set(err, DN_MODEL_FILE, "\"weight_map\": \"%.200s\": not the name of a file beside the index",
                              tensor);
        if (json_object_get(opened, name) != NULL)
            continue;
        if (st->n_maps >= MAX_SHARDS)
            return dn_err_set(err, DN_MODEL_FILE, "\"weight_map\" names more than %d files", MAX_SHARDS);
        struct dn_buf path = {0};
        dn_buf_printf(&path, "%s/%s", dir, name);
        size_t first = st->n_tensors;
        int code = open_shard(st, dn_buf_str(&path), err);
        dn_buf_release(&path);
        if (code != 0)
            return code;
        json_object_set_new(opened, name, json_true());
        for (size_t i = first; i < st->n_tensors; i++) {
            const char *owner = json_string_value(json_object_get(map, st->tensor[i].name));
            if (owner == NULL || strcmp(owner, name) != 0)
                return dn_err_set(err, DN_MODEL_FILE, "tensor \"%.200s\" is in %s, but the index says %s",
                                  st->tensor[i].name, name, owner ? owner : "nothing of it");
        }
    }
    return 0;
}

static int open_index(struct dn_safetensors *st, const char *path, struct dn_err *err)
{
    char *text;
    size_t len;
    int code = dn_mapfile_read_text(path, MAX_INDEX_BYTES, &text, &len, err);
    if (code != 0)
        return code;
    json_t *index;
    code = parse_json(text, len, &index, err);
    free(text);
    if (code != 0)
        return dn_err_prefix(err, "%s", path);
    const json_t *map = json_object_get(index, "weight_map");
    json_t *opened = json_object();
    char *dir = dn_strdup(path);
    char *slash = strrchr(dir, '/');
    if (slash != NULL)
        *slash = '\0';
    if (!json_is_object(map))
        code = dn_err_set(err, DN_MODEL_FILE, "\"weight_map\" is not an object");
    else if (json_object_size(map) == 0)
        code = dn_err_set(err, DN_MODEL_FILE, "\"weight_map\" names no tensor");
    else
        code = open_shards(st, map, slash != NULL ? dir : ".", opened, err);
    if (code == 0)
        code = finish(st, err);
    const char *tensor;
    json_t *file;
    if (code == 0) {
        json_object_foreach((json_t *)(uintptr_t)map, tensor, file)
        {
            if (dn_safetensors_find(st, tensor) == NULL && code == 0)
                code =
                    dn_err_set(err, DN_MODEL_FILE, "tensor \"%.200s\" is not in %s", tensor, json_string_value(file));
        }
    }
    free(dir);
    json_decref(opened);
    json_decref(index);
    return code == 0 ? 0 : dn_err_prefix(err, "%s", path);
}

int dn_safetensors_open_index(const char *path, struct dn_safetensors **out, struct dn_err *err)
{
    struct dn_safetensors *st = dn_alloc0(1, sizeof *st);
    int code = open_index(st, path, err);
    if (code != 0) {
        dn_safetensors_close(st);
        return code;
    }
    *out = st;
    return 0;
}

void dn_safetensors_close(struct dn_safetensors *st)
{
    if (st == NULL)
        return;
    for (size_t i = 0; i < st->n_tensors; i++)
        free((void *)(uintptr_t)st->tensor[i].name);
    free(st->tensor);
    for (size_t i = 0; i < st->n_maps; i++)
        dn_mapfile_release(&st->map[i]);
    free(st->map);
    free(st);
}

const struct dn_tensor *dn_safetensors_find(const struct dn_safetensors *st, const char *name)
{
    struct dn_tensor probe = {.name = name};
    return st->n_tensors == 0 ? NULL : bsearch(&probe, st->tensor, st->n_tensors, sizeof probe, by_name);
}
