#include "kernels/cpu/isa.h"

#include <stdint.h>
#include <string.h>

static const char *const name_of[DN_ISA_COUNT] = {"portable", "avx2", "avx512"};

#if defined(__x86_64__)
#include <cpuid.h>

static uint64_t xcr0(void)
{
    uint32_t lo, hi;
    __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    return (uint64_t)hi << 32 | lo;
}

enum dn_isa dn_isa_detect(void)
{
    /* Bits of cpuid leaf 1 ecx: FMA 12, OSXSAVE 27, AVX 28, F16C 29. Leaf 7 ebx: AVX2 5, BMI1 3, BMI2 8, AVX512 F 16,
     * DQ 17, BW 30, VL 31; ecx: VBMI 1, VNNI 11. */
    const uint32_t avx_1c = 1u << 12 | 1u << 27 | 1u << 28 | 1u << 29,
                   avx512_7b = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31, avx512_7c = 1u << 1 | 1u << 11;
    /* State that the operating system saves: SSE and AVX; opmask and both halves of zmm. */
    const uint64_t os_avx = 0x6, os_avx512 = 0xe6;
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & avx_1c) != avx_1c)
        return DN_ISA_PORTABLE;
    uint64_t os = xcr0();
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & 1u << 5) || (os & os_avx) != os_avx)
        return DN_ISA_PORTABLE;
    if ((b & avx512_7b) == avx512_7b && (c & avx512_7c) == avx512_7c && (os & os_avx512) == os_avx512)
        return DN_ISA_AVX512;
    return DN_ISA_AVX2;
}
#else
enum dn_isa dn_isa_detect(void)
{
    return DN_ISA_PORTABLE;
}
#endif

const char *dn_isa_name(enum dn_isa isa)
{
    return (unsigned)isa < DN_ISA_COUNT ? name_of[isa] : "?";
}

int dn_isa_parse(const char *name, enum dn_isa *out, struct dn_err *err)
{
    enum dn_isa best = dn_isa_detect();
    if (!name || strcmp(name, "auto") == 0) {
        *out = best;
        return 0;
    }
    for (int i = 0; i < DN_ISA_COUNT; i++) {
        if (strcmp(name, name_of[i]) != 0)
            continue;
        if (i > (int)best)
            return dn_err_set(err, DN_CONFIG, "isa \"%s\": this machine has no more than \"%s\"", name, name_of[best]);
        *out = (enum dn_isa)i;
        return 0;
    }
    return dn_err_set(err, DN_CONFIG, "isa \"%.32s\": expected one of auto, portable, avx2, avx512", name);
}
