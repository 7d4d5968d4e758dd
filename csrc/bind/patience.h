// Small operations are first tried in the framework's own thread: two hand-overs, to the engine's thread and
// to one that completes, cost several times what such an operation takes.
#ifndef KOLOVOD_BIND_PATIENCE_H_
#define KOLOVOD_BIND_PATIENCE_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace kolovod {

// Of a call: who comes second, the thread that submits or the engine's callback, has it completed. So what
// depends on it never runs in the middle of driving.
enum class Stage { kSubmitting, kReturned, kDone };

// How long the submitting thread works on an operation before it leaves it to the engine's thread. Where the
// ranks come at the same time that is the fastest way; where they do not, each try in vain halves the number
// of tries, since the framework has something else to do meanwhile.
class Patience {
 public:
  // For an operation of that many bytes; 0: not at all.
  int32_t DriveUs(size_t bytes) {
    if (bytes > kMostBytes) return 0;
    int left = skips_.load(std::memory_order_relaxed);
    if (left == 0) return kDriveUs;
    skips_.store(left - 1, std::memory_order_relaxed);
    return 0;
  }
  // After a try.
  void Note(bool done) {
    const int misses = done ? 0 : std::min(misses_.load(std::memory_order_relaxed) + 1, kMostMisses);
    misses_.store(misses, std::memory_order_relaxed);
    skips_.store(misses < 2 ? 0 : (1 << (misses - 1)) - 1, std::memory_order_relaxed);
  }

 private:
  static constexpr size_t kMostBytes = 64 << 10;  // what takes 20 us; more overlaps with other work
  static constexpr int32_t kDriveUs = 40;
  static constexpr int kMostMisses = 7;
  // Threads may overwrite each other's counts: it is a guess anyway.
  std::atomic<int> skips_{0}, misses_{0};
};

}  // namespace kolovod

#endif  // KOLOVOD_BIND_PATIENCE_H_
