// Should the stores of a reduction into staging bypass the cache? Between cores that share a cache an
// allreduce is better off without; between cores that do not, ordinary stores bounce every line and cost up
// to five times more. Nobody can ask a virtual machine which it is, and it may change under way, so it is
// measured on the data itself, for each kind of reduction. PURE: times are arguments.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace kolovod {

class StreamingChooser {
 public:
  explicit StreamingChooser(bool initially) : streaming_(initially) {}

  // A range of `chunks` pipeline steps begins. While a trial is on, the chunks of long ranges alternate in
  // groups between both ways. Which ones depends only on the chunks that came before, and the group
  // only on the chunk's index, so all ranks try the same way at the same time.
  void BeginRange(uint64_t chunks) {
    trial_ = chunks >= kLong && (trials_ < kFirstTrials || chunks_since_ >= kEvery);
    if (!trial_ && trials_ >= kFirstTrials) chunks_since_ += chunks;
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
    if (std::min(step_ns_[0].size(), step_ns_[1].size()) < kSamples)
      return;  // the next range goes on with it
    const auto cached = static_cast<double>(Median(step_ns_[0]));
    const auto bypassed = static_cast<double>(Median(step_ns_[1]));
    for (std::vector<int64_t>& steps : step_ns_) steps.clear();
    const int verdict = bypassed < 0.85 * cached ? 1 : cached < 0.85 * bypassed ? -1 : 0;
    const bool second = ++trials_ % 2 == 0;
    if (second && verdict != 0 && verdict == verdict_) streaming_ = verdict > 0;
    if (second && trials_ >= kFirstTrials) chunks_since_ = 0;
    verdict_ = verdict;
  }

  bool trial() const { return trial_; }
  bool streaming() const { return streaming_; }

 private:
  static constexpr uint64_t kGroup = 8;        // chunks
  static constexpr uint64_t kLong = 16;        // chunks: a group of each way
  static constexpr size_t kSamples = 18;       // of each way, in a trial: three ranges of 16 chunks
  static constexpr uint64_t kFirstTrials = 4;  // two pairs
  static constexpr uint64_t kEvery = 64 * 64;  // chunks between later pairs

  static int64_t Median(std::vector<int64_t>& values) {
    const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
  }

  bool streaming_;
  bool trial_ = false;               // this range takes part in one
  uint64_t trials_ = 0;              // that are over
  uint64_t chunks_since_ = 0;        // the last pair
  int verdict_ = 0;                  // of the trial before: 1 bypassing is better, -1 worse, 0 alike
  std::vector<int64_t> step_ns_[2];  // of the trial that is on: ordinary, bypassing
};

}  // namespace kolovod
