#include "engine/gguf.h"

#include "engine/gguf_write.h"
#include "engine/model.h"
#include "engine/tokenizer.h"

#include <criterion/criterion.h>
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A valid file with a key of every kind and two tensors. */
static void make(struct dn_buf *out)
{
    static const char *const words[] = {"one", "", "three"};
    static const int32_t numbers[] = {3, -1, 7};
    float v[64];
    for (int i = 0; i < 64; i++)
        v[i] = (float)i;
    struct dn_gguf_writer w = {0};
    dn_gguf_write_string(&w, "general.architecture", "llama");
    dn_gguf_write_u32(&w, "u", 7);
    dn_gguf_write_f32(&w, "f", 1.5f);
    dn_gguf_write_bool(&w, "b", true);
    dn_gguf_write_strings(&w, "words", words, 3);
    dn_gguf_write_i32s(&w, "numbers", numbers, 3);
    dn_gguf_write_tensor(&w, "vector", DN_TT_F32, 0, 5, v);
    dn_gguf_write_tensor(&w, "matrix", DN_TT_F32, 4, 16, v);
    dn_gguf_write_bytes(&w, out);
    dn_gguf_write_release(&w);
}

static struct dn_gguf *open_bytes(const struct dn_buf *b, struct dn_err *err)
{
    struct dn_gguf *g = NULL;
    int code = dn_gguf_open_memory((const uint8_t *)b->data, b->len, &g, err);
    cr_assert_eq(code == 0, g != NULL);
    return g;
}

Test(gguf, reads_what_was_written)
{
    struct dn_buf b = {0};
    struct dn_err err = {0};
    make(&b);
    struct dn_gguf *g = open_bytes(&b, &err);
    cr_assert_not_null(g, "%s", err.text);
    uint64_t u;
    double f;
    bool flag, found;
    struct dn_gguf_str s;
    const struct dn_gguf_value *v;
    cr_assert_eq(dn_gguf_u64(g, "u", 1, 10, &u, NULL, &err), 0);
    cr_assert_eq(u, 7);
    cr_assert_eq(dn_gguf_f64(g, "f", 0, 2, &f, NULL, &err), 0);
    cr_assert_eq(f, 1.5);
    cr_assert_eq(dn_gguf_bool(g, "b", &flag, NULL, &err), 0);
    cr_assert(flag);
    cr_assert_eq(dn_gguf_string(g, "general.architecture", &s, NULL, &err), 0);
    cr_assert(s.len == 5 && memcmp(s.data, "llama", 5) == 0);
    cr_assert_eq(dn_gguf_array(g, "words", DN_GGUF_STRING, 3, &v, NULL, &err), 0);
    const uint8_t *cursor = v->data;
    cr_assert_eq(dn_gguf_next_string(&cursor).len, 3);
    cr_assert_eq(dn_gguf_next_string(&cursor).len, 0);
    s = dn_gguf_next_string(&cursor);
    cr_assert(s.len == 5 && memcmp(s.data, "three", 5) == 0);
    cr_assert_eq(dn_gguf_array(g, "numbers", DN_GGUF_I32, 0, &v, NULL, &err), 0);
    cr_assert_eq(dn_gguf_int_at(v, 1), -1);
    cr_assert_eq(dn_gguf_u64(g, "absent", 0, 1, &u, &found, &err), 0);
    cr_assert_not(found);
    const struct dn_tensor *t = dn_gguf_find_tensor(g, "matrix");
    cr_assert(t->n_dims == 2 && t->dim[0] == 4 && t->dim[1] == 16 && t->type == DN_TT_F32);
    float last;
    memcpy(&last, t->data + 4 * 63, 4);
    cr_assert_eq(last, 63);
    cr_assert_null(dn_gguf_find_tensor(g, "matri"));
    dn_gguf_close(g);
    dn_buf_release(&b);
}

Test(gguf, accessors_name_key_and_reason)
{
    struct dn_buf b = {0};
    struct dn_err err = {0};
    uint64_t u;
    const struct dn_gguf_value *v;
    make(&b);
    struct dn_gguf *g = open_bytes(&b, &err);
    cr_assert_eq(dn_gguf_u64(g, "u", 8, 10, &u, NULL, &err), -DN_MODEL_FILE);
    cr_assert_str_eq(err.text, "key \"u\": 7, expected 8 to 10");
    cr_assert_eq(dn_gguf_u64(g, "f", 0, 10, &u, NULL, &err), -DN_MODEL_FILE);
    cr_assert_str_eq(err.text, "key \"f\": type f32, expected an integer");
    cr_assert_eq(dn_gguf_u64(g, "absent", 0, 10, &u, NULL, &err), -DN_MODEL_FILE);
    cr_assert_str_eq(err.text, "key \"absent\" is missing");
    cr_assert_eq(dn_gguf_array(g, "words", DN_GGUF_F32, 0, &v, NULL, &err), -DN_MODEL_FILE);
    cr_assert_str_eq(err.text, "key \"words\": array of string, expected of f32");
    cr_assert_eq(dn_gguf_array(g, "words", DN_GGUF_STRING, 4, &v, NULL, &err), -DN_MODEL_FILE);
    cr_assert_str_eq(err.text, "key \"words\": 3 elements, expected 4");
    dn_gguf_close(g);
    dn_buf_release(&b);
}

/* Every prefix of a valid file is refused (its last tensor reaches to the last bytes), in memory of exactly that size,
 * so that AddressSanitizer sees any byte read behind it. */
Test(gguf, every_cut_is_refused)
{
    struct dn_buf b = {0};
    make(&b);
    for (size_t n = 0; n < b.len; n++) {
        struct dn_err err = {0};
        struct dn_buf cut = {0};
        dn_buf_put(&cut, b.data, n);
        cut.data = dn_realloc(cut.data, n, 1);
        cr_assert_null(open_bytes(&cut, &err), "%zu bytes", n);
        cr_assert_gt(strlen(err.text), 10);
        free(cut.data);
    }
    dn_buf_release(&b);
}

/* Each byte of head and list changed to a few values: refused or accepted, but never read outside or stuck. */
Test(gguf, no_changed_byte_is_read_outside)
{
    static const uint8_t to[] = {0x00, 0x01, 0x7f, 0x80, 0xff};
    struct dn_buf b = {0};
    make(&b);
    for (size_t at = 0; at < b.len; at++) {
        for (size_t k = 0; k < sizeof to; k++) {
            struct dn_err err = {0};
            char was = b.data[at];
            b.data[at] = (char)to[k];
            dn_gguf_close(open_bytes(&b, &err));
            b.data[at] = was;
        }
    }
    dn_buf_release(&b);
}

static void expect(const struct dn_buf *b, const char *text)
{
    struct dn_err err = {0};
    cr_assert_null(open_bytes(b, &err));
    cr_assert_eq(err.code, DN_MODEL_FILE);
    cr_expect(strstr(err.text, text) != NULL, "\"%s\", expected \"%s\" in it", err.text, text);
}

static size_t find_bytes(const struct dn_buf *b, const char *text)
{
    char *p = memmem(b->data, b->len, text, strlen(text));
    cr_assert_not_null(p);
    return (size_t)(p - b->data);
}

static void with_u64(struct dn_buf *b, size_t at, uint64_t v, const char *text)
{
    char was[8];
    memcpy(was, b->data + at, 8);
    memcpy(b->data + at, &v, 8);
    expect(b, text);
    memcpy(b->data + at, was, 8);
}

static void with_u32(struct dn_buf *b, size_t at, uint32_t v, const char *text)
{
    char was[4];
    memcpy(was, b->data + at, 4);
    memcpy(b->data + at, &v, 4);
    expect(b, text);
    memcpy(b->data + at, was, 4);
}

Test(gguf, messages_say_what_is_wrong_and_where)
{
    struct dn_buf b = {0};
    make(&b);
    size_t words = find_bytes(&b, "words") + 5, matrix = find_bytes(&b, "matrix") + 6,
           vector = find_bytes(&b, "vector") + 6;
    with_u32(&b, 0, 0x46554746, "not a GGUF file");
    with_u32(&b, 4, 1, "GGUF version 1, expected 2 or 3");
    with_u32(&b, 4, 0x03000000, "big-endian GGUF (version 3)");
    with_u64(&b, 8, UINT64_MAX, "18446744073709551615 tensors in a file of");
    with_u64(&b, 16, UINT64_MAX, "18446744073709551615 metadata keys in a file of");
    with_u64(&b, words + 8, 1ull << 63,
             "key \"words\": array of 9223372036854775808 elements of type string in a file of");
    with_u32(&b, words + 4, 9, "key \"words\": array of arrays");
    with_u32(&b, words, 13, "key \"words\": unknown value type 13");
    with_u64(&b, words + 16, 1ull << 61, "key \"words\": element 0: string at byte");
    with_u32(&b, matrix, 5, "tensor \"matrix\": 5 dimensions, at most 4 are possible");
    with_u64(&b, matrix + 4, 1ull << 62, "overflows");
    with_u64(&b, matrix + 4, 0, "dimension 0 is 0, expected at least 1");
    with_u32(&b, matrix + 20, 4, "tensor \"matrix\": unknown or removed tensor type 4");
    with_u32(&b, matrix + 20, 2, "rows of 16 values, expected a multiple of 32 for Q4_0");
    with_u64(&b, matrix + 24, 33, "offset 33 is not a multiple of the alignment 32");
    with_u64(&b, matrix + 24, 1ull << 40, "reach past the end of the file");
    with_u64(&b, matrix + 24, 0, "tensors \"vector\" and \"matrix\" overlap");
    with_u64(&b, vector + 4, 4096, "reach past the end of the file");
    memcpy(b.data + find_bytes(&b, "matrix"), "vector", 6);
    expect(&b, "tensor \"vector\" appears twice");
    dn_buf_release(&b);
}

static void with_key(void (*write)(struct dn_gguf_writer *w), const char *text)
{
    struct dn_gguf_writer w = {0};
    struct dn_buf b = {0};
    write(&w);
    dn_gguf_write_bytes(&w, &b);
    expect(&b, text);
    dn_gguf_write_release(&w);
    dn_buf_release(&b);
}

static void twice(struct dn_gguf_writer *w)
{
    dn_gguf_write_u32(w, "a", 1);
    dn_gguf_write_u32(w, "b", 1);
    dn_gguf_write_bool(w, "a", 1);
}

static void alignment_7(struct dn_gguf_writer *w)
{
    dn_gguf_write_u32(w, "general.alignment", 7);
}

static void alignment_2_31(struct dn_gguf_writer *w)
{
    dn_gguf_write_u32(w, "general.alignment", 1u << 31);
}

static void alignment_text(struct dn_gguf_writer *w)
{
    dn_gguf_write_string(w, "general.alignment", "32");
}

Test(gguf, keys_are_unique_and_the_alignment_is_sane)
{
    with_key(twice, "key \"a\" appears twice");
    with_key(alignment_7, "general.alignment\": 7, expected a power of two");
    with_key(alignment_2_31, "general.alignment\": 2147483648, expected 1 to 1048576");
    with_key(alignment_text, "general.alignment\": type string, expected u32");
}

/* As many keys as fit into 2 MB, all alike but for their end: still opened in no time. */
Test(gguf, many_keys_are_no_trouble, .timeout = 20)
{
    struct dn_gguf_writer w = {0};
    struct dn_buf b = {0};
    struct dn_err err = {0};
    for (int i = 0; i < 65536; i++) {
        char key[40];
        snprintf(key, sizeof key, "aaaaaaaaaaaaaa.%08x", i);
        dn_gguf_write_u32(&w, key, (uint32_t)i);
    }
    dn_gguf_write_bytes(&w, &b);
    struct dn_gguf *g = open_bytes(&b, &err);
    cr_assert_not_null(g, "%s", err.text);
    uint64_t u;
    cr_assert_eq(dn_gguf_u64(g, "aaaaaaaaaaaaaa.00008000", 0, 65536, &u, NULL, &err), 0);
    cr_assert_eq(u, 0x8000);
    dn_gguf_close(g);
    dn_gguf_write_release(&w);
    dn_buf_release(&b);
}

static void put_u64(struct dn_buf *b, uint64_t v)
{
    dn_buf_put(b, &v, sizeof v);
}

/* A terabyte of holes costs nobody anything: what its length allows must not be allocated or walked through. */
Test(gguf, counts_of_a_file_with_holes, .timeout = 20)
{
    static const struct {
        uint64_t n_tensors, n_values, n_strings;
        const char *text;
    } row[] = {{30000000000, 0, 0, "30000000000 tensors in a file"},
               {0, 60000000000, 0, "60000000000 metadata keys in a file"},
               {0, 1, 100000000000, "array of 100000000000 elements of type string"}};
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        char path[] = "/tmp/dn_gguf_XXXXXX";
        struct dn_buf b = {0};
        struct dn_gguf *g;
        struct dn_err err = {0};
        uint32_t word[] = {3, DN_GGUF_ARRAY, DN_GGUF_STRING};
        dn_buf_put(&b, "GGUF", 4);
        dn_buf_put(&b, &word[0], 4);
        put_u64(&b, row[i].n_tensors);
        put_u64(&b, row[i].n_values);
        put_u64(&b, 1);
        dn_buf_puts(&b, "a");
        dn_buf_put(&b, &word[1], 8);
        put_u64(&b, row[i].n_strings);
        int fd = mkstemp(path);
        cr_assert(fd >= 0 && write(fd, b.data, b.len) == (ssize_t)b.len);
        int failed = ftruncate(fd, (off_t)1 << 40);
        close(fd);
        if (failed) {
            printf("SKIPPED: no file of a terabyte in /tmp\n");
        } else {
            cr_assert_eq(dn_gguf_open(path, &g, &err), -DN_MODEL_FILE);
            cr_assert(strstr(err.text, row[i].text), "%s", err.text);
        }
        unlink(path);
        dn_buf_release(&b);
    }
}

Test(gguf, a_folder_or_a_missing_file_is_an_io_error)
{
    struct dn_gguf *g;
    struct dn_err err = {0};
    cr_assert_eq(dn_gguf_open("/", &g, &err), -DN_IO);
    cr_assert_str_eq(err.text, "/: not a regular file");
    cr_assert_eq(dn_gguf_open("/no/such/file", &g, &err), -DN_IO);
    cr_assert_str_eq(err.text, "/no/such/file: No such file or directory");
}

/* ---- The collection of broken files ------------------------------------------------------------------------------ */

/* Files whose fault is in what the keys mean, and a part of the message that says so; the others are refused by
 * dn_gguf_open(). */
static const struct {
    const char *file, *text;
    bool is_tokenizer;
} MEANING[] = {
    {"block_count_huge", "llama.block_count\": 2147483648, expected 1 to 1024", false},
    {"head_count_zero", "llama.attention.head_count\": 0, expected 1 to", false},
    {"vocab_scores_u8", "tokenizer.ggml.scores\": array of u8, expected of f32", true},
    {"vocab_scores_short", "tokenizer.ggml.scores\": 2 elements, expected 8", true},
    {"vocab_tokens_not_str", "tokenizer.ggml.tokens\": array of u32, expected of string", true},
    {"vocab_bos_oob", "tokenizer.ggml.bos_token_id is 99999, but there are 8 tokens", true},
    {"vocab_merges_bad", "tokenizer.ggml.", true},
};

static void check_meaning(const char *path, size_t i)
{
    struct dn_err err = {0};
    struct dn_gguf *g;
    struct dn_model *m = NULL;
    struct dn_tokenizer *t = NULL;
    cr_assert_eq(dn_gguf_open(path, &g, &err), 0, "%s", err.text);
    if (MEANING[i].is_tokenizer) {
        cr_expect_neq(dn_tokenizer_read_gguf(&t, g, &err), 0, "%s", path);
        dn_tokenizer_close(t);
    } else {
        cr_expect_neq(dn_model_open(path, &m, &err), 0, "%s", path);
        dn_model_close(m);
    }
    cr_expect(strstr(err.text, MEANING[i].text) != NULL, "%s: %s", path, err.text);
    dn_gguf_close(g);
}

Test(gguf, verdicts_on_the_broken_files)
{
    FILE *manifest = fopen(DN_SHARED_DATA "/malformed/manifest.tsv", "r");
    char line[1024];
    int n = 0;
    if (manifest == NULL) {
        printf("SKIPPED: " DN_SHARED_DATA "/malformed is not there\n");
        return;
    }
    while (fgets(line, sizeof line, manifest) != NULL) {
        char name[300], verdict[32], path[1024], stem[256];
        int bytes;
        if (sscanf(line, "gguf/%255[^.].gguf %d %31s", stem, &bytes, verdict) != 3)
            continue;
        snprintf(name, sizeof name, "%s.gguf", stem);
        snprintf(path, sizeof path, DN_SHARED_DATA "/malformed/gguf/%s", name);
        if (access(path, R_OK) != 0)
            continue;
        n++;
        size_t i = 0;
        while (i < sizeof MEANING / sizeof *MEANING && strcmp(MEANING[i].file, stem) != 0)
            i++;
        if (i < sizeof MEANING / sizeof *MEANING) {
            cr_assert_str_eq(verdict, "reject");
            check_meaning(path, i);
            continue;
        }
        struct dn_err err = {0};
        struct dn_gguf *g = NULL;
        int code = dn_gguf_open(path, &g, &err);
        if (strcmp(verdict, "accept") == 0)
            cr_expect_eq(code, 0, "%s: %s", name, err.text);
        if (strcmp(verdict, "reject") == 0)
            cr_expect_eq(code, -DN_MODEL_FILE, "%s was accepted", name);
        dn_gguf_close(g);
    }
    fclose(manifest);
    cr_assert_geq(n, 30);
}
