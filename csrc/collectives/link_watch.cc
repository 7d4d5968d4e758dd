#include "collectives/link_watch.h"

#include <algorithm>
#include <functional>

namespace kolovod {

void LinkWatch::Delivered(size_t bytes, int64_t ns) {
  if (bytes < kLeastBytes || ns <= 0) return;
  rates_[seen_++ % kWindow] = static_cast<double>(bytes) * 1000 / static_cast<double>(ns);
}

double LinkWatch::Rate() const {
  std::array<double, kWindow> sorted = rates_;
  const auto end = sorted.begin() + static_cast<std::ptrdiff_t>(std::min(seen_, kWindow));
  std::partial_sort(sorted.begin(), sorted.begin() + 2, end, std::greater<>());
  return std::clamp(sorted[1], kSlowestBytesPerUs, kFastestBytesPerUs);
}

std::optional<LinkCost> LinkWatch::Revise() {
  if (seen_ < 2) return std::nullopt;
  const double rate = Rate();
  const bool faster = rate > cost_.bytes_per_us * kFactor;
  const bool enough = seen_ >= kWindow;
  if (!faster && !enough) return std::nullopt;
  if (!faster && cost_.confirmed && rate * kFactor > cost_.bytes_per_us) {
    if (seen_ >= 2 * kWindow) seen_ = kWindow;  // the window is full, and stays so
    return std::nullopt;
  }
  cost_.bytes_per_us = rate;
  cost_.confirmed = cost_.confirmed || enough;
  seen_ = 0;
  return cost_;
}

}  // namespace kolovod
