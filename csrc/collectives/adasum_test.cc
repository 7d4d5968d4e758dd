#include "collectives/adasum.h"

#include <cmath>
#include <vector>

#include "base/half.h"
#include "testing/check.h"

namespace kolovod {
namespace {

using testing::FirstDifference;

std::vector<double> Pair(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> out(a.size());
  AdasumPair(DType::kFloat64, a.data(), b.data(), out.data(), a.size());
  return out;
}

TEST_CASE("orthogonal vectors are added and equal ones averaged") {
  CHECK(Pair({3, 0, 0}, {0, 4, 0}) == std::vector<double>{3, 4, 0});
  CHECK(Pair({1, 2, 4}, {1, 2, 4}) == std::vector<double>{1, 2, 4});
}

TEST_CASE("a vector of zeros adds nothing") {
  CHECK(Pair({0, 0}, {5, -7}) == std::vector<double>{5, -7});
  CHECK(Pair({5, -7}, {0, 0}) == std::vector<double>{5, -7});
  CHECK(Pair({0, 0}, {0, 0}) == std::vector<double>{0, 0});
  CHECK(Pair({}, {}).empty());
}

TEST_CASE("the formula on vectors of every length") {
  for (size_t n : {1, 7, 8, 9, 100, 1001}) {
    std::vector<double> a(n), b(n);
    double ab = 0, aa = 0, bb = 0;
    for (size_t i = 0; i < n; ++i) {
      a[i] = std::sin(static_cast<double>(i) + 1);
      b[i] = std::cos(static_cast<double>(i) * 3);
      ab += a[i] * b[i];
      aa += a[i] * a[i];
      bb += b[i] * b[i];
    }
    const std::vector<double> out = Pair(a, b);
    for (size_t i = 0; i < n; ++i) {
      const double wanted = (1 - ab / (2 * aa)) * a[i] + (1 - ab / (2 * bb)) * b[i];
      CHECK(std::abs(out[i] - wanted) <= 1e-12);
    }
  }
}

TEST_CASE("sixteen bits are computed in more") {
  // |a|^2 = 2000 * 256 is more than float16 can hold.
  std::vector<uint16_t> a(2000, ToHalf(16.0f).bits), out(2000);
  AdasumPair(DType::kFloat16, a.data(), a.data(), out.data(), a.size());
  CHECK(FirstDifference(out, a) == "");
  std::vector<uint16_t> b(2000, ToBFloat16(-3.0f).bits);
  AdasumPair(DType::kBFloat16, b.data(), b.data(), b.data(), b.size());
  CHECK(FirstDifference(b, std::vector<uint16_t>(2000, ToBFloat16(-3.0f).bits)) == "");
}

}  // namespace
}  // namespace kolovod
