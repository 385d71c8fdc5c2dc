/* The tokenizers on vocabularies made here; the real ones are in test_tokenizer_data.c. */
#include "engine/tokenizer.h"

#include "engine/gguf.h"
#include "engine/gguf_write.h"
#include "unit/engine/tok_small.h"

#include <pthread.h>
#include <stdlib.h>

static const char *const merges[] = {"a", "b", "b", "c", "ab", "c", "a", "a", " ", "a", "x", "x", "xx", "xx", NULL};
enum { AB = 256, BC, ABC, AA, SPACE_A, XX, XXXX };

#define ADDED(id, text, more) "{\"id\":" #id ",\"content\":\"" text "\"" more "}"

static void expect_ids(const struct dn_tokenizer *t, const char *text, unsigned flags, const char *want)
{
    const char *got = small_ids(t, text, flags);
    cr_expect_str_eq(got, want, "\"%s\": %s, expected %s", text, got, want);
}

static void expect_pieces(const struct dn_tokenizer *t, const char *text, const char *want)
{
    const char *got = small_pieces(t, text, 0);
    cr_expect_str_eq(got, want, "\"%s\": %s, expected %s", text, got, want);
}

Test(tokenizer, merges_by_rank_then_leftmost)
{
    struct dn_tokenizer *t = small_open(&(struct small){.merge = merges});
    expect_ids(t, "abc", 0, "258");
    expect_ids(t, "bc", 0, "257");
    expect_ids(t, "abbc", 0, "256 257");
    expect_ids(t, "aaa", 0, "259 97"); /* the left pair first */
    expect_ids(t, "aab", 0, "97 256"); /* "ab" has the lower rank */
    expect_ids(t, "xxxxxxx", 0, "262 261 120");
    expect_ids(t, "", 0, "");
    dn_tokenizer_close(t);
}

/* The same merge rules, the obvious way. */
static void reference(const char *text, size_t n, struct dn_tokens *out)
{
    static const struct {
        int32_t left, right, id;
    } rule[] = {{'a', 'b', AB},      {'b', 'c', BC}, {AB, 'c', ABC}, {'a', 'a', AA},
                {' ', 'a', SPACE_A}, {'x', 'x', XX}, {XX, XX, XXXX}};
    out->len = 0;
    for (size_t i = 0; i < n; i++)
        dn_tokens_put(out, (unsigned char)text[i]);
    for (size_t r = 0; r < sizeof rule / sizeof *rule; r++)
        for (size_t i = 0; i + 1 < out->len; i++)
            if (out->data[i] == rule[r].left && out->data[i + 1] == rule[r].right) {
                out->data[i] = rule[r].id;
                out->len--;
                memmove(out->data + i + 1, out->data + i + 2, (out->len - i - 1) * sizeof *out->data);
                i = (size_t)-1;
                r = 0;
            }
}

Test(tokenizer, short_and_long_pieces_agree_with_the_definition)
{
    /* No splitting: the whole text is one piece, so that lengths on both sides of the heap's threshold are met. */
    struct dn_tokenizer *t = small_open(&(struct small){
        .merge = merges, .pre_tokenizer = "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}"});
    uint32_t seed = 7;
    struct dn_tokens got = {0}, want = {0};
    for (int round = 0; round < 3000; round++) {
        char text[200];
        seed = seed * 1664525u + 1013904223u;
        size_t n = 1 + (seed >> 16) % (round % 2 ? 60 : sizeof text - 1);
        for (size_t i = 0; i < n; i++) {
            seed = seed * 1664525u + 1013904223u;
            text[i] = "aabbccxx "[(seed >> 16) % 9];
        }
        got.len = 0;
        cr_assert_eq(dn_tokenizer_encode(t, text, n, 0, &got, NULL), 0);
        reference(text, n, &want);
        cr_assert(got.len == want.len && memcmp(got.data, want.data, got.len * sizeof *got.data) == 0,
                  "round %d: \"%.*s\"", round, (int)n, text);
    }
    dn_tokens_release(&got);
    dn_tokens_release(&want);
    dn_tokenizer_close(t);
}

Test(tokenizer, every_byte_comes_back)
{
    struct dn_tokenizer *t = small_open(&(struct small){.merge = merges});
    struct dn_tokens ids = {0};
    struct dn_buf text = {0}, back = {0};
    for (uint32_t c = 0; c < 0x110000; c += c < 0x3000 ? 1 : 97) {
        char utf8[4];
        if (c >= 0xD800 && c < 0xE000)
            continue;
        dn_buf_put(&text, utf8, dn_utf8_put(c, utf8));
    }
    cr_assert_eq(dn_tokenizer_encode(t, text.data, text.len, 0, &ids, NULL), 0);
    dn_tokenizer_decode(t, ids.data, ids.len, false, &back);
    cr_expect(back.len == text.len && memcmp(back.data, text.data, text.len) == 0);
    dn_tokens_release(&ids);
    dn_buf_release(&text);
    dn_buf_release(&back);
    dn_tokenizer_close(t);
}

Test(tokenizer, text_must_be_utf8)
{
    static const char *const bad[] = {"\xFF", "a\xC0\xAF", "\xED\xA0\x80", "\xF4\x90\x80\x80", "\xE2\x82", "ok\x80"};
    struct dn_tokenizer *t = small_open(&(struct small){0});
    struct dn_tokens ids = {0};
    struct dn_err err;
    dn_tokens_put(&ids, 5);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        cr_expect_eq(dn_tokenizer_encode(t, bad[i], strlen(bad[i]), 0, &ids, &err), -DN_INVALID_VALUE, "%zu", i);
    cr_expect_eq(ids.len, 1, "out is as before");
    dn_tokens_release(&ids);
    dn_tokenizer_close(t);
}

Test(tokenizer, special_tokens_only_where_asked)
{
    struct dn_tokenizer *t = small_open(&(struct small){
        .merge = merges, .added = "[" ADDED(300, "<|end|>", ",\"special\":true") "," ADDED(301, "<think>", "") "]"});
    expect_ids(t, "<|end|>", DN_TOK_SPECIAL, "300");
    expect_ids(t, "abc<|end|>abc", DN_TOK_SPECIAL, "258 300 258");
    expect_ids(t, "<think>", DN_TOK_SPECIAL, "301");
    cr_expect_str_eq(small_pieces(t, "<|end|>", 0), "<|||e|n|d|||>");
    cr_expect_str_eq(small_pieces(t, "<think>", 0), "<|t|h|i|n|k|>");
    expect_ids(t, "<|end|", DN_TOK_SPECIAL, small_ids(t, "<|end|", 0));
    cr_expect(dn_tokenizer_is_special(t, 300) && !dn_tokenizer_is_special(t, 301) && dn_tokenizer_is_added(t, 301));
    cr_expect_eq(dn_tokenizer_find(t, "<think>", 7), 301);
    cr_expect_eq(dn_tokenizer_find(t, "abc", 3), ABC);
    cr_expect_eq(dn_tokenizer_find(t, "abd", 3), -1);
    cr_expect_eq(dn_tokenizer_n_vocab(t), 302);
    cr_expect(!dn_tokenizer_has_token(t, 299) && dn_tokenizer_piece(t, 299).data == NULL);
    dn_tokenizer_close(t);
}

Test(tokenizer, no_merge_makes_a_control_token_of_a_users_text)
{
    struct dn_tokenizer *t = small_open(&(struct small){
        .merge = merges, .added = "[" ADDED(258, "abc", ",\"special\":true") "," ADDED(262, "xxxx", "") "]"});
    expect_ids(t, "abc", 0, "256 99");
    expect_ids(t, "xabcx", DN_TOK_SPECIAL, "120 258 120");
    expect_ids(t, "xxxx", 0, "262"); /* an added token that is none, others' merges may need it */
    dn_tokenizer_close(t);
}

Test(tokenizer, the_longest_added_token_wins)
{
    struct dn_tokenizer *t = small_open(
        &(struct small){.added = "[" ADDED(300, "<a>", "") "," ADDED(301, "<a><b>", "") "," ADDED(302, "<b>", "") "]"});
    expect_ids(t, "<a><b><a><a", DN_TOK_SPECIAL, "301 300 60 97");
    expect_ids(t, "<b><a>", DN_TOK_SPECIAL, "302 300");
    dn_tokenizer_close(t);
}

Test(tokenizer, added_tokens_swallow_white_space_and_want_word_edges)
{
    struct dn_tokenizer *t = small_open(
        &(struct small){.added = "[" ADDED(300, "<l>", ",\"lstrip\":true") "," ADDED(
                            301, "<r>", ",\"rstrip\":true") "," ADDED(302, "word", ",\"single_word\":true") "]"});
    expect_ids(t, "a \t<l>b", DN_TOK_SPECIAL, "97 300 98");
    expect_ids(t, "a<r>\xE2\x80\x83 b", DN_TOK_SPECIAL, "97 301 98");
    expect_ids(t, "<r> <l>", DN_TOK_SPECIAL, "301 300");
    expect_ids(t, "word", DN_TOK_SPECIAL, "302");
    expect_ids(t, "a-word.", DN_TOK_SPECIAL, "97 45 302 46");
    cr_expect_null(strstr(small_ids(t, "sword", DN_TOK_SPECIAL), "302"));
    cr_expect_null(strstr(small_ids(t, "words", DN_TOK_SPECIAL), "302"));
    cr_expect_null(strstr(small_ids(t, "\xC3\xA9word", DN_TOK_SPECIAL), "302"));
    dn_tokenizer_close(t);
}

struct part {
    const char *text;
    bool is_template;
};

static void expect_parts(const struct dn_tokenizer *t, const struct part *part, size_t n, const char *want)
{
    struct dn_tok_text text[8];
    struct dn_tokens ids = {0};
    struct dn_buf got = {0};
    struct dn_err err = {0};
    for (size_t i = 0; i < n; i++)
        text[i] = (struct dn_tok_text){part[i].text, strlen(part[i].text), part[i].is_template};
    cr_assert_eq(dn_tokenizer_encode_texts(t, text, n, 0, &ids, &err), 0, "%s", err.text);
    for (size_t i = 0; i < ids.len; i++)
        dn_buf_printf(&got, i ? " %d" : "%d", ids.data[i]);
    cr_expect_str_eq(dn_buf_str(&got), want, "%s, expected %s", dn_buf_str(&got), want);
    dn_buf_release(&got);
    dn_tokens_release(&ids);
}

#define PARTS(t, want, ...)                                                                                            \
    expect_parts(t, (const struct part[]){__VA_ARGS__},                                                                \
                 sizeof((const struct part[]){__VA_ARGS__}) / sizeof(struct part), want)

Test(tokenizer, user_text_never_becomes_a_special_token)
{
    struct dn_tokenizer *t = small_open(&(struct small){
        .merge = merges,
        .added = "[" ADDED(300, "<e>", ",\"special\":true") "," ADDED(301, "<n>", ",\"normalized\":true") "]"});
    PARTS(t, "300 258 300", {"<e>", true}, {"abc", false}, {"<e>", true});
    PARTS(t, "300 60 101 62 300", {"<e>", true}, {"<e>", false}, {"<e>", true});
    PARTS(t, "60 101 62", {"<e", true}, {">", false});
    PARTS(t, "60 101 62", {"<", false}, {"e>", true});
    PARTS(t, "60 101 62", {"<", true}, {"e", false}, {">", true});
    PARTS(t, "300", {"<", true}, {"", false}, {"e>", true});
    PARTS(t, "300", {"<", true}, {"e", true}, {">", true});
    PARTS(t, "60 110 62 301 60 110 62", {"<n>", false}, {"<n>", true}, {"<n>", false});
    PARTS(t, "300 60 110 62 301 97 300", {"<e>", true}, {"<n>", false}, {"<n>", true}, {"a", false}, {"<e>", true});
    dn_tokenizer_close(t);
}

Test(tokenizer, parts_are_encoded_as_one_text)
{
    struct dn_tokenizer *t = small_open(&(struct small){.merge = merges});
    PARTS(t, "258", {"a", true}, {"b", false}, {"c", true});
    PARTS(t, "260 258", {" ", true}, {"a", false}, {"abc", true});
    PARTS(t, "195 169", {"\xC3", true}, {"\xA9", false});
    cr_expect_str_eq(small_ids(t, "\xC3\xA9", 0), "195 169");
    dn_tokenizer_close(t);
}

Test(tokenizer, normalizes_to_nfc)
{
    struct dn_tokenizer *t = small_open(
        &(struct small){.normalizer = "{\"type\":\"NFC\"}",
                        .added = "[" ADDED(300, "<e>", "") "," ADDED(301, "<n>", ",\"normalized\":true") "]"});
    expect_ids(t, "e\xCC\x81", 0, "195 169");
    expect_ids(t, "<e>e\xCC\x81<n>", DN_TOK_SPECIAL, "300 195 169 301");
    /* A mark behind ">" makes another character of it under NFC. */
    expect_ids(t, "<e>\xCC\xB8", DN_TOK_SPECIAL, "300 204 184");
    cr_expect_null(strstr(small_ids(t, "<n>\xCC\xB8", DN_TOK_SPECIAL), "301"));
    PARTS(t, "195 169 301", {"e\xCC\x81", false}, {"<n>", true});
    PARTS(t, "195 169 60 110 62", {"e\xCC\x81", true}, {"<n>", false});
    PARTS(t, "301 60 110 62 195 169", {"<n>", true}, {"<n>e\xCC\x81", false});
    dn_tokenizer_close(t);
}

Test(tokenizer, refuses_runs_of_marks_that_would_take_for_ever)
{
    struct dn_tokenizer *t = small_open(&(struct small){.normalizer = "{\"type\":\"NFC\"}"});
    struct dn_buf text = {0};
    struct dn_tokens ids = {0};
    struct dn_err err = {0};
    dn_buf_putc(&text, 'a');
    for (int i = 0; i < 100000; i++)
        dn_buf_puts(&text, i % 2 ? "\xCC\xA3" : "\xCC\x81");
    cr_expect_eq(dn_tokenizer_encode(t, text.data, text.len, 0, &ids, &err), -DN_INVALID_VALUE);
    cr_expect_eq(dn_tokenizer_encode(t, text.data, 1001, 0, &ids, &err), 0, "%s", err.text);
    dn_tokens_release(&ids);
    dn_buf_release(&text);
    dn_tokenizer_close(t);
}

Test(tokenizer, whole_pieces_by_merges_or_by_vocabulary)
{
    /* "bc" is merged before "ab" and "cd" could be: "abcd" can't be reached by merging. */
    static const char *const unreachable[] = {"b", "c", "c", "d", "a", "b", "ab", "cd", NULL};
    struct dn_tokenizer *t = small_open(&(struct small){.merge = unreachable});
    expect_ids(t, "abcd", 0, "97 256 100");
    dn_tokenizer_close(t);
    t = small_open(&(struct small){.merge = unreachable, .model = "\"ignore_merges\":true,"});
    expect_ids(t, "abcd", 0, "259");
    dn_tokenizer_close(t);
}

Test(tokenizer, splits_with_the_steps_of_the_file)
{
    static const char *const words[] = {"1", "2", "12", "3", "h", "i", " ", "hi", NULL};
    struct dn_tokenizer *t = small_open(
        &(struct small){.merge = words,
                        .pre_tokenizer = "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Digits\",\"individual_"
                                         "digits\":true},{\"type\":\"ByteLevel\",\"add_prefix_space\":false}]}"});
    expect_pieces(t, "hi 123", "hi| |1|2|3");
    expect_pieces(t, "hi hi", "hi| hi");
    dn_tokenizer_close(t);
    t = small_open(&(struct small){.merge = words,
                                   .pre_tokenizer =
                                       "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{"
                                       "\"Regex\":\"\\\\p{N}{1,3}\"},\"behavior\":\"Isolated\",\"invert\":false},{"
                                       "\"type\":\"ByteLevel\",\"use_regex\":false}]}"});
    expect_pieces(t, "hi123", "hi|123");
    dn_tokenizer_close(t);
    t = small_open(&(struct small){.merge = words,
                                   .pre_tokenizer =
                                       "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{"
                                       "\"Regex\":\"[a-z]+\"},\"behavior\":\"Removed\",\"invert\":true},{"
                                       "\"type\":\"ByteLevel\",\"use_regex\":false}]}"});
    expect_pieces(t, "hi 12 hi", "hi|hi");
    dn_tokenizer_close(t);
}

Test(tokenizer, puts_the_prefix_that_the_file_asks_for)
{
    struct dn_tokenizer *t = small_open(&(struct small){
        .merge = merges,
        .added = "[" ADDED(300, "<s>", ",\"special\":true") "," ADDED(301, "</s>", "") "]",
        .post_processor =
            "{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"<s>\"}},{\"Sequence\":"
            "{\"id\":\"A\"}},{\"SpecialToken\":{\"id\":\"</s>\"}}]}"});
    expect_ids(t, "abc", 0, "258");
    expect_ids(t, "abc", DN_TOK_ADD_AFFIX, "300 258 301");
    cr_expect(dn_tokenizer_adds_bos(t));
    dn_tokenizer_close(t);
}

Test(tokenizer, reads_ids_from_the_config)
{
    struct dn_buf b = small_json(&(struct small){.added = "[" ADDED(300, "<s>", "") "," ADDED(301, "</s>", "") "]"});
    struct dn_tokenizer *t = NULL;
    struct dn_err err = {0};
    const char *config = "{\"model_max_length\":1000000000000000019884624838656,\"bos_token\":{\"content\":\"<s>\"},"
                         "\"eos_token\":\"</s>\",\"pad_token\":null,\"add_bos_token\":true}";
    cr_assert_eq(dn_tokenizer_parse_json(&t, b.data, b.len, config, strlen(config), &err), 0, "%s", err.text);
    cr_expect(dn_tokenizer_bos(t) == 300 && dn_tokenizer_eos(t) == 301 && dn_tokenizer_pad(t) == -1);
    expect_ids(t, "a", DN_TOK_ADD_AFFIX, "300 97");
    dn_tokenizer_close(t);
    dn_buf_release(&b);
}

static void refuse(const struct small *s, const char *part_of_message)
{
    struct dn_buf b = small_json(s);
    struct dn_tokenizer *t = NULL;
    struct dn_err err = {0};
    cr_expect_eq(dn_tokenizer_parse_json(&t, b.data, b.len, NULL, 0, &err), -DN_MODEL_FILE, "%s", part_of_message);
    cr_expect(strstr(err.text, part_of_message) != NULL, "\"%s\" does not say \"%s\"", err.text, part_of_message);
    cr_expect_null(t);
    dn_buf_release(&b);
}

Test(tokenizer, refuses_what_it_does_not_know_by_name)
{
    refuse(&(struct small){.normalizer = "{\"type\":\"Lowercase\"}"}, "Lowercase");
    refuse(&(struct small){.pre_tokenizer =
                               "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Punctuation\"},{\"type\":"
                               "\"ByteLevel\"}]}"},
           "Punctuation");
    refuse(&(struct small){.pre_tokenizer = "{\"type\":\"Whitespace\"}"}, "ByteLevel");
    refuse(&(struct small){.model = "\"dropout\":0.1,"}, "dropout");
    refuse(&(struct small){.model = "\"continuing_subword_prefix\":\"##\","}, "continuing_subword_prefix");
    refuse(&(struct small){.added = "[{\"id\":-1,\"content\":\"x\"}]"}, "-1");
    refuse(&(struct small){.added = "[{\"id\":99999999,\"content\":\"x\"}]"}, "99999999");
    refuse(&(struct small){.added = "[{\"id\":300,\"content\":\"\"}]"}, "empty");
    refuse(&(struct small){.merge = (const char *const[]){"a", "b", "q", "q", "abq", "b", NULL}},
           "not in the vocabulary");
    refuse(&(struct small){.post_processor = "{\"type\":\"BertProcessing\"}"}, "BertProcessing");
    refuse(&(struct small){.post_processor =
                               "{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"<q>\"}}]}"},
           "<q>");
    refuse(&(struct small){.pre_tokenizer =
                               "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{"
                               "\"Regex\":\"(a\"},\"behavior\":\"Isolated\"},{\"type\":\"ByteLevel\"}]}"},
           "(a");
    refuse(&(struct small){.pre_tokenizer =
                               "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{"
                               "\"Regex\":\"\\\\h+\"},\"behavior\":\"Isolated\"},{\"type\":\"ByteLevel\"}]}"},
           "\\h+");
}

Test(tokenizer, refuses_files_that_are_not_one)
{
    static const char *const bad[] = {
        "", "{", "[]", "{}", "{\"model\":1}", "{\"model\":{\"type\":\"WordPiece\"}}", "\xFF", "{\"a\":1,\"a\":2}"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct dn_tokenizer *t = NULL;
        struct dn_err err = {0};
        cr_expect_eq(dn_tokenizer_parse_json(&t, bad[i], strlen(bad[i]), NULL, 0, &err), -DN_MODEL_FILE, "%zu", i);
        cr_expect(err.text[0] && t == NULL);
    }
    struct dn_tokenizer *t = NULL;
    struct dn_err err = {0};
    cr_expect_eq(dn_tokenizer_open_json(&t, "/nowhere/tokenizer.json", NULL, &err), -DN_IO);
    cr_expect_not_null(strstr(err.text, "/nowhere/tokenizer.json"));
}

static struct dn_tokenizer *open_tiktoken(const char *const *more, const char *config, const char *pre)
{
    struct dn_buf ranks = small_tiktoken(more);
    struct dn_tokenizer *t = NULL;
    struct dn_err err = {0};
    cr_assert_eq(dn_tokenizer_parse_tiktoken(&t, ranks.data, ranks.len, config, config ? strlen(config) : 0, pre, &err),
                 0, "%s", err.text);
    dn_buf_release(&ranks);
    return t;
}

Test(tokenizer, tiktoken_takes_the_pair_whose_bytes_have_the_lowest_rank)
{
    static const char *const more[] = {"bc", "ab", "cd", "abcd", "aa", NULL};
    struct dn_tokenizer *t = open_tiktoken(more, NULL, "gpt-2");
    expect_ids(t, "abcd", 0, "259"); /* whole */
    expect_ids(t, "abcda", 0, "97 256 100 97");
    expect_ids(t, "aaaaa", 0, "260 260 97");
    dn_tokenizer_close(t);
}

Test(tokenizer, tiktoken_names_its_reserved_ids)
{
    struct dn_tokenizer *t =
        open_tiktoken(NULL,
                      "{\"added_tokens_decoder\":{\"256\":{\"content\":\"[BOS]\",\"special\":true},"
                      "\"259\":{\"content\":\"<think>\",\"special\":false}},\"bos_token\":\"[BOS]\"}",
                      "kimi-k2");
    cr_expect_eq(dn_tokenizer_n_vocab(t), 260);
    cr_expect_eq(dn_tokenizer_bos(t), 256);
    cr_expect_eq(dn_tokenizer_find(t, "<|reserved_token_257|>", 22), 257);
    cr_expect(dn_tokenizer_is_special(t, 258) && !dn_tokenizer_is_special(t, 259));
    expect_ids(t, "[BOS]<|reserved_token_258|>", DN_TOK_SPECIAL, "256 258");
    dn_tokenizer_close(t);
}

Test(tokenizer, kimi_splits_at_han_case_and_contractions)
{
    static const char *const more[] = {"He",  "ll",    "llo",   "Hello", "Wo", "World",
                                       "I'm", "CAN'T", " wait", "123",   "45", "\xE4\xB8\xAD\xE6\x96\x87",
                                       "ab",  "abc",   NULL};
    struct dn_tokenizer *t = open_tiktoken(more, NULL, "kimi-k2");
    expect_pieces(t, "HelloWorld", "Hello|World");
    expect_pieces(t,
                  "\xE4\xB8\xAD\xE6\x96\x87"
                  "abc"
                  "\xE4\xB8\xAD\xE6\x96\x87",
                  "\xE4\xB8\xAD\xE6\x96\x87|abc|\xE4\xB8\xAD\xE6\x96\x87");
    expect_pieces(t, "I'm", "I'm");
    expect_pieces(t, "CAN'T wait", "CAN'T| wait");
    expect_pieces(t, "12345", "123|45");
    dn_tokenizer_close(t);
}

Test(tokenizer, refuses_bad_rank_files)
{
    static const struct {
        const char *text, *message;
    } bad[] = {{"IQ==\n", "line 1"},
               {"IQ== x\n", "not a number"},
               {"I 0\n", "base64"},
               {"IQ== 0\nIQ== 1\n", "twice"},
               {"IQ== 0\nIg== 5\n", "the highest is 5"},
               {"IQ== 0\n", "has no rank"},
               {"IQ== 99999999\n", "99999999"},
               {"!!!! 0\n", "base64"},
               {" 0\n", "base64"},
               {"IQ== 0\nIg== 0\n", "used twice"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct dn_tokenizer *t = NULL;
        struct dn_err err = {0};
        cr_expect_eq(dn_tokenizer_parse_tiktoken(&t, bad[i].text, strlen(bad[i].text), NULL, 0, "kimi-k2", &err),
                     -DN_MODEL_FILE, "%zu", i);
        cr_expect(strstr(err.text, bad[i].message) != NULL, "%zu: \"%s\" does not say \"%s\"", i, err.text,
                  bad[i].message);
    }
    struct dn_buf ranks = small_tiktoken(NULL);
    struct dn_tokenizer *t = NULL;
    struct dn_err err = {0};
    cr_expect_eq(dn_tokenizer_parse_tiktoken(&t, ranks.data, ranks.len, NULL, 0, "no-such", &err), -DN_MODEL_FILE);
    cr_expect(strstr(err.text, "no-such") && strstr(err.text, "kimi-k2") && strstr(err.text, "deepseek-v3"), "%s",
              err.text);
    const char *far = "{\"added_tokens_decoder\":{\"1000000\":{\"content\":\"x\"}}}";
    cr_expect_eq(dn_tokenizer_parse_tiktoken(&t, ranks.data, ranks.len, far, strlen(far), "kimi-k2", &err),
                 -DN_MODEL_FILE);
    dn_buf_release(&ranks);
}

Test(tokenizer, every_named_pattern_compiles)
{
    char names[512], *save = NULL;
    snprintf(names, sizeof names, "%s", dn_tokenizer_pre_names());
    int n = 0;
    for (char *name = strtok_r(names, ", ", &save); name; name = strtok_r(NULL, ", ", &save), n++) {
        struct dn_tokenizer *t = open_tiktoken(NULL, NULL, name);
        expect_pieces(t, "a", "a");
        dn_tokenizer_close(t);
    }
    cr_expect_geq(n, 12);
}

/* Byte tokens as a GGUF file has them, then the merges, then two added ones. */
struct gguf {
    char text[300][8];
    struct dn_tok_str token[300], merge[8];
    int32_t type[300];
    struct dn_tok_gguf g;
};

static void fill_gguf(struct gguf *f, const char *pre)
{
    memset(f, 0, sizeof *f);
    f->g = (struct dn_tok_gguf){.model = "gpt2",
                                .pre = pre,
                                .token = f->token,
                                .type = f->type,
                                .merge = f->merge,
                                .bos = -1,
                                .eos = -1,
                                .pad = -1,
                                .unk = -1,
                                .add_bos = -1,
                                .add_space_prefix = -1};
    for (unsigned i = 0; i < 256; i++)
        f->token[i] = (struct dn_tok_str){f->text[i], small_map_byte(i, f->text[i])};
    static const char *const more[] = {"ab", "abc", "<e>", "<t>", "12"};
    for (unsigned i = 0; i < 5; i++)
        f->token[256 + i] = (struct dn_tok_str){more[i], strlen(more[i])};
    for (unsigned i = 0; i < 261; i++)
        f->type[i] = 1;
    f->type[258] = 3;
    f->type[259] = 4;
    f->merge[0] = (struct dn_tok_str){"a b", 3};
    f->merge[1] = (struct dn_tok_str){"ab c", 4};
    f->merge[2] = (struct dn_tok_str){"1 2", 3};
    f->g.n_token = 261;
    f->g.n_merge = 3;
}

Test(tokenizer, gguf_arrays)
{
    struct gguf *f = dn_alloc(sizeof *f);
    struct dn_tokenizer *t = NULL;
    struct dn_err err = {0};
    fill_gguf(f, "smollm");
    f->g.bos = f->g.eos = 258;
    f->g.add_bos = 1;
    cr_assert_eq(dn_tokenizer_open_gguf(&t, &f->g, &err), 0, "%s", err.text);
    expect_ids(t, "abc", 0, "257");
    expect_ids(t, "<e><t>", DN_TOK_SPECIAL | DN_TOK_ADD_AFFIX, "258 258 259");
    cr_expect_str_eq(small_pieces(t, "<e><t>", 0), "<|e|>|<|t|>");
    expect_pieces(t, "12", "1|2"); /* single digits, whatever could be merged */
    expect_pieces(t, "\xC2\xBD", "\xC2|\xBD");
    cr_expect(dn_tokenizer_is_special(t, 258) && !dn_tokenizer_is_special(t, 259) && dn_tokenizer_is_added(t, 259));
    dn_tokenizer_close(t);
    fill_gguf(f, "gpt-2");
    cr_assert_eq(dn_tokenizer_open_gguf(&t, &f->g, &err), 0, "%s", err.text);
    expect_pieces(t, "12", "12");
    dn_tokenizer_close(t);
    free(f);
}

Test(tokenizer, refuses_bad_gguf_arrays)
{
    struct gguf *f = dn_alloc(sizeof *f);
    for (int i = 0; i < 9; i++) {
        struct dn_tokenizer *t = NULL;
        struct dn_err err = {0};
        const char *message = "";
        fill_gguf(f, "gpt-2");
        switch (i) {
        case 0:
            f->g.pre = "no-such", message = "no-such";
            break;
        case 1:
            f->g.pre = NULL, message = "pre is missing";
            break;
        case 2:
            f->g.model = "bert", message = "bert";
            break;
        case 3:
            f->type[3] = 7, message = "[3]";
            break;
        case 4:
            f->g.eos = 261, message = "eos_token_id";
            break;
        case 5:
            f->g.n_merge = 0, message = "merges is missing";
            break;
        case 6:
            f->merge[1].data = "abXc", message = "merges[1]";
            break;
        case 7:
            f->merge[1].data = "ab q", message = "not in the vocabulary";
            break;
        default:
            f->g.model = "llama", message = "scores";
            break;
        }
        cr_expect_eq(dn_tokenizer_open_gguf(&t, &f->g, &err), -DN_MODEL_FILE, "case %d", i);
        cr_expect(strstr(err.text, message) != NULL, "case %d: \"%s\" does not say \"%s\"", i, err.text, message);
    }
    free(f);
}

#define SPACE_MARK_A                                                                                                   \
    "\xE2\x96\x81"                                                                                                     \
    "a"

/* SentencePiece's kind: scores, U+2581 for a space, byte fallback. */
Test(tokenizer, llama_arrays)
{
    static const char *const text[] = {"<unk>", "<s>", "\xE2\x96\x81", "a", "b", "ab", SPACE_MARK_A, "ba"};
    static const float score[] = {0, 0, -5, -6, -7, -2, -1, -3};
    struct dn_tok_str token[8 + 256];
    int32_t type[8 + 256] = {2, 3, 1, 1, 1, 1, 1, 1};
    float scores[8 + 256] = {0};
    static char bytes[256][8];
    for (size_t i = 0; i < 8; i++) {
        token[i] = (struct dn_tok_str){text[i], strlen(text[i])};
        scores[i] = score[i];
    }
    for (unsigned i = 0; i < 256; i++) {
        token[8 + i] = (struct dn_tok_str){bytes[i], (size_t)snprintf(bytes[i], sizeof bytes[i], "<0x%02X>", i)};
        type[8 + i] = 6;
    }
    struct dn_tok_gguf g = {.model = "llama",
                            .token = token,
                            .type = type,
                            .score = scores,
                            .n_token = 8 + 256,
                            .bos = 1,
                            .eos = -1,
                            .pad = -1,
                            .unk = 0,
                            .add_bos = 1,
                            .add_space_prefix = -1};
    struct dn_tokenizer *t = NULL;
    struct dn_err err = {0};
    cr_assert_eq(dn_tokenizer_open_gguf(&t, &g, &err), 0, "%s", err.text);
    expect_ids(t, "ab", 0, "6 4");    /* " a" has the best score */
    expect_ids(t, "bab", 0, "2 4 5"); /* "ab" before "ba" */
    expect_ids(t, "ab", DN_TOK_ADD_AFFIX, "1 6 4");
    expect_ids(t, "<s>a", DN_TOK_SPECIAL, "1 6");
    expect_ids(t, "\xC3\xA9", 0, "2 203 177");
    type[5] = 3; /* SentencePiece merges nothing to a control token */
    struct dn_tokenizer *other = NULL;
    cr_assert_eq(dn_tokenizer_open_gguf(&other, &g, &err), 0, "%s", err.text);
    expect_ids(other, "ab", 0, "6 4");
    expect_ids(other, "bab", 0, "2 7 4");
    dn_tokenizer_close(other);
    struct dn_tokens ids = {0};
    struct dn_buf back = {0};
    cr_assert_eq(dn_tokenizer_encode(t, "ab \xC3\xA9 ba", 8, 0, &ids, &err), 0);
    dn_tokenizer_decode(t, ids.data, ids.len, false, &back);
    cr_expect_str_eq(dn_buf_str(&back), "ab \xC3\xA9 ba");
    dn_buf_release(&back);
    dn_tokens_release(&ids);
    dn_tokenizer_close(t);
}

/* A file of BPE whose ids 2, 3 and 4 begin, end a text and end a turn; types: NULL = the file does not say. */
static struct dn_tokenizer *open_ends(const int32_t *type, const char *eos)
{
    const char *const token[] = {"a", "b", "<s>", eos, "[EOT]", "<", "/", "s", ">", "ab"};
    const char *const merge[] = {"a b"};
    struct dn_gguf_writer w = {0};
    struct dn_buf file = {0};
    struct dn_gguf *g = NULL;
    struct dn_tokenizer *t = NULL;
    struct dn_err err = {0};
    dn_gguf_write_string(&w, "general.architecture", "llama");
    dn_gguf_write_string(&w, "tokenizer.ggml.model", "gpt2");
    dn_gguf_write_string(&w, "tokenizer.ggml.pre", "gpt-2");
    dn_gguf_write_strings(&w, "tokenizer.ggml.tokens", token, sizeof token / sizeof *token);
    dn_gguf_write_strings(&w, "tokenizer.ggml.merges", merge, 1);
    if (type)
        dn_gguf_write_i32s(&w, "tokenizer.ggml.token_type", type, sizeof token / sizeof *token);
    dn_gguf_write_u32(&w, "tokenizer.ggml.bos_token_id", 2);
    dn_gguf_write_u32(&w, "tokenizer.ggml.eos_token_id", 3);
    dn_gguf_write_u32(&w, "tokenizer.ggml.eot_token_id", 4);
    dn_gguf_write_bytes(&w, &file);
    cr_assert_eq(dn_gguf_open_memory((const uint8_t *)file.data, file.len, &g, &err), 0, "%s", err.text);
    cr_assert_eq(dn_tokenizer_read_gguf(&t, g, &err), 0, "%s", err.text);
    dn_gguf_close(g);
    dn_gguf_write_release(&w);
    dn_buf_release(&file);
    return t;
}

Test(tokenizer, ends_that_a_gguf_file_calls_normal_are_control_tokens)
{
    static const int32_t normal[10] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, unused[10] = {1, 1, 3, 5, 4, 1, 1, 1, 1, 1};
    for (int i = 0; i < 2; i++) {
        struct dn_tokenizer *t = open_ends(i ? normal : NULL, "</s>");
        for (int32_t id = 2; id <= 4; id++)
            cr_expect(dn_tokenizer_is_added(t, id));
        cr_expect(!dn_tokenizer_is_added(t, 0));
        expect_ids(t, "a</s>", DN_TOK_SPECIAL, "0 3");
        expect_ids(t, "a</s>", 0, "0 5 6 7 8"); /* a user's */
        dn_tokenizer_close(t);
    }
    struct dn_tokenizer *t = open_ends(normal, "end");
    cr_expect(!dn_tokenizer_is_added(t, 3), "a word is none");
    dn_tokenizer_close(t);
    t = open_ends(unused, "</s>");
    cr_expect(!dn_tokenizer_is_added(t, 3), "another type is what the file says");
    dn_tokenizer_close(t);
}

Test(tokenizer, a_byte_without_a_token_is_an_error_that_names_it)
{
    struct gguf *f = dn_alloc(sizeof *f);
    struct dn_tokenizer *t = NULL;
    struct dn_err err = {0};
    struct dn_tokens ids = {0};
    fill_gguf(f, "gpt-2");
    f->type['q'] = 5;
    cr_assert_eq(dn_tokenizer_open_gguf(&t, &f->g, &err), 0, "%s", err.text);
    cr_expect_eq(dn_tokenizer_encode(t, "abq", 3, 0, &ids, &err), -DN_INVALID_VALUE);
    cr_expect(strstr(err.text, "0x71") != NULL, "%s", err.text);
    cr_expect_eq(ids.len, 0);
    dn_tokens_release(&ids);
    dn_tokenizer_close(t);
    free(f);
}

Test(tokenizer, long_runs_take_bounded_time)
{
    static const char *const units[] = {"x", "_", " ", "\n", " \n", "a b", "\xE3\x81\x82", "X", "1", "<e", "^"};
    struct dn_tokenizer *list[] = {
        open_tiktoken(NULL, NULL, "kimi-k2"),
        open_tiktoken((const char *const[]){"xx", "xxxx", "  ", NULL}, NULL, "deepseek-v3"),
        small_open(&(struct small){.merge = merges, .added = "[" ADDED(300, "<e>", "") "]"})};
    for (size_t i = 0; i < sizeof list / sizeof *list; i++)
        for (size_t u = 0; u < sizeof units / sizeof *units; u++) {
            struct dn_buf text = {0};
            struct dn_tokens ids = {0};
            struct timespec a, b;
            while (text.len < 500000)
                dn_buf_puts(&text, units[u]);
            clock_gettime(CLOCK_MONOTONIC, &a);
            cr_assert_eq(dn_tokenizer_encode(list[i], text.data, text.len, DN_TOK_SPECIAL, &ids, NULL), 0);
            clock_gettime(CLOCK_MONOTONIC, &b);
            cr_expect_lt(b.tv_sec - a.tv_sec, 10, "\"%s\"", units[u]); /* measured: under 0.3 s */
            dn_buf_release(&text);
            dn_tokens_release(&ids);
        }
    for (size_t i = 0; i < sizeof list / sizeof *list; i++)
        dn_tokenizer_close(list[i]);
}

/* Files with random damage are read or refused, and what is read still encodes. */
Test(tokenizer, damaged_files_do_no_harm)
{
    struct dn_buf b = small_json(&(struct small){
        .merge = merges,
        .normalizer = "{\"type\":\"NFC\"}",
        .added = "[" ADDED(300, "<e>", ",\"lstrip\":true") "]",
        .pre_tokenizer = "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{\"Regex\":"
                         "\"[\\\\p{Lu}&&[^\\\\p{Han}]]+|\\\\s+(?!\\\\S)|.\"},\"behavior\":\"Isolated\"},{\"type\":"
                         "\"ByteLevel\",\"use_regex\":true}]}"});
    uint32_t seed = 99;
    int n_read = 0;
    for (int round = 0; round < 3000; round++) {
        struct dn_buf copy = {0};
        struct dn_tokenizer *t = NULL;
        struct dn_tokens ids = {0};
        dn_buf_put(&copy, b.data, b.len);
        for (int i = 0; i < round % 4; i++) {
            seed = seed * 1664525u + 1013904223u;
            size_t at = (seed >> 8) % (round % 3 ? 500 : copy.len);
            copy.data[at] = (char)(i % 2 ? '0' + seed % 75 : (unsigned char)copy.data[at] ^ 1u << seed % 7);
        }
        if (dn_tokenizer_parse_json(&t, copy.data, copy.len, NULL, 0, NULL) == 0) {
            n_read++;
            dn_tokenizer_encode(t, "abc <e> ABC  12 e\xCC\x81", 19, DN_TOK_SPECIAL | DN_TOK_ADD_AFFIX, &ids, NULL);
        }
        dn_tokenizer_close(t);
        dn_tokens_release(&ids);
        dn_buf_release(&copy);
    }
    cr_expect(n_read >= 750 && n_read < 3000, "%d read", n_read); /* every fourth is whole */
    dn_buf_release(&b);
}

Test(tokenizer, a_text_over_the_limit_is_refused)
{
    struct dn_tokenizer *t = small_open(&(struct small){0});
    struct dn_tokens ids = {0};
    struct dn_err err = {0};
    char c = 'a';
    cr_expect_eq(dn_tokenizer_encode(t, &c, DN_TOK_MAX_TEXT + 1, 0, &ids, &err), -DN_CONTEXT_LENGTH);
    struct dn_tok_text two[] = {{&c, SIZE_MAX, true}, {&c, 2, true}};
    cr_expect_eq(dn_tokenizer_encode_texts(t, two, 2, 0, &ids, &err), -DN_CONTEXT_LENGTH);
    dn_tokenizer_close(t);
}

struct job {
    const struct dn_tokenizer *tokenizer;
    int wrong;
};

static void *encode_many(void *arg)
{
    struct job *job = arg;
    struct dn_tokens ids = {0};
    for (int i = 0; i < 500; i++) {
        ids.len = 0;
        if (dn_tokenizer_encode(job->tokenizer, "abc aab <e> xxxxxxx", 19, DN_TOK_SPECIAL, &ids, NULL) != 0 ||
            ids.len < 5 || ids.data[0] != ABC)
            job->wrong++;
    }
    dn_tokens_release(&ids);
    return NULL;
}

Test(tokenizer, many_threads_share_one)
{
    struct dn_tokenizer *t = small_open(&(struct small){.merge = merges, .added = "[" ADDED(300, "<e>", "") "]"});
    pthread_t thread[4];
    struct job job[4];
    for (int i = 0; i < 4; i++) {
        job[i] = (struct job){t, 0};
        cr_assert_eq(pthread_create(&thread[i], NULL, encode_many, &job[i]), 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(thread[i], NULL);
        cr_expect_eq(job[i].wrong, 0);
    }
    dn_tokenizer_close(t);
}
