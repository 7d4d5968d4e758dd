// Memory for results that the engine makes: of an allgather, alltoall or reducescatter.
//
// Large pieces are kept when they are let go, and given out again: the system would take the pages back and
// clear new ones, which costs more than the collective (16 MiB: 3 ms against 1.5).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace kolovod {

class OutputDeleter {
 public:
  OutputDeleter() = default;
  explicit OutputDeleter(size_t length) : length_(length) {}
  void operator()(char* data) const;

 private:
  size_t length_ = 0;  // 0: too small to be kept, or from elsewhere; by std::free
};
using OutputMemory = std::unique_ptr<char, OutputDeleter>;

// At least one byte, aligned to cache lines; null without memory. Any thread, also in a forked child.
OutputMemory AllocateOutput(size_t bytes);

inline constexpr int64_t kLongestUnusedNs = 10'000'000'000;

// How much may lie unused, in the whole process. What is more is given back to the system, the oldest first.
// So is what lies unused longer than `longest_ns`, as soon as another piece is let go: pieces of sizes that
// do not come again would fill what is allowed.
void LimitUnusedOutputs(size_t bytes, int64_t longest_ns = kLongestUnusedNs);
void DropUnusedOutputs();
size_t UnusedOutputBytes();

}  // namespace kolovod
