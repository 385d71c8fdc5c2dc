#include "engine/gguf_write.h"

#include "engine/gguf.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { ALIGNMENT = 32 };

static void put_u32(struct dn_buf *b, uint32_t v)
{
    dn_buf_put(b, &v, sizeof v);
}

static void put_u64(struct dn_buf *b, uint64_t v)
{
    dn_buf_put(b, &v, sizeof v);
}

static void put_str(struct dn_buf *b, const char *s)
{
    put_u64(b, strlen(s));
    dn_buf_puts(b, s);
}

static void put_key(struct dn_gguf_writer *w, const char *key, enum dn_gguf_type type)
{
    put_str(&w->value, key);
    put_u32(&w->value, (uint32_t)type);
    w->n_values++;
}

static void put_array(struct dn_gguf_writer *w, const char *key, enum dn_gguf_type type, uint64_t n)
{
    put_key(w, key, DN_GGUF_ARRAY);
    put_u32(&w->value, (uint32_t)type);
    put_u64(&w->value, n);
}

void dn_gguf_write_u32(struct dn_gguf_writer *w, const char *key, uint32_t v)
{
    put_key(w, key, DN_GGUF_U32);
    put_u32(&w->value, v);
}

void dn_gguf_write_f32(struct dn_gguf_writer *w, const char *key, float v)
{
    put_key(w, key, DN_GGUF_F32);
    dn_buf_put(&w->value, &v, sizeof v);
}

void dn_gguf_write_bool(struct dn_gguf_writer *w, const char *key, bool v)
{
    put_key(w, key, DN_GGUF_BOOL);
    dn_buf_putc(&w->value, v);
}

void dn_gguf_write_string(struct dn_gguf_writer *w, const char *key, const char *v)
{
    put_key(w, key, DN_GGUF_STRING);
    put_str(&w->value, v);
}

void dn_gguf_write_strings(struct dn_gguf_writer *w, const char *key, const char *const *v, uint64_t n)
{
    put_array(w, key, DN_GGUF_STRING, n);
    for (uint64_t i = 0; i < n; i++)
        put_str(&w->value, v[i]);
}

void dn_gguf_write_i32s(struct dn_gguf_writer *w, const char *key, const int32_t *v, uint64_t n)
{
    put_array(w, key, DN_GGUF_I32, n);
    dn_buf_put(&w->value, v, n * sizeof *v);
}

static void pad(struct dn_buf *b)
{
    while (b->len % ALIGNMENT != 0)
        dn_buf_putc(b, 0);
}

void dn_gguf_write_tensor(struct dn_gguf_writer *w, const char *name, enum dn_tensor_type type, uint64_t n_out,
                          uint64_t n_in, const void *data)
{
    pad(&w->data);
    put_str(&w->info, name);
    put_u32(&w->info, n_out ? 2 : 1);
    put_u64(&w->info, n_in); /* the fastest dimension first */
    if (n_out)
        put_u64(&w->info, n_out);
    put_u32(&w->info, dn_gguf_tensor_type_number(type));
    put_u64(&w->info, w->data.len);
    dn_buf_put(&w->data, data, (size_t)(dn_tensor_row_bytes(type, n_in) * (n_out ? n_out : 1)));
    w->n_tensors++;
}

void dn_gguf_write_bytes(const struct dn_gguf_writer *w, struct dn_buf *out)
{
    size_t begin = out->len;
    DN_BUG_ON(begin % ALIGNMENT != 0);
    dn_buf_puts(out, "GGUF");
    put_u32(out, 3);
    put_u64(out, w->n_tensors);
    put_u64(out, w->n_values);
    dn_buf_put(out, w->value.data, w->value.len);
    dn_buf_put(out, w->info.data, w->info.len);
    pad(out);
    dn_buf_put(out, w->data.data, w->data.len);
    pad(out);
}

static int write_all(int fd, const char *data, size_t n)
{
    while (n > 0) {
        ssize_t k = write(fd, data, n);
        if (k < 0 && errno == EINTR)
            continue;
        if (k <= 0)
            return -1;
        data += k;
        n -= (size_t)k;
    }
    return 0;
}

int dn_gguf_write_finish(const struct dn_gguf_writer *w, const char *path, struct dn_err *err)
{
    struct dn_buf bytes = {0}, part = {0};
    dn_gguf_write_bytes(w, &bytes);
    dn_buf_printf(&part, "%s.part%ld", path, (long)getpid());
    const char *temporary = dn_buf_str(&part);
    int code = 0, fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd < 0)
        code = dn_err_set(err, DN_IO, "%s: %s", temporary, strerror(errno));
    else if (write_all(fd, bytes.data, bytes.len) != 0)
        code = dn_err_set(err, DN_IO, "%s: %s", temporary, strerror(errno));
    if (fd >= 0 && close(fd) != 0 && code == 0)
        code = dn_err_set(err, DN_IO, "%s: %s", temporary, strerror(errno));
    if (code == 0 && rename(temporary, path) != 0)
        code = dn_err_set(err, DN_IO, "%s: %s", path, strerror(errno));
    if (code != 0 && fd >= 0)
        unlink(temporary);
    dn_buf_release(&part);
    dn_buf_release(&bytes);
    return code;
}

void dn_gguf_write_release(struct dn_gguf_writer *w)
{
    dn_buf_release(&w->value);
    dn_buf_release(&w->info);
    dn_buf_release(&w->data);
}
