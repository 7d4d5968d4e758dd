#include "engine/output_memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <deque>
#include <mutex>
#include <utility>

#include "base/types.h"

namespace kolovod {
namespace {

constexpr size_t kHugePage = 2 << 20;
constexpr size_t kKeptFrom = 64 << 10;  // what malloc has at hand anyway is smaller

struct Unused {
  char* data;
  size_t length;
};

// Never destroyed: results may be let go while the process ends. Whoever finds the mutex taken does without,
// since the thread that holds it may not exist in a forked child.
struct Kept {
  std::mutex mutex;
  std::deque<Unused> pieces;  // the oldest first
  size_t bytes = 0;
  size_t limit = 0;
};
Kept& TheKept() {
  static Kept* const kept = new Kept;
  return *kept;
}

void Shrink(Kept& kept, size_t limit) {
  while (kept.bytes > limit) {
    kept.bytes -= kept.pieces.front().length;
    std::free(kept.pieces.front().data);
    kept.pieces.pop_front();
  }
}

// The newest piece, which is the likeliest to be in a cache, of those that fit without much waste.
char* TakeKept(size_t length, size_t* taken) {
  Kept& kept = TheKept();
  const std::unique_lock lock(kept.mutex, std::try_to_lock);
  if (!lock.owns_lock()) return nullptr;
  for (auto piece = kept.pieces.rbegin(); piece != kept.pieces.rend(); ++piece) {
    if (piece->length < length || piece->length > length + length / 4) continue;
    const Unused found = *piece;
    kept.pieces.erase(std::next(piece).base());
    kept.bytes -= found.length;
    *taken = found.length;
    return found.data;
  }
  return nullptr;
}

}  // namespace

void OutputDeleter::operator()(char* data) const {
  Kept& kept = TheKept();
  if (data != nullptr && length_ > 0) {
    const std::unique_lock lock(kept.mutex, std::try_to_lock);
    if (lock.owns_lock() && length_ <= kept.limit) {
      kept.pieces.push_back(Unused{data, length_});
      kept.bytes += length_;
      Shrink(kept, kept.limit);
      return;
    }
  }
  std::free(data);
}

OutputMemory AllocateOutput(size_t bytes) {
  if (bytes < kKeptFrom) {
    return OutputMemory(static_cast<char*>(std::aligned_alloc(kLine, RoundUp(bytes + 1, kLine))));
  }
  const bool huge = bytes >= 2 * kHugePage;
  size_t length = RoundUp(bytes, huge ? kHugePage : kLine);
  char* data = TakeKept(length, &length);
  if (data == nullptr) {
    data = static_cast<char*>(std::aligned_alloc(huge ? kHugePage : kLine, length));
    // First touching 128 MiB costs 40 ms in small pages, 6 in huge ones. A hint: may fail.
    if (data != nullptr && huge) madvise(data, length, MADV_HUGEPAGE);
  }
  return OutputMemory(data, OutputDeleter(length));
}

void LimitUnusedOutputs(size_t bytes) {
  Kept& kept = TheKept();
  const std::lock_guard lock(kept.mutex);
  kept.limit = bytes;
  Shrink(kept, bytes);
}

void DropUnusedOutputs() {
  Kept& kept = TheKept();
  const std::lock_guard lock(kept.mutex);
  Shrink(kept, 0);
}

size_t UnusedOutputBytes() {
  Kept& kept = TheKept();
  const std::lock_guard lock(kept.mutex);
  return kept.bytes;
}

}  // namespace kolovod
