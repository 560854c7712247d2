/* Instructions this library was compiled for, separated by spaces, as Linux names them in /proc/cpuinfo. */
#pragma once

const char *draftwood_instructions(void) {
    return ""
#if defined(__AVX__)
           "avx "
#endif
#if defined(__AVX2__)
           "avx2 fma "
#endif
#if defined(__BMI2__)
           "bmi1 bmi2 "
#endif
#if defined(__F16C__)
           "f16c "
#endif
#if defined(__GFNI__)
           "gfni "
#endif
#if defined(__AVX512F__)
           "avx512f "
#endif
#if defined(__AVX512BW__)
           "avx512bw "
#endif
#if defined(__AVX512DQ__)
           "avx512dq "
#endif
#if defined(__AVX512VL__)
           "avx512vl "
#endif
#if defined(__AVX512VBMI__)
           "avx512vbmi "
#endif
#if defined(__AVX512BF16__)
           "avx512_bf16 "
#endif
#if defined(__AVX512VNNI__)
           "avx512_vnni "
#endif
#if defined(__AVXVNNI__)
           "avx_vnni "
#endif
#if defined(__aarch64__)
           "asimd "
#endif
#if defined(__ARM_FEATURE_DOTPROD)
           "asimddp "
#endif
#if defined(__ARM_FEATURE_MATMUL_INT8)
           "i8mm "
#endif
#if defined(__ARM_FEATURE_ATOMICS)
           "atomics "
#endif
#if defined(__ARM_FEATURE_SVE)
           "sve "
#endif
#if defined(__ARM_FEATURE_SVE2)
           "sve2 "
#endif
        ;
}
