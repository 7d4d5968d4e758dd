// Which cached names all of a part of the world has announced: its own host, and the subtree of each child in
// the tree of leaders. Each says so once, and when all have, this host says it once to its parent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/thread_annotations.h"

namespace kolovod {

// Any thread.
class Tally {
 public:
  // `parts`: how many must announce a bit.
  Tally(size_t bits, size_t parts) : bits_(bits), parts_(static_cast<uint32_t>(parts)), counts_(bits) {}

  // One part has announced `bit` (which must exist); true if that was the last, and then it counts anew.
  bool Count(uint64_t bit) {
    MutexLock lock(mutex_);
    uint32_t& count = counts_[bit];
    if (++count < parts_) return false;
    count = 0;
    return true;
  }
  // The bit will stand for another name, and some may have announced it before it was forgotten.
  void Reset(uint64_t bit) {
    MutexLock lock(mutex_);
    counts_[bit] = 0;
  }
  bool Has(uint64_t bit) const { return bit < bits_; }

 private:
  const size_t bits_;
  const uint32_t parts_;
  Mutex mutex_;
  std::vector<uint32_t> counts_ GUARDED_BY(mutex_);  // by bit
};

}  // namespace kolovod
