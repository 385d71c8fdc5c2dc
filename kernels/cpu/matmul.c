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
        .out_stride = w->n_out,
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
            t.out = j->out + start * w->n_out + row;
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
    /* Measured: unpacking INT4 within the L1 cache costs a third of a tile and saves an eighth of each; outside it
     * costs twice that, and FP8 two thirds. */
    j->widen_tiles = w->format == DN_W_INT4 && j->tile_blocks * j->wide_bytes <= WIDE_CHEAP_BYTES ? 3 : 12;
    if (j->tile_blocks * j->wide_bytes > WIDE_BYTES)
        j->widen = NULL;
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
    /* Blocks are read side by side: while some are in use, ask for the next. */
    j->ahead = AHEAD_BYTES;
    if (j->n > 1 && 2 * j->layout.block_bytes <= MAX_AHEAD_BYTES)
        j->ahead = (uint32_t)(2 * j->layout.block_bytes);
    dn_threads_for(x->threads, n_items, chunk ? chunk : 1, multiply, j);
}

void dn_cpu_matmul(const struct dn_cpu_exec *x, const float *a, size_t n, const struct dn_matrix *w, const float *bias,
                   float *out)
{
    DN_BUG_ON(w->bytes == 0 || w->bytes != dn_cpu_matrix_bytes(w));
    struct job j = {.ops = ops_of(x->isa), .w = w, .layout = dn_layout_of(w), .bias = bias, .act = x->scratch};
    choose_format(&j, n);
    j.act_row_bytes = j.zero < 0 ? j.layout.n_in_padded * sizeof *a : w->n_in / DN_GROUP * (size_t)DN_ACT_GROUP_BYTES;
    size_t most = PASS_BYTES / j.act_row_bytes;
    most = most < DN_TILE_ROWS ? DN_TILE_ROWS : most - most % DN_TILE_ROWS;
    /* Passes of equal length, but for the rounding to whole tiles. */
    size_t n_passes = (n + most - 1) / most, rows = n_passes ? dn_up((n + n_passes - 1) / n_passes, DN_TILE_ROWS) : 0;
    for (size_t i = 0; i < n; i += rows) {
        j.a = a + i * w->n_in;
        j.out = out + i * w->n_out;
        j.n = n - i < rows ? n - i : rows;
        run_pass(x, &j);
    }
}
