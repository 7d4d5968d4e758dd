#include "base/memory_facts.h"

#include <cmath>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "testing/check.h"

namespace kolovod {
namespace {

TEST_CASE("each bit, the length and the order count") {
  std::set<uint64_t> seen;
  size_t cases = 0;
  for (size_t bytes = 0; bytes < 100; ++bytes) {
    std::string text(bytes, 'x');
    seen.insert(HashMemory(text.data(), bytes));
    ++cases;
    for (size_t bit = 0; bit < 8 * bytes; ++bit) {
      text[bit / 8] = static_cast<char>(text[bit / 8] ^ (1 << bit % 8));
      seen.insert(HashMemory(text.data(), bytes));
      text[bit / 8] = static_cast<char>(text[bit / 8] ^ (1 << bit % 8));
      ++cases;
    }
  }
  CHECK(seen.size() == cases);
  const double numbers[] = {1, 2, 3, 4, 5, 6, 7, 8, 9}, others[] = {5, 2, 3, 4, 1, 6, 7, 8, 9};
  CHECK(HashMemory(numbers, sizeof(numbers)) != HashMemory(others, sizeof(others)));
  CHECK(HashMemory(numbers, 8) != HashMemory(numbers, 8, 1));
  CHECK(HashMemory(numbers, 64) == HashMemory(numbers, 64));
}

template <class Number>
void CheckFinite(DType dtype, const std::vector<Number>& bad, Number largest) {
  for (const size_t count : {1, 7, 4096, 5000}) {
    std::vector<Number> numbers(count, largest);
    CHECK(!HasNonFinite(numbers.data(), count, dtype));
    for (const Number number : bad) {
      for (const size_t place : {size_t{0}, count / 2, count - 1}) {
        numbers[place] = number;
        CHECK(HasNonFinite(numbers.data(), count, dtype));
        CHECK(!HasNonFinite(numbers.data(), place, dtype));
        numbers[place] = largest;
      }
    }
  }
}

TEST_CASE("what is not finite is found") {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  CheckFinite<float>(DType::kFloat32, {kInfinity, -kInfinity, std::nanf("")}, -3.4e38f);
  CheckFinite<double>(DType::kFloat64, {kInfinity, -kInfinity, std::nan("")}, 1.7e308);
  CheckFinite<uint16_t>(DType::kFloat16, {0x7c00, 0xfc00, 0x7e01}, 0xfbff);
  CheckFinite<uint16_t>(DType::kBFloat16, {0x7f80, 0xff80, 0x7fc1}, 0xff7f);
  const std::vector<int32_t> ints(8, -1);
  CHECK(!HasNonFinite(ints.data(), ints.size(), DType::kInt32));
}

}  // namespace
}  // namespace kolovod
