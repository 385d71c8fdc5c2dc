#include "engine/tokenizer_impl.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

void dn_tokens_release(struct dn_tokens *t)
{
    free(t->data);
    *t = (struct dn_tokens){0};
}

void dn_tokens_put(struct dn_tokens *t, int32_t id)
{
    if (t->len == t->cap) {
        t->cap = t->cap ? t->cap * 2 : 64;
        t->data = dn_realloc(t->data, t->cap, sizeof *t->data);
    }
    t->data[t->len++] = id;
}

void dn_tokenizer_close(struct dn_tokenizer *t)
{
    if (t == NULL)
        return;
    dn_buf_release(&t->blob);
    free(t->piece);
    free(t->map.slot);
    free(t->pairs.slot);
    free(t->merge_id);
    free(t->merge_rank);
    free(t->added);
    free(t->raw.node);
    free(t->normalized.node);
    for (size_t i = 0; i < t->n_step; i++)
        pcre2_code_free(t->step[i].code);
    free(t);
}

int dn_tok_build_added(struct dn_tokenizer *t, int64_t id, const char *text, size_t n, struct dn_tok_added options,
                       bool is_special, struct dn_err *err)
{
    if (n == 0)
        return dn_err_set(err, DN_MODEL_FILE, "added token %lld is empty", (long long)id);
    unsigned flags = DN_PIECE_ADDED | (is_special ? DN_PIECE_SPECIAL : 0u);
    if (id >= 0 && (size_t)id < t->n_vocab && t->piece[id].flags & DN_PIECE_PRESENT) {
        /* Also part of the vocabulary proper. BPE may need it for its merges, so the map keeps it. */
        struct dn_tok_piece *p = &t->piece[id];
        if (n > DN_TOK_MAX_PIECE)
            return dn_err_set(err, DN_MODEL_FILE, "added token %lld: %zu bytes long", (long long)id, n);
        if (!dn_tok_build_is(t, (size_t)id, text, n))
            return dn_err_set(err, DN_MODEL_FILE, "added token %lld is \"%.*s\", but the vocabulary has \"%.*s\" there",
                              (long long)id, (int)(n < 40 ? n : 40), text, (int)(p->len < 40 ? p->len : 40),
                              t->blob.data + p->offset);
        p->flags |= flags;
        if (p->len != n || memcmp(t->blob.data + p->offset, text, n) != 0) {
            p->offset = (uint32_t)t->blob.len; /* an added token is literal text, not byte-mapped */
            p->len = (uint32_t)n;
            dn_buf_put(&t->blob, text, n);
        }
    } else {
        int rc = dn_tok_build_set(t, id, text, n, flags, false, err);
        if (rc)
            return rc;
    }
    options.id = (int32_t)id;
    options.len = (uint32_t)n;
    t->added = dn_realloc(t->added, t->n_added + 1, sizeof *t->added);
    t->added[t->n_added] = options;
    dn_tok_trie_put(options.normalized ? &t->normalized : &t->raw, text, n, (int32_t)t->n_added);
    t->n_added++;
    return 0;
}

int dn_tok_read_file(const char *path, size_t max, struct dn_buf *out, struct dn_err *err)
{
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    int rc = 0;
    if (fd < 0)
        return dn_err_set(err, DN_IO, "%s: %s", path, strerror(errno));
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        rc = dn_err_set(err, DN_IO, "%s: not a regular file", path);
    } else if ((uint64_t)st.st_size > max) {
        rc = dn_err_set(err, DN_MODEL_FILE, "%s: %lld bytes long, expected at most %zu", path, (long long)st.st_size,
                        max);
    }
    while (rc == 0) {
        dn_buf_reserve(out, 1 << 16);
        ssize_t n = read(fd, out->data + out->len, out->cap - out->len);
        if (n == 0)
            break;
        if (n > 0)
            out->len += (size_t)n;
        else if (errno != EINTR)
            rc = dn_err_set(err, DN_IO, "%s: %s", path, strerror(errno));
        if (rc == 0 && out->len > max)
            rc = dn_err_set(err, DN_MODEL_FILE, "%s: longer than %zu bytes", path, max);
    }
    close(fd);
    return rc;
}

/* Which bytes of a text the caller vouches for: template text in ascending stretches. */
struct trust {
    const struct dn_tok_range *range;
    size_t n;
    size_t at; /* matching moves left to right */
};

/* The end of the trusted stretch that holds position `at`, or `at` itself. */
static size_t trusted_until(struct trust *trust, size_t at)
{
    while (trust->at < trust->n && trust->range[trust->at].end <= at)
        trust->at++;
    if (trust->at == trust->n || trust->range[trust->at].start > at)
        return at;
    return trust->range[trust->at].end;
}

enum { AHEAD = 6 }; /* pieces between a prefetch and its use */

/* Text without added tokens. */
static int encode_plain(const struct dn_tokenizer *t, const char *text, size_t n, bool is_first,
                        struct dn_tok_scratch *s)
{
    if (n == 0)
        return 0;
    if (t->is_spm) {
        dn_buf_clear(&s->prefixed);
        if (t->space_prefix && (is_first || !t->space_prefix_first_only))
            dn_buf_putc(&s->prefixed, ' ');
        dn_tok_spm_space(text, n, &s->prefixed);
        text = s->prefixed.data;
        n = s->prefixed.len;
    } else if (t->space_prefix && text[0] != ' ') {
        dn_buf_clear(&s->prefixed);
        dn_buf_putc(&s->prefixed, ' ');
        dn_buf_put(&s->prefixed, text, n);
        text = s->prefixed.data;
        n = s->prefixed.len;
    }
    int rc = dn_tok_pre_split(t, text, n, s);
    for (size_t i = 0; rc == 0 && i < s->n_range[0]; i++) {
        const struct dn_tok_range *r = &s->range[0][i];
        if (i + AHEAD < s->n_range[0])
            dn_tok_prefetch(t, text + r[AHEAD].start, r[AHEAD].end - r[AHEAD].start);
        rc = dn_tok_encode_piece(t, text + r->start, r->end - r->start, s);
    }
    return rc;
}

static int encode_normalizable(const struct dn_tokenizer *t, const char *text, size_t start, size_t end,
                               const struct trust *trust, struct dn_tok_scratch *s);

/* Cuts text[start..end) at the added tokens of one trie and gives what lies between to the next stage. */
static int encode_around_added(const struct dn_tokenizer *t, const struct dn_tok_trie *trie, const char *text,
                               size_t start, size_t end, struct trust trust, struct dn_tok_scratch *s)
{
    bool is_raw = trie == &t->raw;
    size_t done = start;
    int rc = 0;
    struct trust gap = trust; /* stands at `done`, while `trust` runs ahead with `at` */
    trusted_until(&gap, done);
    for (size_t at = start; rc == 0 && trie->n && trust.n && at < end;) {
        int32_t found = -1;
        if (trie->root[(uint8_t)text[at]]) {
            size_t limit = trusted_until(&trust, at);
            if (limit > at)
                found = dn_tok_trie_match(trie, text, at, limit < end ? limit : end);
        }
        if (found < 0) {
            at++;
            continue;
        }
        const struct dn_tok_added *a = &t->added[found];
        size_t from = at, to = at + a->len;
        at = to;
        if (a->single_word && !dn_tok_is_single_word(text + start, end - start, from - start, to - start))
            continue;
        if (a->lstrip)
            from = dn_tok_space_before(text, done, from);
        if (a->rstrip)
            to = dn_tok_space_after(text, to, end);
        if (from < done)
            from = done;
        rc = is_raw ? encode_normalizable(t, text, done, from, &gap, s)
                    : encode_plain(t, text + done, from - done, done == 0, s);
        dn_tokens_put(s->out, a->id);
        done = to;
        trusted_until(&gap, done);
        if (at < to)
            at = to;
    }
    if (rc)
        return rc;
    return is_raw ? encode_normalizable(t, text, done, end, &gap, s)
                  : encode_plain(t, text + done, end - done, done == 0, s);
}

/* Whether the normal form of text[start..end) is that of its trusted and other stretches, one after the other; if so
 * `out` has the trusted stretches of the normal form. */
static bool map_trust(const struct dn_tokenizer *t, const char *text, size_t start, size_t end,
                      const struct trust *trust, const char *normal, size_t n_normal, struct dn_tok_scratch *s,
                      struct dn_tok_range *out, size_t *n_out)
{
    size_t at = start, to = 0;
    *n_out = 0;
    for (size_t i = trust->at; at < end;) {
        while (i < trust->n && trust->range[i].end <= at)
            i++;
        bool is_trusted = i < trust->n && trust->range[i].start <= at;
        size_t stop = i == trust->n ? end : is_trusted ? trust->range[i].end : trust->range[i].start;
        if (stop > end)
            stop = end;
        const char *part;
        size_t n_part;
        if (dn_tok_normalize(t, text + at, stop - at, &s->probe, &part, &n_part, s->err) != 0)
            return false;
        if (n_part > n_normal - to || memcmp(normal + to, part, n_part) != 0)
            return false;
        if (is_trusted)
            out[(*n_out)++] = (struct dn_tok_range){to, to + n_part};
        to += n_part;
        at = stop;
    }
    return to == n_normal;
}

static int encode_normalizable(const struct dn_tokenizer *t, const char *text, size_t start, size_t end,
                               const struct trust *trust, struct dn_tok_scratch *s)
{
    if (start >= end)
        return 0;
    if (t->is_spm || (!t->has_nfc && t->normalized.n == 0)) /* SPM's added tokens are all raw */
        return encode_plain(t, text + start, end - start, start == 0, s);
    const char *normal;
    size_t n;
    int rc = dn_tok_normalize(t, text + start, end - start, &s->normal, &normal, &n, s->err);
    if (rc)
        return rc;
    if (normal == text + start)
        return encode_around_added(t, &t->normalized, text, start, end, *trust, s);
    struct trust mapped = {0};
    struct dn_tok_range *range = NULL;
    if (t->normalized.n && trust->n) {
        range = dn_alloc0(trust->n, sizeof *range);
        if (map_trust(t, text, start, end, trust, normal, n, s, range, &mapped.n))
            mapped.range = range;
        else
            mapped.n = 0;
    }
    rc = encode_around_added(t, &t->normalized, normal, 0, n, mapped, s);
    free(range);
    return rc;
}

static int check_utf8(const char *text, size_t n, struct dn_err *err)
{
    for (size_t at = 0; at < n;) {
        unsigned len = dn_tok_utf8_len((const unsigned char *)text + at, n - at);
        if (len == 0)
            return dn_err_set(err, DN_INVALID_VALUE, "the text is not UTF-8 at byte %zu", at);
        at += len;
    }
    return 0;
}

static int encode_trusted(const struct dn_tokenizer *t, const char *text, size_t n, const struct trust *trust,
                          unsigned flags, struct dn_tok_scratch *s)
{
    int rc = check_utf8(text, n, s->err);
    if (rc)
        return rc;
    for (size_t i = 0; flags & DN_TOK_ADD_AFFIX && i < t->n_prefix; i++)
        dn_tokens_put(s->out, t->prefix[i]);
    rc = encode_around_added(t, &t->raw, text, 0, n, *trust, s);
    for (size_t i = 0; rc == 0 && flags & DN_TOK_ADD_AFFIX && i < t->n_suffix; i++)
        dn_tokens_put(s->out, t->suffix[i]);
    return rc;
}

static int too_long(size_t n, struct dn_err *err)
{
    return dn_err_set(err, DN_CONTEXT_LENGTH, "the text has %zu bytes, more than the tokenizer takes (%zu)", n,
                      DN_TOK_MAX_TEXT);
}

int dn_tokenizer_encode(const struct dn_tokenizer *t, const char *text, size_t n, unsigned flags, struct dn_tokens *out,
                        struct dn_err *err)
{
    if (n > DN_TOK_MAX_TEXT)
        return too_long(n, err);
    struct dn_tok_scratch s;
    int rc = dn_tok_scratch_init(&s, out, err);
    if (rc)
        return rc;
    size_t before = out->len;
    struct dn_tok_range all = {0, n};
    rc = encode_trusted(t, text, n, &(struct trust){&all, flags & DN_TOK_SPECIAL ? 1 : 0, 0}, flags, &s);
    if (rc)
        out->len = before;
    dn_tok_scratch_release(&s);
    return rc;
}

int dn_tokenizer_encode_texts(const struct dn_tokenizer *t, const struct dn_tok_text *text, size_t n_text,
                              unsigned flags, struct dn_tokens *out, struct dn_err *err)
{
    size_t n = 0;
    for (size_t i = 0; i < n_text; i++)
        if (__builtin_add_overflow(n, text[i].len, &n) || n > DN_TOK_MAX_TEXT)
            return too_long(n, err);
    struct dn_tok_scratch s;
    int rc = dn_tok_scratch_init(&s, out, err);
    if (rc)
        return rc;
    struct dn_tok_range *range = dn_alloc0(n_text, sizeof *range);
    size_t n_range = 0, before = out->len;
    for (size_t i = 0; i < n_text; i++) {
        size_t start = s.text.len;
        dn_buf_put(&s.text, text[i].data, text[i].len);
        if (!text[i].is_template || text[i].len == 0)
            continue;
        if (n_range && range[n_range - 1].end == start)
            range[n_range - 1].end = s.text.len;
        else
            range[n_range++] = (struct dn_tok_range){start, s.text.len};
    }
    rc = encode_trusted(t, s.text.data, n, &(struct trust){range, n_range, 0}, flags, &s);
    if (rc)
        out->len = before;
    free(range);
    dn_tok_scratch_release(&s);
    return rc;
}

static const struct dn_tok_piece *piece_of(const struct dn_tokenizer *t, int32_t id)
{
    static const struct dn_tok_piece none;
    return id >= 0 && (size_t)id < t->n_vocab ? &t->piece[id] : &none;
}

struct dn_tok_str dn_tokenizer_piece(const struct dn_tokenizer *t, int32_t id)
{
    const struct dn_tok_piece *p = piece_of(t, id);
    if (!(p->flags & DN_PIECE_PRESENT))
        return (struct dn_tok_str){0};
    return (struct dn_tok_str){t->blob.data + p->offset, p->len};
}

bool dn_tokenizer_has_token(const struct dn_tokenizer *t, int32_t id)
{
    return piece_of(t, id)->flags & DN_PIECE_PRESENT;
}

bool dn_tokenizer_is_special(const struct dn_tokenizer *t, int32_t id)
{
    return piece_of(t, id)->flags & DN_PIECE_SPECIAL;
}

bool dn_tokenizer_is_added(const struct dn_tokenizer *t, int32_t id)
{
    return piece_of(t, id)->flags & DN_PIECE_ADDED;
}

int32_t dn_tokenizer_find(const struct dn_tokenizer *t, const char *text, size_t n)
{
    if (n == 0)
        return -1;
    const struct dn_tok_trie *tries[] = {&t->raw, &t->normalized};
    for (int i = 0; i < 2; i++) {
        int32_t found = tries[i]->n ? dn_tok_trie_match(tries[i], text, 0, n) : -1;
        if (found >= 0 && t->added[found].len == n)
            return t->added[found].id;
    }
    uint32_t id = dn_tok_map_find(t, text, n);
    return id == DN_TOK_NONE ? -1 : (int32_t)id;
}

void dn_tokenizer_decode(const struct dn_tokenizer *t, const int32_t *id, size_t n, bool skip_special,
                         struct dn_buf *out)
{
    bool is_start = dn_tokenizer_has_space_prefix(t);
    for (size_t i = 0; i < n; i++) {
        if (skip_special && dn_tokenizer_is_special(t, id[i]))
            continue;
        struct dn_tok_str piece = dn_tokenizer_piece(t, id[i]);
        size_t cut = is_start && piece.len && piece.data[0] == ' ' && !dn_tokenizer_is_added(t, id[i]);
        dn_buf_put(out, piece.data + cut, piece.len - cut);
        is_start = false;
    }
}

int32_t dn_tokenizer_n_vocab(const struct dn_tokenizer *t)
{
    return (int32_t)t->n_vocab;
}

int32_t dn_tokenizer_bos(const struct dn_tokenizer *t)
{
    return t->bos;
}

int32_t dn_tokenizer_eos(const struct dn_tokenizer *t)
{
    return t->eos;
}

int32_t dn_tokenizer_pad(const struct dn_tokenizer *t)
{
    return t->pad;
}

int32_t dn_tokenizer_unk(const struct dn_tokenizer *t)
{
    return t->unk;
}

bool dn_tokenizer_adds_bos(const struct dn_tokenizer *t)
{
    return t->n_prefix > 0;
}

bool dn_tokenizer_has_space_prefix(const struct dn_tokenizer *t)
{
    return t->is_spm && t->space_prefix;
}
