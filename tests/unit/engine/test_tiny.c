#include "engine/tiny.h"

#include "engine/mapfile.h"
#include "engine/tokenizer.h"
#include "unit/engine/engine_fixture.h"

static const char *write_tiny(void)
{
    static char path[256];
    struct dn_err err = {0};
    snprintf(path, sizeof path, "/tmp/dn_tiny_test.%ld.gguf", (long)getpid());
    cr_assert_eq(dn_tiny_write(path, &err), 0, "%s", err.text);
    return path;
}

/* The file must be the same on every machine: logs, caches and tests refer to it. */
Test(tiny, is_the_same_file_everywhere)
{
    const char *path = write_tiny();
    struct dn_mapfile map;
    struct dn_err err = {0};
    cr_assert_eq(dn_mapfile_init(&map, path, &err), 0);
    uint64_t h = 0xcbf29ce484222325u;
    for (uint64_t i = 0; i < map.bytes; i++)
        h = (h ^ map.data[i]) * 0x100000001b3u;
    cr_assert_lt(map.bytes, 400000);
    cr_assert_eq(h, 0x86f1245da85118fbull, "fnv1a64 %llx of %llu bytes", (unsigned long long)h,
                 (unsigned long long)map.bytes);
    dn_mapfile_release(&map);
    unlink(path);
}

Test(tiny, answers_with_its_own_words)
{
    const char *path = write_tiny();
    struct fixture f;
    struct dn_err err = {0};
    struct dn_tokenizer *t;
    static struct sequence q = {.format = DN_KV_BF16};
    fixture_open(&f, path, DN_WEIGHTS_AUTO, 1, 128);
    unlink(path);
    cr_assert_eq(f.weights->n_notes, 0, "%s", f.weights->note[0]);
    cr_assert_eq(f.weights->format_bytes[DN_W_BF16] + f.weights->format_bytes[DN_W_INT4],
                 f.weights->format_bytes[DN_W_BF16]);
    cr_assert_not_null(f.model->chat_template);
    cr_assert_eq(f.model->n_eos, 1);
    cr_assert_eq(dn_model_open_tokenizer(f.model, &t, &err), 0, "%s", err.text);
    static const char prompt[] = "<|im_start|>user\nsmall birds at the sea<|im_end|>\n<|im_start|>assistant\n";
    struct dn_tokens ids = {0};
    cr_assert_eq(dn_tokenizer_encode(t, prompt, sizeof prompt - 1, DN_TOK_SPECIAL, &ids, &err), 0, "%s", err.text);
    run_tokens(&f, &q, ids.data, (uint32_t)ids.len, 128, NULL);
    struct dn_tokens out = {0};
    for (int i = 0; i < 40; i++) {
        int32_t id = dn_runner_arrays(f.runner)->result[0].id;
        dn_tokens_put(&out, id);
        run_tokens(&f, &q, &id, 1, 1, NULL);
    }
    struct dn_buf text = {0};
    dn_tokenizer_decode(t, out.data, out.len, false, &text);
    printf("%zu prompt tokens; answer: %s\n", ids.len, dn_buf_str(&text));
    for (size_t i = 0; i < text.len; i++)
        cr_assert(text.data[i] >= ' ' && text.data[i] < 0x7f);
    dn_buf_release(&text);
    dn_tokens_release(&ids);
    dn_tokens_release(&out);
    dn_tokenizer_close(t);
    fixture_close(&f);
}
