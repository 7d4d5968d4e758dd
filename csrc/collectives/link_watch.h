// What the links carry, learnt from the operations themselves. What was measured when the world formed
// (measure.h) took 10 ms, and whoever was late in them, or a buffer that took all, made it wrong by any
// factor. PURE: bytes and times in; on one rank, which tells the others what all work with from then on.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "collectives/select.h"

namespace kolovod {

class LinkWatch {
 public:
  explicit LinkWatch(const LinkCost& cost) : cost_(cost) {}

  // An operation has brought `bytes` to this rank, in `ns` from the first to the last. What is short says
  // nothing: it may have waited in buffers. Late ranks, and a processor that others use, make an operation
  // seem slow, but hardly every one; so of several the fastest but one counts.
  void Delivered(size_t bytes, int64_t ns);

  // What the links cost if that is to be told: once it is known, and when it is another by half. Then
  // that is what all work with.
  std::optional<LinkCost> Revise();

  static constexpr size_t kLeastBytes = 512 << 10;

 private:
  static constexpr size_t kWindow = 8;
  static constexpr double kFactor = 1.5;

  // The second highest of those in the window.
  double Rate() const;

  LinkCost cost_;
  std::array<double, kWindow> rates_{};  // bytes per us
  size_t seen_ = 0;                      // since the last revision
};

}  // namespace kolovod
