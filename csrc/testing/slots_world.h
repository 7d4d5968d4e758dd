// Objects of one class, each a rank's, over one segment.
#pragma once

#include <memory>
#include <vector>

#include "base/config.h"
#include "testing/check.h"
#include "transport/segment.h"

namespace kolovod::testing {

template <class OfRank>
struct SlotsWorld {
  explicit SlotsWorld(int size) {
    CHECK_OK(Segment::Map(-1, SegmentLayout(size, size, Config()), &segment));
    for (int r = 0; r < size; ++r) ranks.emplace_back(*segment, r);
  }
  std::shared_ptr<Segment> segment;
  std::vector<OfRank> ranks;
};

}  // namespace kolovod::testing
