#include "kernels/kernels.h"

#include <string.h>

static const char *const weight_names[DN_W_FORMATS] = {"bf16", "fp8", "int8", "int4"};
static const char *const kv_names[DN_KV_FORMATS] = {"bf16", "fp8_e4m3"};

const char *dn_weight_format_name(enum dn_weight_format f)
{
    DN_BUG_ON((unsigned)f >= DN_W_FORMATS);
    return weight_names[f];
}

const char *dn_kv_format_name(enum dn_kv_format f)
{
    DN_BUG_ON((unsigned)f >= DN_KV_FORMATS);
    return kv_names[f];
}

int dn_weight_format_parse(const char *name, enum dn_weight_format *out)
{
    for (unsigned f = 0; f < DN_W_FORMATS; f++) {
        if (strcmp(name, weight_names[f]) == 0) {
            *out = (enum dn_weight_format)f;
            return 0;
        }
    }
    return -DN_INVALID_VALUE;
}

int dn_kv_format_parse(const char *name, enum dn_kv_format *out)
{
    if (strcmp(name, "fp8") == 0) {
        *out = DN_KV_FP8;
        return 0;
    }
    for (unsigned f = 0; f < DN_KV_FORMATS; f++) {
        if (strcmp(name, kv_names[f]) == 0) {
            *out = (enum dn_kv_format)f;
            return 0;
        }
    }
    return -DN_INVALID_VALUE;
}

/* Sizes of one format, from bytes a value and bytes of scales a token and KV head. Layers begin on cache lines. */
static int format_init(struct dn_kv_layout *l, enum dn_kv_format f, uint64_t value_bytes, uint64_t scale_bytes)
{
    uint64_t tokens = (uint64_t)l->n_kv_heads * l->page_tokens; /* both < 2^16, layout_init() */
    bool mla = l->latent_dim != 0;
    uint64_t first = tokens * (mla ? l->latent_dim : l->head_dim) * value_bytes;
    uint64_t second = mla ? tokens * l->rope_dim * 2 : first;
    uint64_t scales = tokens * scale_bytes;
    uint64_t end = first + second + (mla ? scales : 2 * scales);
    uint64_t layer = (end + 63) & ~(uint64_t)63;
    uint64_t page;
    if (layer > UINT32_MAX || __builtin_mul_overflow(layer, l->n_layers, &page) || page > UINT32_MAX)
        return -DN_INVALID_VALUE;
    l->format[f].v_offset = (uint32_t)first;
    l->format[f].k_scale_offset = (uint32_t)(first + second);
    l->format[f].v_scale_offset = (uint32_t)(mla ? end : end - scales);
    l->format[f].layer_bytes = (uint32_t)layer;
    l->format[f].page_bytes = (uint32_t)page;
    return 0;
}

static int layout_init(struct dn_kv_layout *l, struct dn_kv_layout n, uint64_t slab_target_bytes)
{
    if (n.n_layers == 0 || n.n_kv_heads == 0 || n.n_kv_heads > UINT16_MAX || n.head_dim == 0 ||
        n.head_dim > UINT16_MAX || n.page_tokens == 0 || n.page_tokens % DN_PAGE_TOKENS_STEP != 0 ||
        n.page_tokens > UINT16_MAX)
        return -DN_INVALID_VALUE;
    int rc = format_init(&n, DN_KV_BF16, 2, 0);
    if (rc == 0)
        rc = format_init(&n, DN_KV_FP8, 1, sizeof(float));
    if (rc)
        return rc;
    /* A whole number of the largest pages, so that only the smaller format leaves a rest, less than one of its pages.
     */
    uint64_t largest = n.format[0].page_bytes, smallest = largest;
    for (unsigned f = 1; f < DN_KV_FORMATS; f++) {
        uint64_t bytes = n.format[f].page_bytes;
        largest = bytes > largest ? bytes : largest;
        smallest = bytes < smallest ? bytes : smallest;
    }
    uint64_t count = slab_target_bytes / largest;
    n.slab_bytes = largest * (count ? count : 1);
    if (n.slab_bytes / smallest > UINT32_MAX)
        return -DN_INVALID_VALUE;
    n.slab_pages = (uint32_t)(n.slab_bytes / smallest);
    for (unsigned f = 0; f < DN_KV_FORMATS; f++)
        n.format[f].pages_per_slab = (uint32_t)(n.slab_bytes / n.format[f].page_bytes);
    *l = n;
    return 0;
}

int dn_kv_layout_init(struct dn_kv_layout *l, uint32_t n_layers, uint32_t n_kv_heads, uint32_t head_dim,
                      uint32_t page_tokens, uint64_t slab_target_bytes)
{
    return layout_init(
        l,
        (struct dn_kv_layout){
            .n_layers = n_layers, .n_kv_heads = n_kv_heads, .head_dim = head_dim, .page_tokens = page_tokens},
        slab_target_bytes);
}

int dn_kv_layout_init_mla(struct dn_kv_layout *l, uint32_t n_layers, uint32_t latent_dim, uint32_t rope_dim,
                          uint32_t page_tokens, uint64_t slab_target_bytes)
{
    if (latent_dim == 0 || latent_dim > UINT16_MAX / 2 || rope_dim == 0 || rope_dim > UINT16_MAX / 2)
        return -DN_INVALID_VALUE;
    return layout_init(l,
                       (struct dn_kv_layout){.n_layers = n_layers,
                                             .n_kv_heads = 1,
                                             .head_dim = latent_dim + rope_dim,
                                             .page_tokens = page_tokens,
                                             .latent_dim = latent_dim,
                                             .rope_dim = rope_dim},
                       slab_target_bytes);
}

uint64_t dn_kv_page_offset(const struct dn_kv_layout *l, enum dn_kv_format f, uint32_t page)
{
    uint32_t slab = page / l->slab_pages, idx = page % l->slab_pages;
    /* An id that its slab's format leaves unused would reach into the next slab: another sequence's memory. */
    DN_BUG_ON((unsigned)f >= DN_KV_FORMATS || idx >= l->format[f].pages_per_slab);
    return slab * l->slab_bytes + (uint64_t)idx * l->format[f].page_bytes;
}
