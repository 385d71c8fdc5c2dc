/* Patterns of other regular expression dialects in PCRE2's.
 *
 * tokenizer.json files are written for Oniguruma, tiktoken for Rust's regex. Where these and PCRE2 agree on the
 * spelling but not on the meaning the pattern is rewritten: \s \S            White_Space, while PCRE2 also counts
 * U+180E \p{Han}          the script, while PCRE2 means the script extensions [A&&[^B]]        does not exist in PCRE2.
 * A must be a list of \p{category}: the class is turned around into
 *                    [^ all other categories, B ], which stays one class (a look-ahead would need a stack frame for
 *                    each character of a run)
 *   ^ $              line ends in Ruby's syntax, which Oniguruma uses: compiled with PCRE2_MULTILINE
 * Constructs whose meaning differs and that no known file uses (\h, \R, nested classes, ...) are refused by name.
 */
#include "engine/tokenizer_impl.h"

#include <string.h>

const char dn_tok_gpt2_pattern[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

static const char *const categories[] = {"Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl",
                                         "No", "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "Sm", "Sc",
                                         "Sk", "So", "Zs", "Zl", "Zp", "Cc", "Cf", "Cs", "Co", "Cn"};

static int refuse(struct dn_err *err, const char *what, const char *at)
{
    return dn_err_set(err, DN_MODEL_FILE, "pattern: %s at \"%.24s\" is not supported", what, at);
}

/* One backslash sequence; moves *pp behind it. */
static int put_escape(const char **pp, struct dn_buf *out, struct dn_err *err)
{
    const char *p = *pp;
    char c = p[1];
    if (c == 's' || c == 'S') {
        dn_buf_puts(out, c == 's' ? "\\p{White_Space}" : "\\P{White_Space}");
        *pp = p + 2;
        return 0;
    }
    if (c == 'p' || c == 'P') {
        const char *close = p[2] == '{' ? strchr(p, '}') : NULL;
        if (close == NULL || close - p > 40)
            return refuse(err, "this property", p);
        size_t n = (size_t)(close - p) - 3;
        bool is_script = n > 2 && p[3] != '^' && memchr(p + 3, '=', n) == NULL && memchr(p + 3, ':', n) == NULL;
        dn_buf_printf(out, "\\%c{%s%.*s}", c, is_script ? "sc:" : "", (int)n, p + 3);
        *pp = close + 1;
        return 0;
    }
    if (c == 'u' || c == 'x') {
        const char *digits = p + 2;
        bool braces = *digits == '{';
        size_t n = strspn(digits + braces, "0123456789abcdefABCDEF");
        if (n == 0 || n > 8 || (braces && digits[1 + n] != '}'))
            return refuse(err, "this escape", p);
        if (!braces)
            n = n > (c == 'u' ? 4u : 2u) ? (c == 'u' ? 4u : 2u) : n;
        dn_buf_printf(out, "\\x{%.*s}", (int)n, digits + braces);
        *pp = digits + n + (braces ? 2 : 0);
        return 0;
    }
    if (c == '\0' || ((c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z'))) {
        if (c == '\0' || strchr("dDwWbBrntfvAz", c) == NULL)
            return refuse(err, "this escape", p);
    }
    dn_buf_put(out, p, 2);
    *pp = p + 2;
    return 0;
}

/* The end of the simple class that starts at p ("[...]", no nesting), or NULL. */
static const char *class_end(const char *p)
{
    p++;
    if (*p == '^')
        p++;
    if (*p == ']')
        p++;
    for (; *p && *p != ']'; p++) {
        if (*p == '[')
            return NULL;
        if (*p == '\\' && p[1])
            p++;
    }
    return *p ? p : NULL;
}

/* [A&&[^B]]: marks the categories of A, which start at p and end at `end`. */
static int mark_categories(const char *p, const char *end, bool *has, struct dn_err *err)
{
    const size_t n = sizeof categories / sizeof *categories;
    while (p < end) {
        const char *close = strchr(p, '}');
        if (strncmp(p, "\\p{", 3) != 0 || close == NULL || close > end || close - p > 5)
            return refuse(err, "&& with anything but \\p{category} on its left", p);
        size_t len = (size_t)(close - p) - 3;
        bool found = false;
        for (size_t i = 0; i < n; i++)
            if (len > 0 && strncmp(categories[i], p + 3, len) == 0)
                has[i] = found = true;
        if (!found)
            return refuse(err, "this category", p);
        p = close + 1;
    }
    return 0;
}

static int put_intersection(const char **pp, const char *and, struct dn_buf *out, struct dn_err *err)
{
    bool has[sizeof categories / sizeof *categories] = {false};
    const char *inner = and+2;
    const char *end = strncmp(inner, "[^", 2) == 0 ? class_end(inner) : NULL;
    if (end == NULL || end[1] != ']')
        return refuse(err, "&& with anything but [^...] on its right", and);
    int rc = mark_categories(*pp + 1, and, has, err);
    if (rc)
        return rc;
    dn_buf_puts(out, "[^");
    for (size_t i = 0; i < sizeof categories / sizeof *categories; i++)
        if (!has[i])
            dn_buf_printf(out, "\\p{%s}", categories[i]);
    for (const char *p = inner + 2; p < end;) {
        if (*p != '\\') {
            dn_buf_putc(out, *p++);
            continue;
        }
        rc = put_escape(&p, out, err);
        if (rc)
            return rc;
    }
    dn_buf_putc(out, ']');
    *pp = end + 2;
    return 0;
}

/* A whole class; moves *pp behind it. */
static int put_class(const char **pp, struct dn_buf *out, struct dn_err *err)
{
    const char *p = *pp;
    for (const char *q = p + 1; *q && *q != ']'; q++) {
        if (q[0] == '&' && q[1] == '&')
            return put_intersection(pp, q, out, err);
        if (*q == '[')
            break;
        if (*q == '\\' && q[1])
            q++;
    }
    const char *end = class_end(p);
    if (end == NULL)
        return refuse(err, "a class within a class", p);
    dn_buf_putc(out, *p++);
    if (*p == '^')
        dn_buf_putc(out, *p++);
    if (*p == ']')
        dn_buf_putc(out, *p++);
    while (p < end) {
        if (*p != '\\') {
            dn_buf_putc(out, *p++);
            continue;
        }
        int rc = put_escape(&p, out, err);
        if (rc)
            return rc;
    }
    dn_buf_putc(out, ']');
    *pp = end + 1;
    return 0;
}

int dn_tok_regex_translate(const char *pattern, struct dn_buf *out, struct dn_err *err)
{
    for (const char *p = pattern; *p;) {
        int rc = 0;
        if (*p == '\\') {
            rc = put_escape(&p, out, err);
        } else if (*p == '[') {
            rc = put_class(&p, out, err);
        } else if (p[0] == '(' && p[1] == '?' && strchr(":!=i<-", p[2] ? p[2] : '?') == NULL) {
            rc = refuse(err, "this group", p);
        } else {
            dn_buf_putc(out, *p++);
        }
        if (rc)
            return rc;
    }
    return 0;
}

#define WORD_TAIL      "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
#define UPPER          "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]"
#define LOWER          "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]"
#define REST           " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define LLAMA3(digits) "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|" digits "|" REST
#define CJK            "[\\x{4e00}-\\x{9fa5}\\x{0800}-\\x{4e00}\\x{ac00}-\\x{d7ff}]+"

/* The cased letters of Unicode 11 in the scripts that DeepSeek LLM counts as alphabetic. */
#define DEEPSEEK_LETTERS                                                                                               \
    "\\s?[A-Za-z\\x{b5}\\x{c0}-\\x{d6}\\x{d8}-\\x{f6}\\x{f8}-\\x{1ba}\\x{1bc}-\\x{1bf}\\x{1c4}-\\x{293}"               \
    "\\x{295}-\\x{2af}\\x{370}-\\x{373}\\x{376}\\x{377}\\x{37b}-\\x{37d}\\x{37f}\\x{386}\\x{388}-\\x{38a}"             \
    "\\x{38c}\\x{38e}-\\x{3a1}\\x{3a3}-\\x{3f5}\\x{3f7}-\\x{481}\\x{48a}-\\x{52f}\\x{531}-\\x{556}"                    \
    "\\x{10a0}-\\x{10c5}\\x{13a0}-\\x{13f5}\\x{13f8}-\\x{13fd}\\x{1c90}-\\x{1cba}\\x{1cbd}-\\x{1cbf}"                  \
    "\\x{1d00}-\\x{1d2b}\\x{1d6b}-\\x{1d77}\\x{1d79}-\\x{1d9a}\\x{1e00}-\\x{1f15}\\x{1f18}-\\x{1f1d}"                  \
    "\\x{1f20}-\\x{1f45}\\x{1f48}-\\x{1f4d}\\x{1f50}-\\x{1f57}\\x{1f59}\\x{1f5b}\\x{1f5d}\\x{1f5f}-\\x{1f7d}"          \
    "\\x{1f80}-\\x{1fb4}\\x{1fb6}-\\x{1fbc}\\x{1fbe}\\x{1fc2}-\\x{1fc4}\\x{1fc6}-\\x{1fcc}\\x{1fd0}-\\x{1fd3}"         \
    "\\x{1fd6}-\\x{1fdb}\\x{1fe0}-\\x{1fec}\\x{1ff2}-\\x{1ff4}\\x{1ff6}-\\x{1ffc}\\x{2102}\\x{2107}"                   \
    "\\x{210a}-\\x{2113}\\x{2115}\\x{2119}-\\x{211d}\\x{2124}\\x{2126}\\x{2128}\\x{212a}-\\x{212d}"                    \
    "\\x{212f}-\\x{2134}\\x{2139}\\x{213c}-\\x{213f}\\x{2145}-\\x{2149}\\x{214e}\\x{2183}\\x{2184}"                    \
    "\\x{2c00}-\\x{2c7b}\\x{2c7e}-\\x{2ce4}\\x{2ceb}-\\x{2cee}\\x{2cf2}\\x{2cf3}\\x{a640}-\\x{a66d}"                   \
    "\\x{a680}-\\x{a69b}\\x{a722}-\\x{a76f}\\x{a771}-\\x{a787}\\x{a78b}-\\x{a78e}\\x{ab70}-\\x{abbf}"                  \
    "\\x{fb00}-\\x{fb06}\\x{fb13}-\\x{fb17}\\x{ff21}-\\x{ff3a}\\x{ff41}-\\x{ff5a}\\x{10400}-\\x{1044f}"                \
    "\\x{104b0}-\\x{104d3}\\x{104d8}-\\x{104fb}\\x{10c80}-\\x{10cb2}\\x{10cc0}-\\x{10cf2}\\x{118a0}-\\x{118df}"        \
    "\\x{1e900}-\\x{1e943}]+"

/* What a GGUF file's tokenizer.ggml.pre stands for. Patterns are applied one after the other to the pieces of the one
 * before; matches and what lies between them are kept. */
static const struct named_pre {
    const char *name;
    bool ignore_merges, nfc;
    const char *pattern[6];
} named_pres[] = {
    {"gpt-2", false, false, {dn_tok_gpt2_pattern}},
    {"smollm", false, false, {"\\p{N}", dn_tok_gpt2_pattern}},
    {"starcoder", false, false, {"\\p{N}", dn_tok_gpt2_pattern}},
    {"refact", false, false, {"\\p{N}", dn_tok_gpt2_pattern}},
    {"command-r", false, false, {"\\p{N}", dn_tok_gpt2_pattern}},
    {"codeshell", false, false, {"\\p{N}", dn_tok_gpt2_pattern}},
    {"llama-bpe", true, false, {LLAMA3("\\p{N}{1,3}")}},
    {"llama3", true, false, {LLAMA3("\\p{N}{1,3}")}},
    {"glm4", true, false, {LLAMA3("\\p{N}{1,3}")}},
    {"chatglm-bpe", true, false, {LLAMA3("\\p{N}{1,3}")}},
    {"qwen2", false, true, {LLAMA3("\\p{N}")}},
    {"deepseek-r1-qwen", false, true, {LLAMA3("\\p{N}")}},
    {"qwen35",
     false,
     true,
     {"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}|"
      " ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"}},
    {"deepseek-llm",
     false,
     false,
     {"[\\r\\n]", DEEPSEEK_LETTERS,
      "\\s?[!-/:-~\\x{ff01}-\\x{ff0f}\\x{ff1a}-\\x{ff5e}\\x{2018}-\\x{201f}\\x{3000}-\\x{3002}]+", "\\s+$", CJK,
      "\\p{N}"}},
    {"deepseek-coder", false, false, {"[\\r\\n]", "\\s?\\p{L}+", "\\s?\\p{P}+", CJK, "\\p{N}"}},
    {"deepseek-v3",
     false,
     false,
     {"\\p{N}{1,3}", "[\\x{4e00}-\\x{9fa5}\\x{3040}-\\x{309f}\\x{30a0}-\\x{30ff}]+",
      "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+|"
      " ?[\\p{P}\\p{S}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"}},
    {"kimi-k2",
     true,
     false,
     {"[\\p{Han}]+|[^\\r\\n\\p{L}\\p{N}]?" UPPER "*" LOWER "+" WORD_TAIL "|[^\\r\\n\\p{L}\\p{N}]?" UPPER "+" LOWER
      "*" WORD_TAIL "|\\p{N}{1,3}|" REST}},
};

const char *dn_tokenizer_pre_names(void)
{
    return "gpt-2, smollm, starcoder, refact, command-r, codeshell, llama-bpe, llama3, glm4, chatglm-bpe, qwen2, "
           "deepseek-r1-qwen, qwen35, deepseek-llm, deepseek-coder, deepseek-v3, kimi-k2";
}

int dn_tok_pre_add_named(struct dn_tokenizer *t, const char *name, struct dn_err *err)
{
    for (size_t i = 0; i < sizeof named_pres / sizeof *named_pres; i++) {
        const struct named_pre *pre = &named_pres[i];
        if (strcmp(pre->name, name) != 0)
            continue;
        t->ignore_merges = pre->ignore_merges;
        t->has_nfc = pre->nfc;
        for (size_t j = 0; j < sizeof pre->pattern / sizeof *pre->pattern && pre->pattern[j]; j++) {
            int rc = dn_tok_pre_add(t, pre->pattern[j], true, true, err);
            if (rc)
                return rc;
        }
        return 0;
    }
    return dn_err_set(err, DN_MODEL_FILE, "pre-tokenizer \"%.64s\" is not known; known are %s", name,
                      dn_tokenizer_pre_names());
}
