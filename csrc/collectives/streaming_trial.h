// The steps of one range: whether the stores of each bypass the cache, and, while that is tried, how long
// each took.
#pragma once

#include <cstdint>
#include <utility>

#include "collectives/streaming.h"
#include "transport/waiter.h"

namespace kolovod {

class StreamingTrial {
 public:
  StreamingTrial(StreamingChooser& chooser, uint64_t chunks) : chooser_(chooser), chunks_(chunks) {
    chooser.BeginRange(chunks);
    if (chooser.trial()) begin_ns_ = NowNs();
  }
  StreamingTrial(const StreamingTrial&) = delete;
  StreamingTrial& operator=(const StreamingTrial&) = delete;
  ~StreamingTrial() { chooser_.EndRange(); }

  bool Use(uint64_t step) const { return chooser_.Use(step); }

  void StepEnds(uint64_t step) {
    if (!chooser_.trial() || step >= chunks_) return;
    const int64_t now_ns = NowNs();
    chooser_.Record(step, now_ns - std::exchange(begin_ns_, now_ns));
  }

 private:
  StreamingChooser& chooser_;
  const uint64_t chunks_;
  int64_t begin_ns_ = 0;
};

}  // namespace kolovod
