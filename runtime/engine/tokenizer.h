/* Tokenizer: text to token ids and back, exactly as the model's own reference does it.
 *
 * Three kinds of file are read: Hugging Face tokenizer.json, tiktoken rank files (Kimi) and the tokenizer arrays of a
 * GGUF file. Byte-level BPE and SentencePiece-like BPE with byte fallback (Llama 2) are known; a file that asks for
 * anything else is refused with an error that names it.
 *
 * Special tokens are recognised only in text that the caller vouches for (DN_TOK_SPECIAL, dn_tok_text.is_template);
 * in all other text "<|im_end|>" is nine characters like any others. That goes for every added token, whatever its
 * file says about "special", since tool and think markers often carry false there.
 *
 * Ownership: open allocates, close frees; close(NULL) is fine. An open tokenizer never changes: any number of threads
 * may use it at once. Strings that it hands out live until close. Text must be UTF-8; it is not logged.
 */
#ifndef DN_ENGINE_TOKENIZER_H
#define DN_ENGINE_TOKENIZER_H

#include "base/buf.h"
#include "base/err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct dn_tokenizer;

#define DN_TOK_MAX_TEXT  ((size_t)64 << 20) /* bytes in one encode call; longer text is DN_CONTEXT_LENGTH */
#define DN_TOK_MAX_VOCAB (1 << 21)          /* ids a vocabulary may have */

/* A growing array of ids. Zero-initialised is empty; the holder releases it. */
struct dn_tokens {
    int32_t *data;
    size_t len, cap;
};
void dn_tokens_release(struct dn_tokens *t);
void dn_tokens_put(struct dn_tokens *t, int32_t id);

/* Bytes that are not terminated. */
struct dn_tok_str {
    const char *data;
    size_t len;
};

enum dn_tok_flags {
    DN_TOK_SPECIAL = 1,   /* recognise special and added tokens in all of the text */
    DN_TOK_ADD_AFFIX = 2, /* add what the file's post-processor adds to a text: BOS in front, seldom EOS behind */
};

/* A part of a rendered prompt: is_template says that these bytes come from the template and not from a user. */
struct dn_tok_text {
    const char *data;
    size_t len;
    bool is_template;
};

/* Reads a tokenizer.json, and for BOS, EOS and add_bos_token the tokenizer_config.json (NULL: none). Errors:
 * DN_IO, DN_MODEL_FILE. The parse form takes the files' bytes; n_config 0 means none. */
int dn_tokenizer_open_json(struct dn_tokenizer **out, const char *path, const char *config_path, struct dn_err *err);
int dn_tokenizer_parse_json(struct dn_tokenizer **out, const char *json, size_t n_json, const char *config,
                            size_t n_config, struct dn_err *err);

/* Reads a tiktoken file (lines of base64 and rank) with the added_tokens_decoder of a tokenizer_config.json. Ids
 * between the ranks and the highest one listed there are called <|reserved_token_ID|> and are special, as in Kimi's
 * own class. `pre` is the name of a split pattern (dn_tokenizer_pre_names), "kimi-k2" for Kimi. */
int dn_tokenizer_open_tiktoken(struct dn_tokenizer **out, const char *path, const char *config_path, const char *pre,
                               struct dn_err *err);
int dn_tokenizer_parse_tiktoken(struct dn_tokenizer **out, const char *ranks, size_t n_ranks, const char *config,
                                size_t n_config, const char *pre, struct dn_err *err);

/* The tokenizer.ggml.* keys of a GGUF file; all arrays are borrowed for the call. */
struct dn_tok_gguf {
    const char *model;              /* tokenizer.ggml.model: "gpt2" or "llama" */
    const char *pre;                /* tokenizer.ggml.pre, NULL if absent */
    const struct dn_tok_str *token; /* [n_token], byte-mapped for "gpt2" */
    const int32_t *type; /* [n_token] 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte; or NULL */
    const float *score;  /* [n_token], needed by "llama"; or NULL */
    size_t n_token;
    const struct dn_tok_str *merge; /* [n_merge], "left right", needed by "gpt2" */
    size_t n_merge;
    int32_t bos, eos, pad, unk;    /* -1: absent */
    int add_bos, add_space_prefix; /* 0, 1, or -1: absent */
};
int dn_tokenizer_open_gguf(struct dn_tokenizer **out, const struct dn_tok_gguf *g, struct dn_err *err);
/* The same from an open file, which may be closed afterwards. */
struct dn_gguf;
int dn_tokenizer_read_gguf(struct dn_tokenizer **out, const struct dn_gguf *g, struct dn_err *err);

void dn_tokenizer_close(struct dn_tokenizer *t);

/* "gpt-2, smollm, ...": the names of the split patterns that are built in, for messages. */
const char *dn_tokenizer_pre_names(void);

/* Appends the ids of the text to out. Time is O(n log n) for every text. Errors (out is then as before):
 * DN_INVALID_VALUE not UTF-8, or a byte that the vocabulary has no token for; DN_CONTEXT_LENGTH longer than
 * DN_TOK_MAX_TEXT; DN_NO_MEMORY. */
int dn_tokenizer_encode(const struct dn_tokenizer *t, const char *text, size_t n, unsigned flags, struct dn_tokens *out,
                        struct dn_err *err);

/* Encodes the concatenation of the parts, as the reference would, but recognises an added token only where all of it
 * lies in template parts. (If a normalizer composes characters across the edge of a user's part, then added tokens
 * with "normalized": true are not recognised in that stretch.) DN_TOK_SPECIAL is ignored. */
int dn_tokenizer_encode_texts(const struct dn_tokenizer *t, const struct dn_tok_text *text, size_t n_text,
                              unsigned flags, struct dn_tokens *out, struct dn_err *err);

/* Appends the raw bytes of the ids; they may be invalid or incomplete UTF-8 (dn_detok makes text of them). An id that
 * has no token gives nothing. skip_special leaves special tokens out. For Llama 2 the space that encode puts in front
 * of a text is taken away again, so that decode(encode(x)) == x. */
void dn_tokenizer_decode(const struct dn_tokenizer *t, const int32_t *id, size_t n, bool skip_special,
                         struct dn_buf *out);

/* The bytes that the id stands for; {NULL, 0} for an id that has no token (holes, padding rows of the head). */
struct dn_tok_str dn_tokenizer_piece(const struct dn_tokenizer *t, int32_t id);
bool dn_tokenizer_has_token(const struct dn_tokenizer *t, int32_t id);
/* True for control tokens; think and tool markers that the file calls not special are not. */
bool dn_tokenizer_is_special(const struct dn_tokenizer *t, int32_t id);
/* True for every token that only template text can produce, special or not. */
bool dn_tokenizer_is_added(const struct dn_tokenizer *t, int32_t id);
/* The id of the added token with exactly this text, or of the normal token with these bytes; -1 when absent. */
int32_t dn_tokenizer_find(const struct dn_tokenizer *t, const char *text, size_t n);

int32_t dn_tokenizer_n_vocab(const struct dn_tokenizer *t); /* highest id + 1 */
int32_t dn_tokenizer_bos(const struct dn_tokenizer *t);     /* -1: none, as for the others */
int32_t dn_tokenizer_eos(const struct dn_tokenizer *t);
int32_t dn_tokenizer_pad(const struct dn_tokenizer *t);
int32_t dn_tokenizer_unk(const struct dn_tokenizer *t);
/* Whether DN_TOK_ADD_AFFIX adds anything in front: the model expects BOS. */
bool dn_tokenizer_adds_bos(const struct dn_tokenizer *t);
/* Whether the first piece of a text carries a space that is not in the text (Llama 2). */
bool dn_tokenizer_has_space_prefix(const struct dn_tokenizer *t);

#endif
