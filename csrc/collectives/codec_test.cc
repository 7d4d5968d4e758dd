// The kernels of codec.h: what becomes of an element, and that every instruction set makes the same bits.
#include "collectives/codec.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "collectives/reduce.h"
#include "testing/check.h"

namespace kolovod {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kMax = std::numeric_limits<float>::max();
constexpr Codec kCodecs[] = {Codec::kInt8, Codec::kInt4};

float TopOf(Codec codec) { return codec == Codec::kInt8 ? 127.0f : 7.0f; }

// How many elements share a scale.
size_t GroupOf(Codec codec) { return codec == Codec::kInt8 ? 256 : 64; }

// By how much a scale may be less than its group's largest magnitude says: int4's are bfloat16.
float RoundedBy(Codec codec) { return codec == Codec::kInt8 ? 1e-6f : 1.0f / 128; }

// What is stored of a group's largest magnitude: of int4 what bfloat16 has of it, rounded to zero. By
// arithmetic: gcc 12 loses a change of the bits where it builds for sanitizers (-O1).
float StoredOf(Codec codec, float largest) {
  if (codec == Codec::kInt8 || largest == 0) return largest;
  int exponent;
  std::frexp(largest, &exponent);
  return std::ldexp(std::floor(std::ldexp(largest, 8 - exponent)), exponent - 8);
}

std::vector<char> Encode(const Kernels& kernels, Codec codec, const std::vector<float>& from) {
  const size_t blocks = from.size() / kCodecBlock;
  std::vector<char> to(blocks * EncodedBlockBytes(codec) + 1, 'x');
  kernels.encode(codec, from.data(), blocks, to.data());
  CHECK(to.back() == 'x');
  to.pop_back();
  return to;
}

std::vector<float> Decode(const Kernels& kernels, Codec codec, const std::vector<char>& from) {
  const size_t blocks = from.size() / EncodedBlockBytes(codec);
  std::vector<float> to(blocks * kCodecBlock + 1, 7.0f);
  kernels.decode(codec, from.data(), blocks, to.data());
  CHECK(to.back() == 7.0f);
  to.pop_back();
  return to;
}

// As codec.h says it, one element at a time.
std::vector<float> Expected(Codec codec, const std::vector<float>& from) {
  std::vector<float> wanted;
  const size_t group = GroupOf(codec);
  for (size_t begin = 0; begin < from.size(); begin += group) {
    bool unusual = false;
    float largest = 0;
    for (size_t i = begin; i < begin + group; ++i) {
      unusual |= !std::isfinite(from[i]);
      if (std::isfinite(from[i])) largest = std::max(largest, std::fabs(from[i]));
    }
    const float top = TopOf(codec) - (unusual ? 1 : 0);
    const bool tiny = !std::isfinite(top / largest);
    const float stored = StoredOf(codec, largest);
    const float scale = codec == Codec::kInt8 ? stored / top : stored * (1.0f / top);
    const float inverse = top / stored;
    for (size_t i = begin; i < begin + group; ++i) {
      if (!std::isfinite(from[i])) {
        wanted.push_back(from[i]);
      } else {
        wanted.push_back(tiny ? 0.0f : std::nearbyint(from[i] * inverse) * scale);
      }
    }
  }
  return wanted;
}

std::vector<float> Random(size_t blocks, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(blocks * kCodecBlock);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = normal(generator) * std::exp2(static_cast<float>(i / kCodecBlock * 7 % 60) - 30.0f);
  }
  return values;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Zeros have a sign that no code has, and NaNs have many bit patterns.
void CheckAlike(const std::vector<float>& got, const std::vector<float>& wanted) {
  REQUIRE(got.size() == wanted.size());
  for (size_t i = 0; i < got.size(); ++i) {
    CAPTURE(i);
    CHECK((got[i] == wanted[i] || (std::isnan(got[i]) && std::isnan(wanted[i]))));
  }
}

template <class Visit>
void ForKernels(Visit visit) {
  int count = 0;
  const Kernels* const* kernels = RunnableKernels(&count);
  for (int k = 0; k < count; ++k) visit(*kernels[k]);
}

TEST_CASE("an element becomes the nearest whole number of scales") {
  for (const Codec codec : kCodecs) {
    const std::vector<float> values = Random(60, 1);
    ForKernels([&](const Kernels& kernels) {
      const std::vector<float> decoded = Decode(kernels, codec, Encode(kernels, codec, values));
      CheckAlike(decoded, Expected(codec, values));
      const size_t group = GroupOf(codec);
      for (size_t begin = 0; begin < values.size(); begin += group) {
        float largest = 0;
        for (size_t i = begin; i < begin + group; ++i) largest = std::max(largest, std::fabs(values[i]));
        for (size_t i = begin; i < begin + group; ++i) {
          CHECK(std::fabs(decoded[i] - values[i]) <= largest / TopOf(codec) * 0.5001f);
        }
      }
    });
  }
}

TEST_CASE("of two whole numbers that are as near it is the even one") {
  for (const Codec codec : kCodecs) {
    std::vector<float> values(kCodecBlock);
    values[0] = -TopOf(codec);  // the scale is 1
    for (int i = 1; i < 14; ++i) values[static_cast<size_t>(i)] = static_cast<float>(i - 7) + 0.5f;
    ForKernels([&](const Kernels& kernels) {
      const std::vector<float> decoded = Decode(kernels, codec, Encode(kernels, codec, values));
      CHECK(decoded[0] == -TopOf(codec));
      for (size_t i = 1; i < 14; ++i) CHECK(std::fmod(decoded[i], 2.0f) == 0.0f);
    });
  }
}

TEST_CASE("what is not finite survives where it is, and its neighbours do") {
  for (const Codec codec : kCodecs) {
    std::vector<float> values = Random(4, 2);
    values[3] = kNan;
    values[kCodecBlock + 1] = kInf;
    values[kCodecBlock + 2] = -kInf;
    values[kCodecBlock + 255] = -kNan;
    for (size_t i = 2 * kCodecBlock; i < 3 * kCodecBlock; ++i) values[i] = i % 2 == 0 ? kNan : -kInf;
    ForKernels([&](const Kernels& kernels) {
      CheckAlike(Decode(kernels, codec, Encode(kernels, codec, values)), Expected(codec, values));
    });
  }
}

TEST_CASE("the smallest and the largest") {
  for (const Codec codec : kCodecs) {
    std::vector<float> values(5 * kCodecBlock);
    values[7] = std::numeric_limits<float>::denorm_min();
    values[kCodecBlock] = 1e-37f;
    values[2 * kCodecBlock] = 5e-37f;
    values[2 * kCodecBlock + 1] = -5e-37f;
    values[3 * kCodecBlock] = kMax;
    values[3 * kCodecBlock + 1] = -kMax;
    values[4 * kCodecBlock] = -0.0f;
    ForKernels([&](const Kernels& kernels) {
      const std::vector<float> decoded = Decode(kernels, codec, Encode(kernels, codec, values));
      CHECK(decoded[7] == 0.0f);
      CHECK(std::fabs(decoded[kCodecBlock] - 1e-37f) <= 1e-37f);
      CHECK(std::fabs(decoded[2 * kCodecBlock] / 5e-37f - 1) < RoundedBy(codec) + 1e-5f);
      CHECK(decoded[2 * kCodecBlock + 1] == -decoded[2 * kCodecBlock]);
      CHECK(decoded[3 * kCodecBlock] / kMax > 1 - RoundedBy(codec));
      CHECK(std::isfinite(decoded[3 * kCodecBlock]));
      CHECK(decoded[3 * kCodecBlock + 1] == -decoded[3 * kCodecBlock]);
      CHECK(decoded[4 * kCodecBlock] == 0.0f);
    });
  }
}

TEST_CASE("what is not finite, and what is large, has no part in another group") {
  std::vector<float> values = Random(1, 6);
  ForKernels([&](const Kernels& kernels) {
    const std::vector<float> alone = Decode(kernels, Codec::kInt4, Encode(kernels, Codec::kInt4, values));
    for (size_t group = 0; group < 4; ++group) {
      for (const float other : {kNan, -kInf, kMax}) {
        std::vector<float> changed = values;
        changed[group * 64 + 9] = other;
        const std::vector<float> got = Decode(kernels, Codec::kInt4, Encode(kernels, Codec::kInt4, changed));
        for (size_t i = 0; i < kCodecBlock; ++i) {
          if (i / 64 != group) CHECK(got[i] == alone[i]);
        }
      }
    }
  });
}

TEST_CASE("what a group has but one magnitude of stays as it is, but for the last bit") {
  for (const Codec codec : kCodecs) {
    for (const float value : {1.0f, 0.0625f, 3.0f, 100.0f}) {
      std::vector<float> values(kCodecBlock, value);
      for (size_t i = 0; i < values.size(); i += 3) values[i] = -value;
      ForKernels([&](const Kernels& kernels) {
        const std::vector<float> decoded = Decode(kernels, codec, Encode(kernels, codec, values));
        if (value <= 1) CHECK(decoded == values);
        for (size_t i = 0; i < values.size(); ++i) CHECK(std::fabs(decoded[i] / values[i] - 1) <= 1.2e-7f);
      });
    }
  }
}

TEST_CASE("decoding adds") {
  for (const Codec codec : kCodecs) {
    std::vector<float> values = Random(3, 3);
    values[5] = kInf;
    const std::vector<float> before = Random(3, 4);
    ForKernels([&](const Kernels& kernels) {
      const std::vector<char> bytes = Encode(kernels, codec, values);
      const std::vector<float> decoded = Decode(kernels, codec, bytes);
      std::vector<float> wanted = before, sum = before;
      for (size_t i = 0; i < wanted.size(); ++i) wanted[i] += decoded[i];
      kernels.decode_add(codec, bytes.data(), 3, sum.data());
      CheckAlike(sum, wanted);
    });
  }
}

// Whatever the bits: those of floats, and those of blocks that somebody else has made.
TEST_CASE("every instruction set makes the same bits") {
  std::mt19937 generator(5);
  for (const Codec codec : kCodecs) {
    for (int turn = 0; turn < 200; ++turn) {
      std::vector<float> values(2 * kCodecBlock);
      for (float& value : values) {
        uint32_t bits = generator();
        if (turn % 2 == 0) bits = (bits & 0x807fffffu) | (generator() % 40 + 100) << 23;  // finite
        std::memcpy(&value, &bits, sizeof(bits));
      }
      std::vector<char> noise(2 * EncodedBlockBytes(codec));
      for (char& byte : noise) byte = static_cast<char>(generator());
      int count = 0;
      const Kernels& first = *RunnableKernels(&count)[0];
      const std::vector<char> encoded = Encode(first, codec, values);
      const std::vector<float> decoded = Decode(first, codec, noise);
      ForKernels([&](const Kernels& kernels) {
        CHECK(Encode(kernels, codec, values) == encoded);
        CHECK(SameBits(Decode(kernels, codec, noise), decoded));
      });
    }
  }
}

TEST_CASE("which tensors are encoded") {
  CHECK(CodecOf(Codec::kInt8, DType::kFloat32, kLeastCoded) == Codec::kInt8);
  CHECK(CodecOf(Codec::kInt8, DType::kFloat32, kLeastCoded - 1) == Codec::kNone);
  CHECK(CodecOf(Codec::kInt4, DType::kBFloat16, 5000) == Codec::kInt4);
  CHECK(CodecOf(Codec::kInt4, DType::kFloat64, 5000) == Codec::kNone);
  CHECK(CodecOf(Codec::kInt4, DType::kInt32, 5000) == Codec::kNone);
  CHECK(EncodedBlockBytes(Codec::kInt8) == 260);
  CHECK(EncodedBlockBytes(Codec::kInt4) == 136);
}

}  // namespace
}  // namespace kolovod
