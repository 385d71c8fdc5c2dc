#include "engine/detokenizer.h"

#include "unit/engine/tok_kimi.h"
#include "unit/engine/tok_small.h"

static size_t from_hex(const char *hex, char *out)
{
    size_t n = 0;
    for (; hex[0] && hex[1]; hex += 2) {
        unsigned byte;
        cr_assert_eq(sscanf(hex, "%2x", &byte), 1);
        out[n++] = (char)byte;
    }
    return n;
}

/* Feeds the bytes in steps of `step`. */
static struct dn_buf feed(const struct dn_tokenizer *t, const char *bytes, size_t n, size_t step, size_t *dropped)
{
    struct dn_detok d;
    struct dn_buf out = {0};
    dn_detok_init(&d, t, 0);
    for (size_t i = 0; i < n; i += step)
        dn_detok_feed_bytes(&d, bytes + i, n - i < step ? n - i : step, &out);
    *dropped = dn_detok_finish(&d);
    return out;
}

static void check_case(const struct dn_tokenizer *t, const char *id, const char *in, size_t n, const char *want,
                       size_t n_want)
{
    for (size_t step = 1; step <= 5; step++) {
        size_t dropped;
        struct dn_buf got = feed(t, in, n, step, &dropped);
        if (dropped) /* the reference replaces an incomplete end, we drop it */
            dn_buf_put(&got, "\xEF\xBF\xBD", 3);
        cr_expect(got.len == n_want && memcmp(got.data ? got.data : "", want, n_want) == 0, "%s in steps of %zu", id,
                  step);
        dn_buf_release(&got);
    }
}

Test(detokenizer, replaces_as_the_reference_does)
{
    static const struct {
        const char *id, *in, *want;
    } cases[] = {{"good", "41c3a9e282acf09f9880", "41c3a9e282acf09f9880"},
                 {"overlong", "c0af", "efbfbdefbfbd"},
                 {"surrogate", "eda080", "efbfbdefbfbdefbfbd"},
                 {"above_max", "f4908080", "efbfbdefbfbdefbfbdefbfbd"},
                 {"cut then ascii", "e28241", "efbfbd41"},
                 {"cut then good", "f09fc3a9", "efbfbdc3a9"},
                 {"cut", "f09f98", "efbfbd"},
                 {"cut twice", "f09f98f09f98", "efbfbdefbfbd"}};
    struct dn_tokenizer *t = small_open(&(struct small){0});
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char in[64], want[64];
        size_t n = from_hex(cases[i].in, in), n_want = from_hex(cases[i].want, want);
        check_case(t, cases[i].id, in, n, want, n_want);
    }
    dn_tokenizer_close(t);
}

Test(detokenizer, all_cases_of_the_conformance_table)
{
    if (!tok_unpack("conformance"))
        return;
    struct dn_tokenizer *t = small_open(&(struct small){0});
    struct dn_buf table = tok_read(tok_path("conformance/unicode/utf8_cases.tsv"));
    size_t n_case = 0;
    char *line = strchr(table.data, '\n') + 1;
    for (char *end; *line; line = end + 1) {
        char id[64], hex[128], valid[8], want_hex[256], in[64], want[128];
        end = strchr(line, '\n');
        if (end == NULL)
            break;
        cr_assert_eq(sscanf(line, "%63[^\t]\t%127[^\t]\t%7[^\t]\t%255[^\t\n]", id, hex, valid, want_hex), 4, "%.40s",
                     line);
        size_t n = from_hex(hex, in), n_want = from_hex(want_hex, want);
        check_case(t, id, in, n, want, n_want);
        n_case++;
    }
    cr_expect(n_case >= 40, "%zu cases", n_case);
    dn_buf_release(&table);
    dn_tokenizer_close(t);
}

Test(detokenizer, a_character_over_several_tokens_appears_once_it_is_whole)
{
    struct dn_tokenizer *t = small_open(&(struct small){0});
    struct dn_detok d;
    struct dn_buf out = {0};
    dn_detok_init(&d, t, 0);
    static const int32_t smile[] = {0xF0, 0x9F, 0x98, 0x8A};
    for (int i = 0; i < 3; i++) {
        dn_detok_feed(&d, smile[i], &out);
        cr_expect_eq(out.len, 0);
    }
    dn_detok_feed(&d, smile[3], &out);
    cr_expect_str_eq(dn_buf_str(&out), "\xF0\x9F\x98\x8A");
    dn_buf_release(&out);
    dn_tokenizer_close(t);
}

Test(detokenizer, drops_a_character_that_the_end_cuts)
{
    struct dn_tokenizer *t = small_open(&(struct small){0});
    struct dn_detok d;
    struct dn_buf out = {0};
    dn_detok_init(&d, t, 0);
    dn_detok_feed(&d, 'a', &out);
    dn_detok_feed(&d, 0xF0, &out);
    dn_detok_feed(&d, 0x9F, &out);
    cr_expect_eq(dn_detok_finish(&d), 2);
    cr_expect_str_eq(dn_buf_str(&out), "a");
    dn_buf_release(&out);
    dn_tokenizer_close(t);
}

Test(detokenizer, skips_special_tokens_only_when_asked)
{
    struct dn_tokenizer *t =
        small_open(&(struct small){.added = "[{\"id\":300,\"content\":\"<|end|>\",\"special\":true},{\"id\":301,"
                                            "\"content\":\"<think>\",\"special\":false}]"});
    static const int32_t ids[] = {'a', 300, 301, 299, -5, 1 << 20, 'b'};
    static const char *const want[] = {"a<|end|><think>b", "a<think>b"};
    for (unsigned skip = 0; skip < 2; skip++) {
        struct dn_detok d;
        struct dn_buf out = {0};
        dn_detok_init(&d, t, skip ? DN_DETOK_SKIP_SPECIAL : 0);
        for (size_t i = 0; i < sizeof ids / sizeof *ids; i++)
            dn_detok_feed(&d, ids[i], &out);
        cr_expect_str_eq(dn_buf_str(&out), want[skip]);
        dn_buf_clear(&out);
        dn_tokenizer_decode(t, ids, sizeof ids / sizeof *ids, skip, &out);
        cr_expect_str_eq(dn_buf_str(&out), want[skip]);
        dn_buf_release(&out);
    }
    dn_tokenizer_close(t);
}

Test(detokenizer, a_stream_says_what_decode_says)
{
    if (!tok_unpack("tokenizers"))
        return;
    struct dn_tokenizer *t = tok_open_kimi();
    struct dn_buf in = tok_read(tok_path("tokenizers/goldens/utf8_input.txt")), out = {0};
    struct dn_tokens ids = {0};
    tok_encode(t, in.data, in.len, 0, &ids);
    struct dn_detok d;
    dn_detok_init(&d, t, 0);
    for (size_t i = 0; i < ids.len; i++) {
        dn_detok_feed(&d, ids.data[i], &out);
        cr_assert(dn_utf8_is_valid(out.data ? out.data : "", out.len), "token %zu", i);
    }
    cr_expect_eq(dn_detok_finish(&d), 0);
    cr_expect(out.len == in.len && memcmp(out.data, in.data, in.len) == 0);
    dn_tokens_release(&ids);
    dn_buf_release(&in);
    dn_buf_release(&out);
    dn_tokenizer_close(t);
}
