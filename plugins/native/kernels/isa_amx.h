/* Matrix registers of bf16 (AMX on Linux): sixteen rows times a panel, 32 inputs at once. Beside isa_avx512.h, and not
 * among instructions.h: they are only used where Linux allows it. */
#pragma once
#include <sys/syscall.h>
#include <unistd.h>

#define MATRIX_REGISTERS 1
#ifndef REQUEST_PERMISSION
#define REQUEST_PERMISSION 0x1023 /* ARCH_REQ_XCOMP_PERM of asm/prctl.h */
#endif
#define TILE_DATA 18 /* the component of a thread's state for which Linux asks to be asked */

/* Whether this process may use them. A kernel before Linux 5.16, an emulator or a sandbox says no. */
static int registers_allowed(void) { return !syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA); }

/* Eight registers of sixteen rows of 64 bytes, of this thread, until they are released. */
static void open_registers(void) {
    struct {
        uint8_t palette, start, unused[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } form = {.palette = 1};
    for (int index = 0; index < 8; index++) form.bytes[index] = 64, form.rows[index] = 16;
    __asm__ volatile("ldtilecfg %0" : : "m"(form));
}
static void close_registers(void) { __asm__ volatile("tilerelease"); }

#define CLEAR_REGISTER(to) __asm__ volatile("tilezero %%tmm" #to : :)
#define LOAD_REGISTER(to, from) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #to : : "r"(from), "r"((size_t)64) : "memory")
#define STORE_REGISTER(to, from, stride) \
    __asm__ volatile("tilestored %%tmm" #from ", (%0,%1,1)" : : "r"(to), "r"((size_t)(stride)) : "memory")
#define MULTIPLY_REGISTERS(to, rows, panel) \
    __asm__ volatile("tdpbf16ps %%tmm" #panel ", %%tmm" #rows ", %%tmm" #to : :)

/* sums[r][p] = sixteen rows, or 32, times one or two panels, in blocks of 1 KiB: halves, [T][blocks of a row][16][32];
 * weights, [P][blocks][16][16][2]. lines: of each panel that is fetched beside a block. */
INLINE void register_tile(const int T, const int P, const uint16_t *halves, size_t of_rows, const char *weights,
                          size_t panel, const char *next, int lines, int blocks, f32 *sums) {
    CLEAR_REGISTER(0);
    if (P > 1) CLEAR_REGISTER(1);
    if (T > 1) CLEAR_REGISTER(2);
    if (T > 1 && P > 1) CLEAR_REGISTER(3);
    for (int block = 0; block < blocks; block++) {
        const char *rows = (const char *)halves + block * (size_t)1024, *from = weights + block * (size_t)1024;
        for (int line = block * lines; line < (block + 1) * lines; line++)
            for (int p = 0; p < P; p++) __builtin_prefetch(next + p * panel + line * 64, 0, 2);
        LOAD_REGISTER(4, rows);
        LOAD_REGISTER(6, from);
        MULTIPLY_REGISTERS(0, 4, 6);
        if (T > 1) LOAD_REGISTER(5, rows + of_rows);
        if (T > 1) MULTIPLY_REGISTERS(2, 5, 6);
        if (P > 1) LOAD_REGISTER(7, from + panel);
        if (P > 1) MULTIPLY_REGISTERS(1, 4, 7);
        if (T > 1 && P > 1) MULTIPLY_REGISTERS(3, 5, 7);
    }
    STORE_REGISTER(sums, 0, VECTORS * sizeof(f32));
    if (P > 1) STORE_REGISTER(sums + 1, 1, VECTORS * sizeof(f32));
    if (T > 1) STORE_REGISTER(sums + 16 * VECTORS, 2, VECTORS * sizeof(f32));
    if (T > 1 && P > 1) STORE_REGISTER(sums + 16 * VECTORS + 1, 3, VECTORS * sizeof(f32));
}
