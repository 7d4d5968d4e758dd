#include "collectives/reduce.h"

#include <atomic>

#include "base/processor.h"

#if defined(__x86_64__)
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
    if (HasAvx2AndF16c()) {
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
