#include "kernels/cpu/device.h"

#include "base/buf.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* ---- Memory ---- */

/* A mapping. Allocations of at most MAX_SHARED_BYTES share one, in the order in which they come: a small model's
 * matrices would get no huge pages of their own, and reading them in 4 KiB pages costs a sixth of a decode step. Memory
 * given back is not handed out again, so that all of it is zero. */
struct dn_cpu_region {
    uint8_t *data;
    size_t mapped_bytes, used_bytes;
    size_t n_blocks; /* of them in use; unmapped with the last one */
};

struct dn_cpu_block {
    struct dn_cpu_block *next;
    void *data;
    struct dn_cpu_region *region;
};

enum { HUGE_PAGE = 2 << 20, REGION_BYTES = 32 << 20, MAX_SHARED_BYTES = 8 << 20, ALIGNMENT = 256 };

/* Zeroed, at a huge page's boundary; NULL when the system refuses. */
static void *map(size_t bytes, size_t *mapped_bytes)
{
    size_t size, with_slack;
    if (__builtin_add_overflow(bytes, HUGE_PAGE - 1, &size))
        return NULL;
    size = size / HUGE_PAGE * HUGE_PAGE;
    if (__builtin_add_overflow(size, HUGE_PAGE, &with_slack))
        return NULL;
    uint8_t *p = mmap(NULL, with_slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return NULL;
    size_t skip = (HUGE_PAGE - (uintptr_t)p % HUGE_PAGE) % HUGE_PAGE;
    if (skip)
        munmap(p, skip);
    munmap(p + skip + size, HUGE_PAGE - skip);
    madvise(p + skip, size, MADV_HUGEPAGE); /* fewer TLB misses; without it all is well, only slower */
    *mapped_bytes = size;
    return p + skip;
}

/* The region that an allocation is to lie in: the newest shared one if there is room, or a new one. */
static struct dn_cpu_region *region_for(struct dn_cpu_device *d, size_t bytes)
{
    bool is_shared = bytes <= MAX_SHARED_BYTES;
    if (is_shared && d->region && d->region->mapped_bytes - d->region->used_bytes >= bytes)
        return d->region;
    size_t mapped_bytes;
    uint8_t *p = map(is_shared ? REGION_BYTES : bytes, &mapped_bytes);
    if (!p)
        return NULL;
    struct dn_cpu_region *r = dn_alloc(sizeof *r);
    *r = (struct dn_cpu_region){.data = p, .mapped_bytes = mapped_bytes};
    if (is_shared)
        d->region = r;
    return r;
}

static void *device_alloc(struct dn_device *device, size_t bytes)
{
    struct dn_cpu_device *d = dn_cpu(device);
    struct dn_cpu_region *r = region_for(d, bytes ? bytes : 1);
    if (!r)
        return NULL;
    struct dn_cpu_block *b = dn_alloc(sizeof *b);
    *b = (struct dn_cpu_block){.next = d->block, .data = r->data + r->used_bytes, .region = r};
    size_t units = (bytes ? bytes - 1 : 0) / ALIGNMENT + 1; /* within the mapping, which is a multiple of them */
    r->used_bytes += units * ALIGNMENT;
    r->n_blocks++;
    d->block = b;
    return b->data;
}

static void device_free(struct dn_device *device, void *p)
{
    if (!p)
        return;
    struct dn_cpu_device *d = dn_cpu(device);
    struct dn_cpu_block **at = &d->block;
    while (*at && (*at)->data != p)
        at = &(*at)->next;
    DN_BUG_ON(!*at);
    struct dn_cpu_block *b = *at;
    *at = b->next;
    struct dn_cpu_region *r = b->region;
    if (--r->n_blocks == 0) {
        munmap(r->data, r->mapped_bytes);
        d->region = d->region == r ? NULL : d->region;
        free(r);
    }
    free(b);
}

static void device_copy(struct dn_device *device, void *dst, const void *src, size_t bytes)
{
    if (bytes)
        memcpy(dst, src, bytes);
}

/* Grows s to hold that much; false without memory. */
static bool grow(struct dn_cpu_scratch *s, size_t bytes)
{
    if (bytes <= s->bytes)
        return true;
    free(s->data);
    s->bytes = 0;
    size_t size;
    if (__builtin_add_overflow(bytes, 63, &size) || !(s->data = aligned_alloc(64, size & ~(size_t)63)))
        return false;
    s->bytes = size & ~(size_t)63;
    return true;
}

void *dn_cpu_take(struct dn_cpu_device *d, enum dn_scratch which, size_t bytes, size_t at_limits)
{
    struct dn_cpu_scratch *s = d->scratch + which;
    if (d->measuring) {
        s->wanted = at_limits > s->wanted ? at_limits : s->wanted;
        return NULL;
    }
    if (bytes > s->bytes)
        DN_BUG_ON(!grow(s, bytes + bytes / 4));
    return s->data;
}

/* ---- Weights ---- */

static size_t matrix_bytes(const struct dn_matrix *m)
{
    return dn_cpu_matrix_bytes(m);
}

static int matrix_pack(struct dn_device *device, struct dn_matrix *m, uint32_t row0, uint32_t n,
                       const struct dn_rows *rows)
{
    return dn_cpu_matrix_pack(m, row0, n, rows);
}

static void device_matmul(struct dn_device *device, const struct dn_matmul *p)
{
    struct dn_cpu_device *d = dn_cpu(device);
    if (d->measuring)
        return;
    dn_cpu_matmul(&d->exec, p->a, p->rows_only ? d->step.n_rows : d->step.n_tokens, p->w, p->bias, p->out);
}

/* ---- Steps ---- */

static void slot_fill(struct dn_device *device, int32_t slot, const int32_t *prompt_id, size_t n)
{
    struct dn_cpu_device *d = dn_cpu(device);
    DN_BUG_ON(slot < 0 || (uint32_t)slot >= d->n_slots);
    uint16_t *count = d->count + (size_t)slot * d->n_vocab;
    memset(count, 0, (size_t)d->n_vocab * sizeof *count);
    for (size_t i = 0; i < n; i++) {
        DN_BUG_ON(prompt_id[i] < 0 || (uint32_t)prompt_id[i] >= d->n_vocab);
        count[prompt_id[i]] = DN_COUNT_PROMPT;
    }
}

static struct dn_step *step_arrays(struct dn_device *device)
{
    return &dn_cpu(device)->step;
}

/* A step that contradicts itself would read or write another sequence's memory: better no process than that. */
static void check_seq(const struct dn_cpu_device *d, uint32_t q)
{
    const struct dn_step *s = &d->step;
    int32_t begin = s->token_start[q], end = s->token_start[q + 1];
    DN_BUG_ON(begin < 0 || end <= begin || (uint32_t)end > s->n_tokens);
    DN_BUG_ON(s->page_start[q] < 0 || (uint32_t)s->page_start[q] > d->limits.pages);
    DN_BUG_ON(s->kv_format[q] >= DN_KV_FORMATS);
    DN_BUG_ON(s->slot[q] >= 0 && (uint32_t)s->slot[q] >= d->n_slots);
    DN_BUG_ON(s->kv_len[q] < end - begin);
    for (int32_t t = begin; t < end; t++) {
        DN_BUG_ON(s->token_seq[t] != (int32_t)q || s->position[t] != s->kv_len[q] - (end - t));
        DN_BUG_ON(s->token_id[t] < 0);
    }
}

static void check_row(const struct dn_cpu_device *d, uint32_t row)
{
    const struct dn_sample *s = d->step.sample + row;
    DN_BUG_ON(d->step.row_token[row] < 0 || (uint32_t)d->step.row_token[row] >= d->step.n_tokens);
    DN_BUG_ON(s->n_ban < 0 || s->n_ban > DN_MAX_BAN || s->n_top > DN_MAX_TOP);
    DN_BUG_ON(s->slot >= 0 && (uint32_t)s->slot >= d->n_slots);
}

/* Twice for each list, as prefill and as decode, with the counts of a full step: operations compute nothing, but say
 * what scratch they need at the limits. */
static int prepare(struct dn_device *device, uint32_t list, struct dn_err *err)
{
    struct dn_cpu_device *d = dn_cpu(device);
    static const enum dn_step_kind kind[] = {DN_STEP_PREFILL, DN_STEP_DECODE};
    d->measuring = d->prepared < sizeof kind / sizeof *kind;
    struct dn_step *step = &d->step;
    const struct dn_step_limits *l = &d->limits;
    if (d->measuring) {
        step->kind = kind[d->prepared++];
        step->n_seqs = l->seqs < l->tokens ? l->seqs : l->tokens;
        step->n_tokens = step->kind == DN_STEP_DECODE ? step->n_seqs : l->tokens;
        step->n_rows = l->rows;
        return 1;
    }
    d->prepared = 0;
    step->kind = DN_STEP_PREFILL;
    step->n_tokens = step->n_seqs = step->n_rows = 0;
    for (int i = 0; i < DN_SCRATCHES; i++) {
        struct dn_cpu_scratch *s = d->scratch + i;
        if (!grow(s, s->wanted))
            return dn_err_set(err, DN_NO_MEMORY, "cpu device: no memory for %zu bytes of scratch", s->wanted);
    }
    return 0;
}

static void memory(struct dn_device *device, uint64_t *free_bytes, uint64_t *total_bytes)
{
    *free_bytes = *total_bytes = 0;
}

static bool step_begin(struct dn_device *device, uint32_t list)
{
    struct dn_cpu_device *d = dn_cpu(device);
    const struct dn_step *s = &d->step;
    DN_BUG_ON(s->n_tokens > d->limits.tokens || s->n_seqs > d->limits.seqs || s->n_rows > d->limits.rows ||
              s->n_tags > d->limits.tags);
    DN_BUG_ON(s->n_seqs && s->token_start[0] != 0);
    DN_BUG_ON(s->n_seqs ? (uint32_t)s->token_start[s->n_seqs] != s->n_tokens : s->n_tokens != 0);
    for (uint32_t q = 0; q < s->n_seqs; q++)
        check_seq(d, q);
    for (uint32_t row = 0; row < s->n_rows; row++)
        check_row(d, row);
    memset(s->bad, 0, s->n_seqs * sizeof *s->bad);
    for (uint32_t t = 0; t < s->n_tokens; t++) {
        int32_t slot = s->slot[s->token_seq[t]];
        if (!s->token_count[t] || slot < 0)
            continue;
        DN_BUG_ON((uint32_t)s->token_id[t] >= d->n_vocab);
        uint16_t *count = d->count + (size_t)slot * d->n_vocab + s->token_id[t];
        if ((*count & DN_COUNT_MAX) < DN_COUNT_MAX)
            ++*count;
    }
    return true;
}

static void step_end(struct dn_device *device) {}

static int step_wait(struct dn_device *device, struct dn_err *err)
{
    return 0;
}

/* ---- The device ---- */

static void step_release(struct dn_step *s)
{
    void *array[] = {s->token_id,  s->position,  s->token_seq, s->token_count, s->token_start, s->kv_len,
                     s->slot,      s->kv_format, s->check,     s->page_start,  s->page,        s->tag,
                     s->row_token, s->sample,    s->bad,       s->result,      s->tag_new};
    for (size_t i = 0; i < sizeof array / sizeof *array; i++)
        free(array[i]);
}

static void step_init(struct dn_step *s, const struct dn_step_limits *l)
{
    *s = (struct dn_step){.tag_new = dn_alloc0((size_t)l->tags + 1, sizeof *s->tag_new),
                          .token_id = dn_alloc0(l->tokens, sizeof *s->token_id),
                          .position = dn_alloc0(l->tokens, sizeof *s->position),
                          .token_seq = dn_alloc0(l->tokens, sizeof *s->token_seq),
                          .token_count = dn_alloc0(l->tokens, sizeof *s->token_count),
                          .token_start = dn_alloc0((size_t)l->seqs + 1, sizeof *s->token_start),
                          .kv_len = dn_alloc0(l->seqs, sizeof *s->kv_len),
                          .slot = dn_alloc0(l->seqs, sizeof *s->slot),
                          .kv_format = dn_alloc0(l->seqs, sizeof *s->kv_format),
                          .check = dn_alloc0(l->seqs, sizeof *s->check),
                          .page_start = dn_alloc0((size_t)l->seqs + 1, sizeof *s->page_start),
                          .page = dn_alloc0(l->pages, sizeof *s->page),
                          .tag = dn_alloc0(l->pages, sizeof *s->tag),
                          .row_token = dn_alloc0(l->rows, sizeof *s->row_token),
                          .sample = dn_alloc0(l->rows, sizeof *s->sample),
                          .bad = dn_alloc0(l->seqs, sizeof *s->bad),
                          .result = dn_alloc0(l->rows, sizeof *s->result)};
}

static void device_close(struct dn_device *device)
{
    if (!device)
        return;
    struct dn_cpu_device *d = dn_cpu(device);
    dn_threads_close(d->exec.threads);
    while (d->block)
        device_free(device, d->block->data);
    step_release(&d->step);
    for (int i = 0; i < DN_SCRATCHES; i++)
        free(d->scratch[i].data);
    free(d);
}

static void describe(const struct dn_device *device, char *text, size_t n)
{
    const struct dn_cpu_device *d = (const struct dn_cpu_device *)device;
    char line[256], name[128] = "unknown processor";
    FILE *f = fopen("/proc/cpuinfo", "re");
    while (f && fgets(line, sizeof line, f)) {
        if (sscanf(line, "model name : %127[^\n]", name) == 1)
            break;
    }
    if (f)
        fclose(f);
    unsigned n_threads = dn_threads_count(d->exec.threads);
    snprintf(text, n, "%s, %s, %u thread%s", name, dn_isa_name(d->exec.isa), n_threads, n_threads == 1 ? "" : "s");
}

static const struct dn_kernels table = {.name = "cpu",
                                        .act_bytes = sizeof(float),
                                        .close = device_close,
                                        .describe = describe,
                                        .memory = memory,
                                        .alloc = device_alloc,
                                        .free = device_free,
                                        .upload = device_copy,
                                        .download = device_copy,
                                        .matrix_bytes = matrix_bytes,
                                        .matrix_pack = matrix_pack,
                                        .slot_fill = slot_fill,
                                        .prepare = prepare,
                                        .step_arrays = step_arrays,
                                        .step_begin = step_begin,
                                        .embed = dn_cpu_embed,
                                        .rmsnorm = dn_cpu_rmsnorm,
                                        .matmul = device_matmul,
                                        .qkv_write = dn_cpu_qkv_write,
                                        .attention = dn_cpu_attention,
                                        .silu_mul = dn_cpu_silu_mul,
                                        .norm_act = dn_cpu_norm_act,
                                        .group_matmul = dn_cpu_group_matmul,
                                        .mla_write = dn_cpu_mla_write,
                                        .mla_attention = dn_cpu_mla_attention,
                                        .mla_prefill = dn_cpu_mla_prefill,
                                        .route = dn_cpu_route,
                                        .experts = dn_cpu_experts,
                                        .check_tags = dn_cpu_check_tags,
                                        .sample_rows = dn_cpu_sample_rows,
                                        .step_end = step_end,
                                        .step_wait = step_wait,
                                        .read_rate = dn_cpu_read_rate};

int dn_kernels_open_cpu(const struct dn_device_conf *conf, struct dn_device **out, struct dn_err *err)
{
    enum dn_isa isa;
    int rc = dn_isa_parse(conf->isa, &isa, err);
    if (rc)
        return rc;
    struct dn_cpu_device *d = dn_alloc0(1, sizeof *d);
    d->base.ops = &table;
    d->exec.isa = isa;
    d->row = dn_row_ops(isa);
    d->attn = dn_attn_ops(isa);
    d->limits = conf->limits;
    d->n_slots = conf->n_slots;
    d->n_vocab = conf->n_vocab;
    step_init(&d->step, &d->limits);
    rc = dn_threads_open(conf->n_threads, NULL, &d->exec.threads, err);
    if (rc)
        goto fail;
    d->exec.scratch = device_alloc(&d->base, DN_CPU_MATMUL_SCRATCH);
    size_t count_bytes;
    if (!__builtin_mul_overflow((size_t)conf->n_slots, (size_t)conf->n_vocab * sizeof *d->count, &count_bytes))
        d->count = device_alloc(&d->base, count_bytes);
    if (!d->exec.scratch || !d->count) {
        rc = dn_err_set(err, DN_NO_MEMORY, "cpu device: no memory for %u slots of %u token counts", conf->n_slots,
                        conf->n_vocab);
        goto fail;
    }
    *out = &d->base;
    return 0;
fail:
    device_close(&d->base);
    return rc;
}
