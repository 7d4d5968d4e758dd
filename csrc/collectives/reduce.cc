#include "collectives/reduce.h"

#include <atomic>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace kolovod {
namespace isa_base {
extern const Kernels kKernels;
}
#if defined(__x86_64__)
namespace isa_avx2 {
extern const Kernels kKernels;
}
#endif

const Kernels* const* RunnableKernels(int* count) {
  static const Kernels* runnable[2] = {&isa_base::kKernels, nullptr};
  static const int found = [] {
#if defined(__x86_64__)
    __builtin_cpu_init();
    unsigned eax, ebx, ecx = 0, edx;
    // By the instruction, since Clang before 19 does not know the feature's name.
    const bool has_f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
    if (__builtin_cpu_supports("avx2") && has_f16c) {
      runnable[1] = &isa_avx2::kKernels;
      return 2;
    }
#endif
    return 1;
  }();
  *count = found;
  return runnable;
}

const Kernels& ActiveKernels() {
  static const Kernels& best = []() -> const Kernels& {
    int count = 0;
    const Kernels* const* runnable = RunnableKernels(&count);
    return *runnable[count - 1];
  }();
  return best;
}

void StreamingFence() {
#if defined(__x86_64__)
  _mm_sfence();
#else
  std::atomic_thread_fence(std::memory_order_release);
#endif
}

}  // namespace kolovod
