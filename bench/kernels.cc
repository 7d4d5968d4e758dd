// How fast this machine encodes and decodes blocks of floats (csrc/collectives/codec.h), and reduces arrays
// (reduce.h), in the cache, on one core. A measurement, no part of the product.
//
//   f="-O3 -std=c++20 -ffp-contract=off -Icsrc"; c=csrc/collectives; g++ $f -c $c/reduce_base.cc -o b.o
//   g++ $f -mavx2 -mf16c -mprfchw -mprefer-vector-width=256 -c $c/reduce_avx2.cc -o a.o
//   w="-mavx512f -mavx512bw -mavx512vl -mavx512dq"
//   g++ $f $w -mf16c -mprfchw -mprefer-vector-width=512 -c $c/reduce_avx512.cc -o w.o
//   g++ $f bench/kernels.cc csrc/base/processor.cc $c/reduce.cc a.o b.o w.o -o kernels && ./kernels
//
// Medians of 41 times that go over 32 KiB of floats, or arrays of 8,192 elements, some thousand times.
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <random>
#include <vector>

#include "base/dtype_traits.h"
#include "collectives/codec.h"
#include "collectives/reduce.h"

namespace {

using kolovod::Codec;
using kolovod::DType;
using kolovod::Kernels;

constexpr size_t kBlocks = 32;
constexpr size_t kFloats = kBlocks * kolovod::kCodecBlock;
constexpr int kTimes = 41, kRounds = 2000;

int64_t NowNs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

double MedianNs(const std::function<void()>& once) {
  std::vector<double> found;
  for (int t = 0; t < kTimes; ++t) {
    const int64_t start_ns = NowNs();
    for (int r = 0; r < kRounds; ++r) once();
    found.push_back(static_cast<double>(NowNs() - start_ns) / kRounds);
  }
  std::nth_element(found.begin(), found.begin() + kTimes / 2, found.end());
  return found[kTimes / 2];
}

void MeasureCodec(const Kernels& by, Codec codec) {
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  std::vector<float> values(kFloats), sum(kFloats);
  for (float& value : values) value = normal(generator);
  std::vector<char> encoded(kBlocks * kolovod::EncodedBlockBytes(codec));
  const double bytes = kFloats * sizeof(float);
  const double encodes = MedianNs([&] { by.encode(codec, values.data(), kBlocks, encoded.data()); });
  const double decodes = MedianNs([&] { by.decode(codec, encoded.data(), kBlocks, sum.data()); });
  const double adds = MedianNs([&] { by.decode_add(codec, encoded.data(), kBlocks, sum.data()); });
  std::printf("%-6s %s: encode %5.1f GB/s, decode %5.1f, decode and add %5.1f\n", by.name,
              kolovod::NameOf(codec), bytes / encodes, bytes / decodes, bytes / adds);
}

struct alignas(64) Line {
  uint16_t words[32];
};

// The sum of so many arrays of zeros, to two destinations, as an allreduce on one host has it.
void MeasureReduction(const Kernels& by, DType dtype, int sources) {
  constexpr size_t kCount = 8192;
  const std::vector<Line> array(kCount * kolovod::SizeOf(dtype) / sizeof(Line));
  const std::vector<std::vector<Line>> arrays(static_cast<size_t>(sources), array);
  std::vector<Line> out(array), copy(array);
  std::vector<const void*> from;
  for (const auto& each : arrays) from.push_back(each.data());
  void* copies[] = {copy.data()};
  kolovod::Exchange x;
  x.reduce.dtype = dtype;
  x.reduce.sources = from.data();
  x.reduce.source_count = sources;
  x.reduce.out = out.data();
  x.reduce.copies = copies;
  x.reduce.copy_count = 1;
  x.reduce.count = kCount;
  std::printf("%-6s %s, sum of %d: %5.2f elements/ns\n", by.name, kolovod::NameOf(dtype), sources,
              kCount / MedianNs([&] { by.exchange(x); }));
}

}  // namespace

int main() {
  int count = 0;
  const Kernels* const* kernels = kolovod::RunnableKernels(&count);
  for (int k = 0; k < count; ++k) {
    for (const Codec codec : {Codec::kInt8, Codec::kInt4}) MeasureCodec(*kernels[k], codec);
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      for (const int sources : {2, 4, 8}) MeasureReduction(*kernels[k], dtype, sources);
    }
  }
}
