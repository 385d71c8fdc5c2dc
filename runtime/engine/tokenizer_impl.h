/* Inside of the tokenizer: what its source files share. Nothing else includes this.
 *
 * tokenizer.c        encode, decode, look-ups          tokenizer_bpe.c    vocabulary and merge tables, the merge loop
 * tokenizer_added.c  added tokens: trie and matching   tokenizer_pre.c    splitting with PCRE2
 * tokenizer_regex.c  other dialects' patterns in PCRE2's, the named patterns
 * tokenizer_norm.c   NFC and Llama 2's spaces          tokenizer_{json,tiktoken,gguf}.c  loaders
 *
 * A loader fills a zeroed struct with dn_tok_build_* and ends with dn_tok_build_finish(); after that nothing changes.
 */
#ifndef DN_ENGINE_TOKENIZER_IMPL_H
#define DN_ENGINE_TOKENIZER_IMPL_H

#define PCRE2_CODE_UNIT_WIDTH 8
#include "engine/tokenizer.h"

#include <pcre2.h>

enum { DN_TOK_MAX_STEPS = 16, DN_TOK_MAX_AFFIX = 4, DN_TOK_MAX_PIECE = 4096, DN_TOK_MAX_MERGES = (1 << 22) - 1 };
#define DN_TOK_NONE UINT32_MAX

enum dn_tok_piece_flags {
    DN_PIECE_PRESENT = 1,
    DN_PIECE_SPECIAL = 2,
    DN_PIECE_ADDED = 4,
    DN_PIECE_WHOLE = 8, /* a split piece with exactly these bytes becomes this id, without merging */
    DN_PIECE_UNUSED = 16,
};

struct dn_tok_piece {
    uint32_t offset, len; /* in dn_tokenizer.blob */
    uint32_t flags;
};

/* bytes -> id, open addressing; slot = {hash, id + 1}, 0 is empty. */
struct dn_tok_map {
    struct dn_tok_slot {
        uint32_t hash, id1;
    } * slot;
    size_t n, mask;
};

/* (left id, right id) -> merge number, one uint64 each: 21 + 21 bits of key, 22 of value. */
struct dn_tok_pairs {
    uint64_t *slot;
    size_t n, mask;
    unsigned shift;
};

struct dn_tok_added {
    int32_t id;
    uint32_t len;
    bool lstrip, rstrip, single_word, normalized;
};

/* A trie in two arrays: siblings are linked, the root's children are looked up by byte. */
struct dn_tok_trie {
    struct dn_tok_node {
        uint32_t child, sibling; /* 0: none */
        int32_t added;           /* index in dn_tokenizer.added, -1: none ends here */
        uint8_t byte;
    } * node;
    size_t n, cap;
    uint32_t root[256];
};

struct dn_tok_step {
    pcre2_code *code;
    bool keep_match, keep_rest; /* Isolated: both; Removed: rest; Removed + invert: match */
    bool has_jit;
};

struct dn_tokenizer {
    struct dn_buf blob;
    struct dn_tok_piece *piece; /* [n_vocab] */
    size_t n_vocab, cap_vocab;
    struct dn_tok_map map;
    struct dn_tok_pairs pairs;
    uint32_t *merge_id;   /* merge number -> new id; NULL: the number is the id (tiktoken) */
    uint32_t *merge_rank; /* merge number -> rank; NULL: the number is the rank */
    size_t n_merge, cap_merge;
    int32_t byte_id[256]; /* id of each single byte (byte level), or of <0xXX> (byte fallback), -1: none */
    bool ignore_merges;   /* a whole piece that is in the vocabulary is taken without merging */
    bool is_spm;          /* symbols are characters with byte fallback, not bytes */
    bool fuse_unk;
    bool has_nfc;
    bool space_prefix; /* a space in front of each stretch; byte level: only if there is none */
    bool space_prefix_first_only;
    struct dn_tok_added *added;
    size_t n_added;
    struct dn_tok_trie raw, normalized;
    struct dn_tok_step step[DN_TOK_MAX_STEPS];
    size_t n_step;
    int32_t prefix[DN_TOK_MAX_AFFIX], suffix[DN_TOK_MAX_AFFIX];
    size_t n_prefix, n_suffix;
    int32_t bos, eos, pad, unk;
};

/* Memory of one encode call. */
struct dn_tok_scratch {
    pcre2_match_data *match;
    pcre2_match_context *context;
    pcre2_jit_stack *stack;
    struct dn_tok_range {
        size_t start, end;
    } * range[2];
    size_t n_range[2], cap_range[2];
    uint32_t *symbol, *next, *prev, *rank;
    uint64_t *heap;
    size_t cap_symbol;
    struct dn_buf text, normal, probe, prefixed;
    struct dn_tokens *out;
    struct dn_err *err;
};
int dn_tok_scratch_init(struct dn_tok_scratch *s, struct dn_tokens *out, struct dn_err *err);
void dn_tok_scratch_release(struct dn_tok_scratch *s);

/* tokenizer_bpe.c */
uint32_t dn_tok_map_find(const struct dn_tokenizer *t, const char *data, size_t n); /* id or DN_TOK_NONE */
void dn_tok_prefetch(const struct dn_tokenizer *t, const char *data, size_t n);
int dn_tok_encode_piece(const struct dn_tokenizer *t, const char *data, size_t n, struct dn_tok_scratch *s);

/* Building. set puts the token there; what it stands for is data. in_map: BPE may produce it. */
void dn_tok_build_init(struct dn_tokenizer *t);
int dn_tok_build_set(struct dn_tokenizer *t, int64_t id, const char *data, size_t n, unsigned flags, bool in_map,
                     struct dn_err *err);
/* As set, but data is the vocabulary file's spelling (byte-mapped, or SentencePiece's). */
int dn_tok_build_vocab(struct dn_tokenizer *t, int64_t id, const char *data, size_t n, struct dn_err *err);
/* Whether the token that is there has the text `data` in the vocabulary's spelling, or literally. */
bool dn_tok_build_is(const struct dn_tokenizer *t, size_t id, const char *data, size_t n);
/* left and right in the file's spelling; both and their concatenation must be in the vocabulary. */
int dn_tok_build_merge_text(struct dn_tokenizer *t, const char *left, size_t n_left, const char *right, size_t n_right,
                            struct dn_err *err);
int dn_tok_build_merge(struct dn_tokenizer *t, uint32_t left, uint32_t right, uint32_t id, struct dn_err *err);
/* Derives the merges from the vocabulary itself: every split of a token in two tokens, ranked by rank[id] (NULL: by
 * id). */
int dn_tok_build_merges_from_vocab(struct dn_tokenizer *t, uint32_t *rank_take, struct dn_err *err);
int dn_tok_build_added(struct dn_tokenizer *t, int64_t id, const char *text, size_t n, struct dn_tok_added options,
                       bool is_special, struct dn_err *err);
int dn_tok_build_finish(struct dn_tokenizer *t, struct dn_err *err);
int dn_tok_read_file(const char *path, size_t max, struct dn_buf *out, struct dn_err *err);

/* tokenizer_added.c: the longest added token that starts at text[at] and ends by `end`; index or -1. */
void dn_tok_trie_put(struct dn_tok_trie *t, const char *text, size_t n, int32_t added);
int32_t dn_tok_trie_match(const struct dn_tok_trie *t, const char *text, size_t at, size_t end);
size_t dn_tok_space_before(const char *text, size_t from, size_t at); /* start of the white space that ends at `at` */
size_t dn_tok_space_after(const char *text, size_t at, size_t end);
bool dn_tok_is_single_word(const char *text, size_t n, size_t start, size_t end);

/* tokenizer_pre.c: cuts text into s->range[0]. add takes a pattern in Oniguruma's or Rust's dialect. */
int dn_tok_pre_add(struct dn_tokenizer *t, const char *pattern, bool keep_match, bool keep_rest, struct dn_err *err);
int dn_tok_pre_split(const struct dn_tokenizer *t, const char *text, size_t n, struct dn_tok_scratch *s);

/* tokenizer_regex.c */
extern const char dn_tok_gpt2_pattern[];
int dn_tok_regex_translate(const char *pattern, struct dn_buf *out, struct dn_err *err);
int dn_tok_pre_add_named(struct dn_tokenizer *t, const char *name, struct dn_err *err);

/* tokenizer_norm.c: text as BPE wants it; *out points to text itself or into `buf`. */
int dn_tok_normalize(const struct dn_tokenizer *t, const char *text, size_t n, struct dn_buf *buf, const char **out,
                     size_t *n_out, struct dn_err *err);
void dn_tok_spm_space(const char *text, size_t n, struct dn_buf *out);   /* appends; U+2581 becomes a space */
bool dn_tok_unmap_bytes(const char *text, size_t n, struct dn_buf *out); /* appends; false: not byte-mapped text */

/* UTF-8: length of the well-formed character at p (1-4), or 0. */
static inline unsigned dn_tok_utf8_len(const unsigned char *p, size_t n)
{
    if (n == 0)
        return 0;
    unsigned char c = p[0];
    if (c < 0x80)
        return 1;
    if (c < 0xC2 || c > 0xF4)
        return 0;
    unsigned len = c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;
    if (n < len || (p[1] & 0xC0) != 0x80)
        return 0;
    if ((c == 0xE0 && p[1] < 0xA0) || (c == 0xED && p[1] > 0x9F) || (c == 0xF0 && p[1] < 0x90) ||
        (c == 0xF4 && p[1] > 0x8F))
        return 0;
    if (len > 2 && (p[2] & 0xC0) != 0x80)
        return 0;
    if (len > 3 && (p[3] & 0xC0) != 0x80)
        return 0;
    return len;
}

#endif
