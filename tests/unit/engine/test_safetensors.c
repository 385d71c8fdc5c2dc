#include "engine/safetensors.h"

#include "base/buf.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A file of this header (padding and all) and n bytes of data, in memory of exactly its size. */
static struct dn_buf make(const char *header, size_t n)
{
    struct dn_buf b = {0};
    uint64_t len = strlen(header);
    dn_buf_put(&b, &len, 8);
    dn_buf_puts(&b, header);
    for (size_t i = 0; i < n; i++)
        dn_buf_putc(&b, (char)i);
    b.data = dn_realloc(b.data, b.len, 1);
    b.cap = b.len;
    return b;
}

static struct dn_safetensors *open_bytes(const struct dn_buf *b, struct dn_err *err)
{
    struct dn_safetensors *s = NULL;
    int code = dn_safetensors_open_memory((const uint8_t *)b->data, b->len, &s, err);
    cr_assert_eq(code == 0, s != NULL);
    return s;
}

static const char VALID[] = "{\"__metadata__\":{\"format\":\"pt\"},"
                            "\"b\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]},"
                            "\"a\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[24,32]},"
                            "\"scalar\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[32,33]},"
                            "\"empty\":{\"dtype\":\"I64\",\"shape\":[0,7],\"data_offsets\":[33,33]}}  ";

Test(safetensors, reads_every_tensor)
{
    struct dn_buf b = make(VALID, 33);
    struct dn_err err = {0};
    struct dn_safetensors *s = open_bytes(&b, &err);
    cr_assert_not_null(s, "%s", err.text);
    cr_assert_eq(s->n_tensors, 4);
    cr_assert_eq(s->tensor_bytes, 33);
    const struct dn_tensor *t = dn_safetensors_find(s, "b");
    cr_assert(t->type == DN_TT_F32 && t->n_dims == 2 && t->dim[0] == 2 && t->dim[1] == 3 && t->data[5] == 5);
    t = dn_safetensors_find(s, "a");
    cr_assert(t->type == DN_TT_BF16 && t->n_dims == 1 && t->dim[0] == 4 && t->data[0] == 24);
    cr_assert_eq(dn_safetensors_find(s, "scalar")->data[0], 32);
    cr_assert_eq(dn_safetensors_find(s, "empty")->bytes, 0);
    cr_assert_null(dn_safetensors_find(s, "__metadata__"));
    dn_safetensors_close(s);
    dn_buf_release(&b);
}

Test(safetensors, every_cut_is_refused)
{
    struct dn_buf whole = make(VALID, 33);
    for (size_t n = 0; n < whole.len; n++) {
        struct dn_err err = {0};
        struct dn_buf b = {.data = dn_alloc(n), .len = n};
        memcpy(b.data, whole.data, n);
        cr_assert_null(open_bytes(&b, &err), "%zu bytes", n);
        cr_assert_gt(strlen(err.text), 5);
        free(b.data);
    }
    dn_buf_release(&whole);
}

Test(safetensors, messages_say_what_is_wrong_and_where)
{
#define ONE(body) "{\"t\":{" body "}}"
    static const struct {
        const char *header;
        size_t n;
        const char *text;
    } bad[] = {
        {"[1]", 0, "does not begin with \"{\""},
        {"{} x", 0, "header: "},
        {"{\"t\":null}", 0, "tensor \"t\": not an object"},
        {"{\"__metadata__\":{\"a\":1}}", 0, "\"__metadata__\": \"a\" is not a string"},
        {"{\"__metadata__\":[]}", 0, "\"__metadata__\" is not an object"},
        {ONE("\"shape\":[1],\"data_offsets\":[0,4]"), 4, "\"dtype\" is missing"},
        {ONE("\"dtype\":\"F31\",\"shape\":[1],\"data_offsets\":[0,4]"), 4, "unknown dtype \"F31\""},
        {ONE("\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]"), 4, "\"shape\"[0] is not a size"},
        {ONE("\"dtype\":\"F32\",\"shape\":[1.0],\"data_offsets\":[0,4]"), 4, "\"shape\"[0] is not a size"},
        {ONE("\"dtype\":\"F32\",\"shape\":\"1\",\"data_offsets\":[0,4]"), 4, "\"shape\" is not an array"},
        {ONE("\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,4]"), 4, "overflows 64 bits"},
        {ONE("\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]"), 4, "\"data_offsets\" is not [begin, end]"},
        {ONE("\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]"), 4, "\"data_offsets\" is not [begin, end]"},
        {ONE("\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,4]"), 4, "\"data_offsets\" is not [begin, end]"},
        {ONE("\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4.0]"), 4, "\"data_offsets\" is not [begin, end]"},
        {ONE("\"dtype\":\"F32\",\"shape\":[1]"), 4, "\"data_offsets\" is not [begin, end]"},
        {ONE("\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]"), 4,
         "ends at byte 8 of the data, which are 4 bytes"},
        {ONE("\"dtype\":\"F32\",\"shape\":[1000000],\"data_offsets\":[0,4]"), 4,
         "4 bytes long, expected 4000000 for F32 [1000000]"},
        {ONE("\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]"), 5, "1 bytes behind the last tensor"},
        {ONE("\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]"), 8,
         "4 bytes before tensor \"t\" belong to no tensor"},
        {"{\"t\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},\"u\":{\"dtype\":\"U8\",\"shape\":[4],\"data_"
         "offsets\":[2,6]}}",
         6, "tensors \"t\" and \"u\" overlap"},
        {"{\"t\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},\"t\":{\"dtype\":\"U8\",\"shape\":[4],\"data_"
         "offsets\":[0,4]}}",
         4, "header: "},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct dn_buf b = make(bad[i].header, bad[i].n);
        struct dn_err err = {0};
        cr_assert_null(open_bytes(&b, &err), "%s", bad[i].header);
        cr_expect(strstr(err.text, bad[i].text) != NULL, "%s: \"%s\", expected \"%s\" in it", bad[i].header, err.text,
                  bad[i].text);
        cr_expect_eq(err.code, DN_MODEL_FILE);
        dn_buf_release(&b);
    }
}

Test(safetensors, deep_nesting_is_refused)
{
    struct dn_buf header = {0};
    struct dn_err err = {0};
    dn_buf_puts(&header, "{\"a\":");
    for (int i = 0; i < 20000; i++)
        dn_buf_putc(&header, '[');
    struct dn_buf b = make(dn_buf_str(&header), 0);
    cr_assert_null(open_bytes(&b, &err));
    dn_buf_release(&b);
    dn_buf_release(&header);
}

static void put_file(const char *folder, const char *name, const struct dn_buf *b)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "wb");
    cr_assert_not_null(f);
    cr_assert_eq(fwrite(b->data, 1, b->len, f), b->len);
    fclose(f);
}

static void check_index(const char *folder, const char *json, const char *text)
{
    char path[256];
    struct dn_buf b = {0};
    struct dn_err err = {0};
    struct dn_safetensors *s = NULL;
    dn_buf_puts(&b, json);
    put_file(folder, "model.safetensors.index.json", &b);
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", folder);
    int code = dn_safetensors_open_index(path, &s, &err);
    if (text == NULL) {
        cr_assert_eq(code, 0, "%s", err.text);
        cr_assert_eq(s->n_tensors, 2);
        cr_assert_eq(dn_safetensors_find(s, "y")->data[0], 0);
        cr_assert_eq(s->n_maps, 2);
    } else {
        cr_expect_neq(code, 0);
        cr_expect(strstr(err.text, text) != NULL, "\"%s\", expected \"%s\" in it", err.text, text);
    }
    dn_safetensors_close(s);
    dn_buf_release(&b);
    unlink(path);
}

Test(safetensors, index_and_shards_must_agree)
{
    char folder[] = "/tmp/dn_st_XXXXXX", path[256];
    cr_assert_not_null(mkdtemp(folder));
    struct dn_buf x = make("{\"x\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", 4);
    struct dn_buf y = make("{\"y\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", 4);
    put_file(folder, "1.safetensors", &x);
    put_file(folder, "2.safetensors", &y);
    check_index(folder, "{\"weight_map\":{\"x\":\"1.safetensors\",\"y\":\"2.safetensors\"}}", NULL);
    check_index(folder, "{\"weight_map\":{\"x\":\"1.safetensors\",\"z\":\"2.safetensors\"}}",
                "tensor \"y\" is in 2.safetensors, but the index says nothing of it");
    check_index(folder, "{\"weight_map\":{\"x\":\"1.safetensors\",\"y\":\"2.safetensors\",\"z\":\"2.safetensors\"}}",
                "tensor \"z\" is not in 2.safetensors");
    check_index(folder, "{\"weight_map\":{\"x\":\"2.safetensors\",\"y\":\"2.safetensors\"}}",
                "tensor \"x\" is not in 2.safetensors");
    check_index(folder, "{\"weight_map\":{\"x\":\"../1.safetensors\"}}", "not the name of a file beside the index");
    check_index(folder, "{\"weight_map\":{\"x\":\"3.safetensors\"}}", "3.safetensors: No such file");
    check_index(folder, "{\"weight_map\":[]}", "\"weight_map\" is not an object");
    check_index(folder, "{\"weight_map\":{}}", "\"weight_map\" names no tensor");
    check_index(folder, "{", "index.json: ");
    put_file(folder, "2.safetensors", &x);
    check_index(folder, "{\"weight_map\":{\"x\":\"1.safetensors\",\"y\":\"2.safetensors\"}}",
                "tensor \"x\" is in 2.safetensors");
    for (int i = 1; i <= 2; i++) {
        snprintf(path, sizeof path, "%s/%d.safetensors", folder, i);
        unlink(path);
    }
    rmdir(folder);
    dn_buf_release(&x);
    dn_buf_release(&y);
}

Test(safetensors, verdicts_on_the_broken_files)
{
    FILE *manifest = fopen(DN_SHARED_DATA "/malformed/manifest.tsv", "r");
    char line[1024];
    int n = 0;
    if (manifest == NULL) {
        printf("SKIPPED: " DN_SHARED_DATA "/malformed is not there\n");
        return;
    }
    while (fgets(line, sizeof line, manifest) != NULL) {
        char verdict[32], path[1024], stem[256];
        int bytes;
        if (sscanf(line, "safetensors/%255[^.].safetensors %d %31s", stem, &bytes, verdict) != 3)
            continue;
        snprintf(path, sizeof path, DN_SHARED_DATA "/malformed/safetensors/%s.safetensors", stem);
        if (access(path, R_OK) != 0)
            continue;
        n++;
        struct dn_err err = {0};
        struct dn_safetensors *s = NULL;
        int code = dn_safetensors_open(path, &s, &err);
        if (strcmp(verdict, "accept") == 0)
            cr_expect_eq(code, 0, "%s: %s", stem, err.text);
        if (strcmp(verdict, "reject") == 0)
            cr_expect_eq(code, -DN_MODEL_FILE, "%s was accepted", stem);
        dn_safetensors_close(s);
    }
    fclose(manifest);
    cr_assert_geq(n, 28);
}
