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
namespace isa_avx512 {
void Exchange16BitFloats(const Exchange& x);
}

namespace {

void ExchangeWithAvx512(const Exchange& x) {
  const bool is_narrow = x.reduce.dtype == DType::kFloat16 || x.reduce.dtype == DType::kBFloat16;
  is_narrow ? isa_avx512::Exchange16BitFloats(x) : isa_avx2::kKernels.exchange(x);
}

const Kernels& Avx512Kernels() {
  static const Kernels kernels = [] {
    Kernels made = isa_avx2::kKernels;
    made.exchange = ExchangeWithAvx512;
    made.name = "avx512";
    return made;
  }();
  return kernels;
}

}  // namespace
#endif

const Kernels* const* RunnableKernels(int* count) {
  static const Kernels* runnable[3] = {&isa_base::kKernels};
  static const int found = [] {
    int sets = 1;
#if defined(__x86_64__)
    if (HasAvx2AndF16c()) runnable[sets++] = &isa_avx2::kKernels;
    if (sets == 2 && HasAvx512()) runnable[sets++] = &Avx512Kernels();
#endif
    return sets;
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
