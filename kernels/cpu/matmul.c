#include "kernels/cpu/matmul.h"
#include "kernels/cpu/matmul_tile.h"

#include <string.h>

/* Activations of one pass: small enough to stay in the L2 cache of a core while all weights pass by. */
enum { PASS_BYTES = 640 << 10 };
/* A piece of work reads at least this much when there are few activation rows, so that taking it costs next to nothing.
 */
enum { PIECE_BYTES = 16 << 10 };
/* How far ahead of use weights are asked for; the hardware's own prefetch stops at every 4 KiB. At most half the L1
 * cache. */
enum { AHEAD_BYTES = 4 << 10, MAX_AHEAD_BYTES = 24 << 10, ROW_AHEAD_BYTES = 2 << 10 };
/* Few rows of activations: pieces for each thread, of at least so many blocks, since each begins with cold streams. */
enum { FEW_ROWS = 3, ROW_PIECES = 3, ROW_PIECE_BLOCKS = 24 };

/* The blocks of a tile unpacked for several tiles (dn_widen_fn), on the thread's stack; longer rows are unpacked again
 * for each tile. */
enum { WIDE_BYTES = 256 << 10, WIDE_CHEAP_BYTES = 36 << 10 };

struct job {
    const struct dn_matmul_ops *ops;
    dn_tile_fn *tile;
    dn_widen_fn *widen; /* or NULL */
    size_t wide_bytes;  /* of one block */
    size_t widen_tiles; /* worth it from so many tiles */
    const struct dn_matrix *w;
    struct dn_layout layout;
    const float *a;
    const float *bias;
    float *out;
    size_t out_stride; /* from row to row */
    uint8_t *act;
    size_t act_row_bytes;
    size_t n, n_tiles;               /* activation rows of this pass, in tiles of equal height or one more */
    uint32_t tile_rows, tile_blocks; /* at most, in one tile */
    size_t tiles_per_item, splits;   /* an item is tile_blocks blocks of weights times some tiles */
    uint32_t ahead;                  /* struct dn_tile */
    int zero;                        /* dn_act_fn; -1: activations stay f32 */
};

static const struct dn_matmul_ops *ops_of(enum dn_isa isa)
{
    switch (isa) {
#if defined(__x86_64__)
    case DN_ISA_AVX512:
        return &dn_matmul_avx512;
    case DN_ISA_AVX2:
        return &dn_matmul_avx2;
#endif
    default:
        return &dn_matmul_portable;
    }
}

static size_t tile_start(const struct job *j, size_t tile)
{
    size_t low = j->n / j->n_tiles, taller = j->n % j->n_tiles;
    return tile * low + (tile < taller ? tile : taller);
}

static uint32_t tile_height(const struct job *j, size_t tile)
{
    return (uint32_t)(tile_start(j, tile + 1) - tile_start(j, tile));
}

/* a[n_rows][n_in] to [n_in_padded][n_rows]. */
static void transpose_tile(const float *a, uint32_t n_in, uint32_t n_in_padded, uint32_t n_rows, float *out)
{
    for (uint32_t k = 0; k < n_in; k++)
        for (uint32_t m = 0; m < n_rows; m++)
            out[(size_t)k * n_rows + m] = a[(size_t)m * n_in + k];
    memset(out + (size_t)n_in * n_rows, 0, (size_t)(n_in_padded - n_in) * n_rows * sizeof *out);
}

static void pack_activations(void *arg, size_t begin, size_t end, unsigned part)
{
    const struct job *j = arg;
    for (size_t i = begin; i < end; i++) {
        const float *a = j->a + tile_start(j, i) * j->w->n_in;
        uint8_t *out = j->act + tile_start(j, i) * j->act_row_bytes;
        if (j->zero < 0)
            transpose_tile(a, j->w->n_in, j->layout.n_in_padded, tile_height(j, i), (float *)out);
        else
            j->ops->act(a, j->w->n_in, tile_height(j, i), j->zero, out);
    }
}

/* n_blocks blocks from `block` on, `step` blocks apart. */
static struct dn_tile tile_of(const struct job *j, size_t block, size_t n_blocks, size_t step)
{
    const struct dn_matrix *w = j->w;
    size_t row = block * DN_BLOCK_ROWS, n_out = ((n_blocks - 1) * step + 1) * DN_BLOCK_ROWS;
    return (struct dn_tile){
        .block = (const uint8_t *)w->data + block * j->layout.block_bytes,
        .bias = j->bias ? j->bias + row : NULL,
        .out_stride = j->out_stride,
        .n_in = w->n_in,
        .n_out = w->n_out - row < n_out ? (uint32_t)(w->n_out - row) : (uint32_t)n_out,
        .n_blocks = (uint32_t)n_blocks,
        .block_rows = (uint32_t)step * DN_BLOCK_ROWS,
        .ahead = j->ahead,
        .scale_is_bf16 = w->scale_is_bf16,
        .block_bytes = step * j->layout.block_bytes,
        .offset_at = j->layout.offset_at,
        .data_at = j->layout.data_at,
    };
}

/* Streams for n blocks of which the fewest are left over. */
static size_t streams_of(const struct job *j, size_t n)
{
    size_t most = j->n == 1 ? j->ops->row_blocks : j->tile_blocks, fewer = most > 3 ? most - 2 : most;
    return n % most <= n % fewer ? most : fewer;
}

/* INT8 and INT4 with FEW_ROWS rows of activations at most, bound by memory: blocks [begin, end) as several streams,
 * each a share of them, since one stream does not keep enough reads under way. */
static void multiply_few(void *arg, size_t begin, size_t end, unsigned part)
{
    const struct job *j = arg;
    size_t n_streams = streams_of(j, end - begin), step = (end - begin) / n_streams, n_steps = step;
    if (step == 0)
        n_streams = end - begin, step = n_steps = 1;
    /* What the tiles do not ask for. */
    for (size_t at = 0; at < ROW_AHEAD_BYTES; at += 64)
        for (size_t i = 0; i < n_streams; i++)
            __builtin_prefetch((const char *)j->w->data + (begin + i * step) * j->layout.block_bytes + at);
    for (size_t block = begin; block < end; block += n_streams * step) {
        /* What is left over after all streams: side by side. */
        if (end - block < n_streams * step)
            n_streams = end - block, step = n_steps = 1;
        for (size_t i = 0; i < n_steps; i++) {
            struct dn_tile t = tile_of(j, block + i, n_streams, step);
            t.act = j->act;
            t.n_rows = (uint32_t)j->n;
            t.out = j->out + (block + i) * DN_BLOCK_ROWS;
            j->tile(&t);
        }
    }
}

static void multiply(void *arg, size_t begin, size_t end, unsigned part)
{
    const struct job *j = arg;
    const struct dn_matrix *w = j->w;
    _Alignas(64) uint8_t wide[WIDE_BYTES];
    for (size_t item = begin; item < end; item++) {
        size_t block = item / j->splits * j->tile_blocks, tile = item % j->splits * j->tiles_per_item,
               row = block * DN_BLOCK_ROWS;
        size_t tile_end = tile + j->tiles_per_item < j->n_tiles ? tile + j->tiles_per_item : j->n_tiles;
        size_t left = j->layout.n_blocks - block, n_blocks = left < j->tile_blocks ? left : j->tile_blocks;
        struct dn_tile t = tile_of(j, block, n_blocks, 1);
        if (j->widen && tile_end - tile >= j->widen_tiles) {
            t.wide_bytes = j->wide_bytes;
            j->widen(&t, wide);
            t.wide = wide;
            t.ahead = 0;
        }
        /* Each tile asks for a share of the next blocks, if they are this thread's. */
        size_t n_groups = w->n_in / DN_GROUP, n_shares = tile_end - tile;
        t.next = t.block;
        if (j->zero >= 0 && j->splits == 1 && item + 1 < end) {
            t.next = t.block + n_blocks * j->layout.block_bytes;
            t.next_step = (uint32_t)dn_up(j->layout.block_bytes / n_shares / n_groups + 1, 64);
        }
        for (; tile < tile_end; tile++, t.ahead = 0) {
            size_t start = tile_start(j, tile);
            t.act = j->act + start * j->act_row_bytes;
            t.n_rows = tile_height(j, tile);
            t.out = j->out + start * j->out_stride + row;
            j->tile(&t);
            t.next += t.next_step * n_groups;
            if ((size_t)(t.next - t.block) >= (n_blocks + 1) * j->layout.block_bytes)
                t.next_step = 0; /* shares are rounded up: nothing is left */
        }
    }
}

/* For n rows of activations. */
static void choose_format(struct job *j, size_t n)
{
    const struct dn_matrix *w = j->w;
    j->zero = -1;
    switch (w->format) {
    case DN_W_BF16:
        j->tile = j->ops->bf16;
        break;
    case DN_W_FP8:
        j->tile = j->ops->fp8;
        j->widen = j->ops->widen_fp8;
        j->wide_bytes = (size_t)j->layout.n_in_padded * DN_BLOCK_ROWS * 2;
        break;
    case DN_W_INT8:
        j->tile = j->ops->int8;
        j->zero = 128;
        break;
    default:
        j->tile = w->symmetric ? j->ops->int4_sym : j->ops->int4;
        j->zero = w->symmetric ? 8 : 0;
        j->widen = j->ops->widen_int4;
        /* And f32 scales and offsets. */
        j->wide_bytes = (size_t)w->n_in * DN_BLOCK_ROWS + w->n_in / DN_GROUP * 2 * DN_BLOCK_ROWS * sizeof(float);
    }
    struct dn_tile_shape shape = {DN_TILE_ROWS, 2};
    if (j->zero >= 0)
        shape = j->zero == 0 && n > j->ops->int_shape.rows ? j->ops->int4_shape : j->ops->int_shape;
    j->tile_rows = shape.rows;
    j->tile_blocks = shape.blocks;
    j->act_row_bytes =
        j->zero < 0 ? j->layout.n_in_padded * sizeof *j->a : w->n_in / DN_GROUP * (size_t)DN_ACT_GROUP_BYTES;
    /* Measured: unpacking INT4 within the L1 cache costs a third of a tile and saves an eighth of each; outside it
     * costs twice that, and FP8 two thirds. */
    j->widen_tiles = w->format == DN_W_INT4 && j->tile_blocks * j->wide_bytes <= WIDE_CHEAP_BYTES ? 3 : 12;
    if (j->tile_blocks * j->wide_bytes > WIDE_BYTES)
        j->widen = NULL;
}

/* Rows of a pass over n: all of equal length, but for the rounding to whole tiles. */
static size_t pass_rows(const struct job *j, size_t n)
{
    size_t most = PASS_BYTES / j->act_row_bytes;
    most = most < DN_TILE_ROWS ? DN_TILE_ROWS : most - most % DN_TILE_ROWS;
    size_t n_passes = (n + most - 1) / most;
    return n_passes ? dn_up((n + n_passes - 1) / n_passes, DN_TILE_ROWS) : 0;
}

/* Blocks that are read side by side: while some are in use, ask for the next. */
static uint32_t ahead_of(const struct job *j)
{
    if (j->n > 1 && 2 * j->layout.block_bytes <= MAX_AHEAD_BYTES)
        return (uint32_t)(2 * j->layout.block_bytes);
    return AHEAD_BYTES;
}

/* One pass over all weights with the j->n rows at j->a. */
static void run_pass(const struct dn_cpu_exec *x, struct job *j)
{
    size_t n_threads = dn_threads_count(x->threads);
    j->n_tiles = (j->n + j->tile_rows - 1) / j->tile_rows;
    if (j->n <= 2 * DN_TILE_ROWS)
        pack_activations(j, 0, j->n_tiles, 0);
    else
        dn_threads_for(x->threads, j->n_tiles, 1 + j->n_tiles / (4 * n_threads), pack_activations, j);

    if (j->n <= FEW_ROWS && j->zero >= 0) {
        bool is_long = j->layout.n_blocks >= ROW_PIECE_BLOCKS * ROW_PIECES * n_threads;
        size_t pieces = n_threads > 1 && is_long ? ROW_PIECES * n_threads : n_threads;
        j->ahead = ROW_AHEAD_BYTES;
        dn_threads_for(x->threads, j->layout.n_blocks, (j->layout.n_blocks + pieces - 1) / pieces, multiply_few, j);
        return;
    }
    /* Enough items for all threads: whole columns of tiles if the blocks suffice, since the block then stays in the L1
     * cache. */
    size_t wanted = 4 * n_threads, n_blocks = (j->layout.n_blocks + j->tile_blocks - 1) / j->tile_blocks;
    j->splits = n_threads == 1 || n_blocks >= wanted ? 1 : (wanted + n_blocks - 1) / n_blocks;
    j->splits = j->splits > j->n_tiles ? j->n_tiles : j->splits;
    j->tiles_per_item = (j->n_tiles + j->splits - 1) / j->splits;
    j->splits = (j->n_tiles + j->tiles_per_item - 1) / j->tiles_per_item;
    /* Few rows: long pieces, since the first blocks of each come unasked. */
    size_t n_items = n_blocks * j->splits, item_bytes = j->tile_blocks * j->layout.block_bytes;
    size_t chunk = n_items / ((j->n <= 4 * DN_TILE_ROWS ? 3 : 8) * n_threads);
    if (j->n <= 2 * DN_TILE_ROWS && chunk < PIECE_BYTES / item_bytes)
        chunk = PIECE_BYTES / item_bytes;
    j->ahead = ahead_of(j);
    dn_threads_for(x->threads, n_items, chunk ? chunk : 1, multiply, j);
}

void dn_cpu_matmul(const struct dn_cpu_exec *x, const float *a, size_t n, const struct dn_matrix *w, const float *bias,
                   float *out)
{
    DN_BUG_ON(w->bytes == 0 || w->bytes != dn_cpu_matrix_bytes(w) || w->n_groups > 1);
    struct job j = {.ops = ops_of(x->isa),
                    .w = w,
                    .layout = dn_layout_of(w),
                    .bias = bias,
                    .act = x->scratch,
                    .out_stride = w->n_out};
    choose_format(&j, n);
    size_t rows = pass_rows(&j, n);
    for (size_t i = 0; i < n; i += rows) {
        j.a = a + i * w->n_in;
        j.out = out + i * w->n_out;
        j.n = n - i < rows ? n - i : rows;
        run_pass(x, &j);
    }
}

/* ---- Groups ---- */

/* A piece of work is some blocks of one group with all rows of that group. Each packs its activations anew, on its own
 * thread: at GROUP_BLOCKS blocks that costs a tenth of the products, and nothing has to be shared or waited for. */
enum { GROUP_BLOCKS = 24 /* a multiple of all tiles' blocks */ };

struct grouped {
    const struct dn_cpu_exec *x;
    const struct dn_cpu_grouped *p;
    struct job job; /* what is the same for all pieces */
    struct dn_matrix one;
    size_t piece_blocks, n_pieces; /* of a group */
    uint8_t *scratch;
    size_t thread_bytes, gather_bytes;
};

static size_t gather_bytes(const struct dn_matrix *w)
{
    return dn_up((size_t)w->n_in * DN_TILE_ROWS * sizeof(float), 64);
}

static size_t thread_bytes(const struct dn_matrix *w)
{
    size_t tile = gather_bytes(w) + 64 * DN_TILE_ROWS; /* not less than a packed tile */
    return gather_bytes(w) + dn_up(tile > PASS_BYTES ? tile : PASS_BYTES, 64);
}

size_t dn_cpu_grouped_scratch(const struct dn_cpu_exec *x, const struct dn_matrix *w)
{
    return dn_threads_count(x->threads) * thread_bytes(w);
}

/* Packs rows [first, first + j->n) of group g. */
static void pack_group(const struct grouped *c, const struct job *j, uint32_t g, size_t first, float *gather)
{
    const struct dn_cpu_grouped *p = c->p;
    size_t n_in = j->w->n_in;
    for (size_t tile = 0; tile < j->n_tiles; tile++) {
        size_t start = tile_start(j, tile), n = tile_height(j, tile);
        const float *a = gather;
        if (n == 1 || (!p->index && p->a_stride == n_in)) {
            size_t i = first + start;
            a = p->a + (p->index ? p->index[i] : i) * p->a_stride + g * p->a_group_stride;
        } else {
            for (size_t r = 0; r < n; r++) {
                size_t i = first + start + r;
                memcpy(gather + r * n_in, p->a + (p->index ? p->index[i] : i) * p->a_stride + g * p->a_group_stride,
                       n_in * sizeof *gather);
            }
        }
        uint8_t *act = j->act + start * j->act_row_bytes;
        if (j->zero < 0)
            transpose_tile(a, j->w->n_in, j->layout.n_in_padded, (uint32_t)n, (float *)act);
        else
            j->ops->act(a, j->w->n_in, (uint32_t)n, j->zero, act);
    }
}

/* Blocks [begin, end) of group g with rows [first, last) */
static void multiply_group(const struct grouped *c, uint32_t g, size_t begin, size_t end, size_t first, size_t last,
                           unsigned part)
{
    uint8_t *scratch = c->scratch + part * c->thread_bytes;
    struct dn_matrix w = c->one;
    w.data = (uint8_t *)w.data + g * w.bytes;
    struct job j = c->job;
    j.w = &w;
    choose_format(&j, last - first);
    j.act = scratch + c->gather_bytes;
    size_t rows = pass_rows(&j, last - first);
    for (; first < last; first += rows) {
        j.n = last - first < rows ? last - first : rows;
        j.n_tiles = (j.n + j.tile_rows - 1) / j.tile_rows;
        j.out = c->p->out + first * c->p->out_stride + g * c->p->out_group_stride;
        pack_group(c, &j, g, first, (float *)scratch);
        if (j.n <= FEW_ROWS && j.zero >= 0) {
            j.ahead = ROW_AHEAD_BYTES;
            multiply_few(&j, begin, end, part);
            continue;
        }
        j.splits = 1;
        j.tiles_per_item = j.n_tiles;
        j.ahead = ahead_of(&j);
        multiply(&j, begin / j.tile_blocks, (end + j.tile_blocks - 1) / j.tile_blocks, part);
    }
}

static void run_groups(void *arg, size_t begin, size_t end, unsigned part)
{
    const struct grouped *c = arg;
    const uint32_t *start = c->p->start;
    for (size_t i = begin; i < end; i++) {
        uint32_t g = (uint32_t)(i / c->n_pieces);
        size_t block = i % c->n_pieces * c->piece_blocks, n_blocks = c->job.layout.n_blocks;
        size_t block_end = block + c->piece_blocks < n_blocks ? block + c->piece_blocks : n_blocks;
        size_t first = start ? start[g] : 0, last = start ? start[g + 1] : c->p->n;
        if (first < last)
            multiply_group(c, g, block, block_end, first, last, part);
    }
}

void dn_cpu_matmul_grouped(const struct dn_cpu_exec *x, const struct dn_cpu_grouped *p, void *scratch)
{
    const struct dn_matrix *w = p->w;
    DN_BUG_ON(w->bytes == 0 || w->bytes != dn_cpu_matrix_bytes(w));
    uint32_t n_groups = w->n_groups > 1 ? w->n_groups : 1;
    struct grouped c = {.x = x,
                        .p = p,
                        .one = *w,
                        .scratch = scratch,
                        .thread_bytes = thread_bytes(w),
                        .gather_bytes = gather_bytes(w)};
    c.one.n_groups = 0;
    c.one.bytes = w->bytes / n_groups;
    c.job = (struct job){.ops = ops_of(x->isa), .layout = dn_layout_of(&c.one), .out_stride = p->out_stride};
    size_t n_threads = dn_threads_count(x->threads), n_blocks = c.job.layout.n_blocks, active = 0;
    for (uint32_t g = 0; g < n_groups; g++)
        active += p->start ? p->start[g + 1] > p->start[g] : p->n > 0;
    /* Whole groups to a piece if these suffice for all threads. */
    size_t wanted = n_threads == 1 ? 1 : (8 * n_threads + active - 1) / (active ? active : 1);
    c.piece_blocks = dn_up((n_blocks + wanted - 1) / wanted, GROUP_BLOCKS);
    c.n_pieces = (n_blocks + c.piece_blocks - 1) / c.piece_blocks;
    if (active)
        dn_threads_for(x->threads, n_groups * c.n_pieces, 1, run_groups, &c);
}
