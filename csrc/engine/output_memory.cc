#include "engine/output_memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <deque>
#include <utility>

#include "base/thread_annotations.h"
#include "base/types.h"
#include "transport/waiter.h"

namespace kolovod {
namespace {

constexpr size_t kPage = 4 << 10;
constexpr size_t kHugePage = 2 << 20;
constexpr size_t kKeptFrom = 64 << 10;  // what malloc has at hand anyway is smaller

struct Unused {
  char* data;
  size_t length;
  int64_t since_ns;
};

// Never destroyed: results may be let go while the process ends. Whoever finds the mutex taken does without,
// since the thread that holds it may not exist in a forked child.
struct Kept {
  Mutex mutex;
  std::deque<Unused> pieces GUARDED_BY(mutex);  // the oldest first
  size_t bytes GUARDED_BY(mutex) = 0;
  size_t limit GUARDED_BY(mutex) = 0;
  int64_t longest_ns GUARDED_BY(mutex) = 0;
};
Kept& TheKept() {
  static Kept* const kept = new Kept;
  return *kept;
}

// From the system, not from malloc: kept among what the program allocates and frees they would hold its heap
// apart, which then grows by as much again. Null without memory.
char* Map(size_t length, size_t alignment) {
  const size_t reserved = length + alignment - kPage;
  void* const mapped = mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  char* const begin = static_cast<char*>(mapped);
  const size_t before =
      RoundUp(reinterpret_cast<uintptr_t>(begin), alignment) - reinterpret_cast<uintptr_t>(begin);
  if (before > 0) munmap(begin, before);
  if (reserved - before > length) munmap(begin + before + length, reserved - before - length);
  return begin + before;
}

// What is beyond the limit goes, and what lies there since `since_ns` or longer.
void Shrink(Kept& kept, size_t limit, int64_t since_ns = 0) REQUIRES(kept.mutex) {
  while (!kept.pieces.empty() && (kept.bytes > limit || kept.pieces.front().since_ns <= since_ns)) {
    kept.bytes -= kept.pieces.front().length;
    munmap(kept.pieces.front().data, kept.pieces.front().length);
    kept.pieces.pop_front();
  }
}

// The newest piece, which is the likeliest to be in a cache, of those that fit without much waste.
char* TakeFrom(Kept& kept, size_t length, size_t* taken) REQUIRES(kept.mutex) {
  char* found = nullptr;
  for (auto piece = kept.pieces.rbegin(); piece != kept.pieces.rend(); ++piece) {
    if (piece->length < length || piece->length > length + length / 4) continue;
    found = piece->data;
    *taken = piece->length;
    kept.bytes -= piece->length;
    kept.pieces.erase(std::next(piece).base());
    break;
  }
  return found;
}

// As TakeFrom, if nobody has the mutex.
char* TakeKept(size_t length, size_t* taken) {
  Kept& kept = TheKept();
  if (!kept.mutex.try_lock()) return nullptr;
  char* const found = TakeFrom(kept, length, taken);
  kept.mutex.unlock();
  return found;
}

// Whether it is kept.
bool Keep(Kept& kept, char* data, size_t length) REQUIRES(kept.mutex) {
  if (length > kept.limit) return false;
  const int64_t now_ns = NowNs();
  kept.pieces.push_back(Unused{data, length, now_ns});
  kept.bytes += length;
  Shrink(kept, kept.limit, now_ns - kept.longest_ns);
  return true;
}

}  // namespace

void OutputDeleter::operator()(char* data) const {
  if (data == nullptr || length_ == 0) {
    std::free(data);
    return;
  }
  Kept& kept = TheKept();
  bool is_kept = false;
  if (kept.mutex.try_lock()) {
    is_kept = Keep(kept, data, length_);
    kept.mutex.unlock();
  }
  if (!is_kept) munmap(data, length_);
}

OutputMemory AllocateOutput(size_t bytes) {
  if (bytes < kKeptFrom) {
    return OutputMemory(static_cast<char*>(std::aligned_alloc(kLine, RoundUp(bytes + 1, kLine))));
  }
  const bool huge = bytes >= 2 * kHugePage;
  size_t length = RoundUp(bytes, huge ? kHugePage : kPage);
  char* data = TakeKept(length, &length);
  if (data == nullptr) {
    data = Map(length, huge ? kHugePage : kPage);
    // First touching 128 MiB costs 40 ms in small pages, 6 in huge ones. A hint: may fail.
    if (data != nullptr && huge) madvise(data, length, MADV_HUGEPAGE);
  }
  return OutputMemory(data, OutputDeleter(length));
}

void LimitUnusedOutputs(size_t bytes, int64_t longest_ns) {
  Kept& kept = TheKept();
  MutexLock lock(kept.mutex);
  kept.limit = bytes;
  kept.longest_ns = longest_ns;
  Shrink(kept, bytes);
}

void DropUnusedOutputs() {
  Kept& kept = TheKept();
  MutexLock lock(kept.mutex);
  Shrink(kept, 0);
}

size_t UnusedOutputBytes() {
  Kept& kept = TheKept();
  MutexLock lock(kept.mutex);
  return kept.bytes;
}

}  // namespace kolovod
