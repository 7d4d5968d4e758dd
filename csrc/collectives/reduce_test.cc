#include "collectives/reduce.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/half.h"
#include "testing/check.h"

namespace kolovod {
namespace {

using testing::FirstDifference;

std::vector<char> RandomBytes(DType dtype, size_t count, std::mt19937& random) {
  std::vector<char> bytes(count * SizeOf(dtype));
  std::uniform_int_distribution<int> small(-20, 20);
  for (size_t i = 0; i < count; ++i) {
    const int v = small(random);
    char* at = bytes.data() + i * SizeOf(dtype);
    const auto put = [at](auto value) { std::memcpy(at, &value, sizeof(value)); };
    switch (dtype) {
      case DType::kUInt8:
        put(static_cast<uint8_t>(v));
        break;
      case DType::kInt8:
        put(static_cast<int8_t>(v));
        break;
      case DType::kUInt16:
        put(static_cast<uint16_t>(v));
        break;
      case DType::kInt16:
        put(static_cast<int16_t>(v));
        break;
      case DType::kInt32:
        put(static_cast<int32_t>(v * 100003));
        break;
      case DType::kInt64:
        put(static_cast<int64_t>(v) * 10000000019LL);
        break;
      case DType::kFloat16:
        put(ToHalf(static_cast<float>(v) * 0.37f));
        break;
      case DType::kFloat32:
        put(static_cast<float>(v) * 0.37f);
        break;
      case DType::kFloat64:
        put(v * 0.37);
        break;
      case DType::kBool:
        put(static_cast<uint8_t>(v > 0));
        break;
      case DType::kBFloat16:
        put(ToBFloat16(static_cast<float>(v) * 0.37f));
        break;
    }
  }
  return bytes;
}

// With `copies` the result also replaces every source but the own one, past the cache or not.
std::vector<char> Run(const Kernels& kernels, Reduction r, std::vector<std::vector<char>> in, bool copies,
                      bool streaming) {
  std::vector<const void*> sources;
  std::vector<void*> destinations;
  for (size_t s = 0; s < in.size(); ++s) {
    sources.push_back(in[s].data());
    if (static_cast<int>(s) != r.own_source) destinations.push_back(in[s].data());
  }
  std::vector<char> out(in[0].size());
  Exchange x;
  x.reduce = r;
  x.reduce.sources = sources.data();
  x.reduce.source_count = static_cast<int>(in.size());
  x.reduce.out = out.data();
  x.reduce.copies = destinations.data();
  x.reduce.copy_count = copies ? static_cast<int>(destinations.size()) : 0;
  x.reduce.streaming = streaming;
  kernels.exchange(x);
  StreamingFence();
  for (void* copy : destinations) CHECK((!copies || std::memcmp(copy, out.data(), out.size()) == 0));
  return out;
}

TEST_CASE("every kernel set gives the same bits") {
  int sets = 0;
  const Kernels* const* kernels = RunnableKernels(&sets);
  CHECK(sets >= 1);
  std::mt19937 random(1);
  for (int dtype = 0; dtype < kDTypeCount; ++dtype) {
    for (Op op : {Op::kAverage, Op::kSum, Op::kMin, Op::kMax, Op::kProduct}) {
      for (int sources : {1, 2, 3, 5}) {
        Reduction r;
        r.dtype = static_cast<DType>(dtype);
        r.op = op;
        r.count = 2500;
        r.divisor = op == Op::kAverage ? sources : 1;
        for (double factor : {1.0, 0.5, 0.3}) {
          if (r.dtype == DType::kBool && (factor != 1.0 || op == Op::kAverage)) continue;
          r.prescale = r.scale = factor;
          r.own_source = factor == 0.3 ? -1 : sources / 2;  // -1: nothing is scaled before
          std::vector<std::vector<char>> in;
          for (int s = 0; s < sources; ++s) in.push_back(RandomBytes(r.dtype, r.count, random));
          const std::vector<char> expected = Run(*kernels[0], r, in, false, false);
          for (int k = 0; k < sets; ++k) {
            CHECK(Run(*kernels[k], r, in, true, false) == expected);
            CHECK(Run(*kernels[k], r, in, true, true) == expected);
          }
        }
      }
    }
  }
}

// (a + b) + c in three calls, the partial results in their own type between them, has the bits of one call.
TEST_CASE("partial results lose nothing") {
  int sets = 0;
  const Kernels* const* kernels = RunnableKernels(&sets);
  std::mt19937 random(4);
  for (int dtype = 0; dtype < kDTypeCount; ++dtype) {
    for (Op op : {Op::kAverage, Op::kSum, Op::kMin, Op::kMax, Op::kProduct}) {
      for (double factor : {1.0, 0.5}) {
        Exchange x;
        Reduction& r = x.reduce;
        r.dtype = static_cast<DType>(dtype);
        r.op = op;
        r.count = 1003;
        if (r.dtype == DType::kBool && (factor != 1.0 || op == Op::kAverage)) continue;
        std::vector<std::vector<char>> in;
        for (int s = 0; s < 3; ++s) in.push_back(RandomBytes(r.dtype, r.count, random));
        const size_t partial_bytes = r.count * SizeOf(AccumulatorOf(r.dtype, op));
        std::vector<char> once(in[0].size()), sum(partial_bytes), alone(partial_bytes), last(in[0].size());
        const auto run = [&](int k, const std::vector<const void*>& sources, int own,
                             std::vector<char>& out) {
          r.sources = sources.data();
          r.source_count = static_cast<int>(sources.size());
          r.own_source = own;
          r.prescale = own < 0 ? 1.0 : factor;
          const bool whole = !r.to_partials;
          r.scale = whole ? factor : 1.0;
          r.divisor = whole && op == Op::kAverage ? 3 : 1;
          r.out = out.data();
          kernels[k]->exchange(x);
        };
        for (int k = 0; k < sets; ++k) {
          r.from_partials = r.to_partials = false;
          run(k, {in[0].data(), in[1].data(), in[2].data()}, 1, once);
          r.to_partials = true;
          run(k, {in[0].data(), in[1].data()}, 1, sum);
          run(k, {in[2].data()}, -1, alone);
          r.from_partials = true;
          r.to_partials = false;
          run(k, {sum.data(), alone.data()}, -1, last);
          CHECK(FirstDifference(last, once) == "");
        }
      }
    }
  }
}

template <class T>
std::vector<T> Reduce(Op op, DType dtype, const std::vector<std::vector<T>>& in, double scale = 1.0) {
  Exchange x;
  Reduction& r = x.reduce;
  r.dtype = dtype;
  r.op = op;
  r.scale = scale;
  r.count = in[0].size();
  r.divisor = op == Op::kAverage ? static_cast<int>(in.size()) : 1;
  std::vector<const void*> sources;
  for (const auto& values : in) sources.push_back(values.data());
  r.sources = sources.data();
  r.source_count = static_cast<int>(in.size());
  std::vector<T> out(r.count);
  r.out = out.data();
  ActiveKernels().exchange(x);
  return out;
}

TEST_CASE("values") {
  using I = std::vector<int32_t>;
  CHECK(Reduce<int32_t>(Op::kSum, DType::kInt32, {{1, -2}, {10, -20}, {100, -200}}) == I{111, -222});
  // Integer averages truncate toward zero, and are exact where the quotient is (49/49).
  CHECK(Reduce<int32_t>(Op::kAverage, DType::kInt32, {{3, -3}, {4, -4}}) == I{3, -3});
  CHECK(Reduce<int32_t>(Op::kMax, DType::kInt32, {{3, -3}, {4, -4}}) == I{4, -3});
  CHECK(Reduce<int32_t>(Op::kMin, DType::kInt32, {{3, -3}, {4, -4}}) == I{3, -4});
  CHECK(Reduce<int32_t>(Op::kProduct, DType::kInt32, {{3, -3}, {4, -4}}) == I{12, 12});
  CHECK(Reduce<int32_t>(Op::kSum, DType::kInt32, {{5, -5}, {0, 0}}, 0.5) == I{2, -2});
  CHECK(Reduce<uint8_t>(Op::kSum, DType::kUInt8, {{200}, {100}}) == std::vector<uint8_t>{44});
  CHECK(Reduce<uint8_t>(Op::kSum, DType::kBool, {{1, 0, 1}, {1, 0, 0}}) == std::vector<uint8_t>{1, 0, 1});
  CHECK(Reduce<uint8_t>(Op::kMin, DType::kBool, {{1, 0, 1}, {1, 0, 0}}) == std::vector<uint8_t>{1, 0, 0});
  // Addition in source order: (1e8 - 1e8) + 1, not 1e8 + (-1e8 + 1).
  CHECK(Reduce<float>(Op::kSum, DType::kFloat32, {{1e8f}, {-1e8f}, {1.0f}}) == std::vector<float>{1.0f});
  CHECK(Reduce<float>(Op::kAverage, DType::kFloat32, {{0.1f}, {0.1f}, {0.1f}})[0] ==
        (0.1f + 0.1f + 0.1f) / 3.0f);
}

TEST_CASE("a nan on any rank is the result") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (Op op : {Op::kMin, Op::kMax, Op::kSum}) {
    CHECK(std::isnan(Reduce<float>(op, DType::kFloat32, {{nan}, {1.0f}})[0]));
    CHECK(std::isnan(Reduce<float>(op, DType::kFloat32, {{1.0f}, {nan}})[0]));
  }
}

TEST_CASE("sixteen bit floats are accumulated in float32") {
  // 2048 + 1 is 2048 in float16: a sum that rounds at each addition would stay there.
  std::vector<std::vector<uint16_t>> in;
  in.push_back({ToHalf(2048.0f).bits});
  for (int i = 0; i < 4; ++i) in.push_back({ToHalf(1.0f).bits});
  CHECK(ToFloat(Half{Reduce<uint16_t>(Op::kSum, DType::kFloat16, in)[0]}) == 2052.0f);
}

TEST_CASE("half conversions round trip") {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const Half half{static_cast<uint16_t>(bits)};
    const BFloat16 brain{static_cast<uint16_t>(bits)};
    if (std::isnan(ToFloat(half))) {
      CHECK(std::isnan(ToFloat(ToHalf(ToFloat(half)))));
    } else {
      CHECK(ToHalf(ToFloat(half)).bits == half.bits);
    }
    if (std::isnan(ToFloat(brain))) {
      CHECK(std::isnan(ToFloat(ToBFloat16(ToFloat(brain)))));
    } else {
      CHECK(ToBFloat16(ToFloat(brain)).bits == brain.bits);
    }
  }
  CHECK(ToHalf(65519.0f).bits == 0x7bff);
  CHECK(ToHalf(65520.0f).bits == 0x7c00);
  CHECK(ToHalf(0x1p-25f).bits == 0);              // a tie rounds to even
  CHECK(ToHalf(0x1.8p-24f).bits == 2);            // a tie rounds to even
  CHECK(ToBFloat16(1.00390625f).bits == 0x3f80);  // 1 + 2^-8: a tie
  CHECK(ToBFloat16(std::numeric_limits<float>::max()).bits == 0x7f80);
}

// The three tasks side by side, of unequal lengths, do what each would do alone.
TEST_CASE("tasks of an exchange do not disturb each other") {
  std::mt19937 random(2);
  int sets = 0;
  const Kernels* const* kernels = RunnableKernels(&sets);
  for (int round = 0; round < 200; ++round) {
    const auto draw = [&](size_t limit) { return std::uniform_int_distribution<size_t>(0, limit)(random); };
    const size_t packed = draw(5000), reduced = draw(5000), copied = draw(5000);
    const std::vector<char> tensor = RandomBytes(DType::kFloat32, packed, random);
    const std::vector<char> result = RandomBytes(DType::kFloat32, copied, random);
    const std::vector<char> a = RandomBytes(DType::kFloat32, reduced, random);
    std::vector<char> b = RandomBytes(DType::kFloat32, reduced, random);
    std::vector<char> sum(a.size());
    for (size_t i = 0; i < reduced; ++i) {
      float x = 0, y = 0;
      std::memcpy(&x, &a[4 * i], 4);
      std::memcpy(&y, &b[4 * i], 4);
      x += y;
      std::memcpy(&sum[4 * i], &x, 4);
    }
    std::vector<char> staged(tensor.size() + 1, 'x'), out(result.size() + 1, 'x'), total(a.size() + 1, 'x');
    const void* sources[] = {a.data(), b.data()};
    void* copies[] = {b.data()};
    Exchange x;
    x.pack_from = tensor.data();
    x.pack_to = staged.data();
    x.pack_bytes = tensor.size();
    x.out_from = result.data();
    x.out_to = out.data();
    x.out_bytes = result.size();
    x.weight = static_cast<int>(1 + draw(3));
    x.pack_streaming = round % 2 == 0;
    x.out_streaming = round % 3 == 0;
    x.reduce.sources = sources;
    x.reduce.source_count = 2;
    x.reduce.own_source = 0;
    x.reduce.out = total.data();
    x.reduce.copies = copies;
    x.reduce.copy_count = 1;
    x.reduce.streaming = round % 5 == 0;
    x.reduce.count = reduced;
    kernels[round % sets]->exchange(x);
    StreamingFence();
    CHECK(std::equal(tensor.begin(), tensor.end(), staged.begin()));
    CHECK(staged.back() == 'x');
    CHECK(std::equal(result.begin(), result.end(), out.begin()));
    CHECK(out.back() == 'x');
    CHECK(std::equal(sum.begin(), sum.end(), total.begin()));
    CHECK(total.back() == 'x');
    CHECK(FirstDifference(b, sum) == "");
  }
}

TEST_CASE("streaming copy at any alignment") {
  std::vector<char> src(700);
  for (size_t i = 0; i < src.size(); ++i) src[i] = static_cast<char>(i * 7);
  for (size_t from : {0, 1, 13}) {
    for (size_t to : {0, 3, 33, 63}) {
      for (size_t bytes : {0, 1, 63, 64, 129, 500}) {
        std::vector<char> dst(700, 'x');
        ActiveKernels().copy_streaming(dst.data() + to, src.data() + from, bytes);
        StreamingFence();
        CHECK(std::memcmp(dst.data() + to, src.data() + from, bytes) == 0);
        CHECK(dst[to + bytes] == 'x');
      }
    }
  }
}

}  // namespace
}  // namespace kolovod
