// AMX in plain C, for CPUs without it: tests include this file before _native.c.
// It follows Intel's description of each instruction, and aborts where the instruction would fault.

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define __AMX_BF16__ 1
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated_loadconfig
#define _tile_release emulated_release
#define _tile_zero emulated_zero
#define _tile_loadd emulated_loadd
#define _tile_stored emulated_stored
#define _tile_dpbf16ps emulated_dpbf16ps
#define syscall(...) 0  // Linux permits the use of tiles

static _Thread_local float tiles[8][16][16];
static _Thread_local int is_described;
int products_of_tiles;  // that were computed; a test checks that there are some

// The description is 64 bytes: the palette, the first row, 14 zeros, 16 widths in bytes, and 16 numbers of rows.
static void emulated_loadconfig(const void *description) {
    const uint8_t *bytes = description;
    uint16_t widths[16];
    memcpy(widths, bytes + 16, sizeof widths);
    if (bytes[0] != 1 || bytes[1] != 0) abort();
    for (int i = 2; i < 16; i++)
        if (bytes[i] != 0) abort();
    for (int i = 0; i < 16; i++)
        if (widths[i] != (i < 8 ? 64 : 0) || bytes[48 + i] != (i < 8 ? 16 : 0)) abort();
    is_described = 1;
}

static void emulated_release(void) { is_described = 0; }

static void emulated_zero(int tile) {
    if (!is_described) abort();
    memset(tiles[tile], 0, sizeof tiles[tile]);
}

static void emulated_loadd(int tile, const void *from, int64_t stride) {
    if (!is_described) abort();
    for (int row = 0; row < 16; row++) memcpy(tiles[tile][row], (const char *)from + row * stride, 64);
}

static void emulated_stored(int tile, void *to, int64_t stride) {
    if (!is_described) abort();
    for (int row = 0; row < 16; row++) memcpy((char *)to + row * stride, tiles[tile][row], 64);
}

static float emulated_term(float pair, int half) {  // the lower or the upper bf16 of 32 bits
    uint32_t bits;
    memcpy(&bits, &pair, sizeof bits);
    bits = half ? bits & 0xffff0000u : bits << 16;
    memcpy(&pair, &bits, sizeof bits);
    return pair;
}

// Terms with even and with odd numbers have sums of their own.
static void emulated_dpbf16ps(int to, int a, int b) {
    if (!is_described) abort();
#pragma omp atomic
    products_of_tiles++;
    for (int row = 0; row < 16; row++)
        for (int column = 0; column < 16; column++) {
            float sums[2] = {0, 0};
            for (int k = 0; k < 16; k++)
                for (int half = 0; half < 2; half++)
                    sums[half] = fmaf(
                        emulated_term(tiles[a][row][k], half), emulated_term(tiles[b][k][column], half), sums[half]
                    );
            tiles[to][row][column] += sums[0] + sums[1];
        }
}
