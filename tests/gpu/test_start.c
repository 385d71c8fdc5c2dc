/* What opening a runner promises: all memory is taken and all code is loaded, so that no step takes memory and the
 * first prefill is as fast as the next. Models without files, of a size at which every operation takes the kernels that
 * it takes for large ones; each in a process of its own, since what CUDA has loaded once stays. Nobody else may use the
 * GPU at the time, as with the tests that measure. On an H200, with kernels loaded when they run first, the first
 * prefill takes 24 ms instead of 2.5 (Kimi), 10 instead of 3.6 (Qwen2); for these kernels CUDA still had memory.
 *
 * And what the device says it was built for: a library without sm_90a must say so on an H200.
 */
#include "engine/runner.h"
#include "engine/synthetic.h"
#include "gpu/gpu.h"

#include <unistd.h>

enum { STEP_TOKENS = 2048, SEQS = 64, ROWS = 128, SEQ_PAGES = 40, PAGE = 64, FIRST = 1900 };

static const char kimi[] =
    "{\"model_type\": \"kimi_k2\", \"num_hidden_layers\": 3, \"hidden_size\": 2048, \"intermediate_size\": 4096,"
    " \"vocab_size\": 20000, \"max_position_embeddings\": 4096, \"num_attention_heads\": 16, \"rms_norm_eps\": 1e-6,"
    " \"kv_lora_rank\": 512, \"q_lora_rank\": 768, \"qk_nope_head_dim\": 128, \"qk_rope_head_dim\": 64,"
    " \"v_head_dim\": 128, \"n_routed_experts\": 64, \"num_experts_per_tok\": 8, \"moe_intermediate_size\": 512,"
    " \"n_shared_experts\": 1, \"first_k_dense_replace\": 1, \"norm_topk_prob\": true, \"routed_scaling_factor\": 2.5,"
    " \"scoring_func\": \"sigmoid\", \"topk_method\": \"noaux_tc\", \"n_group\": 1, \"topk_group\": 1,"
    " \"hidden_act\": \"silu\", \"rope_theta\": 50000.0}";
static const char llama[] =
    "{\"model_type\": \"qwen2\", \"num_hidden_layers\": 3, \"hidden_size\": 4096, \"intermediate_size\": 8192,"
    " \"vocab_size\": 20000, \"max_position_embeddings\": 4096, \"num_attention_heads\": 32,"
    " \"num_key_value_heads\": 8, \"rms_norm_eps\": 1e-6, \"hidden_act\": \"silu\", \"rope_theta\": 10000.0}";

struct node {
    struct gpu g;
    struct dn_model *m;
    struct dn_weights *w;
    struct dn_runner *r;
    uint64_t free_bytes; /* once the runner is open */
};

static uint64_t free_memory(struct node *n)
{
    uint64_t free_bytes, total;
    n->g.ops->memory(n->g.d, &free_bytes, &total);
    return free_bytes;
}

static void node_open(struct node *n, const char *config, enum dn_weight_format f)
{
    struct dn_step_limits limits = {
        .tokens = STEP_TOKENS, .seqs = SEQS, .rows = ROWS, .pages = SEQS * SEQ_PAGES, .tags = 8};
    struct dn_err err = {0};
    char path[] = "/tmp/dunlin-start-XXXXXX";
    int fd = mkstemp(path);
    cr_assert(fd >= 0 && write(fd, config, strlen(config)) == (ssize_t)strlen(config));
    close(fd);
    memset(n, 0, sizeof *n);
    cr_assert_eq(dn_synthetic_open(path, 0, f, &n->m, &err), 0, "%s", err.text);
    unlink(path);
    gpu_open(&n->g, &limits, SEQS, n->m->hyper.n_vocab);
    cr_assert_eq(dn_weights_open(n->g.d, n->m, &(struct dn_weights_conf){.format = DN_WEIGHTS_AUTO}, &n->w, &err), 0,
                 "%s", err.text);
    uint64_t before = free_memory(n), t = dn_now_ns();
    cr_assert_eq(dn_runner_open(n->g.d, n->w, &(struct dn_runner_conf){.limits = limits, .arena_bytes = 2ull << 30},
                                &n->r, &err),
                 0, "%s", err.text);
    n->free_bytes = free_memory(n);
    printf("%s %s: opened in %.0f ms, takes %.1f MiB\n", dn_arch_name(n->m->hyper.arch), n->m->type_text,
           (double)(dn_now_ns() - t) / 1e6, (double)(before - n->free_bytes) / (1 << 20));
}

/* Pages of sequence q, ids that both formats have. */
static uint32_t page_id(const struct node *n, uint32_t q, uint32_t i)
{
    uint32_t k = q * SEQ_PAGES + i, per_slab = n->r->layout.format[DN_KV_BF16].pages_per_slab;
    uint32_t id = k / per_slab * n->r->layout.slab_pages + k % per_slab;
    cr_assert_lt(id, n->r->n_pages);
    return id;
}

struct shape {
    enum dn_step_kind kind;
    uint32_t seqs, each, kv_len; /* tokens of each sequence in the step, and with those before */
    uint32_t rows;
    bool check;
    int format;
};

/* Microseconds. */
static double step(struct node *n, const struct shape *h)
{
    struct dn_step *s = dn_runner_arrays(n->r);
    struct dn_err err = {0};
    uint32_t page = 0;
    s->kind = h->kind;
    s->n_seqs = h->seqs;
    s->n_tokens = h->seqs * h->each;
    s->n_rows = h->rows;
    s->n_tags = s->tag_first = 0;
    for (uint32_t q = 0; q < h->seqs; q++) {
        s->token_start[q] = (int32_t)(q * h->each);
        s->token_start[q + 1] = s->token_start[q] + (int32_t)h->each;
        s->kv_len[q] = (int32_t)h->kv_len;
        s->slot[q] = (int32_t)q;
        s->kv_format[q] = (uint8_t)h->format;
        s->check[q] = h->check;
        s->page_start[q] = (int32_t)page;
        for (uint32_t i = 0; i < (h->kv_len + PAGE - 1) / PAGE; i++, page++) {
            s->page[page] = page_id(n, q, i);
            s->tag[page] = 0;
        }
        for (uint32_t i = 0; i < h->each; i++) {
            uint32_t t = q * h->each + i;
            s->token_id[t] = (int32_t)(gpu_rng() % n->m->hyper.n_vocab);
            s->position[t] = (int32_t)(h->kv_len - h->each + i);
            s->token_seq[t] = (int32_t)q;
            s->token_count[t] = h->kind == DN_STEP_DECODE;
        }
    }
    for (uint32_t i = 0; i < h->rows; i++) {
        s->row_token[i] = (int32_t)((i + 1) * s->n_tokens / h->rows) - 1;
        s->sample[i] = (struct dn_sample){
            .temperature = i % 2 ? 0 : 1, .top_p = 0.9f, .repetition = 1.1f, .slot = 0, .target = -1, .n_top = 5};
    }
    uint64_t t = dn_now_ns();
    cr_assert_eq(dn_runner_step(n->r, &err), 0, "%s", err.text);
    return (double)(dn_now_ns() - t) / 1e3;
}

static void expect_memory(struct node *n, const char *what, const struct shape *h)
{
    uint64_t now = free_memory(n);
    if (now != n->free_bytes)
        printf("%s %s, %u x %u tokens, %u rows: %lld bytes of memory are gone\n", n->m->type_text, what, h->seqs,
               h->each, h->rows, (long long)(n->free_bytes - now));
    cr_expect_eq(now, n->free_bytes, "%s, %u x %u tokens", what, h->seqs, h->each);
    n->free_bytes = now; /* the next one's loss is its own */
}

static void check_start(const char *config, enum dn_weight_format f)
{
    struct node *n = malloc(sizeof *n);
    node_open(n, config, f);
    struct shape h = {DN_STEP_PREFILL, 1, FIRST, FIRST, 1, false, DN_KV_BF16};
    double first = step(n, &h), second = step(n, &h), third = step(n, &h);
    printf("%s: the first prefill of %d tokens takes %.2f ms, the next %.2f and %.2f\n", n->m->type_text, FIRST,
           first / 1e3, second / 1e3, third / 1e3);
    fflush(stdout);
    expect_memory(n, "first prefill", &h);
    cr_expect(first < 1.5 * second + 2e3, "the first prefill takes %.2f ms, the second %.2f", first / 1e3,
              second / 1e3);
    /* Rows and tokens at which operations choose other kernels, both formats, both lists. */
    for (int i = 0; i < 4; i++) {
        static const uint32_t seqs[] = {1, 2, 3, 5, 8, 9, 16, 17, 24, 32, 33, 48, 64};
        for (size_t k = 0; k < sizeof seqs / sizeof *seqs; k++) {
            uint32_t q = seqs[k];
            struct shape steps[] = {
                {DN_STEP_PREFILL, q, 1, 1 + q, q, i & 1, i / 2},
                {DN_STEP_PREFILL, q, 9, 700, q, i & 1, i / 2},
                {DN_STEP_PREFILL, q, STEP_TOKENS / q > 200 ? 200 : STEP_TOKENS / q, 2000, 2 * q, i & 1, i / 2},
                {DN_STEP_DECODE, q, 1, 38 * q, q, i & 1, i / 2}};
            for (size_t j = 0; j < sizeof steps / sizeof *steps; j++) {
                step(n, &steps[j]);
                expect_memory(n, steps[j].kind == DN_STEP_DECODE ? "decode" : "prefill", &steps[j]);
            }
        }
    }
    dn_runner_close(n->r);
    dn_weights_close(n->w);
    gpu_close(&n->g);
    dn_model_close(n->m);
    free(n);
}

Test(start, bench_kimi_int4)
{
    check_start(kimi, DN_W_INT4);
}
Test(start, bench_kimi_fp8)
{
    check_start(kimi, DN_W_FP8);
}
Test(start, bench_llama_bf16)
{
    check_start(llama, DN_W_BF16);
}

/* DN_TEST_SLOW_LIBRARY: one that was built for less than the GPU has. */
Test(start, says_what_it_was_built_for)
{
    const struct dn_step_limits limits = {.tokens = 1, .seqs = 1, .rows = 1, .pages = 1};
    const struct dn_device_conf conf = {.limits = limits, .n_slots = 1, .n_vocab = 8};
    const char *slow = getenv("DN_TEST_SLOW_LIBRARY");
    struct gpu g;
    struct dn_device *d;
    struct dn_err err = {0};
    char text[256];
    gpu_open(&g, &limits, 1, 8);
    g.ops->describe(g.d, text, sizeof text);
    printf("%s\n", text);
    cr_expect(!strstr(text, "slow kernels"), "%s", text);
    gpu_close(&g);
    if (!slow) {
        printf("SKIPPED: DN_TEST_SLOW_LIBRARY is not set: no library without the GPU's own code\n");
        return;
    }
    cr_assert_eq(dn_kernels_open_library(slow, &conf, &d, &err), 0, "%s", err.text);
    d->ops->describe(d, text, sizeof text);
    printf("%s\n", text);
    cr_expect(strstr(text, "; built without sm_") && strstr(text, ": slow kernels"), "%s", text);
    d->ops->close(d);
}
