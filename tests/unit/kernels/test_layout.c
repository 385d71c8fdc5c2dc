/* Format names, and where things lie in the KV arena. */
#include "unit/kernels/oracle.h"

Test(layout, names_of_formats_are_parsed_back)
{
    for (unsigned f = 0; f < DN_KV_FORMATS; f++) {
        enum dn_kv_format out;
        cr_assert_eq(dn_kv_format_parse(dn_kv_format_name((enum dn_kv_format)f), &out), 0);
        cr_assert_eq(out, f);
    }
    for (unsigned f = 0; f < DN_W_FORMATS; f++) {
        enum dn_weight_format out;
        cr_assert_eq(dn_weight_format_parse(dn_weight_format_name((enum dn_weight_format)f), &out), 0);
        cr_assert_eq(out, f);
    }
    enum dn_kv_format kv = DN_KV_BF16;
    enum dn_weight_format w = DN_W_INT8;
    cr_assert_eq(dn_kv_format_parse("fp8", &kv), 0);
    cr_assert_eq(kv, DN_KV_FP8);
    cr_assert_lt(dn_kv_format_parse("fp16", &kv), 0);
    cr_assert_lt(dn_kv_format_parse("", &kv), 0);
    cr_assert_lt(dn_weight_format_parse("fp8_e4m3x", &w), 0);
    cr_assert(kv == DN_KV_FP8 && w == DN_W_INT8, "a failed parse changed its result");
}

/* Every byte of every page of a format, layer by layer, belongs to one thing only. */
static void check_layout(const struct dn_kv_layout *l, enum dn_kv_format f)
{
    enum { SLABS = 3 };
    uint8_t *owner = calloc(SLABS, l->slab_bytes);
    bool mla = l->latent_dim != 0;
    uint64_t tokens = (uint64_t)l->n_kv_heads * l->page_tokens, bytes = f == DN_KV_BF16 ? 2 : 1;
    uint64_t first = tokens * (mla ? l->latent_dim : l->head_dim) * bytes,
             second = mla ? tokens * l->rope_dim * 2 : first;
    uint64_t scales = f == DN_KV_FP8 ? 4 * tokens : 0;
    for (uint32_t slab = 0; slab < SLABS; slab++) {
        for (uint32_t i = 0; i < l->format[f].pages_per_slab; i++) {
            uint64_t at = dn_kv_page_offset(l, f, slab * l->slab_pages + i);
            cr_assert_eq(at % 64, 0);
            cr_assert(at >= slab * l->slab_bytes && at + l->format[f].page_bytes <= (slab + 1) * l->slab_bytes);
            for (uint32_t layer = 0; layer < l->n_layers; layer++) {
                uint64_t base = at + (uint64_t)layer * l->format[f].layer_bytes;
                uint64_t piece[4][2] = {{0, first},
                                        {l->format[f].v_offset, second},
                                        {l->format[f].k_scale_offset, scales},
                                        {l->format[f].v_scale_offset, mla ? 0 : scales}};
                for (int p = 0; p < 4; p++) {
                    for (uint64_t b = 0; b < piece[p][1]; b++)
                        cr_assert_eq(owner[base + piece[p][0] + b]++, 0, "two owners of a byte");
                }
            }
        }
    }
    free(owner);
}

Test(layout, pages_of_latents_do_not_overlap_and_stay_in_their_slab)
{
    /* layers, latent, rope, page; the bytes of a token are those of DeepSeek-V2: latent and one rope key */
    static const uint32_t grid[][4] = {
        {1, 16, 2, 16}, {3, 512, 64, 64}, {2, 80, 20, 48}, {61, 512, 64, 64}, {2, 33, 2, 16}};
    for (size_t g = 0; g < sizeof grid / sizeof *grid; g++) {
        for (uint64_t target = 1; target < 8 << 20; target *= 7) {
            struct dn_kv_layout l;
            cr_assert_eq(dn_kv_layout_init_mla(&l, grid[g][0], grid[g][1], grid[g][2], grid[g][3], target), 0);
            cr_assert_eq(l.n_kv_heads, 1);
            cr_assert_eq(l.head_dim, grid[g][1] + grid[g][2]);
            uint32_t bf16 = (grid[g][1] + grid[g][2]) * 2 * grid[g][3],
                     fp8 = (grid[g][1] + grid[g][2] * 2 + 4) * grid[g][3];
            cr_assert_eq(l.format[DN_KV_BF16].layer_bytes, (bf16 + 63) / 64 * 64);
            cr_assert_eq(l.format[DN_KV_FP8].layer_bytes, (fp8 + 63) / 64 * 64);
            for (unsigned f = 0; f < DN_KV_FORMATS && l.slab_bytes < 16 << 20; f++)
                check_layout(&l, (enum dn_kv_format)f);
        }
    }
}

Test(layout, says_no_to_latents_that_cannot_be)
{
    struct dn_kv_layout l = {.slab_pages = 7}, before = l;
    static const uint32_t bad[][4] = {{0, 512, 64, 64},    {1, 0, 64, 64},           {1, 512, 0, 64},
                                      {1, 512, 64, 0},     {1, 512, 64, 24},         {1, 40000, 64, 64},
                                      {1, 512, 40000, 64}, {60000, 32000, 32000, 16}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        cr_assert_lt(dn_kv_layout_init_mla(&l, bad[i][0], bad[i][1], bad[i][2], bad[i][3], 1 << 20), 0, "%zu", i);
    cr_assert(memcmp(&l, &before, sizeof l) == 0, "a refusal changed the layout");
}

Test(layout, pages_do_not_overlap_and_stay_in_their_slab)
{
    static const uint32_t grid[][4] = {{1, 1, 16, 16}, {3, 2, 64, 16}, {2, 3, 48, 32}, {2, 1, 20, 48}, {1, 8, 128, 64}};
    for (size_t g = 0; g < sizeof grid / sizeof *grid; g++) {
        for (uint64_t target = 1; target < 4 << 20; target *= 7) {
            struct dn_kv_layout l;
            cr_assert_eq(dn_kv_layout_init(&l, grid[g][0], grid[g][1], grid[g][2], grid[g][3], target), 0);
            for (unsigned f = 0; f < DN_KV_FORMATS; f++) {
                uint64_t rest = l.slab_bytes - (uint64_t)l.format[f].pages_per_slab * l.format[f].page_bytes;
                cr_assert_lt(rest, l.format[f].page_bytes, "room for one more page is wasted");
                cr_assert_geq(l.format[f].pages_per_slab, 1);
                cr_assert_leq(l.format[f].pages_per_slab, l.slab_pages);
                check_layout(&l, (enum dn_kv_format)f);
            }
            uint64_t largest = l.format[DN_KV_BF16].page_bytes;
            cr_assert(l.slab_bytes <= (target > largest ? target : largest), "slabs larger than asked");
        }
    }
}

Test(layout, fp8_pages_are_little_more_than_half)
{
    struct dn_kv_layout l;
    cr_assert_eq(dn_kv_layout_init(&l, 30, 3, 64, 16, 16 << 20), 0); /* SmolLM2-135M */
    cr_assert_eq(l.format[DN_KV_BF16].page_bytes, 30u * 2 * 3 * 16 * 64 * 2);
    cr_assert_eq(l.format[DN_KV_FP8].page_bytes, 30u * 2 * 3 * 16 * (64 + 4));
}

Test(layout, refuses_sizes_that_make_no_page_or_overflow)
{
    struct dn_kv_layout l = {.n_layers = 77};
    static const uint32_t bad[][4] = {{0, 1, 64, 16},
                                      {1, 0, 64, 16},
                                      {1, 1, 0, 16},
                                      {1, 1, 64, 0},
                                      {1, 1, 64, 8},
                                      {1, 1, 64, 24},
                                      {1, 1, 64, 1 << 20},
                                      {1, 1 << 16, 64, 16},
                                      {1, 1, 1 << 16, 16},
                                      {1, 65535, 65535, 65520},
                                      {UINT32_MAX, 8, 128, 16},
                                      {200000, 8, 128, 16}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        cr_assert_eq(dn_kv_layout_init(&l, bad[i][0], bad[i][1], bad[i][2], bad[i][3], 1 << 20), -DN_INVALID_VALUE,
                     "%zu", i);
    cr_assert_eq(dn_kv_layout_init(&l, 1, 1, 16, 16, UINT64_MAX), -DN_INVALID_VALUE);
    cr_assert_eq(l.n_layers, 77, "a failed init changed its result");
}
