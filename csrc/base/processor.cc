#include "base/processor.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

// By the instructions: __builtin_cpu_supports says no to everything where the compiler's runtime library has
// no model of the processor (Zig's, by which wheels are compiled).

namespace kolovod {

#if defined(__x86_64__)

namespace {

// Whether all of these bits are in ECX of CPUID's first page.
bool HasFeatures(unsigned needed) {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & needed) == needed;
}

// Whether the system keeps these registers, by their bits in XCR0.
bool Keeps(unsigned registers) {
  if (!HasFeatures(bit_OSXSAVE)) return false;
  unsigned low = 0, high = 0;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & registers) == registers;
}

// Whether all of these bits are in EBX and ECX of CPUID's page of extensions.
bool HasExtensions(unsigned needed_b, unsigned needed_c) {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (ebx & needed_b) == needed_b &&
         (ecx & needed_c) == needed_c;
}

constexpr unsigned kYmm = 0x6;   // and XMM
constexpr unsigned kZmm = 0xe6;  // and YMM, and masks

}  // namespace

bool HasAvx2AndF16c() { return HasFeatures(bit_F16C | bit_AVX) && Keeps(kYmm) && HasExtensions(bit_AVX2, 0); }

bool HasAvx512() {
  constexpr unsigned kVectors = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
  return Keeps(kZmm) && HasExtensions(kVectors, bit_AVX512VBMI2);
}

bool HasAesInstructions() { return HasFeatures(bit_AES | bit_PCLMUL); }

#elif defined(__aarch64__)

bool HasAvx2AndF16c() { return false; }
bool HasAvx512() { return false; }

bool HasAesInstructions() {
  constexpr unsigned long kAes = 1UL << 3, kPmull = 1UL << 4;  // HWCAP_AES, HWCAP_PMULL
  return (getauxval(AT_HWCAP) & (kAes | kPmull)) == (kAes | kPmull);
}

#else

bool HasAvx2AndF16c() { return false; }
bool HasAvx512() { return false; }
bool HasAesInstructions() { return false; }

#endif

}  // namespace kolovod
