// Kernels for training and sampling on CPUs with AVX-512, in float32, and in bf16 where the CPU has instructions for it.
// native.py compiles this file once for each type, for bf16 with BF16 defined, and calls it. It also defines ROWS,
// TERMS, MASSES and FOR_HEAD_SIZES: sizes that both use.
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

typedef enum { NARROW, WIDE, ADD } Result;  // of a product: a `number`, float32, or added to float32

enum { LANES = 16, COLUMNS = 16 };  // floats per register; columns of a block of `product`
_Static_assert(ROWS % LANES == 0 && ROWS <= 4 * LANES, "a block of `product` has one to four registers of rows");
_Static_assert(MASSES % LANES == 0, "`draw` adds up whole registers");

// ---- one register ----

static inline __mmask16 first(int64_t count) { return count >= LANES ? 0xffff : (__mmask16)((1u << count) - 1); }

// A `number` is an element of weights and activations. A unit is what a lane multiplies at once: two neighboring bf16
// numbers, or one float32 number. Both have 32 bits.
#ifdef BF16

typedef uint16_t number;
typedef __m512bh Units;
enum { PER_UNIT = 2 };

static inline __m512 widen(const number *x, __mmask16 mask) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, x)), 16));
}

static inline void narrow(number *out, __m512 x, __mmask16 mask) {
    _mm256_mask_storeu_epi16(out, mask, (__m256i)_mm512_cvtneps_pbh(x));
}

static inline __m512 multiply_add(__m512 sum, Units a, Units b) { return _mm512_dpbf16_ps(sum, a, b); }

#else

typedef float number;
typedef __m512 Units;
enum { PER_UNIT = 1 };

static inline __m512 widen(const number *x, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, x); }
static inline void narrow(number *out, __m512 x, __mmask16 mask) { _mm512_mask_storeu_ps(out, mask, x); }
static inline __m512 multiply_add(__m512 sum, Units a, Units b) { return _mm512_fmadd_ps(a, b, sum); }

#endif

enum { NUMBERS = LANES * PER_UNIT };  // in a register of units

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

// Pack up to ROWS rows so that each register holds one unit of 16 rows: [units, ROWS].
static void pack_rows(const number *input, int64_t stride, int64_t rows, int64_t units, uint32_t *packed) {
    for (int64_t row = 0; row < rows; row += 16)
        for (int64_t unit = 0; unit < units; unit += 16) {
            __m512i block[16];
            for (int i = 0; i < 16; i++) {
                const __mmask16 mask = row + i < rows ? first(units - unit) : 0;
                block[i] = _mm512_maskz_loadu_epi32(mask, input + (row + i) * stride + PER_UNIT * unit);
            }
            transpose(block);
            for (int i = 0; i < 16 && unit + i < units; i++)
                _mm512_storeu_si512(packed + (unit + i) * ROWS + row, block[i]);
        }
}

// Rows whose units are read one by one. Row i begins at i * step.
typedef struct { const uint32_t *units; int64_t step; } Lines;

// Multiply 16 * `registers` packed rows with `count` lines; the last line of the matrix is `last` lines further on. The
// terms are added in order, a unit at a time. Meanwhile the lines that come next are fetched.
static inline __attribute__((always_inline)) void multiply(
    const uint32_t *packed, Lines lines, int64_t last, int64_t units, const int registers, const int count, float *out
) {
    const uint32_t *line[COLUMNS];
    __m512 sums[COLUMNS];
    for (int c = 0; c < count; c++) line[c] = lines.units + (c < last ? c : last) * lines.step;
    for (int i = 0; i < count * registers; i++) sums[i] = _mm512_setzero_ps();
    for (int64_t unit = 0; unit < units; unit++) {
        Units rows[4];
        for (int r = 0; r < registers; r++) {
            rows[r] = (Units)_mm512_loadu_si512(packed + unit * ROWS + r * LANES);
            __asm__("" : "+v"(rows[r]));  // or the compiler loads it again for every line
        }
        for (int c = 0; c < count; c++) {
            const Units both = (Units)_mm512_set1_epi32((int32_t)line[c][unit]);
            for (int r = 0; r < registers; r++)
                sums[c * registers + r] = multiply_add(sums[c * registers + r], rows[r], both);
        }
        if (unit % (16 / count) == 0)
            _mm_prefetch((const char *)(line[0] + count * (lines.step + unit)), _MM_HINT_T0);
    }
    for (int c = 0; c < count; c++)
        for (int r = 0; r < registers; r++) _mm512_storeu_ps(out + c * ROWS + r * LANES, sums[c * registers + r]);
}

// Compute 16 columns of the result, one per line, in as many steps as keep all sums in registers.
static inline __attribute__((always_inline)) void sixteen_columns(
    const uint32_t *packed, Lines lines, int64_t last, int64_t units, int registers, float *out
) {
    const int count = registers == 1 ? 16 : registers == 2 ? 8 : 4;
    for (int c = 0; c < COLUMNS; c += count, last -= count, lines.units += count * lines.step, out += count * ROWS)
        if (registers == 1) multiply(packed, lines, last, units, 1, 16, out);
        else if (registers == 2) multiply(packed, lines, last, units, 2, 8, out);
        else if (registers == 3) multiply(packed, lines, last, units, 3, 4, out);
        else multiply(packed, lines, last, units, 4, 4, out);
}

// ---- the same with AMX, whose registers are tiles of 16 rows ----

// Rows, units and bytes per row of a tile; columns that are computed at once.
enum { TILE = 16, TILE_UNITS = TERMS / 2, TILE_BYTES = 2 * TERMS, WIDTH = 2 * TILE };

static int has_tiles;  // whether Linux lets this process use tiles

#if defined(BF16) && defined(__AMX_BF16__)

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
    const uint32_t *packed, const number *weight, int64_t units, const int down, const int fetches, float *out
) {
    const int64_t stride = units * (int64_t)sizeof(uint32_t), row = ROWS * sizeof(uint32_t);
    const char *next = (const char *)(weight + 2 * WIDTH * units);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t unit = 0; unit < units; unit += TILE_UNITS) {
        for (int i = 0; fetches && i < WIDTH; i++, next += TILE_BYTES) _mm_prefetch(next, _MM_HINT_T1);
        _tile_loadd(4, weight + 2 * unit, stride);
        _tile_loadd(6, packed + unit * ROWS, row);
        _tile_loadd(5, weight + 2 * (TILE * units + unit), stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
        if (down == 1) continue;
        _tile_loadd(7, packed + unit * ROWS + TILE, row);
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
static void two_tiles(const uint32_t *packed, const number *weight, int64_t units, int registers, int fetches, float *out) {
    if (registers == 1) multiply_tiles(packed, weight, units, 1, fetches, out);
    else multiply_tiles(packed, weight, units, 2, fetches, out);
    if (registers == 3) multiply_tiles(packed + 2 * TILE, weight, units, 1, 0, out + 2 * TILE);
    if (registers == 4) multiply_tiles(packed + 2 * TILE, weight, units, 2, 0, out + 2 * TILE);
}

#else

int allow_tiles(void) { return 0; }
static void describe_tiles(void) {}
static void forget_tiles(void) {}
static void two_tiles(const uint32_t *packed, const number *weight, int64_t units, int registers, int fetches, float *out) {}

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
            if (kind == NARROW) narrow((number *)out + place, sum, mask);
            else _mm512_mask_storeu_ps(wide, mask, sum);
        }
    }
}

// out[rows, outputs] = input[rows, terms] @ weight[outputs, terms].T + bias, or += without a bias.
// The rows consist of whole units. `packed` has room for the units of ROWS rows, times the blocks of ROWS rows.
void product(
    const number *input, int64_t stride, const number *weight, const number *bias, void *out, Result kind,
    uint32_t *packed, int64_t rows, int64_t outputs, int64_t terms
) {
    const int64_t units = terms / PER_UNIT, blocks = (rows + ROWS - 1) / ROWS;
    const int is_tiled = has_tiles && units % TILE_UNITS == 0 && outputs >= WIDTH;  // the same for every row
    const int64_t width = is_tiled ? WIDTH : COLUMNS;
    // Columns that a thread computes for one block of rows before the next. With many blocks, more share one read.
    const int64_t group = blocks > 1 ? 4 * width : width, groups = (outputs + group - 1) / group;
#pragma omp parallel
    {
        if (is_tiled) describe_tiles();
#pragma omp for schedule(static)
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t row = block * ROWS, here = rows - row < ROWS ? rows - row : ROWS;
            pack_rows(input + row * stride, stride, here, units, packed + row * units);
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
                    const number *from = weight + begin * terms;
                    const Lines lines = {(const uint32_t *)from, units};
                    if (is_tiled) two_tiles(packed + row * units, from, units, registers, row == 0, sums);
                    else sixteen_columns(packed + row * units, lines, outputs - 1 - column, units, registers, sums);
                    for (int64_t c = column; c < column + width && c < outputs; c += COLUMNS) {
                        const __m512 offset = bias ? widen(bias + c, first(outputs - c)) : _mm512_setzero_ps();
                        store_columns(sums + (c - begin) * ROWS, offset, kind, out, row, here, outputs, c);
                    }
                }
        if (is_tiled) forget_tiles();
    }
}

#ifndef BF16

enum { SOME_TERMS = 256, SOME_ROWS = 256, PANELS = 4 };  // of a part of `plain_product`, whose factors fit into a cache

// Write up to 16 columns of `count` terms as rows, with zeros for the rest: tile[16, SOME_TERMS].
static void pack_columns(const float *from, int64_t stride, int64_t columns, int64_t count, float *tile) {
    for (int64_t term = 0; term < count; term += 16) {
        __m512i block[16];
        for (int i = 0; i < 16; i++) {
            const __mmask16 mask = term + i < count ? first(columns) : 0;
            block[i] = _mm512_maskz_loadu_epi32(mask, from + (term + i) * stride);
        }
        transpose(block);
        for (int i = 0; i < 16; i++) _mm512_storeu_si512(tile + i * SOME_TERMS + term, block[i]);
    }
}

// Copy up to PANELS * ROWS columns of `count` terms, so that the terms of ROWS columns lie together, with zeros for the
// rest: panels[PANELS, SOME_TERMS, ROWS].
static void pack_panels(const float *from, int64_t stride, int64_t columns, int64_t count, float *panels) {
    for (int64_t column = 0; column < columns; column += ROWS, panels += SOME_TERMS * ROWS)
        for (int64_t term = 0; term < count; term++)
            for (int64_t i = 0; i < ROWS; i += LANES) {
                const int64_t here = column + i;
                const __mmask16 mask = here < columns ? first(columns - here) : 0;
                _mm512_storeu_ps(panels + term * ROWS + i, _mm512_maskz_loadu_ps(mask, from + term * stride + here));
            }
}

// out[rows, outputs] = left[rows, terms] @ right[terms, outputs], or += if `adds`. Term t of row i of `left` is at
// i * row_step + t * term_step, so that `left` may be transposed; one of the steps is 1.
// Return 0 if there is no memory, else 1.
int plain_product(
    const float *left, int64_t row_step, int64_t term_step, const float *right, float *out, int adds, int64_t rows,
    int64_t outputs, int64_t terms
) {
    int is_done = 1;
#pragma omp parallel reduction(&& : is_done)
    {
        float *panels = malloc(sizeof(float) * PANELS * SOME_TERMS * ROWS);
        is_done = panels != NULL;
#pragma omp for schedule(dynamic) collapse(2)
        for (int64_t begin = 0; begin < rows; begin += SOME_ROWS)
            for (int64_t column = 0; column < outputs; column += PANELS * ROWS)
                for (int64_t term = 0; panels && term < terms; term += SOME_TERMS) {
                    const int64_t count = terms - term < SOME_TERMS ? terms - term : SOME_TERMS;
                    const int64_t columns = outputs - column < PANELS * ROWS ? outputs - column : PANELS * ROWS;
                    pack_panels(right + term * outputs + column, outputs, columns, count, panels);
                    for (int64_t row = begin; row < begin + SOME_ROWS && row < rows; row += COLUMNS) {
                        float tile[COLUMNS * SOME_TERMS], sums[COLUMNS * ROWS];
                        const float *from = left + row * row_step + term * term_step;
                        Lines lines = {(const uint32_t *)from, row_step};
                        if (term_step != 1) {
                            pack_columns(from, term_step, rows - row, count, tile);
                            lines = (Lines){(const uint32_t *)tile, SOME_TERMS};
                        }
                        for (int64_t c = 0; c < columns; c += ROWS) {
                            const int64_t width = columns - c < ROWS ? columns - c : ROWS;
                            const int registers = (int)((width + LANES - 1) / LANES);
                            const uint32_t *panel = (const uint32_t *)panels + c * SOME_TERMS;
                            sixteen_columns(panel, lines, rows - 1 - row, count, registers, sums);
                            float *place = out + row * outputs + column + c;
                            for (int64_t i = 0; i < COLUMNS && row + i < rows; i++, place += outputs)
                                for (int64_t at = 0; at < width; at += LANES) {
                                    const __mmask16 mask = first(width - at);
                                    __m512 sum = _mm512_loadu_ps(sums + i * ROWS + at);
                                    if (adds || term > 0) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, place + at));
                                    _mm512_mask_storeu_ps(place + at, mask, sum);
                                }
                        }
                    }
                }
        free(panels);
    }
    return is_done;
}

#endif

// ---- row by row ----

// Add `delta`, unless it is null, to the residual stream, and normalize: the total, 1 / rms, and the normed rows.
void add_rms_norm(
    const float *residual, const number *delta, const number *weight, float eps, number *normed, float *total, float *rstd,
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
                x = _mm512_add_ps(x, widen(delta + row * width + i, mask));
                _mm512_mask_storeu_ps(sums + i, mask, x);
            }
            squares = _mm512_fmadd_ps(x, x, squares);
        }
        const float scale = 1.0f / sqrtf(_mm512_reduce_add_ps(squares) / (float)width + eps);
        rstd[row] = scale;
        for (int64_t i = 0; i < width; i += LANES) {
            const __mmask16 mask = first(width - i);
            const __m512 x = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, sums + i), _mm512_set1_ps(scale));
            narrow(normed + row * width + i, _mm512_mul_ps(x, widen(weight + i, mask)), mask);
        }
    }
}

// out = silu(gate) * up, where gate and up are the halves of each row.
void swiglu(const number *gate_up, number *out, int64_t rows, int64_t width) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < width; i += LANES) {
            const __mmask16 mask = first(width - i);
            const __m512 gate = widen(gate_up + 2 * row * width + i, mask);
            const __m512 up = widen(gate_up + (2 * row + 1) * width + i, mask);
            const __m512 one = _mm512_set1_ps(1.0f);
            const __m512 below = _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), gate)));
            narrow(out + row * width + i, _mm512_mul_ps(_mm512_div_ps(gate, below), up), mask);
        }
}

// The activation again, for the gradient of the next weight, and the gradients of gate and up.
void swiglu_backward(
    const number *gate_up, const number *grad, number *active, number *grad_gate_up, int64_t rows, int64_t width
) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < width; i += LANES) {
            const __mmask16 mask = first(width - i);
            const int64_t left = 2 * row * width + i, right = left + width, place = row * width + i;
            const __m512 gate = widen(gate_up + left, mask), up = widen(gate_up + right, mask);
            const __m512 from = widen(grad + place, mask), one = _mm512_set1_ps(1.0f);
            const __m512 below = _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), gate)));
            const __m512 sigmoid = _mm512_div_ps(one, below), silu = _mm512_mul_ps(gate, sigmoid);
            const __m512 slope = _mm512_fmadd_ps(silu, _mm512_sub_ps(one, sigmoid), sigmoid);  // of silu
            narrow(active + place, _mm512_mul_ps(silu, up), mask);
            narrow(grad_gate_up + left, _mm512_mul_ps(_mm512_mul_ps(from, up), slope), mask);
            narrow(grad_gate_up + right, _mm512_mul_ps(from, silu), mask);
        }
}

// Normalize each head by the root mean square of its `dim` values, times the weight of queries or keys.
static void normalize_head(const number *in, const number *weight, float eps, number *out, int64_t dim) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < dim; i += LANES) {
        const __m512 x = widen(in + i, first(dim - i));
        squares = _mm512_fmadd_ps(x, x, squares);
    }
    const __m512 scale = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(squares) / (float)dim + eps));
    for (int64_t i = 0; i < dim; i += LANES) {
        const __mmask16 mask = first(dim - i);
        const __m512 x = _mm512_mul_ps(widen(in + i, mask), scale);
        narrow(out + i, _mm512_mul_ps(x, widen(weight + i, mask)), mask);
    }
}

// Write the query and key heads of each row of `qkv` to `out`, which may be `qkv`: normed if there are weights, rotated
// if there is a table, which holds cosines, then sines, of each position.
void rotate(
    const number *qkv, int64_t stride, number *out, int64_t out_stride, const int64_t *positions, const float *table,
    const number *query_norm, const number *key_norm, float eps, int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim
) {
    const int64_t half = dim / 2;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads + kv_heads; head++) {
            const number *in = qkv + row * stride + head * dim;
            number *left = out + row * out_stride + head * dim, *right = left + half;
            if (query_norm) normalize_head(in, head < heads ? query_norm : key_norm, eps, left, dim);
            else if (left != in) memcpy(left, in, (size_t)dim * sizeof(number));
            for (int64_t i = 0; table && i < half; i += LANES) {
                const __mmask16 mask = first(half - i);
                const float *angle = table + positions[row] * dim + i;
                const __m512 cosine = _mm512_maskz_loadu_ps(mask, angle);
                const __m512 sine = _mm512_maskz_loadu_ps(mask, angle + half);
                const __m512 a = widen(left + i, mask), b = widen(right + i, mask);
                narrow(left + i, _mm512_fmsub_ps(a, cosine, _mm512_mul_ps(b, sine)), mask);
                narrow(right + i, _mm512_fmadd_ps(b, cosine, _mm512_mul_ps(a, sine)), mask);
            }
        }
}

#ifdef BF16

// Round to bf16, up or down by a hash of the element's index (rounding.py), plus the base if there is one.
void round_dithered(const float *wide, const number *base, number *out, int64_t count) {
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
        out[i] = (number)((x.value != x.value ? x.bits | 0x400000 : x.bits + hash) >> 16);
    }
}

#endif

// ---- attention ----

// Tokens that queries attend to: for query t, `counts[t]` tokens from element `starts[t]` on.
typedef struct {
    const number *keys, *values;
    const int64_t *starts, *counts;
    int64_t token_stride, head_stride;
} Source;

// Load register i of a head of `dim` numbers. Behind the last number follow zeros.
static inline __attribute__((always_inline)) Units load_units(const number *head, int i, const int dim) {
    return (Units)_mm512_maskz_loadu_epi32(first((dim - NUMBERS * i) / PER_UNIT), head + NUMBERS * i);
}

// scores[g, t] = query[g] . keys[t]
static inline __attribute__((always_inline)) void score(
    const number *query, const number *keys, int64_t stride, int64_t count, float *scores, int64_t width, int64_t groups,
    const int dim
) {
    for (int64_t g = 0; g < groups; g++) {
        Units q[16];
        for (int i = 0; NUMBERS * i < dim; i++) q[i] = load_units(query + g * dim, i, dim);
        for (int64_t t = 0; t < count; t++) {
            __m512 sum = _mm512_setzero_ps();
            for (int i = 0; NUMBERS * i < dim; i++) sum = multiply_add(sum, q[i], load_units(keys + t * stride, i, dim));
            scores[g * width + t] = _mm512_reduce_add_ps(sum);
        }
    }
}

// sums[dim] += weights[t] * values[t], token by token
static inline __attribute__((always_inline)) void add_values(
    __m512 *sums, const float *weights, const number *values, int64_t stride, int64_t count, const int dim
) {
    for (int64_t t = 0; t < count; t++) {
        const __m512 weight = _mm512_set1_ps(weights[t]);
        for (int i = 0; i < dim / LANES; i++)
            sums[i] = _mm512_fmadd_ps(weight, widen(values + t * stride + LANES * i, 0xffff), sums[i]);
    }
}

// Attend with the `groups` query heads that share key head `head`. How the tokens divide into the two sources changes
// no bit: scores are computed one by one, their sum in 16 lanes by place, and values are added token by token.
static inline __attribute__((always_inline)) void attend(
    const number *query, const Source *sources, int64_t token, int64_t head, float scale, int64_t groups, float *scores,
    number *out, const int dim
) {
    const int64_t width = sources[0].counts[token] + sources[1].counts[token];
    float *place = scores;
    for (const Source *s = sources; s < sources + 2; place += s++->counts[token]) {
        const number *keys = s->keys + s->starts[token] + head * s->head_stride;
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
            const number *values = s->values + s->starts[token] + head * s->head_stride;
            add_values(sums, weights, values, s->token_stride, s->counts[token], dim);
        }
        const __m512 share = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(total));
        for (int i = 0; i < dim / LANES; i++)
            narrow(out + g * dim + LANES * i, _mm512_mul_ps(sums[i], share), 0xffff);
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
    const number *query, int64_t query_stride, const Source *sources, int64_t longest, float scale, number *out,
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
                const number *q = query + t * query_stride + head * groups * dim;
                number *result = out + (t * heads + head * groups) * dim;
                if (!scores) continue;
                switch (dim) { FOR_HEAD_SIZES(ATTEND) }
            }
        free(scores);
    }
    return is_done;
}

// Copy keys and values [tokens, kv_heads, dim] into a cache, token t to element `places[t]`.
void store(
    const number *key, const number *value, int64_t stride, number *keys, number *values, const int64_t *places,
    int64_t head_stride, int64_t tokens, int64_t kv_heads, int64_t dim
) {
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t head = 0; head < kv_heads; head++) {
            const int64_t from = t * stride + head * dim, to = places[t] + head * head_stride;
            memcpy(keys + to, key + from, (size_t)dim * sizeof(number));
            memcpy(values + to, value + from, (size_t)dim * sizeof(number));
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
