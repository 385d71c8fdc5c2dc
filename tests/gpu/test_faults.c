/* Faults in the page tables of a step, on the GPU: an entry swapped with another sequence's, one out of range, one
 * whose page was freed while in use, a stale one whose page has a new owner. The step must name the sequences that are
 * wrong and their first wrong page, write nothing at all for them, least of all to the foreign page, give zeros and no
 * token; and every other sequence's pages, attention and token must be the same bits as in a step without the fault.
 * GQA and MLA, BF16 and FP8 KV mixed in a batch, recorded decode steps, eager ones and prefill chunks.
 * And the step after it: a host that has not reacted, and asks for the next tokens of the same sequences with the same
 * page tables, must get the same.
 */
#include "gpu/gpu.h"

enum {
    SEQS = 6,
    PAGES = 3,
    PAGE = 64,
    LAYERS = 2,
    HEADS = 16,
    KV_HEADS = 2,
    DIM = 64,
    LATENT = 512,
    ROPE = 64,
    NOPE = 128
};
enum { VOCAB = 100, TOKENS = 64, POSITIONS = 1024, GQA_ROW = (HEADS + 2 * KV_HEADS) * DIM, MLA_Q = LATENT + ROPE };

struct cache {
    bool mla;
    struct dn_kv_layout layout;
    void *arena;
    size_t bytes;
    uint64_t *tags, tag[SEQS * 64]; /* device, host */
    uint32_t n_pages;
    void *act, *out, *q, *q_rope; /* device */
    uint16_t *act_host;
    size_t act_bytes, out_bytes;
    float *rope, *norm, *logits;
};

static void ops(struct gpu *g, void *ctx)
{
    struct cache *c = ctx;
    g->ops->check_tags(g->d, &(struct dn_check_tags){.table = c->tags, .n_pages = c->n_pages});
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        if (c->mla) {
            g->ops->mla_write(g->d, &(struct dn_mla_write){.kv = c->act,
                                                           .kv_stride = MLA_Q,
                                                           .q = c->q,
                                                           .q_rope = c->q_rope,
                                                           .q_rope_stride = HEADS * MLA_Q,
                                                           .q_rope_head_stride = MLA_Q,
                                                           .n_heads = HEADS,
                                                           .nope_dim = NOPE,
                                                           .rope_dim = ROPE,
                                                           .latent_dim = LATENT,
                                                           .kv_norm = c->norm,
                                                           .norm_eps = 1e-6f,
                                                           .rope = c->rope,
                                                           .interleaved = true,
                                                           .layout = &c->layout,
                                                           .arena = c->arena,
                                                           .layer = layer});
            if (g->s->kind == DN_STEP_DECODE)
                g->ops->mla_attention(g->d, &(struct dn_mla_attention){.q = (uint16_t *)c->q_rope - LATENT,
                                                                       .n_heads = HEADS,
                                                                       .latent_dim = LATENT,
                                                                       .rope_dim = ROPE,
                                                                       .scale = 0.07f,
                                                                       .layout = &c->layout,
                                                                       .arena = c->arena,
                                                                       .layer = layer,
                                                                       .out = c->out});
        } else {
            g->ops->qkv_write(g->d, &(struct dn_qkv_write){.qkv = c->act,
                                                           .n_heads = HEADS,
                                                           .n_kv_heads = KV_HEADS,
                                                           .head_dim = DIM,
                                                           .rope = c->rope,
                                                           .rotary_dim = DIM,
                                                           .layout = &c->layout,
                                                           .arena = c->arena,
                                                           .layer = layer});
            g->ops->attention(g->d, &(struct dn_attention){.q = c->act,
                                                           .q_stride = GQA_ROW,
                                                           .n_heads = HEADS,
                                                           .n_kv_heads = KV_HEADS,
                                                           .head_dim = DIM,
                                                           .scale = 0.125f,
                                                           .layout = &c->layout,
                                                           .arena = c->arena,
                                                           .layer = layer,
                                                           .out = c->out});
        }
    }
    g->ops->sample_rows(g->d, &(struct dn_sample_rows){.logits = c->logits, .n_vocab = VOCAB, .n_valid = VOCAB});
}

static uint16_t *random_bf16(size_t n)
{
    uint16_t *h = malloc(n * sizeof *h);
    for (size_t i = 0; i < n; i++)
        h[i] = f32_to_bf16(gpu_normal());
    return h;
}

static void open_cache(struct gpu *g, struct cache *c, bool mla)
{
    gpu_open(g, &(struct dn_step_limits){.tokens = TOKENS, .seqs = SEQS, .rows = SEQS, .pages = 64, .tags = 4}, 1,
             VOCAB);
    *c = (struct cache){.mla = mla};
    uint64_t slab = (uint64_t)LAYERS * PAGE * (mla ? MLA_Q : 2 * KV_HEADS * DIM) * 2 * (PAGES + 1);
    int rc = mla ? dn_kv_layout_init_mla(&c->layout, LAYERS, LATENT, ROPE, PAGE, slab)
                 : dn_kv_layout_init(&c->layout, LAYERS, KV_HEADS, DIM, PAGE, slab);
    cr_assert_eq(rc, 0);
    cr_assert_geq(c->layout.format[DN_KV_BF16].pages_per_slab, PAGES);
    cr_assert_leq(c->layout.slab_pages, 64);
    c->n_pages = SEQS * c->layout.slab_pages;
    c->bytes = SEQS * c->layout.slab_bytes;
    c->arena = gpu_alloc(g, c->bytes);
    c->tags = gpu_alloc(g, c->n_pages * sizeof *c->tags);
    size_t row = mla ? MLA_Q : GQA_ROW;
    c->act_bytes = TOKENS * row * 2;
    c->act_host = random_bf16(TOKENS * row);
    c->act = gpu_copy(g, c->act_host, c->act_bytes);
    c->out_bytes = (size_t)TOKENS * HEADS * (mla ? LATENT : DIM) * 2;
    c->out = gpu_alloc(g, c->out_bytes);
    if (mla) {
        uint16_t *q = random_bf16((size_t)TOKENS * HEADS * (NOPE + ROPE)),
                 *qq = random_bf16((size_t)TOKENS * HEADS * MLA_Q);
        c->q = gpu_copy(g, q, (size_t)TOKENS * HEADS * (NOPE + ROPE) * 2);
        c->q_rope = (uint16_t *)gpu_copy(g, qq, (size_t)TOKENS * HEADS * MLA_Q * 2) + LATENT;
        free(q), free(qq);
    }
    float *table = malloc((size_t)POSITIONS * ROPE * sizeof *table), ones[LATENT], logits[SEQS * VOCAB];
    for (int p = 0; p < POSITIONS; p++)
        for (int i = 0; i < ROPE / 2; i++) {
            table[p * ROPE + 2 * i] = (float)cos(p * pow(10000, -2.0 * i / ROPE));
            table[p * ROPE + 2 * i + 1] = (float)sin(p * pow(10000, -2.0 * i / ROPE));
        }
    for (int i = 0; i < LATENT; i++)
        ones[i] = 1;
    for (int i = 0; i < SEQS * VOCAB; i++)
        logits[i] = gpu_normal();
    c->rope = gpu_copy(g, table, (size_t)POSITIONS * ROPE * sizeof *table);
    c->norm = gpu_copy(g, ones, sizeof ones);
    c->logits = gpu_copy(g, logits, sizeof logits);
    free(table);
}

/* Sequence q has the first pages of slab q, in format q % 2, and three quarters of its tokens in the cache already. */
static void make_step(struct gpu *g, struct cache *c, enum dn_step_kind kind, uint32_t n_new)
{
    struct dn_step *s = g->s;
    s->kind = kind;
    s->n_seqs = s->n_rows = SEQS;
    s->n_tokens = SEQS * n_new;
    s->n_tags = s->tag_first = 0;
    s->token_start[0] = s->page_start[0] = 0;
    for (uint32_t q = 0; q < SEQS; q++) {
        s->kv_len[q] = 2 * PAGE + 10 + (int32_t)q;
        s->token_start[q + 1] = (int32_t)((q + 1) * n_new);
        s->page_start[q + 1] = (int32_t)((q + 1) * PAGES);
        s->slot[q] = -1;
        s->kv_format[q] = q % 2;
        s->check[q] = 1;
        s->row_token[q] = (int32_t)((q + 1) * n_new) - 1;
        s->sample[q] = (struct dn_sample){.top_p = 1, .repetition = 1, .slot = -1, .target = -1, .n_top = 0};
        for (uint32_t t = q * n_new; t < (q + 1) * n_new; t++) {
            s->token_id[t] = 1;
            s->token_count[t] = 0;
            s->token_seq[t] = (int32_t)q;
            s->position[t] = s->kv_len[q] - (int32_t)((q + 1) * n_new - t);
        }
        for (uint32_t i = 0; i < PAGES; i++) {
            uint32_t page = q * c->layout.slab_pages + i;
            s->page[q * PAGES + i] = page;
            s->tag[q * PAGES + i] = c->tag[page];
        }
    }
}

/* The arena with finite contents in both formats: 16-bit patterns whose bytes are small positive e4m3 and whose words,
 * as bf16 or as halves of an f32 scale, are small numbers. */
static uint8_t *fresh_arena(const struct cache *c)
{
    uint8_t *a = malloc(c->bytes);
    for (size_t i = 0; i < c->bytes; i++)
        a[i] = (uint8_t)(0x38 + gpu_rng() % 6);
    return a;
}

struct outcome {
    uint8_t *arena, *out;
    int32_t bad[SEQS], id[SEQS];
};

/* What a host asks for next that has seen no flag. Tags are in the table already. */
static void next_step(struct gpu *g, uint32_t n_new)
{
    struct dn_step *s = g->s;
    s->n_tags = 0;
    for (uint32_t q = 0; q < SEQS; q++)
        s->kv_len[q] += (int32_t)n_new;
    for (uint32_t t = 0; t < s->n_tokens; t++)
        s->position[t] += (int32_t)n_new;
}

/* n_steps of them, one behind the other; the outcome is that of the last. */
static void run(struct gpu *g, uint32_t list, struct cache *c, const uint8_t *arena, int n_steps, struct outcome *o)
{
    g->ops->upload(g->d, c->arena, arena, c->bytes);
    g->ops->upload(g->d, c->act, c->act_host, c->act_bytes); /* qkv_write turns q in place */
    g->ops->upload(g->d, c->tags, c->tag, c->n_pages * sizeof *c->tag);
    for (int i = 0; i < n_steps; i++) {
        if (i > 0)
            next_step(g, g->s->n_tokens / SEQS);
        gpu_poison(g, c->out, c->out_bytes);
        gpu_step(g, list, ops, c);
    }
    o->arena = malloc(c->bytes);
    o->out = malloc(c->out_bytes);
    g->ops->download(g->d, o->arena, c->arena, c->bytes);
    g->ops->download(g->d, o->out, c->out, c->out_bytes);
    for (int q = 0; q < SEQS; q++) {
        o->bad[q] = g->s->bad[q];
        o->id[q] = g->s->result[q].id;
    }
}

enum fault { SWAPPED_LAST, SWAPPED_FIRST, OUT_OF_RANGE, FAR_OUT_OF_RANGE, FREED, STALE, UNCHECKED, FAULTS };
static const char *const fault_name[] = {"last pages swapped", "first pages swapped", "out of range",
                                         "far out of range",   "freed in use",        "stale",
                                         "unchecked sequence"};

/* Makes the fault in sequence 2 (and 3); sets what bad[] must be. */
static void inject(struct gpu *g, struct cache *c, enum fault f, int32_t want[SEQS])
{
    struct dn_step *s = g->s;
    uint32_t a = 2 * PAGES, b = 3 * PAGES, last = PAGES - 1, page = s->page[a + last];
    memset(want, 0, SEQS * sizeof *want);
    switch (f) {
    case SWAPPED_LAST:
    case SWAPPED_FIRST: {
        uint32_t i = f == SWAPPED_LAST ? last : 0;
        s->page[a + i] = s->page[b + i];
        s->page[b + i] = page - last + i;
        want[2] = want[3] = 1 + (int32_t)i;
        break;
    }
    case OUT_OF_RANGE:
        s->page[a + last] = c->n_pages;
        want[2] = 1 + (int32_t)last;
        break;
    case FAR_OUT_OF_RANGE:
        s->page[a] = 0xfffffff0;
        want[2] = 1;
        break;
    case FREED: /* its new tag comes with this very step */
        s->n_tags = 1;
        s->tag_first = page;
        s->tag_new[0] = gpu_rng();
        want[2] = 1 + (int32_t)last;
        break;
    case STALE: /* sequence 4's last page, with the tag of an owner before it */
        s->page[a + last] = s->page[4 * PAGES + last];
        s->tag[a + last] = gpu_rng();
        want[2] = 1 + (int32_t)last;
        break;
    default: /* without the check nothing is compared */
        s->check[2] = 0;
        s->tag[a + last] ^= 1;
        break;
    }
}

static size_t differ(const uint8_t *a, const uint8_t *b, size_t from, size_t n)
{
    size_t d = 0;
    for (size_t i = from; i < from + n; i++)
        d += a[i] != b[i];
    return d;
}

static void one_fault(struct gpu *g, uint32_t list, struct cache *c, enum dn_step_kind kind, uint32_t n_new,
                      enum fault f, const uint8_t *arena, int n_steps, const struct outcome *good)
{
    struct outcome o;
    int32_t want[SEQS];
    char what[128];
    make_step(g, c, kind, n_new);
    inject(g, c, f, want);
    snprintf(what, sizeof what, "%s, list %u, kind %d, step %d: %s", c->mla ? "mla" : "gqa", list, kind, n_steps,
             fault_name[f]);
    run(g, list, c, arena, n_steps, &o);
    size_t slab = c->layout.slab_bytes, row = c->out_bytes / TOKENS * n_new;
    for (uint32_t q = 0; q < SEQS; q++) {
        cr_expect_eq(o.bad[q], want[q], "%s: bad[%u] is %d, expected %d", what, q, o.bad[q], want[q]);
        const uint8_t *expected = want[q] ? arena : good->arena;
        size_t d = differ(o.arena, expected, q * slab, slab);
        cr_expect_eq(d, 0, "%s: %zu bytes of the pages of sequence %u (%s)", what, d, q, want[q] ? "wrong" : "right");
        cr_expect_eq(o.id[q], want[q] ? -1 : good->id[q], "%s: token of sequence %u is %d", what, q, o.id[q]);
        if (c->mla && kind != DN_STEP_DECODE)
            continue;
        size_t nonzero = 0;
        for (size_t i = q * row; i < (q + 1) * row; i++)
            nonzero += o.out[i] != 0 && o.out[i] != (i % 2 ? 0x80 : 0);
        if (want[q])
            cr_expect_eq(nonzero, 0, "%s: attention of sequence %u is not zero", what, q);
        else
            cr_expect_eq(differ(o.out, good->out, q * row, row), 0, "%s: attention of sequence %u", what, q);
    }
    free(o.arena), free(o.out);
}

static void all_faults(struct gpu *g, uint32_t list, struct cache *c, enum dn_step_kind kind, uint32_t n_new)
{
    struct outcome good;
    uint8_t *arena = fresh_arena(c);
    for (uint32_t i = 0; i < c->n_pages; i++)
        c->tag[i] = gpu_rng();
    for (int n_steps = 1; n_steps <= 2; n_steps++) {
        make_step(g, c, kind, n_new);
        run(g, list, c, arena, n_steps, &good);
        for (uint32_t q = 0; q < SEQS; q++) {
            size_t d = differ(good.arena, arena, q * c->layout.slab_bytes, c->layout.slab_bytes);
            cr_expect_eq(good.bad[q], 0);
            cr_expect_gt(d, n_new * 64 * (size_t)n_steps, "not enough was written for sequence %u", q);
            cr_expect(good.id[q] >= 0 && good.id[q] < VOCAB);
        }
        for (int f = getenv("DN_GPU_SMALL") ? FREED : 0; f < FAULTS; f++)
            one_fault(g, list, c, kind, n_new, (enum fault)f, arena, n_steps, &good);
        free(good.arena), free(good.out);
    }
    free(arena);
}

static void whole_test(bool mla)
{
    struct gpu g;
    struct cache c;
    open_cache(&g, &c, mla);
    gpu_prepare(&g, 1, ops, &c);
    all_faults(&g, 1, &c, DN_STEP_DECODE, 1);
    if (!getenv("DN_GPU_SMALL"))
        all_faults(&g, 7, &c, DN_STEP_DECODE, 1);
    all_faults(&g, 1, &c, DN_STEP_PREFILL, 9);
    printf("faults: %s done\n", mla ? "mla" : "gqa");
    free(c.act_host);
    gpu_close(&g);
}

Test(faults, gqa)
{
    whole_test(false);
}

Test(faults, mla)
{
    whole_test(true);
}
