/* Which sizes the CUDA backend refuses, and what it says: plain C, compiled here, since its library is not everywhere.
 */
#include "kernels/cuda/supports.c" /* NOLINT(bugprone-suspicious-include) */

#include <criterion/criterion.h>
#include <string.h>

static const struct dn_model_sizes kimi = {.n_heads = 64,
                                           .n_kv_heads = 1,
                                           .head_dim = 192,
                                           .rotary_dim = 64,
                                           .latent_dim = 512,
                                           .nope_dim = 128,
                                           .rope_dim = 64,
                                           .v_dim = 128};
static const struct dn_model_sizes llama = {.n_heads = 32, .n_kv_heads = 8, .head_dim = 128, .rotary_dim = 128};

/* The text, "" if it is supported. */
static const char *says(struct dn_model_sizes m, uint32_t seqs)
{
    static struct dn_err err;
    err = (struct dn_err){0};
    int rc = dn_cuda_supports(&(struct dn_step_limits){.tokens = 2048, .seqs = seqs}, &m, &err);
    cr_assert(rc == (err.text[0] ? -DN_CONFIG : 0));
    return err.text;
}

static void expect(struct dn_model_sizes m, const char *value, const char *right)
{
    const char *text = says(m, 64);
    cr_expect(strstr(text, value) && strstr(text, right), "\"%s\" says neither \"%s\" nor \"%s\"", text, value, right);
}

Test(cuda_supports, sizes)
{
    struct dn_model_sizes m = kimi;
    cr_expect_str_eq(says(kimi, 1024), "");
    cr_expect_str_eq(says(llama, 1024), "");
    m.rope_dim = 32;
    expect(m, "(qk_rope_head_dim) of 32", "expects 64");
    m = kimi;
    m.latent_dim = 576;
    expect(m, "(kv_lora_rank) of 576", "or 512");
    m.latent_dim = 96;
    expect(m, "(kv_lora_rank) of 96", "64, 128");
    m.latent_dim = 256; /* by the simple kernels */
    cr_expect_str_eq(says(m, 64), "");
    m = llama;
    m.head_dim = m.rotary_dim = 72;
    expect(m, "head dimension of 72", "or 256");
    m.head_dim = m.rotary_dim = 272;
    expect(m, "head dimension of 272", "or 256");
    m.head_dim = m.rotary_dim = 256;
    cr_expect_str_eq(says(m, 64), "");
    m.rotary_dim = 258;
    expect(m, "rotary dimension of 258", "head dimension");
    m = llama;
    m.n_heads = 65536;
    expect(m, "heads, 65536", "65535");
    m = kimi;
    m.n_heads = 65 * 64;
    cr_expect_str_eq(says(m, 1008), "");
    cr_expect(strstr(says(m, 1009), "engine.max_sequences 1009 with 4160 heads"), "%s", says(m, 1009));
}
