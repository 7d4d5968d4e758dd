#include "engine/output_memory.h"

#include <malloc.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "testing/check.h"

namespace kolovod {
namespace {

constexpr size_t kMiB = 1 << 20;

TEST_CASE("a large piece is given out again") {
  LimitUnusedOutputs(64 * kMiB);
  OutputMemory first = AllocateOutput(8 * kMiB);
  char* const data = first.get();
  std::memset(data, 1, 8 * kMiB);
  OutputMemory other = AllocateOutput(8 * kMiB);
  CHECK(other.get() != data);
  first.reset();
  CHECK(UnusedOutputBytes() == 8 * kMiB);
  CHECK(AllocateOutput(12 * kMiB).get() != data);  // too small
  DropUnusedOutputs();
  CHECK(UnusedOutputBytes() == 0);
  other.reset();
  CHECK(AllocateOutput(2 * kMiB).get() != nullptr);  // and it would be wasted on this
  CHECK(UnusedOutputBytes() == 8 * kMiB + 2 * kMiB);
  DropUnusedOutputs();
}

TEST_CASE("a little waste is allowed") {
  LimitUnusedOutputs(64 * kMiB);
  char* const data = AllocateOutput(kMiB).get();
  OutputMemory smaller = AllocateOutput(kMiB - kMiB / 8);
  CHECK(smaller.get() == data);
  smaller.reset();
  CHECK(UnusedOutputBytes() == kMiB);  // the whole piece
  DropUnusedOutputs();
}

TEST_CASE("what is kept is not in the heap") {
  LimitUnusedOutputs(64 * kMiB);
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // malloc comes to that by itself once much was allocated and freed
  const auto of_malloc = [] {
#if __GLIBC_PREREQ(2, 33)
    const auto info = mallinfo2();
#else  // of 32 bits, enough here
    const auto info = mallinfo();
#endif
    return static_cast<size_t>(info.arena) + static_cast<size_t>(info.hblkhd);
  };
  std::vector<OutputMemory> pieces;
  pieces.reserve(100);
  const size_t before = of_malloc();
  for (size_t i = 0; i < 100; ++i) {
    pieces.push_back(AllocateOutput((64 << 10) + i * 10'000));
    std::memset(pieces.back().get(), 1, 64 << 10);
  }
  pieces.clear();
  CHECK(UnusedOutputBytes() > 50 * kMiB);
  CHECK(of_malloc() - before < kMiB);
  DropUnusedOutputs();
}

TEST_CASE("what nobody takes goes back in time") {
  LimitUnusedOutputs(64 * kMiB);
  AllocateOutput(3 * kMiB).reset();
  AllocateOutput(kMiB).reset();
  CHECK(UnusedOutputBytes() == 4 * kMiB);
  LimitUnusedOutputs(64 * kMiB, /*longest_ns=*/20'000'000);  // not before both were counted
  for (int i = 0; i < 20; ++i) {                             // this one is taken again and again
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    AllocateOutput(kMiB).reset();
  }
  CHECK(UnusedOutputBytes() == kMiB);
  DropUnusedOutputs();
}

TEST_CASE("a piece of huge pages begins with one") {
  LimitUnusedOutputs(0);
  for (int i = 0; i < 3; ++i) {
    const OutputMemory memory = AllocateOutput(5 * kMiB);
    CHECK(reinterpret_cast<uintptr_t>(memory.get()) % (2 * kMiB) == 0);
    std::memset(memory.get(), 1, 5 * kMiB);
  }
}

TEST_CASE("small pieces are not kept") {
  LimitUnusedOutputs(64 * kMiB);
  for (size_t bytes : {size_t{0}, size_t{1}, size_t{1000}, (size_t{64} << 10) - 1}) {
    const OutputMemory memory = AllocateOutput(bytes);
    CHECK(memory != nullptr);
    CHECK(reinterpret_cast<uintptr_t>(memory.get()) % 64 == 0);
    std::memset(memory.get(), 1, bytes);
  }
  CHECK(UnusedOutputBytes() == 0);
}

TEST_CASE("never more than the limit and the oldest goes first") {
  LimitUnusedOutputs(3 * kMiB);
  std::vector<OutputMemory> pieces;
  for (int i = 0; i < 4; ++i) pieces.push_back(AllocateOutput(kMiB));
  char* const oldest = pieces.front().get();
  char* const newest = pieces.back().get();
  for (OutputMemory& piece : pieces) piece.reset();
  CHECK(UnusedOutputBytes() == 3 * kMiB);
  const OutputMemory again = AllocateOutput(kMiB);
  CHECK(again.get() == newest);
  CHECK(again.get() != oldest);
  CHECK(AllocateOutput(4 * kMiB) != nullptr);
  CHECK(UnusedOutputBytes() == 2 * kMiB);  // what is larger than the limit goes back at once
  LimitUnusedOutputs(0);
  CHECK(UnusedOutputBytes() == 0);
}

TEST_CASE("threads and a forked child") {
  LimitUnusedOutputs(64 * kMiB);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      for (int i = 0; i < 500; ++i) {
        const OutputMemory memory = AllocateOutput((1 + (i + t) % 5) * size_t{100'000});
        memory.get()[0] = static_cast<char>(t);
        std::this_thread::yield();
        CHECK(memory.get()[0] == static_cast<char>(t));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    const OutputMemory memory = AllocateOutput(kMiB);
    _exit(memory == nullptr ? 1 : 0);
  }
  int ended = 0;
  CHECK(waitpid(child, &ended, 0) == child);
  CHECK(ended == 0);
  DropUnusedOutputs();
}

}  // namespace
}  // namespace kolovod
