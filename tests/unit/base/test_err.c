#include "base/err.h"

#include <criterion/criterion.h>
#include <string.h>

Test(err, reads_as_a_path_when_prefixed)
{
    struct dn_err err = {0};
    cr_assert_eq(dn_err_set(&err, DN_MODEL_FILE, "%d bytes long, not a GGUF file", 12), -DN_MODEL_FILE);
    cr_assert_eq(dn_err_prefix(&err, "model \"%s\"", "qwen"), -DN_MODEL_FILE);
    cr_assert_str_eq(err.text, "model \"qwen\": 12 bytes long, not a GGUF file");
}

Test(err, keeps_the_parameter_when_prefixed)
{
    struct dn_err err = {0};
    dn_err_param(&err, DN_INVALID_VALUE, "top_p", "must be in (0, 1]");
    dn_err_prefix(&err, "request");
    cr_assert_str_eq(err.param, "top_p");
}

Test(err, cuts_a_long_text_at_a_whole_character)
{
    char long_text[2 * DN_ERR_TEXT];
    for (size_t i = 0; i + 2 < sizeof long_text; i += 2)
        memcpy(long_text + i, "\xc3\xa9", 2);
    long_text[sizeof long_text - 2] = '\0';
    for (int shift = 0; shift < 4; shift++) {
        struct dn_err err = {0};
        dn_err_set(&err, DN_INTERNAL, "%.*s%s", shift, "abc", long_text);
        size_t n = strlen(err.text);
        cr_assert(n < DN_ERR_TEXT);
        cr_assert_str_eq(err.text + n - 3, "...");
        cr_assert_eq((n - 3 - (size_t)shift) % 2, 0, "cut inside a character");
    }
}

Test(err, shows_no_control_characters)
{
    struct dn_err err = {0};
    dn_err_set(&err, DN_MODEL_FILE, "tensor \"%s\"", "a\033[2J\r\x7f\xc3\xa9\tb\n");
    cr_expect_str_eq(err.text, "tensor \"a?[2J??\xc3\xa9\tb\n\"");
    dn_err_prefix(&err, "%s", "x\033");
    cr_expect_str_eq(err.text, "x?: tensor \"a?[2J??\xc3\xa9\tb\n\"");
}

Test(err, every_code_has_a_row)
{
    for (int c = 1; c < DN_CODE_COUNT; c++) {
        const struct dn_code_info *info = dn_code_info(-c);
        cr_assert(info->status >= 400 && info->status < 600, "%s", info->name);
        cr_assert(info->code[0] && info->type[0] && info->help[0], "%s", info->name);
    }
    cr_assert_eq(dn_code_info(9999)->status, 500);
}
