/* Test material of the tokenizers: unpacked into the build folder, never copied into the project. */
#ifndef TOK_DATA_H
#define TOK_DATA_H

#include "engine/gguf.h"
#include "engine/tokenizer.h"

#include <criterion/criterion.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Runs a program with its standard output in a file (NULL: ours); fails the test if it fails. */
static inline void tok_run(const char *const argv[], const char *output)
{
    posix_spawn_file_actions_t actions;
    pid_t pid;
    int status = -1;
    posix_spawn_file_actions_init(&actions);
    if (output)
        posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, output, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    cr_assert_eq(posix_spawnp(&pid, argv[0], &actions, NULL, (char *const *)(uintptr_t)argv, environ), 0, "%s",
                 argv[0]);
    cr_assert_eq(waitpid(pid, &status, 0), pid);
    cr_assert_eq(status, 0, "%s %s failed", argv[0], argv[1]);
    posix_spawn_file_actions_destroy(&actions);
}

/* Unpacks shared/data/<name>.tar.gz once; false, with the reason printed, when it is not there. Tests are processes of
 * their own and may get here at the same time, so the folder appears by a rename. */
static inline bool tok_unpack(const char *name)
{
    char archive[512], dir[512], tmp[600], inner[700];
    snprintf(archive, sizeof archive, "%s/%s.tar.gz", DN_SHARED_DATA, name);
    snprintf(dir, sizeof dir, "%s/testdata/%s", DN_BUILD_DIR, name);
    snprintf(tmp, sizeof tmp, "%s.%d", dir, (int)getpid());
    if (access(dir, R_OK) == 0)
        return true;
    if (access(archive, R_OK) != 0) {
        printf("SKIPPED: %s is not there\n", archive);
        return false;
    }
    tok_run((const char *const[]){"mkdir", "-p", tmp, NULL}, NULL);
    tok_run((const char *const[]){"tar", "-xzf", archive, "-C", tmp, NULL}, NULL);
    snprintf(inner, sizeof inner, "%s/%s", tmp, name);
    if (rename(inner, dir) != 0)
        cr_assert_eq(access(dir, R_OK), 0, "can't make %s", dir);
    tok_run((const char *const[]){"rm", "-rf", tmp, NULL}, NULL);
    return true;
}

static inline const char *tok_path(const char *name)
{
    static char path[4][700];
    static unsigned turn;
    char *p = path[turn++ % 4];
    snprintf(p, sizeof *path, "%s/testdata/%s", DN_BUILD_DIR, name);
    return p;
}

static inline struct dn_buf tok_read(const char *path)
{
    struct dn_buf b = {0};
    FILE *f = fopen(path, "rb");
    cr_assert_not_null(f, "%s", path);
    char block[1 << 16];
    size_t n;
    while ((n = fread(block, 1, sizeof block, f)) > 0)
        dn_buf_put(&b, block, n);
    fclose(f);
    dn_buf_str(&b);
    return b;
}

/* "1, 2, 3" or "1 2 3" up to the end of the line; *p moves behind it. */
static inline void tok_read_ids(const char **p, struct dn_tokens *out)
{
    out->len = 0;
    while (**p && **p != '\n') {
        if (**p >= '0' && **p <= '9')
            dn_tokens_put(out, (int32_t)strtol(*p, (char **)p, 10));
        else
            (*p)++;
    }
    if (**p)
        (*p)++;
}

static inline void tok_expect(const struct dn_tokens *got, const struct dn_tokens *want, const char *where, size_t line)
{
    size_t n = got->len < want->len ? got->len : want->len, i = 0;
    while (i < n && got->data[i] == want->data[i])
        i++;
    cr_expect(got->len == want->len && i == n, "%s, input %zu: %zu ids, expected %zu; first difference at %zu: %d / %d",
              where, line, got->len, want->len, i, i < got->len ? got->data[i] : -1,
              i < want->len ? want->data[i] : -1);
}

static inline void tok_encode(const struct dn_tokenizer *t, const char *text, size_t n, unsigned flags,
                              struct dn_tokens *out)
{
    struct dn_err err = {0};
    out->len = 0;
    cr_assert_eq(dn_tokenizer_encode(t, text, n, flags, out, &err), 0, "%s", err.text);
}

/* decode(encode(text)) == text */
static inline void tok_round_trip(const struct dn_tokenizer *t, const char *text, size_t n)
{
    struct dn_tokens ids = {0};
    struct dn_buf back = {0};
    tok_encode(t, text, n, 0, &ids);
    dn_tokenizer_decode(t, ids.data, ids.len, false, &back);
    cr_expect(back.len == n && (n == 0 || memcmp(back.data, text, n) == 0), "\"%.40s\" comes back as \"%.*s\"", text,
              back.len > 40 ? 40 : (int)back.len, back.data ? back.data : "");
    for (size_t i = 0; i < ids.len; i++)
        cr_assert(!dn_tokenizer_is_special(t, ids.data[i]));
    dn_tokens_release(&ids);
    dn_buf_release(&back);
}

static inline double tok_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

#endif
