// How fast this machine encodes and decodes blocks of floats (csrc/collectives/codec.h), in the cache, on one
// core. A measurement, no part of the product.
//
//   f="-O3 -std=c++20 -ffp-contract=off -Icsrc"; c=csrc/collectives; g++ $f -c $c/reduce_base.cc -o b.o
//   g++ $f -mavx2 -mf16c -mprfchw -c $c/reduce_avx2.cc -o a.o
//   g++ $f bench/codecs.cc csrc/base/processor.cc $c/reduce.cc a.o b.o -o codecs && ./codecs
//
// Floats per second, as bytes: medians of 41 times that go over 32 KiB of floats 2,000 times.
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <random>
#include <vector>

#include "collectives/codec.h"
#include "collectives/reduce.h"

namespace {

using kolovod::Codec;
using kolovod::Kernels;

constexpr size_t kBlocks = 32;
constexpr size_t kFloats = kBlocks * kolovod::kCodecBlock;
constexpr int kTimes = 41, kRounds = 2000;

int64_t NowNs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

double GigabytesPerSecond(const std::function<void()>& once) {
  std::vector<double> found;
  for (int t = 0; t < kTimes; ++t) {
    const int64_t start_ns = NowNs();
    for (int r = 0; r < kRounds; ++r) once();
    const auto elapsed_ns = static_cast<double>(NowNs() - start_ns);
    found.push_back(static_cast<double>(kFloats * sizeof(float)) * kRounds / elapsed_ns);
  }
  std::nth_element(found.begin(), found.begin() + kTimes / 2, found.end());
  return found[kTimes / 2];
}

}  // namespace

int main() {
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  std::vector<float> values(kFloats), sum(kFloats);
  for (float& value : values) value = normal(generator);
  std::vector<char> encoded(kBlocks * kolovod::EncodedBlockBytes(Codec::kInt8));
  int count = 0;
  const Kernels* const* kernels = kolovod::RunnableKernels(&count);
  for (int k = 0; k < count; ++k) {
    for (const Codec codec : {Codec::kInt8, Codec::kInt4}) {
      const Kernels& by = *kernels[k];
      const double encodes =
          GigabytesPerSecond([&] { by.encode(codec, values.data(), kBlocks, encoded.data()); });
      const double decodes =
          GigabytesPerSecond([&] { by.decode(codec, encoded.data(), kBlocks, sum.data()); });
      const double adds =
          GigabytesPerSecond([&] { by.decode_add(codec, encoded.data(), kBlocks, sum.data()); });
      std::printf("%-5s %s: encode %5.1f GB/s, decode %5.1f, decode and add %5.1f\n", by.name,
                  kolovod::NameOf(codec), encodes, decodes, adds);
    }
  }
}
