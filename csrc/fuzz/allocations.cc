// Counts the memory that is taken, so that a target can require that decoding takes little.
#include <cstdlib>
#include <new>

#include "fuzz/fuzz.h"

#if defined(__has_feature)
#define KV_HAS_FEATURE(feature) __has_feature(feature)
#else
#define KV_HAS_FEATURE(feature) 0
#endif

namespace {
thread_local size_t allocated = 0;
}

namespace kolovod::fuzz {
size_t AllocatedBytes() { return allocated; }
}  // namespace kolovod::fuzz

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || KV_HAS_FEATURE(address_sanitizer) || \
    KV_HAS_FEATURE(thread_sanitizer)

// A sanitizer has an operator new of its own, and this beside it; GCC comes without the header.
extern "C" int __sanitizer_install_malloc_and_free_hooks(void (*on_malloc)(const volatile void*, size_t),
                                                         void (*on_free)(const volatile void*));

namespace {
const int installed = __sanitizer_install_malloc_and_free_hooks(
    [](const volatile void*, size_t bytes) { allocated += bytes; }, [](const volatile void*) {});
}  // namespace

#else

void* operator new(size_t bytes) {
  allocated += bytes;
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

#endif
