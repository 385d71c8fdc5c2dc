#include "engine/tokenizer_impl.h"

#include <string.h>
#include <utf8proc.h>

static uint32_t trie_add_node(struct dn_tok_trie *t, uint8_t byte)
{
    if (t->n == 0)
        t->n = 1; /* node 0 stands for "none" */
    if (t->n >= t->cap) {
        t->cap = t->cap ? t->cap * 2 : 256;
        t->node = dn_realloc(t->node, t->cap, sizeof *t->node);
    }
    t->node[t->n] = (struct dn_tok_node){.added = -1, .byte = byte};
    return (uint32_t)t->n++;
}

static uint32_t trie_child(const struct dn_tok_trie *t, uint32_t node, uint8_t byte)
{
    uint32_t c = t->node[node].child;
    while (c && t->node[c].byte != byte)
        c = t->node[c].sibling;
    return c;
}

void dn_tok_trie_put(struct dn_tok_trie *t, const char *text, size_t n, int32_t added)
{
    if (n == 0)
        return;
    uint8_t first = (uint8_t)text[0];
    uint32_t node = t->root[first];
    if (!node)
        node = t->root[first] = trie_add_node(t, first);
    for (size_t i = 1; i < n; i++) {
        uint32_t c = trie_child(t, node, (uint8_t)text[i]);
        if (!c) {
            c = trie_add_node(t, (uint8_t)text[i]);
            t->node[c].sibling = t->node[node].child;
            t->node[node].child = c;
        }
        node = c;
    }
    if (t->node[node].added < 0)
        t->node[node].added = added;
}

int32_t dn_tok_trie_match(const struct dn_tok_trie *t, const char *text, size_t at, size_t end)
{
    int32_t best = -1;
    uint32_t node = t->root[(uint8_t)text[at]];
    while (node) {
        if (t->node[node].added >= 0)
            best = t->node[node].added;
        if (++at >= end)
            break;
        node = trie_child(t, node, (uint8_t)text[at]);
    }
    return best;
}

static bool is_space(int32_t c)
{
    return (c >= 9 && c <= 13) || c == ' ' || c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) ||
           c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

/* \w: letters, marks, decimal digits, letter numbers, connectors. */
static bool is_word(int32_t c)
{
    switch (utf8proc_category(c)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
        return true;
    default:
        return false;
    }
}

static int32_t char_at(const char *text, size_t at, size_t end, size_t *len)
{
    utf8proc_int32_t c = -1;
    utf8proc_ssize_t n = utf8proc_iterate((const utf8proc_uint8_t *)text + at, (utf8proc_ssize_t)(end - at), &c);
    *len = n > 0 ? (size_t)n : 1;
    return c;
}

static size_t char_start(const char *text, size_t from, size_t at)
{
    do
        at--;
    while (at > from && ((unsigned char)text[at] & 0xC0) == 0x80);
    return at;
}

size_t dn_tok_space_before(const char *text, size_t from, size_t at)
{
    while (at > from) {
        size_t len, start = char_start(text, from, at);
        if (!is_space(char_at(text, start, at, &len)))
            break;
        at = start;
    }
    return at;
}

size_t dn_tok_space_after(const char *text, size_t at, size_t end)
{
    while (at < end) {
        size_t len;
        if (!is_space(char_at(text, at, end, &len)))
            break;
        at += len;
    }
    return at;
}

bool dn_tok_is_single_word(const char *text, size_t n, size_t start, size_t end)
{
    size_t len;
    if (start > 0 && is_word(char_at(text, char_start(text, 0, start), start, &len)))
        return false;
    return end >= n || !is_word(char_at(text, end, n, &len));
}
