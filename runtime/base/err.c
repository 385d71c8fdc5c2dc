#include "base/err.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#undef dn_err_set /* the analyzer's view of them */
#undef dn_err_param

static const struct dn_code_info code_info[DN_CODE_COUNT] = {
    [DN_OK] = {"OK", 200, "", "", ""},
#define DN_ERROR(name_, status_, type_, code_, help_) [DN_##name_] = {#name_, status_, type_, code_, help_},
#include "base/errors.def"
#undef DN_ERROR
};

const struct dn_code_info *dn_code_info(int code)
{
    if (code < 0)
        code = -code;
    return &code_info[code < DN_CODE_COUNT ? code : DN_INTERNAL];
}

/* Cuts at a whole character and shows that something was cut. */
static void mark_cut(char *text, size_t cap, int wanted)
{
    if (wanted < 0 || (size_t)wanted < cap)
        return;
    size_t end = cap - 4;
    while (end > 0 && ((unsigned char)text[end] & 0xC0) == 0x80)
        end--;
    memcpy(text + end, "...", 4);
}

/* Names out of files are in the text, which goes to terminals: without this a tensor's name could command one. */
static void hide_controls(char *text)
{
    for (; *text; text++)
        if (((unsigned char)*text < 0x20 && *text != '\n' && *text != '\t') || *text == 0x7f)
            *text = '?';
}

static void set_text(struct dn_err *err, enum dn_code code, const char *param, const char *format, va_list ap)
{
    err->code = code;
    snprintf(err->param, sizeof err->param, "%s", param);
    mark_cut(err->text, sizeof err->text, vsnprintf(err->text, sizeof err->text, format, ap));
    hide_controls(err->text);
}

int dn_err_set(struct dn_err *err, enum dn_code code, const char *format, ...)
{
    if (err) {
        va_list ap;
        va_start(ap, format);
        set_text(err, code, "", format, ap);
        va_end(ap);
    }
    return -(int)code;
}

int dn_err_param(struct dn_err *err, enum dn_code code, const char *param, const char *format, ...)
{
    if (err) {
        va_list ap;
        va_start(ap, format);
        set_text(err, code, param, format, ap);
        va_end(ap);
    }
    return -(int)code;
}

int dn_err_prefix(struct dn_err *err, const char *format, ...)
{
    if (!err)
        return -DN_INTERNAL;
    char old[DN_ERR_TEXT];
    memcpy(old, err->text, sizeof old);
    va_list ap;
    va_start(ap, format);
    int n = vsnprintf(err->text, sizeof err->text, format, ap);
    va_end(ap);
    if (n >= 0 && (size_t)n < sizeof err->text) {
        size_t left = sizeof err->text - (size_t)n;
        mark_cut(err->text, sizeof err->text, n + snprintf(err->text + n, left, ": %s", old));
    }
    hide_controls(err->text);
    return -(int)err->code;
}

void dn_bug(const char *file, int line, const char *condition)
{
    fprintf(stderr, "dunlin: bug: %s:%d: %s\n", file, line, condition);
    abort();
}
