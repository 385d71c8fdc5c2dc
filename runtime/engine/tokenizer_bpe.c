#include "engine/tokenizer_impl.h"

#include <stdlib.h>
#include <string.h>

/* Pieces of at most this many symbols are merged by scanning for the lowest rank, which beats the heap's bookkeeping
 * there; longer ones use the heap, so that no text costs more than O(n log n). */
enum { SHORT_PIECE = 48 };

static uint32_t hash_bytes(const char *data, size_t n)
{
    uint64_t h = n * 0x9E3779B97F4A7C15ull;
    while (n >= 8) {
        uint64_t w;
        memcpy(&w, data, 8);
        h = (h ^ w) * 0xD6E8FEB86659FD93ull;
        h ^= h >> 32;
        data += 8;
        n -= 8;
    }
    if (n) {
        uint64_t w = 0;
        memcpy(&w, data, n);
        h = (h ^ w) * 0xD6E8FEB86659FD93ull;
        h ^= h >> 32;
    }
    h *= 0xD6E8FEB86659FD93ull;
    return (uint32_t)(h >> 32);
}

uint32_t dn_tok_map_find(const struct dn_tokenizer *t, const char *data, size_t n)
{
    if (t->map.slot == NULL)
        return DN_TOK_NONE;
    uint32_t hash = hash_bytes(data, n);
    for (size_t i = hash & t->map.mask; t->map.slot[i].id1; i = (i + 1) & t->map.mask) {
        if (t->map.slot[i].hash != hash)
            continue;
        const struct dn_tok_piece *p = &t->piece[t->map.slot[i].id1 - 1];
        if (p->len == n && memcmp(t->blob.data + p->offset, data, n) == 0)
            return t->map.slot[i].id1 - 1;
    }
    return DN_TOK_NONE;
}

/* A look-up waits for memory most of its time: asking for the slot some pieces ahead hides that. */
void dn_tok_prefetch(const struct dn_tokenizer *t, const char *data, size_t n)
{
    if (n <= DN_TOK_MAX_PIECE && t->map.slot)
        __builtin_prefetch(&t->map.slot[hash_bytes(data, n) & t->map.mask]);
}

static void map_place(struct dn_tok_map *m, struct dn_tok_slot slot)
{
    size_t i = slot.hash & m->mask;
    while (m->slot[i].id1)
        i = (i + 1) & m->mask;
    m->slot[i] = slot;
}

static void map_put(struct dn_tokenizer *t, uint32_t id)
{
    struct dn_tok_map *m = &t->map;
    if (m->n * 2 >= m->mask) {
        struct dn_tok_map old = *m;
        size_t size = old.slot ? (old.mask + 1) * 2 : 1024;
        m->slot = dn_alloc0(size, sizeof *m->slot);
        m->mask = size - 1;
        for (size_t i = 0; old.slot && i <= old.mask; i++)
            if (old.slot[i].id1)
                map_place(m, old.slot[i]);
        free(old.slot);
    }
    const struct dn_tok_piece *p = &t->piece[id];
    map_place(m, (struct dn_tok_slot){hash_bytes(t->blob.data + p->offset, p->len), id + 1});
    m->n++;
}

/* A merge's key and number share 64 bits, so that one cache line holds eight of them. */
static inline uint64_t pair_key(uint32_t left, uint32_t right)
{
    return (uint64_t)left << 21 | right;
}

static inline size_t pair_slot(const struct dn_tok_pairs *p, uint64_t key)
{
    return (size_t)(key * 0x9E3779B97F4A7C15ull >> p->shift);
}

static inline uint32_t pair_find(const struct dn_tok_pairs *p, uint32_t left, uint32_t right)
{
    uint64_t key = pair_key(left, right);
    for (size_t i = pair_slot(p, key);; i = (i + 1) & p->mask) {
        uint64_t e = p->slot[i];
        if (e >> 22 == key && e != UINT64_MAX)
            return (uint32_t)(e & 0x3FFFFF);
        if (e == UINT64_MAX)
            return DN_TOK_NONE;
    }
}

static void pairs_grow(struct dn_tok_pairs *p)
{
    struct dn_tok_pairs old = *p;
    size_t size = old.slot ? (old.mask + 1) * 2 : 1024;
    p->slot = dn_alloc(size * sizeof *p->slot);
    memset(p->slot, 0xFF, size * sizeof *p->slot);
    p->mask = size - 1;
    p->shift = 64 - (unsigned)__builtin_ctzll(size);
    for (size_t j = 0; old.slot && j <= old.mask; j++) {
        if (old.slot[j] == UINT64_MAX)
            continue;
        size_t i = pair_slot(p, old.slot[j] >> 22);
        while (p->slot[i] != UINT64_MAX)
            i = (i + 1) & p->mask;
        p->slot[i] = old.slot[j];
    }
    free(old.slot);
}

/* The first merge of a pair wins. */
static void pairs_put(struct dn_tok_pairs *p, uint32_t left, uint32_t right, uint32_t number)
{
    if (p->slot == NULL || p->n * 2 >= p->mask)
        pairs_grow(p);
    uint64_t key = pair_key(left, right);
    size_t i = pair_slot(p, key);
    while (p->slot[i] != UINT64_MAX) {
        if (p->slot[i] >> 22 == key)
            return;
        i = (i + 1) & p->mask;
    }
    p->slot[i] = key << 22 | number;
    p->n++;
}

static inline uint32_t new_id(const struct dn_tokenizer *t, uint32_t number)
{
    return t->merge_id ? t->merge_id[number] : number;
}

static inline uint32_t rank_of(const struct dn_tokenizer *t, uint32_t number)
{
    return number == DN_TOK_NONE || !t->merge_rank ? number : t->merge_rank[number];
}

static inline uint32_t pair_of(const struct dn_tokenizer *t, uint32_t left, uint32_t right)
{
    if (left == DN_TOK_NONE || right == DN_TOK_NONE)
        return DN_TOK_NONE;
    return pair_find(&t->pairs, left, right);
}

/* Merges in place: always the lowest rank, the leftmost of equals. merge[i] is the merge of symbols i and i + 1. */
static size_t merge_short(const struct dn_tokenizer *t, uint32_t *symbol, size_t n)
{
    uint32_t merge[SHORT_PIECE];
    for (size_t i = 0; i + 1 < n; i++)
        merge[i] = pair_of(t, symbol[i], symbol[i + 1]);
    while (n > 1) {
        size_t best = 0;
        uint32_t best_rank = DN_TOK_NONE;
        for (size_t i = 0; i + 1 < n; i++) {
            uint32_t rank = rank_of(t, merge[i]);
            if (rank < best_rank) {
                best_rank = rank;
                best = i;
            }
        }
        if (best_rank == DN_TOK_NONE)
            break;
        symbol[best] = new_id(t, merge[best]);
        n--;
        memmove(symbol + best + 1, symbol + best + 2, (n - best - 1) * sizeof *symbol);
        if (best + 1 < n) {
            memmove(merge + best + 1, merge + best + 2, (n - best - 2) * sizeof *merge);
            merge[best] = pair_of(t, symbol[best], symbol[best + 1]);
        }
        if (best > 0)
            merge[best - 1] = pair_of(t, symbol[best - 1], symbol[best]);
    }
    return n;
}

static void heap_down(uint64_t *heap, size_t n, size_t i)
{
    uint64_t x = heap[i];
    for (;;) {
        size_t c = 2 * i + 1;
        if (c >= n)
            break;
        if (c + 1 < n && heap[c + 1] < heap[c])
            c++;
        if (heap[c] >= x)
            break;
        heap[i] = heap[c];
        i = c;
    }
    heap[i] = x;
}

static void heap_up(uint64_t *heap, size_t i)
{
    uint64_t x = heap[i];
    while (i > 0 && heap[(i - 1) / 2] > x) {
        heap[i] = heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    heap[i] = x;
}

/* The merge at position i changed: remembers it and puts it on the heap. Old entries for i are recognised as stale
 * because their rank is no longer the one remembered. */
static void set_merge(const struct dn_tokenizer *t, struct dn_tok_scratch *s, size_t i, size_t *n_heap)
{
    uint32_t right = s->next[i];
    uint32_t number = right == DN_TOK_NONE ? DN_TOK_NONE : pair_of(t, s->symbol[i], s->symbol[right]);
    s->rank[i] = rank_of(t, number);
    if (number == DN_TOK_NONE)
        return;
    s->heap[(*n_heap)++] = (uint64_t)s->rank[i] << 32 | i;
}

/* The same order as merge_short with a heap of (rank, position); symbols stay where they are and are linked. Each
 * merge removes a symbol and adds at most two entries, so 3 n entries are enough. */
static size_t merge_long(const struct dn_tokenizer *t, struct dn_tok_scratch *s, size_t n)
{
    size_t n_heap = 0;
    for (size_t i = 0; i < n; i++) {
        s->next[i] = i + 1 < n ? (uint32_t)(i + 1) : DN_TOK_NONE;
        s->prev[i] = i ? (uint32_t)(i - 1) : DN_TOK_NONE;
    }
    for (size_t i = 0; i < n; i++)
        set_merge(t, s, i, &n_heap);
    for (size_t i = n_heap / 2; i-- > 0;)
        heap_down(s->heap, n_heap, i);
    while (n_heap) {
        uint32_t at = (uint32_t)s->heap[0], rank = (uint32_t)(s->heap[0] >> 32);
        s->heap[0] = s->heap[--n_heap];
        heap_down(s->heap, n_heap, 0);
        if (s->rank[at] != rank)
            continue;
        uint32_t right = s->next[at];
        s->symbol[at] = new_id(t, pair_of(t, s->symbol[at], s->symbol[right]));
        s->rank[right] = DN_TOK_NONE;
        s->next[at] = s->next[right];
        if (s->next[at] != DN_TOK_NONE)
            s->prev[s->next[at]] = at;
        size_t before = n_heap;
        set_merge(t, s, at, &n_heap);
        if (n_heap > before)
            heap_up(s->heap, n_heap - 1);
        before = n_heap;
        if (s->prev[at] != DN_TOK_NONE)
            set_merge(t, s, s->prev[at], &n_heap);
        if (n_heap > before)
            heap_up(s->heap, n_heap - 1);
    }
    size_t kept = 0;
    for (uint32_t i = 0; i != DN_TOK_NONE; i = s->next[i]) {
        s->symbol[kept] = s->symbol[i];
        s->prev[kept++] = i; /* where it started, for unknown characters */
    }
    return kept;
}

static int reserve_symbols(struct dn_tok_scratch *s, size_t n)
{
    if (n <= s->cap_symbol)
        return 0;
    size_t cap = n + n / 2;
    free(s->symbol);
    free(s->next);
    free(s->heap);
    s->symbol = malloc(cap * sizeof *s->symbol);
    s->next = malloc(3 * cap * sizeof *s->next);
    s->heap = malloc(3 * cap * sizeof *s->heap);
    s->cap_symbol = cap;
    if (s->symbol == NULL || s->next == NULL || s->heap == NULL) {
        s->cap_symbol = 0;
        return dn_err_set(s->err, DN_NO_MEMORY, "no memory to tokenize a piece of %zu bytes", n);
    }
    s->prev = s->next + cap;
    s->rank = s->prev + cap;
    return 0;
}

static int no_byte(const struct dn_tok_scratch *s, unsigned char byte)
{
    return dn_err_set(s->err, DN_INVALID_VALUE, "the model's vocabulary has no token for the byte 0x%02x", byte);
}

static int encode_bytes(const struct dn_tokenizer *t, const char *data, size_t n, struct dn_tok_scratch *s)
{
    uint32_t few[SHORT_PIECE];
    uint32_t *symbol = few;
    if (n > SHORT_PIECE) {
        int rc = reserve_symbols(s, n);
        if (rc)
            return rc;
        symbol = s->symbol;
    }
    for (size_t i = 0; i < n; i++) {
        int32_t id = t->byte_id[(unsigned char)data[i]];
        if (id < 0 && t->unk >= 0 && !(t->piece[t->unk].flags & DN_PIECE_SPECIAL))
            id = t->unk; /* never a control token, which SmolLM2's <|endoftext|> is */
        if (id < 0)
            return no_byte(s, (unsigned char)data[i]);
        symbol[i] = (uint32_t)id;
    }
    n = n > SHORT_PIECE ? merge_long(t, s, n) : merge_short(t, symbol, n);
    for (size_t i = 0; i < n; i++)
        dn_tokens_put(s->out, (int32_t)symbol[i]);
    return 0;
}

/* A character without a token: its bytes' tokens if there are all of them, else the unknown token. */
static int put_unknown(const struct dn_tokenizer *t, const char *c, size_t n, struct dn_tok_scratch *s, bool *was_unk)
{
    bool have = true;
    for (size_t i = 0; i < n; i++)
        have = have && t->byte_id[(unsigned char)c[i]] >= 0;
    if (!have) {
        if (t->unk < 0)
            return no_byte(s, (unsigned char)c[0]);
        if (!*was_unk || !t->fuse_unk)
            dn_tokens_put(s->out, t->unk);
        *was_unk = true;
        return 0;
    }
    for (size_t i = 0; i < n; i++)
        dn_tokens_put(s->out, t->byte_id[(unsigned char)c[i]]);
    *was_unk = false;
    return 0;
}

/* SentencePiece's way: characters are the first symbols. merge_long leaves in prev[] the number of the character that
 * each symbol starts with; walking the text once more finds the bytes of those that have no token. */
static int encode_chars(const struct dn_tokenizer *t, const char *data, size_t n, struct dn_tok_scratch *s)
{
    int rc = reserve_symbols(s, n);
    if (rc)
        return rc;
    size_t n_char = 0;
    for (size_t at = 0; at < n;) {
        unsigned len = dn_tok_utf8_len((const unsigned char *)data + at, n - at);
        s->symbol[n_char++] = dn_tok_map_find(t, data + at, len);
        at += len;
    }
    size_t n_symbol = merge_long(t, s, n_char);
    bool was_unk = false;
    size_t at = 0;
    uint32_t ch = 0;
    for (size_t i = 0; i < n_symbol; i++) {
        for (; ch < s->prev[i]; ch++)
            at += dn_tok_utf8_len((const unsigned char *)data + at, n - at);
        if (s->symbol[i] != DN_TOK_NONE) {
            dn_tokens_put(s->out, (int32_t)s->symbol[i]);
            was_unk = false;
            continue;
        }
        rc = put_unknown(t, data + at, dn_tok_utf8_len((const unsigned char *)data + at, n - at), s, &was_unk);
        if (rc)
            return rc;
    }
    return 0;
}

int dn_tok_encode_piece(const struct dn_tokenizer *t, const char *data, size_t n, struct dn_tok_scratch *s)
{
    if (n == 0)
        return 0;
    if (t->is_spm)
        return encode_chars(t, data, n, s);
    if (n <= DN_TOK_MAX_PIECE) {
        uint32_t id = dn_tok_map_find(t, data, n);
        if (id != DN_TOK_NONE && t->piece[id].flags & DN_PIECE_WHOLE) {
            dn_tokens_put(s->out, (int32_t)id);
            return 0;
        }
    }
    return encode_bytes(t, data, n, s);
}

void dn_tok_build_init(struct dn_tokenizer *t)
{
    *t = (struct dn_tokenizer){.bos = -1, .eos = -1, .pad = -1, .unk = -1};
    for (int i = 0; i < 256; i++)
        t->byte_id[i] = -1;
}

int dn_tok_build_set(struct dn_tokenizer *t, int64_t id, const char *data, size_t n, unsigned flags, bool in_map,
                     struct dn_err *err)
{
    if (id < 0 || id >= DN_TOK_MAX_VOCAB - 1)
        return dn_err_set(err, DN_MODEL_FILE, "token id %lld: expected 0 to %d", (long long)id, DN_TOK_MAX_VOCAB - 2);
    if (n > DN_TOK_MAX_PIECE)
        return dn_err_set(err, DN_MODEL_FILE, "token %lld: %zu bytes long, expected at most %d", (long long)id, n,
                          DN_TOK_MAX_PIECE);
    if (t->blob.len > (size_t)1 << 30)
        return dn_err_set(err, DN_MODEL_FILE, "the tokens' text is longer than 1 GiB");
    size_t i = (size_t)id;
    if (i >= t->cap_vocab) {
        size_t cap = i + i / 2 + 256;
        t->piece = dn_realloc(t->piece, cap, sizeof *t->piece);
        memset(t->piece + t->cap_vocab, 0, (cap - t->cap_vocab) * sizeof *t->piece);
        t->cap_vocab = cap;
    }
    if (i >= t->n_vocab)
        t->n_vocab = i + 1;
    else if (t->piece[i].flags & DN_PIECE_PRESENT)
        return dn_err_set(err, DN_MODEL_FILE, "token id %lld is used twice", (long long)id);
    t->piece[i] = (struct dn_tok_piece){(uint32_t)t->blob.len, (uint32_t)n, flags | DN_PIECE_PRESENT};
    dn_buf_put(&t->blob, data, n);
    if (!in_map)
        return 0;
    if (n == 0)
        return dn_err_set(err, DN_MODEL_FILE, "token %lld is empty", (long long)id);
    if (dn_tok_map_find(t, data, n) == DN_TOK_NONE)
        map_put(t, (uint32_t)i);
    return 0;
}

/* "<0x0A>" is byte 10. */
static int fallback_byte(const char *data, size_t n)
{
    if (n != 6 || memcmp(data, "<0x", 3) != 0 || data[5] != '>')
        return -1;
    int byte = 0;
    for (int i = 3; i < 5; i++) {
        char c = data[i];
        if (c >= '0' && c <= '9')
            byte = byte * 16 + (c - '0');
        else if (c >= 'A' && c <= 'F')
            byte = byte * 16 + (c - 'A' + 10);
        else
            return -1;
    }
    return byte;
}

int dn_tok_build_vocab(struct dn_tokenizer *t, int64_t id, const char *data, size_t n, struct dn_err *err)
{
    struct dn_buf raw = {0};
    int rc;
    if (t->is_spm) {
        int byte = fallback_byte(data, n);
        if (byte >= 0) {
            char c = (char)byte;
            rc = dn_tok_build_set(t, id, &c, 1, 0, false, err);
            if (rc == 0)
                t->byte_id[byte] = (int32_t)id;
            return rc;
        }
        dn_tok_spm_space(data, n, &raw);
        rc = dn_tok_build_set(t, id, raw.data, raw.len, 0, true, err);
    } else if (dn_tok_unmap_bytes(data, n, &raw)) {
        rc = dn_tok_build_set(t, id, raw.data, raw.len, 0, true, err);
    } else {
        rc = dn_tok_build_set(t, id, data, n, 0, false, err); /* a marker; BPE can't produce it */
    }
    dn_buf_release(&raw);
    return rc;
}

bool dn_tok_build_is(const struct dn_tokenizer *t, size_t id, const char *data, size_t n)
{
    const struct dn_tok_piece *p = &t->piece[id];
    const char *piece = t->blob.data + p->offset;
    struct dn_buf raw = {0};
    bool is = p->len == n && memcmp(piece, data, n) == 0;
    if (!is && t->is_spm) {
        int byte = fallback_byte(data, n);
        if (byte >= 0)
            dn_buf_putc(&raw, (char)byte);
        else
            dn_tok_spm_space(data, n, &raw);
        is = raw.len == p->len && memcmp(raw.data, piece, raw.len) == 0;
    } else if (!is && dn_tok_unmap_bytes(data, n, &raw)) {
        is = raw.len == p->len && memcmp(raw.data, piece, raw.len) == 0;
    }
    dn_buf_release(&raw);
    return is;
}

int dn_tok_build_merge_text(struct dn_tokenizer *t, const char *left, size_t n_left, const char *right, size_t n_right,
                            struct dn_err *err)
{
    struct dn_buf raw = {0};
    bool ok = true;
    size_t cut = 0;
    if (t->is_spm) {
        dn_tok_spm_space(left, n_left, &raw);
        cut = raw.len;
        dn_tok_spm_space(right, n_right, &raw);
    } else {
        ok = dn_tok_unmap_bytes(left, n_left, &raw);
        cut = raw.len;
        ok = ok && dn_tok_unmap_bytes(right, n_right, &raw);
    }
    uint32_t l = DN_TOK_NONE, r = DN_TOK_NONE, both = DN_TOK_NONE;
    if (ok && cut > 0 && cut < raw.len) {
        l = dn_tok_map_find(t, raw.data, cut);
        r = dn_tok_map_find(t, raw.data + cut, raw.len - cut);
        both = dn_tok_map_find(t, raw.data, raw.len);
    }
    dn_buf_release(&raw);
    if (l == DN_TOK_NONE || r == DN_TOK_NONE || both == DN_TOK_NONE)
        return dn_err_set(err, DN_MODEL_FILE, "merge %zu (\"%.*s\" \"%.*s\"): not in the vocabulary", t->n_merge,
                          n_left > 64 ? 64 : (int)n_left, left, n_right > 64 ? 64 : (int)n_right, right);
    return dn_tok_build_merge(t, l, r, both, err);
}

int dn_tok_build_merge(struct dn_tokenizer *t, uint32_t left, uint32_t right, uint32_t id, struct dn_err *err)
{
    if (t->n_merge >= DN_TOK_MAX_MERGES)
        return dn_err_set(err, DN_MODEL_FILE, "more than %d merges", DN_TOK_MAX_MERGES);
    if (t->n_merge == t->cap_merge) {
        t->cap_merge = t->cap_merge ? t->cap_merge * 2 : 1024;
        t->merge_id = dn_realloc(t->merge_id, t->cap_merge, sizeof *t->merge_id);
    }
    pairs_put(&t->pairs, left, right, (uint32_t)t->n_merge);
    t->merge_id[t->n_merge++] = id;
    return 0;
}

int dn_tok_build_merges_from_vocab(struct dn_tokenizer *t, uint32_t *rank_take, struct dn_err *err)
{
    t->merge_rank = rank_take;
    for (size_t id = 0; id < t->n_vocab; id++) {
        const struct dn_tok_piece *p = &t->piece[id];
        const char *data = t->blob.data + p->offset;
        if (p->len < 2 || dn_tok_map_find(t, data, p->len) != id)
            continue;
        for (uint32_t cut = 1; cut < p->len; cut++) {
            uint32_t left = dn_tok_map_find(t, data, cut);
            if (left == DN_TOK_NONE)
                continue;
            uint32_t right = dn_tok_map_find(t, data + cut, p->len - cut);
            if (right != DN_TOK_NONE)
                pairs_put(&t->pairs, left, right, (uint32_t)id);
        }
    }
    return 0;
}

/* Which tokens come out of BPE as themselves: for those a look-up replaces the merge loop. */
static void find_whole(struct dn_tokenizer *t)
{
    struct dn_tokens ids = {0};
    struct dn_tok_scratch s = {.out = &ids};
    for (size_t id = 0; id < t->n_vocab; id++) {
        struct dn_tok_piece *p = &t->piece[id];
        const char *data = t->blob.data + p->offset;
        if (!(p->flags & DN_PIECE_PRESENT) || p->flags & (DN_PIECE_SPECIAL | DN_PIECE_ADDED) ||
            dn_tok_map_find(t, data, p->len) != id)
            continue;
        bool whole = t->ignore_merges;
        if (!whole) {
            ids.len = 0;
            whole = encode_bytes(t, data, p->len, &s) == 0 && ids.len == 1 && ids.data[0] == (int32_t)id;
        }
        if (whole)
            p->flags |= DN_PIECE_WHOLE;
    }
    dn_tokens_release(&ids);
    dn_tok_scratch_release(&s);
}

/* A user's text never becomes a control token, not by merges either (SentencePiece has none for them). */
static void drop_control_merges(struct dn_tokenizer *t)
{
    struct dn_tok_pairs old = t->pairs;
    t->pairs = (struct dn_tok_pairs){0};
    for (size_t i = 0; old.slot && i <= old.mask; i++) {
        uint64_t e = old.slot[i];
        if (e != UINT64_MAX && !(t->piece[new_id(t, e & 0x3FFFFF)].flags & DN_PIECE_SPECIAL))
            pairs_put(&t->pairs, (uint32_t)(e >> 43), (uint32_t)(e >> 22 & 0x1FFFFF), (uint32_t)(e & 0x3FFFFF));
    }
    free(old.slot);
}

static bool has_control_merges(const struct dn_tokenizer *t)
{
    for (size_t i = 0; t->pairs.slot && i <= t->pairs.mask; i++)
        if (t->pairs.slot[i] != UINT64_MAX && t->piece[new_id(t, t->pairs.slot[i] & 0x3FFFFF)].flags & DN_PIECE_SPECIAL)
            return true;
    return false;
}

int dn_tok_build_finish(struct dn_tokenizer *t, struct dn_err *err)
{
    if (t->n_vocab == 0)
        return dn_err_set(err, DN_MODEL_FILE, "the vocabulary is empty");
    if (has_control_merges(t))
        drop_control_merges(t);
    if (t->pairs.slot == NULL)
        pairs_grow(&t->pairs);
    if (t->is_spm)
        return 0;
    for (int b = 0; b < 256; b++) {
        char c = (char)b;
        uint32_t id = dn_tok_map_find(t, &c, 1);
        t->byte_id[b] = id == DN_TOK_NONE ? -1 : (int32_t)id;
    }
    find_whole(t);
    return 0;
}
