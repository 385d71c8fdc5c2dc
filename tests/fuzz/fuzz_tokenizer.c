/* Tokenizer: the first byte chooses what the rest is (a tokenizer.json, tiktoken ranks, or a text that is encoded in
 * template and user parts and must come back). */
#include "base/utf8.h"
#include "engine/detokenizer.h"
#include "engine/tokenizer.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool ok)
{
    if (!ok)
        abort();
}

/* The 256 bytes, some pairs and two specials. */
static struct dn_tokenizer *open_fixed(void)
{
    static const char digit[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    static const char *const names[] = {"kimi-k2", "deepseek-llm", "qwen2"};
    static unsigned turn;
    static const char config[] =
        "{\"added_tokens_decoder\":{\"264\":{\"content\":\"<e>\",\"special\":true},"
        "\"265\":{\"content\":\"<e><n>\",\"normalized\":true,\"lstrip\":true,\"rstrip\":true}}}";
    struct dn_buf b = {0};
    for (unsigned rank = 0; rank < 264; rank++) {
        unsigned char two[2] = {(unsigned char)(rank < 256 ? rank : ' ' + rank % 4), 'a'};
        size_t n = rank < 256 ? 1 : 2;
        if (rank >= 260)
            two[1] = ' ';
        uint32_t bits = (uint32_t)two[0] << 16 | (n == 2 ? (uint32_t)two[1] << 8 : 0);
        dn_buf_putc(&b, digit[bits >> 18]);
        dn_buf_putc(&b, digit[bits >> 12 & 63]);
        dn_buf_putc(&b, n == 2 ? digit[bits >> 6 & 63] : '=');
        dn_buf_printf(&b, "= %u\n", rank);
    }
    struct dn_tokenizer *t = NULL;
    require(dn_tokenizer_parse_tiktoken(&t, b.data, b.len, config, sizeof config - 1, names[turn++ % 3], NULL) == 0);
    dn_buf_release(&b);
    return t;
}

static void encode(const struct dn_tokenizer *t, const char *text, size_t n)
{
    struct dn_tokens ids = {0};
    struct dn_buf back = {0};
    int rc = dn_tokenizer_encode(t, text, n, 0, &ids, NULL);
    require((rc == 0) == dn_utf8_is_valid(text, n));
    if (rc == 0) {
        dn_tokenizer_decode(t, ids.data, ids.len, false, &back);
        require(back.len == n && (n == 0 || memcmp(back.data, text, n) == 0));
        for (size_t i = 0; i < ids.len; i++)
            require(!dn_tokenizer_is_added(t, ids.data[i]));
    }
    ids.len = 0;
    struct dn_tok_text part[3] = {
        {text, n / 3, true}, {text + n / 3, n / 3, false}, {text + n / 3 * 2, n - n / 3 * 2, true}};
    if (dn_tokenizer_encode_texts(t, part, 3, DN_TOK_ADD_AFFIX, &ids, NULL) == 0) {
        struct dn_detok d;
        dn_detok_init(&d, t, 0);
        dn_buf_clear(&back);
        for (size_t i = 0; i < ids.len; i++)
            dn_detok_feed(&d, ids.data[i], &back);
        dn_detok_finish(&d);
        require(back.len == 0 || dn_utf8_is_valid(back.data, back.len));
    }
    dn_tokens_release(&ids);
    dn_buf_release(&back);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct dn_tokenizer *t = NULL;
    if (size == 0)
        return 0;
    const char *rest = (const char *)data + 1;
    size_t n = size - 1;
    switch (data[0] % 3) {
    case 0:
        dn_tokenizer_parse_json(&t, rest, n, rest, n, NULL);
        break;
    case 1:
        dn_tokenizer_parse_tiktoken(&t, rest, n, NULL, 0, "gpt-2", NULL);
        break;
    default:
        t = open_fixed();
        encode(t, rest, n);
    }
    dn_tokenizer_close(t);
    return 0;
}
