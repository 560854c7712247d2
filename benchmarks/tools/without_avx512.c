/* A library that hides AVX-512, AVX-VNNI and AMX from everything its process loads afterwards: what chooses its kernels
 * by the instruction CPUID, as ONNX Runtime and oneDNN do, then computes as on a processor that has AVX2 alone. Linux
 * makes CPUID fault where the processor can (cpuid_fault in /proc/cpuinfo); the fault is answered without those bits. */
#define _GNU_SOURCE
#include <asm/prctl.h>
#include <cpuid.h>
#include <signal.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

static void answer(int number, siginfo_t *info, void *context) {
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const uint8_t *at = (const uint8_t *)registers[REG_RIP];
    unsigned a, b, c, d;
    if (at[0] != 0x0f || at[1] != 0xa2) { /* a fault of another kind happens again, unanswered */
        signal(number, SIG_DFL);
        return;
    }
    const unsigned leaf = (unsigned)registers[REG_RAX], part = (unsigned)registers[REG_RCX];
    syscall(SYS_arch_prctl, ARCH_SET_CPUID, 1);
    __cpuid_count(leaf, part, a, b, c, d);
    syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0);
    if (leaf == 7 && part == 0) {
        b &= ~(1u << 16 | 1u << 17 | 1u << 21 | 1u << 26 | 1u << 27 | 1u << 28 | 1u << 30 | 1u << 31);
        c &= ~(1u << 1 | 1u << 6 | 1u << 11 | 1u << 12 | 1u << 14);
        d &= ~(1u << 2 | 1u << 3 | 1u << 8 | 1u << 22 | 1u << 23 | 1u << 24 | 1u << 25);
    }
    if (leaf == 7 && part == 1) a &= ~(1u << 4 | 1u << 5 | 1u << 21);
    registers[REG_RAX] = a, registers[REG_RBX] = b, registers[REG_RCX] = c, registers[REG_RDX] = d;
    registers[REG_RIP] += 2;
}

/* 0, or -1 where the processor or the system cannot do it. Of this thread and of those that it starts. */
int hide_avx512(void) {
    struct sigaction action = {.sa_sigaction = answer, .sa_flags = SA_SIGINFO | SA_NODEFER};
    if (sigaction(SIGSEGV, &action, NULL)) return -1;
    return (int)syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0);
}
