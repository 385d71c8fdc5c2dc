/* Packing weights: rows as a checkpoint has them to the tiles of weights.cuh.
 *
 * Maths: none but bits if the rows are of the matrix's own family. Otherwise to f32 and on to the format with the CPU
 * backend's functions (pack_quantise.h), so that both backends hold the same numbers.
 *
 * The calling thread copies a piece (some blocks of 64 rows x some k tiles, at most 4 MiB) into a pinned buffer of its
 * lane, padded to whole tiles with zeros; pack_tiles reads it over the bus, each byte once, and writes packed tiles.
 * Two buffers a lane: one is filled while the other is read. Piece: codes [rows][k tiles][128 codes], then scales
 * [rows][k tiles][4] 16-bit, offsets alike, then FP8's scales [row blocks][k tiles] f32.
 *
 * pack_tiles: a block of 256 threads for 64 rows x 256 bytes of codes; shared: those rows. Rows that the piece does not
 * have keep what the packed tile has. Floor: the bus, some 55 GB/s.
 */
#include "kernels/cpu/pack_numbers.h"
#include "kernels/cuda/weights.cuh"
extern "C" {
#include "kernels/cpu/pack_quantise.h"
}

enum { GROUP = 32, FP8_BLOCK = 128, THREADS = 256 };

/* A piece in a pinned buffer, and where it goes. */
struct piece {
    uint8_t *codes;             /* [rows][n_tiles][code_bytes] */
    uint16_t *scales, *offsets; /* [rows][n_tiles][4] */
    float *fp8_scales;          /* [row blocks][n_tiles] */
    uint32_t block0, n_blocks;  /* of 64 rows; rows 64 * block0 + [first, end) are packed */
    uint32_t first, end;
    uint32_t tile0, n_tiles;
};

/* Bytes of a row's codes in a tile. */
static __host__ __device__ constexpr uint32_t row_bytes(int format)
{
    return dn_tile_codes(format) / DN_TILE_ROWS;
}

/* ---- On the device ---- */

/* Tiles a block packs, side by side: 256 bytes of a row at a time cross the bus better than 64. */
static __host__ __device__ constexpr uint32_t block_tiles(int format)
{
    return 256 / row_bytes(format);
}
enum { ROW_STRIDE = 256 + 16 }; /* in shared memory */

/* Word i of a tile's codes from its rows; words of rows that are not new keep `old`'s bits. */
template <int format>
static __device__ uint32_t packed_word(const uint8_t *rows, uint32_t i, uint32_t first, uint32_t end, uint32_t old)
{
    uint32_t lane = i / 4 % 32, chunk = i / 128, row = lane / 4, k = lane % 4 * 2, word = 0, mask = 0;
    if (format == DN_W_BF16) {
        row += chunk / 8 * 16 + (i & 1) * 8;
        k += chunk % 8 * 16 + (i & 2) * 4;
        word = *(const uint32_t *)(rows + row * ROW_STRIDE + k * 2);
        mask = row >= first && row < end ? ~0u : 0;
    } else if (format == DN_W_INT4) {
        row += chunk / 2 * 16;
        k += chunk % 2 * 64 + i % 4 * 16;
        for (int j = 0; j < 4; j++) {
            uint32_t r = row + (j & 1) * 8, b = rows[r * ROW_STRIDE + k / 2 + (j >> 1) * 4];
            word |= ((b & 15) | (b >> 4) << 16) << (4 * j);
            mask |= r >= first && r < end ? 0x000f000fu << (4 * j) : 0;
        }
    } else {
        row += chunk / 4 * 16;
        k += chunk % 4 * 32 + i / 2 % 2 * 16 + i % 2 * 8;
        for (int b = 0; b < 4; b++) {
            uint32_t r = row + (b & 1) * 8;
            word |= (uint32_t)rows[r * ROW_STRIDE + k + (b >> 1)] << (8 * b);
            mask |= r >= first && r < end ? 0xffu << (8 * b) : 0;
        }
    }
    return (word & mask) | (old & ~mask);
}

/* In the order of the packed scales: i 0..255. */
static __device__ void pack_scales(uint16_t *to, const uint16_t *from, uint32_t i, uint32_t first, uint32_t end,
                                   uint32_t n_tiles)
{
    uint32_t row = i / 64 * 16 + i / 8 % 8 + i % 2 * 8;
    if (row >= first && row < end)
        to[i] = from[(size_t)row * n_tiles * 4 + i / 2 % 4];
}

/* FP8's header; all threads of the block. */
static __device__ void pack_head(uint8_t *head, const uint8_t *rows, uint32_t first, uint32_t end, float scale)
{
    __shared__ uint32_t nan_rows[2];
    __syncthreads();
    if (threadIdx.x < 2)
        nan_rows[threadIdx.x] = 0;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < DN_TILE_ROWS * DN_TILE_K; i += THREADS) {
        uint32_t row = i / DN_TILE_K;
        if ((rows[row * ROW_STRIDE + i % DN_TILE_K] & 0x7f) == 0x7f && row >= first && row < end)
            atomicOr(&nan_rows[row / 32], 1u << row % 32);
    }
    __syncthreads();
    if (threadIdx.x == 0)
        *(uint4 *)head = make_uint4(__float_as_uint(scale), 0, nan_rows[0], nan_rows[1]);
}

template <int format> static __global__ void __launch_bounds__(THREADS) pack_tiles(struct dn_weights w, struct piece p)
{
    __shared__ __align__(16) uint8_t rows[DN_TILE_ROWS * ROW_STRIDE];
    const uint32_t block = blockIdx.y, tile0 = blockIdx.x * block_tiles(format), first_row = block * DN_TILE_ROWS;
    const uint32_t first = p.first > first_row ? p.first - first_row : 0;
    const uint32_t end = min(p.end - first_row, (uint32_t)DN_TILE_ROWS),
                   tiles = min(p.n_tiles - tile0, block_tiles(format));
    const bool whole = first == 0 && end == DN_TILE_ROWS;
    constexpr uint32_t vectors = row_bytes(format) / 16;
    for (uint32_t i = threadIdx.x; i < DN_TILE_ROWS * 16; i += THREADS) {
        size_t row = first_row + i / 16;
        if (i % 16 < tiles * vectors)
            *(uint4 *)(rows + i / 16 * ROW_STRIDE + i % 16 * 16) =
                ((const uint4 *)p.codes)[(row * p.n_tiles + tile0) * vectors + i % 16];
    }
    __syncthreads();
    for (uint32_t tile = tile0; tile < tile0 + tiles; tile++) {
        const uint8_t *in = rows + (tile - tile0) * row_bytes(format);
        uint8_t *out = (uint8_t *)dn_tile(w, p.block0 + block, p.tile0 + tile);
        for (uint32_t i = threadIdx.x; i < dn_tile_codes(format) / 4; i += THREADS)
            ((uint32_t *)out)[i] = packed_word<format>(in, i, first, end, whole ? 0 : ((const uint32_t *)out)[i]);
        if (format == DN_W_INT4 || format == DN_W_INT8) {
            uint16_t *scales = (uint16_t *)(out + dn_tile_codes(format));
            size_t at = ((size_t)first_row * p.n_tiles + tile) * 4;
            pack_scales(scales, p.scales + at, threadIdx.x, first, end, p.n_tiles);
            if (format == DN_W_INT4 && !w.symmetric)
                pack_scales(scales + DN_TILE_SCALES / 2, p.offsets + at, threadIdx.x, first, end, p.n_tiles);
        }
        if (format == DN_W_FP8)
            pack_head(out + dn_tile_codes(format), in, first, end, p.fp8_scales[(size_t)block * p.n_tiles + tile]);
    }
}

/* ---- On the host ---- */

size_t dn_cuda_matrix_bytes(const struct dn_matrix *m)
{
    bool in_groups = m->format == DN_W_INT8 || m->format == DN_W_INT4;
    uint64_t rows = (uint64_t)dn_weights_groups(m) * m->n_out, tiles = ((uint64_t)m->n_in + DN_TILE_K - 1) / DN_TILE_K;
    size_t bytes;
    /* Activations are copied 16 bytes at a time. */
    if (!m->n_out || !m->n_in || m->n_in % (in_groups ? 32 : 8) || rows > UINT32_MAX - DN_TILE_ROWS)
        return 0;
    if (m->n_groups > 1 && m->n_out % (m->format == DN_W_FP8 ? 128 : 64))
        return 0;
    if (__builtin_mul_overflow((rows + DN_TILE_ROWS - 1) / DN_TILE_ROWS, tiles * dn_tile_bytes(m->format, m->symmetric),
                               &bytes))
        return 0;
    return bytes;
}

/* Copies `bytes` and fills up to `padded` with zeros. */
static void put(void *to, const void *from, size_t bytes, size_t padded)
{
    memcpy(to, from, bytes);
    memset((uint8_t *)to + bytes, 0, padded - bytes);
}

/* Lays out and fills a piece in `at`. rows[i] is row row0 + i of the matrix; i0 is the first that the piece has. */
static void fill_piece(const struct dn_matrix *m, struct piece *p, uint8_t *at, const struct dn_rows *rows, uint32_t i0)
{
    const uint32_t stride = row_bytes(m->format), n_rows = p->n_blocks * DN_TILE_ROWS, k0 = p->tile0 * DN_TILE_K;
    const uint32_t width = min(m->n_in - k0, p->n_tiles * DN_TILE_K); /* inputs that exist */
    const size_t row_codes = (size_t)p->n_tiles * stride, codes = (size_t)width * stride / DN_TILE_K;
    const size_t row_scales = (size_t)p->n_tiles * 4 * 2, groups = m->n_in / GROUP, scales = width / GROUP * 2;
    const uint8_t *from = m->format == DN_W_BF16   ? (const uint8_t *)rows->bf16
                          : m->format == DN_W_FP8  ? rows->fp8
                          : m->format == DN_W_INT8 ? (const uint8_t *)rows->q8
                                                   : rows->q4;
    p->codes = at;
    p->scales = (uint16_t *)(at + n_rows * row_codes);
    p->offsets = p->scales + n_rows * row_scales / 2;
    p->fp8_scales = (float *)p->scales;
    for (uint32_t r = 0; r < n_rows; r++) {
        bool exists = r >= p->first && r < p->end &&
                      (uint64_t)p->block0 * DN_TILE_ROWS + r < dn_weights_groups(m) * (uint64_t)m->n_out;
        size_t i = exists ? i0 + (r - p->first) : 0, in = (i * m->n_in + k0) * stride / DN_TILE_K,
               g = i * groups + k0 / GROUP;
        put(p->codes + r * row_codes, from + in, exists ? codes : 0, row_codes);
        if (m->format == DN_W_INT8 || m->format == DN_W_INT4)
            put(p->scales + r * row_scales / 2, rows->scale16 + g, exists ? scales : 0, row_scales);
        if (m->format == DN_W_INT4 && !m->symmetric)
            put(p->offsets + r * row_scales / 2, rows->offset16 + g, exists ? scales : 0, row_scales);
    }
    const size_t across = (m->n_in + FP8_BLOCK - 1) / FP8_BLOCK;
    if (m->format == DN_W_FP8)
        for (uint32_t b = 0; b < p->n_blocks; b++)
            memcpy(p->fp8_scales + (size_t)b * p->n_tiles,
                   rows->block_scale + (i0 + b * DN_TILE_ROWS) / FP8_BLOCK * across + p->tile0,
                   p->n_tiles * sizeof(float));
}

static void launch_pack(struct dn_cuda *c, const struct dn_matrix *m, const struct piece *p, cudaStream_t stream)
{
    struct dn_weights w = dn_weights_of(m);
    const uint32_t tiles = block_tiles(m->format);
    dim3 grid((p->n_tiles + tiles - 1) / tiles, p->n_blocks);
    if (m->format == DN_W_BF16)
        pack_tiles<DN_W_BF16><<<grid, THREADS, 0, stream>>>(w, *p);
    else if (m->format == DN_W_FP8)
        pack_tiles<DN_W_FP8><<<grid, THREADS, 0, stream>>>(w, *p);
    else if (m->format == DN_W_INT8)
        pack_tiles<DN_W_INT8><<<grid, THREADS, 0, stream>>>(w, *p);
    else
        pack_tiles<DN_W_INT4><<<grid, THREADS, 0, stream>>>(w, *p);
    cudaError_t e = cudaGetLastError();
    if (e != cudaSuccess)
        dn_cuda_failed(c, e, "matrix_pack");
}

/* Rows of the matrix's own family. `last`: nothing else goes through the lane before it is put back. */
static void pack_lossless(struct dn_cuda *c, struct dn_cuda_lane *lane, const struct dn_matrix *m, uint32_t row0,
                          uint32_t n, const struct dn_rows *rows, bool last)
{
    /* More than a row of a tile needs in any format, FP8's scale included. */
    const size_t row_tile = row_bytes(m->format) + 16 + 1;
    const uint64_t all_rows = dn_weights_groups(m) * (uint64_t)m->n_out;
    const uint32_t n_tiles = (m->n_in + DN_TILE_K - 1) / DN_TILE_K;
    const uint32_t most = (uint32_t)(DN_CUDA_LANE_BYTES / (row_tile * DN_TILE_ROWS)); /* tiles a piece */
    const uint32_t tiles = n_tiles < most ? n_tiles : most, blocks = most / tiles;
    const bool once =
        last && tiles == n_tiles && row0 / DN_TILE_ROWS + blocks >= (row0 + n + DN_TILE_ROWS - 1) / DN_TILE_ROWS;
    for (uint32_t row = row0; row < row0 + n;) {
        struct piece p = {};
        p.block0 = row / DN_TILE_ROWS;
        uint32_t stop = (p.block0 + blocks) * DN_TILE_ROWS; /* past the piece's last row */
        stop = stop < row0 + n ? stop : row0 + n;
        p.first = row % DN_TILE_ROWS;
        p.end = stop - p.block0 * DN_TILE_ROWS;
        p.n_blocks = (p.end + DN_TILE_ROWS - 1) / DN_TILE_ROWS;
        if (stop == all_rows)
            p.end = p.n_blocks * DN_TILE_ROWS; /* padding */
        for (p.tile0 = 0; p.tile0 < n_tiles; p.tile0 += tiles) {
            p.n_tiles = n_tiles - p.tile0 < tiles ? n_tiles - p.tile0 : tiles;
            fill_piece(m, &p, dn_cuda_lane_buffer(lane), rows, row - row0);
            launch_pack(c, m, &p, dn_cuda_lane_stream(lane));
            /* Nothing to copy: marks the buffer as busy until the kernel is done. put() waits anyway. */
            if (!once)
                dn_cuda_lane_send(lane, m->data, 0);
        }
        row = stop;
    }
}

/* ---- Through f32 ---- */

/* Row i of `rows` as f32, by the rules of the CPU backend. */
static void row_to_f32(const struct dn_matrix *m, const struct dn_rows *rows, size_t i, float *out)
{
    size_t n_in = m->n_in, at = i * n_in;
    bool is_bf16 = m->scale_is_bf16;
    for (size_t k = 0; k < n_in; k++) {
        size_t group = (at + k) / GROUP;
        if (rows->f32) {
            out[k] = rows->f32[at + k];
        } else if (rows->bf16) {
            out[k] = dn_bf16_to_f32(rows->bf16[at + k]);
        } else if (rows->q8) {
            out[k] = (float)rows->q8[at + k] * dn_scale16_to_f32(rows->scale16[group], is_bf16);
        } else if (rows->q4) {
            int q = rows->q4[(at + k) / 2] >> (k % 2 * 4) & 15;
            float s = dn_scale16_to_f32(rows->scale16[group], is_bf16);
            out[k] =
                rows->offset16 ? (float)q * s + dn_scale16_to_f32(rows->offset16[group], is_bf16) : (float)(q - 8) * s;
        } else {
            size_t across = (n_in + FP8_BLOCK - 1) / FP8_BLOCK;
            out[k] = dn_e4m3_to_f32(rows->fp8[at + k]) * rows->block_scale[i / FP8_BLOCK * across + k / FP8_BLOCK];
        }
    }
}

/* Up to 128 rows rounded to the matrix's family. */
struct rounded {
    float *f32;     /* [rows][n_in] */
    uint8_t *codes; /* BF16, FP8, INT8: [rows][n_in]; INT4: [rows][n_in / 2] */
    uint16_t *scale, *offset;
    float *block;
    struct dn_rows rows;
};

static void rounded_release(struct rounded *r)
{
    free(r->f32);
    free(r->codes);
    free(r->scale);
    free(r->offset);
    free(r->block);
}

static bool rounded_init(struct rounded *r, const struct dn_matrix *m)
{
    size_t n = (size_t)FP8_BLOCK * m->n_in;
    memset(r, 0, sizeof *r);
    r->f32 = (float *)malloc(n * sizeof *r->f32);
    r->codes = (uint8_t *)malloc(n * 2);
    r->scale = (uint16_t *)malloc((n / GROUP + 1) * sizeof *r->scale);
    r->offset = (uint16_t *)malloc((n / GROUP + 1) * sizeof *r->offset);
    r->block = (float *)malloc((m->n_in / FP8_BLOCK + 1) * sizeof *r->block);
    if (r->f32 && r->codes && r->scale && r->offset && r->block)
        return true;
    rounded_release(r);
    return false;
}

static void round_groups(struct rounded *r, const struct dn_matrix *m, size_t n_groups)
{
    for (size_t g = 0; g < n_groups; g++) {
        const float *x = r->f32 + g * GROUP;
        uint8_t q[GROUP];
        if (m->format == DN_W_INT8) {
            dn_quantise_int8(x, m->scale_is_bf16, (int8_t *)r->codes + g * GROUP, &r->scale[g]);
            continue;
        }
        if (m->symmetric)
            dn_quantise_int4_sym(x, m->scale_is_bf16, q, &r->scale[g]);
        else
            dn_quantise_int4(x, m->scale_is_bf16, q, &r->scale[g], &r->offset[g]);
        for (int i = 0; i < GROUP / 2; i++)
            r->codes[g * (GROUP / 2) + i] = (uint8_t)(q[2 * i] | q[2 * i + 1] << 4);
    }
}

static void round_fp8(struct rounded *r, const struct dn_matrix *m, uint32_t n)
{
    for (uint32_t k0 = 0; k0 < m->n_in; k0 += FP8_BLOCK) {
        uint32_t width = m->n_in - k0 < FP8_BLOCK ? m->n_in - k0 : (uint32_t)FP8_BLOCK;
        float top = 0;
        for (uint32_t i = 0; i < n; i++) {
            float t = dn_largest_finite(r->f32 + (size_t)i * m->n_in + k0, width);
            top = t > top ? t : top;
        }
        float scale = r->block[k0 / FP8_BLOCK] = dn_fp8_scale(top);
        for (uint32_t i = 0; i < n; i++)
            for (size_t at = (size_t)i * m->n_in + k0; at < (size_t)i * m->n_in + k0 + width; at++)
                r->codes[at] = dn_quantise_fp8(r->f32[at], scale);
    }
}

static void round_rows(struct rounded *r, const struct dn_matrix *m, const struct dn_rows *rows, uint32_t i0,
                       uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        row_to_f32(m, rows, i0 + i, r->f32 + (size_t)i * m->n_in);
    memset(&r->rows, 0, sizeof r->rows);
    switch (m->format) {
    case DN_W_BF16:
        for (size_t i = 0; i < (size_t)n * m->n_in; i++)
            ((uint16_t *)r->codes)[i] = dn_f32_to_bf16(r->f32[i]);
        r->rows.bf16 = (const uint16_t *)r->codes;
        break;
    case DN_W_FP8:
        round_fp8(r, m, n);
        r->rows.fp8 = r->codes;
        r->rows.block_scale = r->block;
        break;
    default:
        round_groups(r, m, (size_t)n * (m->n_in / GROUP));
        r->rows.q8 = m->format == DN_W_INT8 ? (const int8_t *)r->codes : NULL;
        r->rows.q4 = m->format == DN_W_INT4 ? r->codes : NULL;
        r->rows.scale16 = r->scale;
        r->rows.offset16 = m->format == DN_W_INT4 && !m->symmetric ? r->offset : NULL;
    }
}

int dn_cuda_matrix_pack(struct dn_device *d, struct dn_matrix *m, uint32_t row0, uint32_t n, const struct dn_rows *rows)
{
    struct dn_cuda *c = dn_cuda(d);
    size_t bytes = dn_cuda_matrix_bytes(m);
    uint64_t n_rows = dn_weights_groups(m) * (uint64_t)m->n_out;
    if (!bytes || m->bytes != bytes || !m->data || row0 > n_rows || n > n_rows - row0 || !dn_rows_are_complete(rows, m->n_in))
        return -DN_INVALID_VALUE;
    if ((m->format == DN_W_FP8 || rows->fp8) && (row0 % FP8_BLOCK || (n % FP8_BLOCK && row0 + n != n_rows)))
        return -DN_INVALID_VALUE;
    struct dn_cuda_lane *lane = dn_cuda_lane_take(c);
    if (!lane)
        return -DN_NO_MEMORY;
    int ret = 0;
    if (dn_rows_are_lossless(m, rows)) {
        pack_lossless(c, lane, m, row0, n, rows, true);
    } else {
        struct rounded r;
        ret = rounded_init(&r, m) ? 0 : -DN_NO_MEMORY;
        for (uint32_t i = 0; i < n && ret == 0; i += FP8_BLOCK) {
            uint32_t now = n - i < FP8_BLOCK ? n - i : (uint32_t)FP8_BLOCK;
            round_rows(&r, m, rows, i, now);
            pack_lossless(c, lane, m, row0 + i, now, &r.rows, false); /* has left r.rows behind: pieces are copies */
        }
        if (ret == 0)
            rounded_release(&r);
    }
    dn_cuda_lane_put(lane);
    return ret == 0 && c->failed ? -DN_INTERNAL : ret;
}
