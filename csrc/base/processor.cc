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

}  // namespace

bool HasAvx2AndF16c() {
  if (!HasFeatures(bit_F16C | bit_AVX | bit_OSXSAVE)) return false;
  unsigned low = 0, high = 0;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned kKept = 6;  // by the system: XMM and YMM registers
  if ((low & kKept) != kKept) return false;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (ebx & bit_AVX2) != 0;
}

bool HasAesInstructions() { return HasFeatures(bit_AES | bit_PCLMUL); }

#elif defined(__aarch64__)

bool HasAvx2AndF16c() { return false; }

bool HasAesInstructions() {
  constexpr unsigned long kAes = 1UL << 3, kPmull = 1UL << 4;  // HWCAP_AES, HWCAP_PMULL
  return (getauxval(AT_HWCAP) & (kAes | kPmull)) == (kAes | kPmull);
}

#else

bool HasAvx2AndF16c() { return false; }
bool HasAesInstructions() { return false; }

#endif

}  // namespace kolovod
