#include "collectives/shm.h"

#include <cstring>

#include "testing/shm_world.h"
#include "testing/verbs.h"

namespace kolovod {
namespace {

using testing::Bytes;

// A processor whose stores that bypass the cache become visible at the fence and not before. The real one is
// free to do so, and hardly ever does where a test could see it.
struct Deferred {
  struct Store {
    void* to;
    Bytes bytes;
  };
  static std::vector<Store>& Pending() {
    thread_local std::vector<Store> pending;
    return pending;
  }
  static char* Instead(void* to, size_t bytes) {
    Pending().push_back({to, Bytes(bytes)});
    return Pending().back().bytes.data();
  }

  static void CopyStreaming(void* to, const void* from, size_t bytes) {
    std::memcpy(Instead(to, bytes), from, bytes);
  }
  static void Run(const Exchange& exchange) {
    Exchange x = exchange;
    if (x.pack_streaming && x.pack_bytes > 0) x.pack_to = Instead(x.pack_to, x.pack_bytes);
    std::vector<void*> copies;
    const size_t bytes = x.reduce.count * SizeOf(x.reduce.dtype);
    for (int c = 0; c < x.reduce.copy_count && x.reduce.streaming && bytes > 0; ++c) {
      copies.push_back(Instead(x.reduce.copies[c], bytes));
    }
    if (!copies.empty()) x.reduce.copies = copies.data();
    ActiveKernels().exchange(x);
  }
  static void Fence() {
    for (const Store& store : Pending()) std::memcpy(store.to, store.bytes.data(), store.bytes.size());
    Pending().clear();
  }
};

constexpr Kernels kDeferred = {Deferred::Run, Deferred::CopyStreaming, Deferred::Fence, "deferred"};

// Large enough for streaming and for trials of the chooser, which do both.
TEST(what_bypasses_the_cache_is_fenced_before_it_is_published) {
  Config config;
  config.cores = 8;
  config.chunk_bytes = 64 << 10;
  for (const int size : {2, 3}) {
    testing::RunShm(size, config, /*streaming=*/true, kDeferred, [&](ShmBackend& backend, int rank) {
      for (const size_t count : {9'000, 100'000, 300'000}) {
        for (int again = 0; again < 3; ++again) {
          testing::CheckAllreduce(backend, rank, size, testing::Combined, DType::kFloat32, Op::kSum, {},
                                  {count, 5}, again == 0);
          testing::CheckReducescatter(backend, rank, size, testing::Combined, DType::kFloat32, Op::kSum, {},
                                      std::vector<size_t>(static_cast<size_t>(size), count));
          testing::CheckBroadcast(backend, rank, count, again % size, false);
          testing::CheckAllgather(backend, rank, std::vector<size_t>(static_cast<size_t>(size), count));
          testing::CheckAlltoall(backend, rank, size, count);
        }
      }
    });
  }
}

TEST(every_verb_with_and_without_cores_for_all) {
  for (const int size : {2, 3, 5}) {
    for (const int64_t cores : {1, 16}) {
      for (const int64_t chunk_bytes : {0, 4096}) {
        Config config;
        config.cores = cores;
        config.chunk_bytes = chunk_bytes;
        testing::RunShm(size, config, false, ActiveKernels(), [&](ShmBackend& backend, int rank) {
          testing::CheckAllSizes(backend, rank, size, testing::Combined);
        });
      }
    }
  }
}

}  // namespace
}  // namespace kolovod

TEST_MAIN()
