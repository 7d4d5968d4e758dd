// Should stores into staging bypass the cache? Between cores that share a cache, no; between cores that
// do not, ordinary stores bounce every line and cost up to five times more. Nobody can ask a virtual
// machine which it is, and it may change under way, so it is measured on the data itself. PURE: times
// are arguments.
#pragma once

#include <cstdint>

namespace kolovod {

class StreamingChooser {
 public:
  explicit StreamingChooser(bool initially) : streaming_(initially) {}

  // A range of `chunks` pipeline steps begins. Some long ranges are trials: their chunks alternate in
  // groups between both ways. Which ones depends only on how many long ranges came before, and the group
  // only on the chunk's index, so all ranks try the same way at the same time.
  void BeginRange(uint64_t chunks) {
    trial_ = chunks >= 2 * kGroup && (long_ranges_ < kFirstTrials || long_ranges_ % kEvery == 0);
    if (chunks >= 2 * kGroup) ++long_ranges_;
    for (Sample& sample : samples_) sample = Sample{};
  }

  bool Use(uint64_t index) const { return trial_ ? (index / kGroup) % 2 == 1 : streaming_; }

  // The step of chunk `index` took this long. The first steps after a change are both ways mixed.
  void Record(uint64_t index, int64_t step_ns) {
    if (!trial_ || index % kGroup < 2) return;
    Sample& sample = samples_[Use(index) ? 1 : 0];
    sample.total_ns += step_ns;
    ++sample.steps;
  }

  void EndRange() {
    if (!trial_ || samples_[0].steps == 0 || samples_[1].steps == 0) return;
    const double cached = static_cast<double>(samples_[0].total_ns) / samples_[0].steps;
    const double bypassed = static_cast<double>(samples_[1].total_ns) / samples_[1].steps;
    // A clear difference only: noise must not flip the choice to and fro.
    if (bypassed < 0.85 * cached) streaming_ = true;
    if (cached < 0.85 * bypassed) streaming_ = false;
    trial_ = false;
  }

  bool trial() const { return trial_; }
  bool streaming() const { return streaming_; }

 private:
  static constexpr uint64_t kGroup = 8;        // chunks
  static constexpr uint64_t kFirstTrials = 3;  // long ranges
  static constexpr uint64_t kEvery = 64;       // long ranges between later trials

  struct Sample {
    int64_t total_ns = 0;
    int steps = 0;
  };
  bool streaming_;
  bool trial_ = false;
  uint64_t long_ranges_ = 0;
  Sample samples_[2];
};

}  // namespace kolovod
