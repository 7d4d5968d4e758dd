// Should stores into staging bypass the cache? Between cores that share a cache, no; between cores that
// do not, ordinary stores bounce every line and cost up to five times more. Nobody can ask a virtual
// machine which it is, and it may change under way, so it is measured on the data itself. PURE: times
// are arguments.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace kolovod {

class StreamingChooser {
 public:
  explicit StreamingChooser(bool initially) : streaming_(initially) {}

  // A range of `chunks` pipeline steps begins. Some long ranges are trials: their chunks alternate in
  // groups between both ways. Which ones depends only on how many long ranges came before, and the group
  // only on the chunk's index, so all ranks try the same way at the same time.
  void BeginRange(uint64_t chunks) {
    trial_ = chunks >= kLong && (long_ranges_ < kFirstTrials || long_ranges_ % kEvery < 2);
    first_of_pair_ = long_ranges_ % 2 == 0;
    if (chunks >= kLong) ++long_ranges_;
    for (std::vector<int64_t>& steps : step_ns_) steps.clear();
  }

  bool Use(uint64_t index) const { return trial_ ? (index / kGroup) % 2 == 1 : streaming_; }

  // The step of chunk `index` took this long. The first steps after a change are both ways mixed.
  void Record(uint64_t index, int64_t step_ns) {
    if (trial_ && index % kGroup >= 2) step_ns_[Use(index) ? 1 : 0].push_back(step_ns);
  }

  // Medians, since a step that was preempted says nothing; and two trials that agree, each by a clear
  // difference: a wrong choice lasts for long, and noise must not flip it to and fro.
  void EndRange() {
    if (!trial_) return;
    trial_ = false;
    const auto cached = static_cast<double>(Median(step_ns_[0]));
    const auto bypassed = static_cast<double>(Median(step_ns_[1]));
    const int verdict = bypassed < 0.85 * cached ? 1 : cached < 0.85 * bypassed ? -1 : 0;
    if (!first_of_pair_ && verdict != 0 && verdict == verdict_) streaming_ = verdict > 0;
    verdict_ = verdict;
  }

  bool trial() const { return trial_; }
  bool streaming() const { return streaming_; }

 private:
  static constexpr uint64_t kGroup = 8;        // chunks
  static constexpr uint64_t kLong = 64;        // chunks: several groups of each way
  static constexpr uint64_t kFirstTrials = 4;  // long ranges, two pairs
  static constexpr uint64_t kEvery = 64;       // long ranges between later pairs

  static int64_t Median(std::vector<int64_t>& values) {
    const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return values.empty() ? 0 : *middle;
  }

  bool streaming_;
  bool trial_ = false;
  bool first_of_pair_ = false;
  int verdict_ = 0;  // of the trial before: 1 bypassing is better, -1 worse, 0 alike
  uint64_t long_ranges_ = 0;
  std::vector<int64_t> step_ns_[2];  // ordinary, bypassing
};

}  // namespace kolovod
