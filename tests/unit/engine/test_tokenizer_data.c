/* Ids of the real vocabularies. Skipped, with the reason, where the material is not there. */
#include "unit/engine/tok_kimi.h"

/* The golden lines write a line break as \n, a blank as \s and nothing as \x. */
static size_t unescape(const char *line, size_t n, char *out)
{
    size_t k = 0;
    for (size_t i = 0; i < n; i++) {
        if (line[i] == '\\' && i + 1 < n && strchr("nsx", line[i + 1])) {
            char c = line[++i];
            if (c != 'x')
                out[k++] = c == 'n' ? '\n' : ' ';
        } else {
            out[k++] = line[i];
        }
    }
    return k;
}

static void check_lines(const struct dn_tokenizer *t, const char *input, const char *expected, unsigned flags)
{
    struct dn_buf in = tok_read(tok_path(input)), out = tok_read(tok_path(expected));
    struct dn_tokens got = {0}, want = {0};
    const char *p = out.data;
    char *text = dn_alloc(in.len + 1);
    size_t n_line = 0;
    for (size_t at = 0; at < in.len;) {
        const char *end = memchr(in.data + at, '\n', in.len - at);
        size_t len = end ? (size_t)(end - in.data) - at : in.len - at;
        if (len) {
            size_t n = unescape(in.data + at, len, text);
            tok_read_ids(&p, &want);
            tok_encode(t, text, n, flags, &got);
            tok_expect(&got, &want, expected, ++n_line);
        }
        at += len + 1;
    }
    cr_expect(n_line >= 20, "%s", input);
    free(text);
    dn_tokens_release(&got);
    dn_tokens_release(&want);
    dn_buf_release(&in);
    dn_buf_release(&out);
}

static void check_whole(const struct dn_tokenizer *t, const char *expected, unsigned flags)
{
    struct dn_buf in = tok_read(tok_path("tokenizers/goldens/utf8_input.txt")), out = tok_read(tok_path(expected));
    struct dn_tokens got = {0}, want = {0};
    const char *p = out.data;
    tok_read_ids(&p, &want);
    cr_expect(want.len > 1000);
    tok_encode(t, in.data, in.len, flags, &got);
    tok_expect(&got, &want, expected, 0);
    dn_tokens_release(&got);
    dn_tokens_release(&want);
    dn_buf_release(&in);
    dn_buf_release(&out);
}

/* `stem` + small_tokens.txt, mixed_tokens.txt, utf8_tokens.txt */
static void check_goldens(const struct dn_tokenizer *t, const char *stem, unsigned flags)
{
    char name[200];
    snprintf(name, sizeof name, "tokenizers/%ssmall_tokens.txt", stem);
    check_lines(t, "tokenizers/goldens/small_input.txt", name, flags);
    snprintf(name, sizeof name, "tokenizers/%smixed_tokens.txt", stem);
    check_lines(t, "tokenizers/goldens/mixed_input.txt", name, flags);
    snprintf(name, sizeof name, "tokenizers/%sutf8_tokens.txt", stem);
    check_whole(t, name, flags);
}

Test(tokenizer_data, kimi_goldens)
{
    if (!tok_unpack("tokenizers"))
        return;
    struct dn_tokenizer *t = tok_open_kimi();
    cr_expect_eq(dn_tokenizer_n_vocab(t), 163840);
    check_goldens(t, "kimi_k2/", 0);
    dn_tokenizer_close(t);
}

static void ids_of(const json_t *array, struct dn_tokens *out)
{
    size_t i;
    const json_t *v;
    out->len = 0;
    json_array_foreach(array, i, v) dn_tokens_put(out, (int32_t)json_integer_value(v));
}

/* Lines of {"text": ..., plain: [ids], special: [ids]}. */
static void check_jsonl(const struct dn_tokenizer *t, const char *path, const char *plain, const char *special,
                        size_t at_least)
{
    struct dn_buf in = tok_read(path);
    struct dn_tokens got = {0}, want = {0};
    size_t line = 0;
    for (char *p = in.data; *p;) {
        char *end = strchr(p, '\n');
        json_t *row = json_loadb(p, end ? (size_t)(end - p) : strlen(p), JSON_ALLOW_NUL, NULL);
        cr_assert_not_null(row, "%s line %zu", path, line);
        const json_t *text = json_object_get(row, "text");
        const char *keys[] = {plain, special};
        for (int i = 0; i < 2; i++) {
            if (keys[i] == NULL)
                continue;
            cr_assert(json_is_array(json_object_get(row, keys[i])));
            ids_of(json_object_get(row, keys[i]), &want);
            tok_encode(t, json_string_value(text), json_string_length(text), i ? DN_TOK_SPECIAL : 0, &got);
            tok_expect(&got, &want, keys[i], line);
        }
        json_decref(row);
        line++;
        p = end ? end + 1 : p + strlen(p);
    }
    cr_expect(line >= at_least);
    dn_tokens_release(&got);
    dn_tokens_release(&want);
    dn_buf_release(&in);
}

Test(tokenizer_data, kimi_hard_strings_with_and_without_specials)
{
    if (!tok_unpack("tokenizers"))
        return;
    struct dn_tokenizer *t = tok_open_kimi();
    check_jsonl(t, tok_path("tokenizers/kimi_k2/extra_vectors.jsonl"), "ids_plain", "ids_with_special", 30);
    dn_tokenizer_close(t);
}

Test(tokenizer_data, kimi_reserved_ids_have_names)
{
    if (!tok_unpack("tokenizers"))
        return;
    struct dn_tokenizer *t = tok_open_kimi();
    static const int32_t reserved[] = {163589, 163592, 163600, 163700};
    for (int i = 0; i < 4; i++) {
        char name[64];
        snprintf(name, sizeof name, "<|reserved_token_%d|>", reserved[i]);
        struct dn_tok_str piece = dn_tokenizer_piece(t, reserved[i]);
        cr_expect(piece.len == strlen(name) && memcmp(piece.data, name, piece.len) == 0);
        cr_expect(dn_tokenizer_is_special(t, reserved[i]));
    }
    cr_expect_eq(dn_tokenizer_find(t, "<|im_end|>", 10), 163586);
    cr_expect(dn_tokenizer_is_special(t, 163586));
    cr_expect(!dn_tokenizer_is_special(t, 163606) && dn_tokenizer_is_added(t, 163606), "<think> survives skip_special");
    cr_expect_eq(dn_tokenizer_bos(t), 163584);
    cr_expect_eq(dn_tokenizer_eos(t), 163585);
    cr_expect(!dn_tokenizer_adds_bos(t));
    cr_expect(!dn_tokenizer_has_token(t, 163840) && !dn_tokenizer_has_token(t, -1));
    dn_tokenizer_close(t);
}

Test(tokenizer_data, llama3_goldens)
{
    if (!tok_unpack("tokenizers"))
        return;
    struct dn_tokenizer *t = NULL;
    struct dn_err err = {0};
    cr_assert_eq(dn_tokenizer_open_tiktoken(&t, tok_path("tokenizers/llama3/llama3.tiktoken"), NULL, "llama-bpe", &err),
                 0, "%s", err.text);
    check_goldens(t, "llama3/llama33.", 0);
    dn_tokenizer_close(t);
}

static struct dn_tokenizer *open_json(const char *path)
{
    struct dn_tokenizer *t = NULL;
    struct dn_err err = {0};
    cr_assert_eq(dn_tokenizer_open_json(&t, path, NULL, &err), 0, "%s", err.text);
    return t;
}

Test(tokenizer_data, deepseek_goldens)
{
    if (!tok_unpack("tokenizers"))
        return;
    char path[700], packed[700];
    snprintf(path, sizeof path, "%s.%d.json", tok_path("tokenizers/deepseek/v4"), (int)getpid());
    snprintf(packed, sizeof packed, "%s", tok_path("tokenizers/deepseek/deepseek-v4.tokenizer.json.gz"));
    tok_run((const char *const[]){"gzip", "-dc", packed, NULL}, path);
    struct dn_tokenizer *t = open_json(path);
    unlink(path);
    check_goldens(t, "deepseek/deepseek_r1.", 0);
    dn_tokenizer_close(t);
}

Test(tokenizer_data, gpt2_goldens)
{
    if (!tok_unpack("tokenizers"))
        return;
    struct dn_tokenizer *t = open_json(tok_path("tokenizers/hf/gpt2.json"));
    check_goldens(t, "hf/gpt2.", DN_TOK_SPECIAL); /* line 3 is the special token itself */
    dn_tokenizer_close(t);
}

Test(tokenizer_data, llama2_goldens)
{
    if (!tok_unpack("tokenizers"))
        return;
    struct dn_tokenizer *t = open_json(tok_path("tokenizers/hf/llama2.json"));
    check_goldens(t, "hf/llama2.", DN_TOK_SPECIAL);
    dn_tokenizer_close(t);
}

static struct dn_tokenizer *open_gguf(const char *path)
{
    struct dn_gguf *g = NULL;
    struct dn_tokenizer *t = NULL;
    struct dn_err err = {0};
    cr_assert_eq(dn_gguf_open(path, &g, &err), 0, "%s", err.text);
    cr_assert_eq(dn_tokenizer_read_gguf(&t, g, &err), 0, "%s", err.text);
    dn_gguf_close(g);
    return t;
}

/* llama.cpp's vectors: inputs with a separator line between them, one line of ids each. */
static void check_gguf(const char *name)
{
    static const char separator[] = "\n__ggml_vocab_test__\n";
    char path[300];
    if (!tok_unpack("tokenizers"))
        return;
    snprintf(path, sizeof path, "tokenizers/gguf/ggml-vocab-%s.gguf", name);
    struct dn_tokenizer *t = open_gguf(tok_path(path));
    snprintf(path, sizeof path, "tokenizers/gguf/ggml-vocab-%s.gguf.inp", name);
    struct dn_buf in = tok_read(tok_path(path));
    snprintf(path, sizeof path, "tokenizers/gguf/ggml-vocab-%s.gguf.out", name);
    struct dn_buf out = tok_read(tok_path(path));
    struct dn_tokens got = {0}, want = {0};
    const char *p = in.data, *q = out.data;
    size_t n = 0;
    while (*q) {
        const char *end = strstr(p, separator);
        size_t len = end ? (size_t)(end - p) : strlen(p);
        tok_read_ids(&q, &want);
        tok_encode(t, p, len, 0, &got);
        tok_expect(&got, &want, path, n++);
        tok_round_trip(t, p, len);
        p = end ? end + strlen(separator) : p + len;
    }
    cr_expect(n >= 45, "%zu vectors", n);
    dn_tokens_release(&got);
    dn_tokens_release(&want);
    dn_buf_release(&in);
    dn_buf_release(&out);
    dn_tokenizer_close(t);
}

Test(tokenizer_data, gguf_gpt2)
{
    check_gguf("gpt-2");
}

Test(tokenizer_data, gguf_starcoder)
{
    check_gguf("starcoder");
}

Test(tokenizer_data, gguf_deepseek_coder)
{
    check_gguf("deepseek-coder");
}

Test(tokenizer_data, gguf_deepseek_llm)
{
    check_gguf("deepseek-llm");
}

Test(tokenizer_data, gguf_llama_spm)
{
    check_gguf("llama-spm");
}

Test(tokenizer_data, gguf_phi3)
{
    check_gguf("phi-3");
}

Test(tokenizer_data, llama2_reports)
{
    if (!tok_unpack("tokenizers"))
        return;
    struct dn_tokenizer *t = open_gguf(tok_path("tokenizers/gguf/ggml-vocab-llama-spm.gguf"));
    struct dn_tokens got = {0};
    int32_t lama[] = {1, 910, 338, 29871, 243, 162, 169, 156, 29889, 8223};
    const char *text = "This is \xF0\x9F\xA6\x99.cpp";
    tok_encode(t, text, strlen(text), DN_TOK_ADD_AFFIX, &got);
    tok_expect(&got, &(struct dn_tokens){lama, 10, 10}, "llama.cpp 167", 0);
    int32_t after_special[] = {1, 0};
    tok_encode(t, "<s>G", 4, DN_TOK_SPECIAL, &got);
    after_special[1] = dn_tokenizer_find(t, " G", 2);
    tok_expect(&got, &(struct dn_tokens){after_special, 2, 2}, "llama.cpp 4772", 0);
    dn_tokens_release(&got);
    dn_tokenizer_close(t);
}

Test(tokenizer_data, miniatures)
{
    struct dn_tokenizer *t = NULL;
    struct dn_err err = {0};
    if (access(DN_SHARED_DATA "/mini/mini-kimi/tiktoken.model", R_OK) != 0) {
        printf("SKIPPED: " DN_SHARED_DATA "/mini is not there\n");
        return;
    }
    cr_assert_eq(dn_tokenizer_open_tiktoken(&t, DN_SHARED_DATA "/mini/mini-kimi/tiktoken.model",
                                            DN_SHARED_DATA "/mini/mini-kimi/tokenizer_config.json", "kimi-k2", &err),
                 0, "%s", err.text);
    cr_expect_eq(dn_tokenizer_n_vocab(t), 8192);
    check_jsonl(t, DN_SHARED_DATA "/mini/mini-kimi/tokenizer_golden.jsonl", "ids_without_specials", "ids", 50);
    dn_tokenizer_close(t);
    cr_assert_eq(dn_tokenizer_open_json(&t, DN_SHARED_DATA "/mini/mini-glm/tokenizer.json",
                                        DN_SHARED_DATA "/mini/mini-glm/tokenizer_config.json", &err),
                 0, "%s", err.text);
    check_jsonl(t, DN_SHARED_DATA "/mini/mini-glm/tokenizer_golden.jsonl", NULL, "ids", 50);
    dn_tokenizer_close(t);
}

Test(tokenizer_data, naughty_strings_come_back)
{
    if (!tok_unpack("tokenizers") || !tok_unpack("conformance"))
        return;
    struct dn_tokenizer *kimi = tok_open_kimi(), *gpt2 = open_json(tok_path("tokenizers/hf/gpt2.json"));
    json_t *list = json_load_file(tok_path("conformance/unicode/blns.json"), JSON_ALLOW_NUL, NULL);
    cr_assert(json_array_size(list) > 400);
    size_t i;
    json_t *s;
    json_array_foreach(list, i, s)
    {
        tok_round_trip(kimi, json_string_value(s), json_string_length(s));
        tok_round_trip(gpt2, json_string_value(s), json_string_length(s));
    }
    json_decref(list);
    dn_tokenizer_close(kimi);
    dn_tokenizer_close(gpt2);
}

static void time_repeat(const struct dn_tokenizer *t, const char *unit, size_t n, const char *what)
{
    struct dn_buf text = {0};
    struct dn_tokens ids = {0};
    for (size_t i = 0; i < n; i++)
        dn_buf_puts(&text, unit);
    double start = tok_seconds();
    tok_encode(t, text.data, text.len, DN_TOK_SPECIAL, &ids);
    double took = tok_seconds() - start;
    printf("%s: %zu bytes, %zu ids, %.3f s\n", what, text.len, ids.len, took);
    cr_expect(took < 10, "%s took %.1f s", what, took); /* far above the measured 0.3 s, far below quadratic */
    dn_buf_release(&text);
    dn_tokens_release(&ids);
}

Test(tokenizer_data, long_runs_take_bounded_time)
{
    if (!tok_unpack("tokenizers"))
        return;
    struct dn_tokenizer *list[] = {tok_open_kimi(), open_json(tok_path("tokenizers/hf/gpt2.json")),
                                   open_gguf(tok_path("tokenizers/gguf/ggml-vocab-llama-spm.gguf")),
                                   open_gguf(tok_path("tokenizers/gguf/ggml-vocab-deepseek-llm.gguf"))};
    for (int i = 0; i < 4; i++) {
        time_repeat(list[i], "_", 50000, "50,000 x _");
        time_repeat(list[i], "x", 512 << 10, "512 Ki x");
        time_repeat(list[i], "X", 512 << 10, "512 Ki X");
        time_repeat(list[i], "^", 1000000, "1,000,000 ^");
        time_repeat(list[i], " ", 1000000, "1,000,000 blanks");
        time_repeat(list[i], " \n", 500000, "500,000 lines");
        time_repeat(list[i], "\xE3\x81\x82", 300000, "300,000 hiragana");
        time_repeat(list[i], "<", 1000000, "1,000,000 <");
        time_repeat(list[i], "<|im_en", 150000, "150,000 half specials");
        dn_tokenizer_close(list[i]);
    }
}

/* Not a test of speed; prints it. */
Test(tokenizer_data, speed)
{
    if (!tok_unpack("tokenizers"))
        return;
    struct dn_tokenizer *kimi = tok_open_kimi();
    struct dn_buf one = tok_read(tok_path("tokenizers/goldens/mixed_input.txt")), text = {0};
    for (int i = 0; i < 40; i++)
        dn_buf_put(&text, one.data, one.len);
    struct dn_tokens ids = {0};
    double start = tok_seconds();
    tok_encode(kimi, text.data, text.len, 0, &ids);
    double took = tok_seconds() - start;
    printf("kimi: %.1f MB/s, %.2f M ids/s\n", (double)text.len / took / 1e6, (double)ids.len / took / 1e6);
    cr_expect_gt(ids.len, 0);
    dn_tokens_release(&ids);
    dn_buf_release(&text);
    dn_buf_release(&one);
    dn_tokenizer_close(kimi);
}
