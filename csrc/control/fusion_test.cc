#include "control/fusion.h"

#include <random>

#include "testing/check.h"

namespace kolovod {
namespace {

TEST_CASE("a bucket takes what fits and at least one") {
  CHECK(EntriesForBucket({}, 10) == 0);
  CHECK(EntriesForBucket({100}, 10) == 1);
  CHECK(EntriesForBucket({4, 4, 4}, 10) == 2);
  CHECK(EntriesForBucket({4, 6, 0, 0, 1}, 10) == 4);
  CHECK(EntriesForBucket({0, 100, 1}, 10) == 1);
}

TEST_CASE("equal keys are grouped in order") {
  const FusionKey a{DType::kFloat32, Op::kSum, 1, 1, Codec::kNone};
  const FusionKey b{DType::kFloat16, Op::kSum, 1, 1, Codec::kNone};
  const FusionKey c{DType::kFloat32, Op::kSum, 0.5, 1, Codec::kNone};
  const FusionKey d{DType::kFloat32, Op::kSum, 1, 1, Codec::kInt8};
  const auto groups = GroupByKey({a, b, a, c, b, d, a});
  CHECK(groups == std::vector<std::vector<size_t>>{{0, 2, 6}, {1, 4}, {3}, {5}});
}

TEST_CASE("slices and chunks cover everything once") {
  std::mt19937_64 random(2);
  for (int i = 0; i < 20000; ++i) {
    const int size = 1 + static_cast<int>(random() % 9);
    const size_t total = 1 + random() % (i % 2 ? 5000 : 5'000'000);
    const size_t most = 4096 * (1 + random() % 256);
    const ChunkPlan plan = PlanChunks(total, most, size);
    CHECK(plan.chunk_bytes <= most);
    CHECK(plan.chunk_bytes % (kLine * static_cast<size_t>(size)) == 0);
    CHECK((plan.count - 1) * plan.chunk_bytes < total);
    CHECK(plan.count * plan.chunk_bytes >= total);
    const size_t last = total - (plan.count - 1) * plan.chunk_bytes;
    for (const size_t length : {plan.chunk_bytes, last}) {
      size_t at = 0;
      for (int r = 0; r < size; ++r) {
        const Slice slice = SliceOf(length, size, r);
        CHECK(slice.begin == at);
        CHECK(slice.end >= slice.begin);
        CHECK(slice.end <= length);
        CHECK((slice.begin % kLine == 0 || slice.begin == length));
        at = slice.end;
      }
      CHECK(at == length);
    }
  }
}

}  // namespace
}  // namespace kolovod
