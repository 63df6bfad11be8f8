// Kernels for training and sampling in bf16 on CPUs with AVX-512 bf16, with products by AMX where the CPU has it.
// native.py compiles this file and calls it. It defines ROWS, TERMS, MASSES and FOR_HEAD_SIZES: sizes that both use.
//
// Every function computes each row of its input on its own, in an order that depends neither on the other rows nor on
// the number of threads. So a token has the same bits alone or in any batch, and the sampler's are the trainer's.
// Products and sums are float32. Strides count elements. OpenMP comes from PyTorch's own library.

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef uint16_t bf16;
typedef enum { NARROW, WIDE, ADD } Result;  // of a product: bf16, float32, or added to float32

enum { LANES = 16, COLUMNS = 16 };  // floats per register; columns of a block of `product`
_Static_assert(ROWS % LANES == 0 && ROWS <= 4 * LANES, "a block of `product` has one to four registers of rows");
_Static_assert(MASSES % LANES == 0, "`draw` adds up whole registers");

// ---- one register ----

static inline __mmask16 first(int64_t count) { return count >= LANES ? 0xffff : (__mmask16)((1u << count) - 1); }

static inline __m512 widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

static inline __m512 load_bf16(const bf16 *x, __mmask16 mask) { return widen(_mm256_maskz_loadu_epi16(mask, x)); }

static inline void store_bf16(bf16 *out, __m512 x, __mmask16 mask) {
    _mm256_mask_storeu_epi16(out, mask, (__m256i)_mm512_cvtneps_pbh(x));
}

// exp(x) = 2^n exp(r) with |r| <= ln(2) / 2, and Taylor's polynomial of degree 7 for exp(r): the error is below 2 ulp.
static inline __m512 exponential(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-104.0f));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);  // ln(2) in two parts, the first one exact
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    static const float factors[] = {1 / 720.0f, 1 / 120.0f, 1 / 24.0f, 1 / 6.0f, 0.5f, 1.0f, 1.0f};
    __m512 sum = _mm512_set1_ps(1 / 5040.0f);
    for (int i = 0; i < 7; i++) sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(factors[i]));
    return _mm512_scalef_ps(sum, n);
}

// Transpose 16 rows of 16 values of 32 bits.
static inline void transpose(__m512i x[16]) {
    __m512i y[16];
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int half = 0; half < 2; half++) {
            x[i + 2 * half] = _mm512_unpacklo_epi64(y[i + half], y[i + half + 2]);
            x[i + 2 * half + 1] = _mm512_unpackhi_epi64(y[i + half], y[i + half + 2]);
        }
    for (int i = 0; i < 4; i++)
        for (int half = 0; half < 2; half++) {
            y[8 * half + i] = _mm512_shuffle_i32x4(x[8 * half + i], x[8 * half + i + 4], 0x88);
            y[8 * half + i + 4] = _mm512_shuffle_i32x4(x[8 * half + i], x[8 * half + i + 4], 0xdd);
        }
    for (int i = 0; i < 4; i++) {
        x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
        x[i + 4] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0x88);
        x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
        x[i + 12] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0xdd);
    }
}

// ---- input @ weight.T ----

// Pack up to ROWS rows so that each register holds one pair of neighboring terms of 16 rows: [pairs, ROWS].
static void pack_rows(const bf16 *input, int64_t stride, int64_t rows, int64_t pairs, uint32_t *packed) {
    for (int64_t row = 0; row < rows; row += 16)
        for (int64_t pair = 0; pair < pairs; pair += 16) {
            __m512i block[16];
            for (int i = 0; i < 16; i++) {
                const __mmask16 mask = row + i < rows ? first(pairs - pair) : 0;
                block[i] = _mm512_maskz_loadu_epi32(mask, input + (row + i) * stride + 2 * pair);
            }
            transpose(block);
            for (int i = 0; i < 16 && pair + i < pairs; i++)
                _mm512_storeu_si512(packed + (pair + i) * ROWS + row, block[i]);
        }
}

// Multiply 16 * `registers` packed rows with `count` rows of the weight; its last row is `last` rows further on. The
// terms are added in order, two at a time. Meanwhile the rows of the weight that come next are fetched.
static inline __attribute__((always_inline)) void multiply(
    const uint32_t *packed, const bf16 *weight, int64_t last, int64_t pairs, const int registers, const int count,
    float *out
) {
    const int32_t *columns[COLUMNS];
    __m512 sums[COLUMNS];
    for (int c = 0; c < count; c++) columns[c] = (const int32_t *)weight + (c < last ? c : last) * pairs;
    for (int i = 0; i < count * registers; i++) sums[i] = _mm512_setzero_ps();
    for (int64_t pair = 0; pair < pairs; pair++) {
        __m512bh rows[4];
        for (int r = 0; r < registers; r++) rows[r] = (__m512bh)_mm512_loadu_si512(packed + pair * ROWS + r * LANES);
        for (int c = 0; c < count; c++) {
            const __m512bh both = (__m512bh)_mm512_set1_epi32(columns[c][pair]);
            for (int r = 0; r < registers; r++)
                sums[c * registers + r] = _mm512_dpbf16_ps(sums[c * registers + r], rows[r], both);
        }
        if (pair % (16 / count) == 0) _mm_prefetch((const char *)(columns[0] + count * (pairs + pair)), _MM_HINT_T0);
    }
    for (int c = 0; c < count; c++)
        for (int r = 0; r < registers; r++) _mm512_storeu_ps(out + c * ROWS + r * LANES, sums[c * registers + r]);
}

// Compute 16 columns of the result, in as many steps as keep all sums in registers.
static void sixteen_columns(
    const uint32_t *packed, const bf16 *weight, int64_t last, int64_t pairs, int registers, float *out
) {
    const int64_t step = 2 * pairs;
    if (registers == 1) multiply(packed, weight, last, pairs, 1, 16, out);
    else if (registers == 2)
        for (int c = 0; c < COLUMNS; c += 8) multiply(packed, weight + c * step, last - c, pairs, 2, 8, out + c * ROWS);
    else if (registers == 3)
        for (int c = 0; c < COLUMNS; c += 4) multiply(packed, weight + c * step, last - c, pairs, 3, 4, out + c * ROWS);
    else
        for (int c = 0; c < COLUMNS; c += 4) multiply(packed, weight + c * step, last - c, pairs, 4, 4, out + c * ROWS);
}

// ---- the same with AMX, whose registers are tiles of 16 rows ----

// Rows, pairs of terms and bytes per row of a tile; columns that are computed at once.
enum { TILE = 16, TILE_PAIRS = TERMS / 2, TILE_BYTES = 2 * TERMS, WIDTH = 2 * TILE };

static int has_tiles;  // whether Linux lets this process use tiles

#ifdef __AMX_BF16__

// Ask Linux for the use of tiles, for all threads of the process. Return whether they can be used.
int allow_tiles(void) {
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    has_tiles = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return has_tiles;
}

// Every thread describes its tiles before it uses them.
static void describe_tiles(void) {
    struct { uint8_t palette, start, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; } shape = {.palette = 1};
    for (int i = 0; i < 8; i++) shape.bytes[i] = TILE_BYTES, shape.rows[i] = TILE;
    _tile_loadconfig(&shape);
}

static void forget_tiles(void) { _tile_release(); }

// Multiply 16 * `down` packed rows with 32 rows of the weight. Tiles 0 to 3 are sums, 4 and 5 rows of the weight, 6 and
// 7 packed rows. If `fetches`, fetch the 32 rows of the weight that come next.
static inline __attribute__((always_inline)) void multiply_tiles(
    const uint32_t *packed, const bf16 *weight, int64_t pairs, const int down, const int fetches, float *out
) {
    const int64_t stride = pairs * (int64_t)sizeof(uint32_t), row = ROWS * sizeof(uint32_t);
    const char *next = (const char *)(weight + 2 * WIDTH * pairs);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t pair = 0; pair < pairs; pair += TILE_PAIRS) {
        for (int i = 0; fetches && i < WIDTH; i++, next += TILE_BYTES) _mm_prefetch(next, _MM_HINT_T1);
        _tile_loadd(4, weight + 2 * pair, stride);
        _tile_loadd(6, packed + pair * ROWS, row);
        _tile_loadd(5, weight + 2 * (TILE * pairs + pair), stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
        if (down == 1) continue;
        _tile_loadd(7, packed + pair * ROWS + TILE, row);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out, row);
    _tile_stored(2, out + TILE * ROWS, row);
    if (down == 1) return;
    _tile_stored(1, out + TILE, row);
    _tile_stored(3, out + TILE * ROWS + TILE, row);
}

// Compute 32 columns of the result, for 16 * `registers` rows.
static void two_tiles(const uint32_t *packed, const bf16 *weight, int64_t pairs, int registers, int fetches, float *out) {
    if (registers == 1) multiply_tiles(packed, weight, pairs, 1, fetches, out);
    else multiply_tiles(packed, weight, pairs, 2, fetches, out);
    if (registers == 3) multiply_tiles(packed + 2 * TILE, weight, pairs, 1, 0, out + 2 * TILE);
    if (registers == 4) multiply_tiles(packed + 2 * TILE, weight, pairs, 2, 0, out + 2 * TILE);
}

#else

int allow_tiles(void) { return 0; }
static void describe_tiles(void) {}
static void forget_tiles(void) {}
static void two_tiles(const uint32_t *packed, const bf16 *weight, int64_t pairs, int registers, int fetches, float *out) {}

#endif

// Store 16 columns of up to ROWS rows of the result.
static void store_columns(
    const float *sums, __m512 bias, Result kind, void *out, int64_t row, int64_t rows, int64_t outputs, int64_t column
) {
    const __mmask16 mask = first(outputs - column);
    for (int64_t start = 0; start < rows; start += LANES) {
        __m512i tile[16];
        for (int i = 0; i < 16; i++) tile[i] = _mm512_loadu_si512(sums + i * ROWS + start);
        transpose(tile);
        for (int64_t i = 0; i < 16 && start + i < rows; i++) {
            const int64_t place = (row + start + i) * outputs + column;
            float *wide = (float *)out + place;
            __m512 sum = _mm512_add_ps((__m512)tile[i], bias);
            if (kind == ADD) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, wide));
            if (kind == NARROW) store_bf16((bf16 *)out + place, sum, mask);
            else _mm512_mask_storeu_ps(wide, mask, sum);
        }
    }
}

// out[rows, outputs] = input[rows, terms] @ weight[outputs, terms].T + bias, or += without a bias.
// The number of terms is even. `packed` has room for ROWS * terms / 2 pairs per ROWS rows.
void product(
    const bf16 *input, int64_t stride, const bf16 *weight, const bf16 *bias, void *out, Result kind, uint32_t *packed,
    int64_t rows, int64_t outputs, int64_t terms
) {
    const int64_t pairs = terms / 2, blocks = (rows + ROWS - 1) / ROWS;
    const int is_tiled = has_tiles && pairs % TILE_PAIRS == 0 && outputs >= WIDTH;  // the same for every row
    const int64_t width = is_tiled ? WIDTH : COLUMNS;
    // Columns that a thread computes for one block of rows before the next. With many blocks, more share one read.
    const int64_t group = blocks > 1 ? 4 * width : width, groups = (outputs + group - 1) / group;
#pragma omp parallel
    {
        if (is_tiled) describe_tiles();
#pragma omp for schedule(static)
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t row = block * ROWS, here = rows - row < ROWS ? rows - row : ROWS;
            pack_rows(input + row * stride, stride, here, pairs, packed + row * pairs);
        }
#pragma omp for schedule(static)
        for (int64_t at = 0; at < groups; at++)
            for (int64_t row = 0; row < rows; row += ROWS)
                for (int64_t column = at * group; column < (at + 1) * group && column < outputs; column += width) {
                    const int64_t here = rows - row < ROWS ? rows - row : ROWS;
                    const int registers = (int)((here + LANES - 1) / LANES);
                    float sums[(WIDTH + COLUMNS) * ROWS];
                    // The last tiles end with the last row of the weight, so some of their columns come a second time.
                    const int64_t begin = is_tiled && column + WIDTH > outputs ? outputs - WIDTH : column;
                    const bf16 *from = weight + begin * terms;
                    if (is_tiled) two_tiles(packed + row * pairs, from, pairs, registers, row == 0, sums);
                    else sixteen_columns(packed + row * pairs, from, outputs - 1 - column, pairs, registers, sums);
                    for (int64_t c = column; c < column + width && c < outputs; c += COLUMNS) {
                        const __m512 offset = bias ? load_bf16(bias + c, first(outputs - c)) : _mm512_setzero_ps();
                        store_columns(sums + (c - begin) * ROWS, offset, kind, out, row, here, outputs, c);
                    }
                }
        if (is_tiled) forget_tiles();
    }
}

// ---- row by row ----

// Add `delta`, unless it is null, to the residual stream, and normalize: the total, 1 / rms, and the normed rows.
void add_rms_norm(
    const float *residual, const bf16 *delta, const bf16 *weight, float eps, bf16 *normed, float *total, float *rstd,
    int64_t rows, int64_t width
) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const float *in = residual + row * width;
        float *sums = delta ? total + row * width : (float *)in;
        __m512 squares = _mm512_setzero_ps();
        for (int64_t i = 0; i < width; i += LANES) {
            const __mmask16 mask = first(width - i);
            __m512 x = _mm512_maskz_loadu_ps(mask, in + i);
            if (delta) {
                x = _mm512_add_ps(x, load_bf16(delta + row * width + i, mask));
                _mm512_mask_storeu_ps(sums + i, mask, x);
            }
            squares = _mm512_fmadd_ps(x, x, squares);
        }
        const float scale = 1.0f / sqrtf(_mm512_reduce_add_ps(squares) / (float)width + eps);
        rstd[row] = scale;
        for (int64_t i = 0; i < width; i += LANES) {
            const __mmask16 mask = first(width - i);
            const __m512 x = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, sums + i), _mm512_set1_ps(scale));
            store_bf16(normed + row * width + i, _mm512_mul_ps(x, load_bf16(weight + i, mask)), mask);
        }
    }
}

// out = silu(gate) * up, where gate and up are the halves of each row.
void swiglu(const bf16 *gate_up, bf16 *out, int64_t rows, int64_t width) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < width; i += LANES) {
            const __mmask16 mask = first(width - i);
            const __m512 gate = load_bf16(gate_up + 2 * row * width + i, mask);
            const __m512 up = load_bf16(gate_up + (2 * row + 1) * width + i, mask);
            const __m512 one = _mm512_set1_ps(1.0f);
            const __m512 below = _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), gate)));
            store_bf16(out + row * width + i, _mm512_mul_ps(_mm512_div_ps(gate, below), up), mask);
        }
}

// Normalize each head by the root mean square of its `dim` values, times the weight of queries or keys.
static void normalize_head(const bf16 *in, const bf16 *weight, float eps, bf16 *out, int64_t dim) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < dim; i += LANES) {
        const __m512 x = load_bf16(in + i, first(dim - i));
        squares = _mm512_fmadd_ps(x, x, squares);
    }
    const __m512 scale = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(squares) / (float)dim + eps));
    for (int64_t i = 0; i < dim; i += LANES) {
        const __mmask16 mask = first(dim - i);
        const __m512 x = _mm512_mul_ps(load_bf16(in + i, mask), scale);
        store_bf16(out + i, _mm512_mul_ps(x, load_bf16(weight + i, mask)), mask);
    }
}

// Write the query and key heads of each row of `qkv` to `out`, which may be `qkv`: normed if there are weights, rotated
// if there is a table, which holds cosines, then sines, of each position.
void rotate(
    const bf16 *qkv, int64_t stride, bf16 *out, int64_t out_stride, const int64_t *positions, const float *table,
    const bf16 *query_norm, const bf16 *key_norm, float eps, int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim
) {
    const int64_t half = dim / 2;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads + kv_heads; head++) {
            const bf16 *in = qkv + row * stride + head * dim;
            bf16 *left = out + row * out_stride + head * dim, *right = left + half;
            if (query_norm) normalize_head(in, head < heads ? query_norm : key_norm, eps, left, dim);
            else if (left != in) memcpy(left, in, (size_t)dim * sizeof(bf16));
            for (int64_t i = 0; table && i < half; i += LANES) {
                const __mmask16 mask = first(half - i);
                const float *angle = table + positions[row] * dim + i;
                const __m512 cosine = _mm512_maskz_loadu_ps(mask, angle);
                const __m512 sine = _mm512_maskz_loadu_ps(mask, angle + half);
                const __m512 a = load_bf16(left + i, mask), b = load_bf16(right + i, mask);
                store_bf16(left + i, _mm512_fmsub_ps(a, cosine, _mm512_mul_ps(b, sine)), mask);
                store_bf16(right + i, _mm512_fmadd_ps(b, cosine, _mm512_mul_ps(a, sine)), mask);
            }
        }
}

// Round to bf16, up or down by a hash of the element's index (rounding.py), plus the base if there is one.
void round_dithered(const float *wide, const bf16 *base, bf16 *out, int64_t count) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < count; i++) {
        union { float value; uint32_t bits; } x = {wide[i]}, b;
        if (base) {
            b.bits = (uint32_t)base[i] << 16;
            x.value = wide[i] == 0 ? b.value : b.value + wide[i];  // -0.0 + 0.0 would be 0.0
        }
        uint32_t hash = (uint32_t)i;
        hash = (hash ^ hash >> 16) * 0x7feb352dU;
        hash = (hash ^ hash >> 15) * 0x846ca68bU;
        hash = (hash ^ hash >> 16) & 0xffff;
        out[i] = (bf16)((x.value != x.value ? x.bits | 0x400000 : x.bits + hash) >> 16);
    }
}

// ---- attention ----

// Tokens that queries attend to: for query t, `counts[t]` tokens from element `starts[t]` on.
typedef struct {
    const bf16 *keys, *values;
    const int64_t *starts, *counts;
    int64_t token_stride, head_stride;
} Source;

// Load 32 numbers from place 32 * i of a head, or the last 16 of a head of an odd multiple of 16, followed by zeros.
static inline __attribute__((always_inline)) __m512bh load_pairs(const bf16 *head, int i, const int dim) {
    if (32 * i + 32 <= dim) return (__m512bh)_mm512_loadu_si512(head + 32 * i);
    return (__m512bh)_mm512_maskz_loadu_epi16(0xffff, head + 32 * i);
}

// scores[g, t] = query[g] . keys[t]
static inline __attribute__((always_inline)) void score(
    const bf16 *query, const bf16 *keys, int64_t stride, int64_t count, float *scores, int64_t width, int64_t groups,
    const int dim
) {
    for (int64_t g = 0; g < groups; g++) {
        __m512bh q[8];
        for (int i = 0; 32 * i < dim; i++) q[i] = load_pairs(query + g * dim, i, dim);
        for (int64_t t = 0; t < count; t++) {
            __m512 sum = _mm512_setzero_ps();
            for (int i = 0; 32 * i < dim; i++)
                sum = _mm512_dpbf16_ps(sum, q[i], load_pairs(keys + t * stride, i, dim));
            scores[g * width + t] = _mm512_reduce_add_ps(sum);
        }
    }
}

// sums[dim] += weights[t] * values[t], token by token
static inline __attribute__((always_inline)) void add_values(
    __m512 *sums, const float *weights, const bf16 *values, int64_t stride, int64_t count, const int dim
) {
    for (int64_t t = 0; t < count; t++) {
        const __m512 weight = _mm512_set1_ps(weights[t]);
        for (int i = 0; i < dim / LANES; i++)
            sums[i] = _mm512_fmadd_ps(weight, load_bf16(values + t * stride + LANES * i, 0xffff), sums[i]);
    }
}

// Attend with the `groups` query heads that share key head `head`. How the tokens divide into the two sources changes
// no bit: scores are computed one by one, their sum in 16 lanes by place, and values are added token by token.
static inline __attribute__((always_inline)) void attend(
    const bf16 *query, const Source *sources, int64_t token, int64_t head, float scale, int64_t groups, float *scores,
    bf16 *out, const int dim
) {
    const int64_t width = sources[0].counts[token] + sources[1].counts[token];
    float *place = scores;
    for (const Source *s = sources; s < sources + 2; place += s++->counts[token]) {
        const bf16 *keys = s->keys + s->starts[token] + head * s->head_stride;
        score(query, keys, s->token_stride, s->counts[token], place, width, groups, dim);
    }
    for (int64_t g = 0; g < groups; g++) {
        float *weights = scores + g * width;
        __m512 peaks = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps(), sums[16];
        for (int64_t t = 0; t < width; t += LANES) {
            const __mmask16 mask = first(width - t);
            peaks = _mm512_mask_max_ps(peaks, mask, peaks, _mm512_maskz_loadu_ps(mask, weights + t));
        }
        const __m512 peak = _mm512_set1_ps(_mm512_reduce_max_ps(peaks));
        for (int64_t t = 0; t < width; t += LANES) {
            const __mmask16 mask = first(width - t);
            const __m512 below = _mm512_sub_ps(_mm512_maskz_loadu_ps(mask, weights + t), peak);
            const __m512 mass = exponential(_mm512_mul_ps(below, _mm512_set1_ps(scale)));
            total = _mm512_mask_add_ps(total, mask, total, mass);
            _mm512_mask_storeu_ps(weights + t, mask, mass);
        }
        for (int i = 0; i < dim / LANES; i++) sums[i] = _mm512_setzero_ps();
        for (const Source *s = sources; s < sources + 2; weights += s++->counts[token]) {
            const bf16 *values = s->values + s->starts[token] + head * s->head_stride;
            add_values(sums, weights, values, s->token_stride, s->counts[token], dim);
        }
        const __m512 share = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(total));
        for (int i = 0; i < dim / LANES; i++)
            store_bf16(out + g * dim + LANES * i, _mm512_mul_ps(sums[i], share), 0xffff);
    }
}

#define ATTEND(size)                                                                             \
    case size: {                                                                                 \
        _Static_assert(size % 16 == 0 && size <= 256, "`attend` has registers for 256 numbers"); \
        attend(q, sources, t, head, scale, groups, scores, result, size);                        \
        break;                                                                                   \
    }

// Attend with each query [tokens, heads, dim] to the tokens of both sources, at most `longest` in total.
// Return 0 if there is no memory for the scores, else 1.
int attention(
    const bf16 *query, int64_t query_stride, const Source *sources, int64_t longest, float scale, bf16 *out,
    int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim
) {
    const int64_t groups = heads / kv_heads;
    int is_done = 1;
#pragma omp parallel reduction(&& : is_done)
    {
        float *scores = malloc(sizeof(float) * (size_t)(groups * longest));
        is_done = scores != NULL;
#pragma omp for schedule(dynamic, 8) collapse(2)
        for (int64_t head = 0; head < kv_heads; head++)
            for (int64_t t = 0; t < tokens; t++) {
                const bf16 *q = query + t * query_stride + head * groups * dim;
                bf16 *result = out + (t * heads + head * groups) * dim;
                if (!scores) continue;
                switch (dim) { FOR_HEAD_SIZES(ATTEND) }
            }
        free(scores);
    }
    return is_done;
}

// Copy keys and values [tokens, kv_heads, dim] into a cache, token t to element `places[t]`.
void store(
    const bf16 *key, const bf16 *value, int64_t stride, bf16 *keys, bf16 *values, const int64_t *places,
    int64_t head_stride, int64_t tokens, int64_t kv_heads, int64_t dim
) {
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t head = 0; head < kv_heads; head++) {
            const int64_t from = t * stride + head * dim, to = places[t] + head * head_stride;
            memcpy(keys + to, key + from, (size_t)dim * sizeof(bf16));
            memcpy(values + to, value + from, (size_t)dim * sizeof(bf16));
        }
}

// ---- the next token ----

// exp((logit - peak) / temperature) of up to 16 tokens from `start` on; 0 beyond the vocabulary
static inline __m512 masses(const float *logits, __m512 peak, __m512 heat, int64_t start, int64_t end) {
    const __mmask16 mask = start < end ? first(end - start) : 0;
    const __m512 below = _mm512_sub_ps(_mm512_maskz_loadu_ps(mask, logits + start), peak);
    return _mm512_maskz_mov_ps(mask, exponential(_mm512_div_ps(below, heat)));
}

// Draw one token per row: the first one whose cumulative probability exceeds the row's uniform number.
// `blocks` has room for one double per MASSES tokens and row.
void draw(
    const float *logits, const double *uniforms, float temperature, double *blocks, int64_t *tokens, float *logprobs,
    int64_t rows, int64_t vocabulary
) {
    const int64_t count = (vocabulary + MASSES - 1) / MASSES;
    const __m512 heat = _mm512_set1_ps(temperature);
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const float *in = logits + row * vocabulary;
        double *sums = blocks + row * count;
        __m512 peaks = _mm512_set1_ps(-INFINITY);
        __mmask16 nans = 0;  // a maximum forgets them
        for (int64_t i = 0; i < vocabulary; i += LANES) {
            const __mmask16 mask = first(vocabulary - i);
            const __m512 here = _mm512_maskz_loadu_ps(mask, in + i);
            nans |= _mm512_cmp_ps_mask(here, here, _CMP_UNORD_Q);
            peaks = _mm512_mask_max_ps(peaks, mask, peaks, here);
        }
        if (nans) {
            tokens[row] = 0, logprobs[row] = NAN;
            continue;
        }
        const float highest = _mm512_reduce_max_ps(peaks);
        const __m512 peak = _mm512_set1_ps(highest);
        double total = 0;
        for (int64_t block = 0; block < count; block++) {
            __m512 sum = _mm512_setzero_ps();
            for (int64_t i = block * MASSES; i < (block + 1) * MASSES; i += LANES)
                sum = _mm512_add_ps(sum, masses(in, peak, heat, i, vocabulary));
            sums[block] = (double)_mm512_reduce_add_ps(sum);
            total += sums[block];
        }
        // Find the block, then the token in it. Rounding may leave the target unreached: then the last token counts
        // that has any probability.
        double before = 0, target = uniforms[row] * total;
        int64_t token = -1;
        for (int64_t block = 0; block < count && before <= target; before += sums[block++]) {
            if (before + sums[block] <= target && block + 1 < count) continue;
            double inside = before;
            for (int64_t i = block * MASSES; i < (block + 1) * MASSES && inside <= target; i += LANES) {
                float mass[LANES];
                _mm512_storeu_ps(mass, masses(in, peak, heat, i, vocabulary));
                for (int lane = 0; lane < LANES && inside <= target; lane++)
                    if (mass[lane] > 0) {
                        inside += (double)mass[lane];
                        token = i + lane;
                    }
            }
            if (inside > target) break;
        }
        tokens[row] = token < 0 ? 0 : token;  // there is none if a logit is infinite
        const double below = ((double)in[tokens[row]] - (double)highest) / (double)temperature;
        logprobs[row] = token < 0 ? NAN : (float)(below - log(total));
    }
}
