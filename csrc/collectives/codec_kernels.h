// Encoding and decoding blocks of codec.h. Included once per instruction set, by reduce_kernels.h: see there
// for why nothing here may have external linkage.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "collectives/codec.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace kolovod {
namespace {

constexpr uint32_t kSignBit = 0x80000000u;
constexpr uint32_t kInfinityBits = 0x7f800000u;
constexpr uint32_t kNanBits = 0x7fc00000u;
constexpr float kLargestFloat = 3.402823466e38f;
// A float in which a whole number of up to 22 bits is the low ones of the mantissa, rounded to nearest even.
constexpr float kRounder = 12582912.0f;

uint32_t BitsOf(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}
float FloatOf(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// The scale by which `top` stands for `largest`, and what to multiply by instead of dividing; zeros for a
// block that is too small for that.
struct BlockScale {
  float scale, inverse;
};
BlockScale ScaleOf(float largest, float top) {
  const float inverse = top / largest;
  if (!(inverse <= kLargestFloat)) return {0.0f, 0.0f};
  float scale = largest / top;
  if (!(scale * top <= kLargestFloat)) scale = FloatOf(BitsOf(scale) - 1);
  return {scale, inverse};
}

// int8 codes of a block with elements that are not finite; returns the scale with its sign bit set.
float QuantizeUnusual(const float* from, int8_t top, int8_t* codes) {
  uint32_t largest = 0;
  for (size_t i = 0; i < kCodecBlock; ++i) {
    const uint32_t magnitude = BitsOf(from[i]) & ~kSignBit;
    if (magnitude < kInfinityBits && magnitude > largest) largest = magnitude;
  }
  const BlockScale by = ScaleOf(FloatOf(largest), static_cast<float>(top - 1));
  for (size_t i = 0; i < kCodecBlock; ++i) {
    const uint32_t magnitude = BitsOf(from[i]) & ~kSignBit;
    if (magnitude > kInfinityBits) {
      codes[i] = static_cast<int8_t>(-top - 1);
    } else if (magnitude == kInfinityBits) {
      codes[i] = static_cast<int8_t>(from[i] < 0 ? -top : top);
    } else {
      const float rounded = from[i] * by.inverse + kRounder;
      codes[i] = static_cast<int8_t>(static_cast<int32_t>(BitsOf(rounded) - BitsOf(kRounder)));
    }
  }
  return FloatOf(BitsOf(by.scale) | kSignBit);
}

float ValueOfUnusual(int8_t code, float scale, int8_t top) {
  if (code < -top) return FloatOf(kNanBits);
  if (code == top) return FloatOf(kInfinityBits);
  if (code == -top) return FloatOf(kInfinityBits | kSignBit);
  return static_cast<float>(code) * scale;
}

// The largest magnitude's bits: as whole numbers they are in the order of the magnitudes, NaNs last.
uint32_t LargestBits(const float* from) {
#if defined(__AVX2__)
  const __m256i magnitude = _mm256_set1_epi32(INT32_MAX);
  __m256i largest[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(),
                        _mm256_setzero_si256()};
  for (size_t i = 0; i < kCodecBlock; i += 32) {
    for (size_t k = 0; k < 4; ++k) {
      const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + 8 * k));
      largest[k] = _mm256_max_epi32(largest[k], _mm256_and_si256(bits, magnitude));
    }
  }
  const __m256i all =
      _mm256_max_epi32(_mm256_max_epi32(largest[0], largest[1]), _mm256_max_epi32(largest[2], largest[3]));
  __m128i half = _mm_max_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(half));
#else
  uint32_t largest = 0;
  for (size_t i = 0; i < kCodecBlock; ++i) {
    const uint32_t bits = BitsOf(from[i]) & ~kSignBit;
    largest = bits > largest ? bits : largest;
  }
  return largest;
#endif
}

// Codes of a block whose elements are finite.
#if defined(__AVX2__)
// Of 32 elements, in their order.
__m256i Codes(const float* from, __m256 inverse) {
  const auto code = [&](size_t k) {
    return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(from + 8 * k), inverse));
  };
  const __m256i packed =
      _mm256_packs_epi16(_mm256_packs_epi32(code(0), code(1)), _mm256_packs_epi32(code(2), code(3)));
  return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
#endif

void Quantize(const float* from, float inverse, int8_t* codes) {
#if defined(__AVX2__)
  const __m256 by = _mm256_set1_ps(inverse);
  for (size_t i = 0; i < kCodecBlock; i += 32) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i), Codes(from + i, by));
  }
#else
  for (size_t i = 0; i < kCodecBlock; ++i) {
    codes[i] =
        static_cast<int8_t>(static_cast<int32_t>(BitsOf(from[i] * inverse + kRounder) - BitsOf(kRounder)));
  }
#endif
}

// Four bits each of a block's codes.
void PackHalves(const int8_t* codes, char* to) {
#if defined(__AVX2__)
  const __m256i eight = _mm256_set1_epi8(8);
  for (size_t i = 0; i < kCodecBlock; i += 64, to += 32) {
    const auto load = [&](size_t at) {
      return _mm256_add_epi8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + at)), eight);
    };
    // No bit crosses into another byte: what is shifted is below 16.
    const __m256i bytes = _mm256_or_si256(load(i), _mm256_slli_epi16(load(i + 32), 4));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bytes);
  }
#else
  for (size_t i = 0; i < kCodecBlock; i += 64, to += 32) {
    for (size_t j = 0; j < 32; ++j) {
      to[j] = static_cast<char>((codes[i + j] + 8) | (codes[i + j + 32] + 8) << 4);
    }
  }
#endif
}

void UnpackHalves(const char* from, int8_t* codes) {
#if defined(__AVX2__)
  const __m256i eight = _mm256_set1_epi8(8), low = _mm256_set1_epi8(15);
  for (size_t i = 0; i < kCodecBlock; i += 64, from += 32) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i first = _mm256_sub_epi8(_mm256_and_si256(bytes, low), eight);
    const __m256i second = _mm256_sub_epi8(_mm256_and_si256(_mm256_srli_epi16(bytes, 4), low), eight);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i), first);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i + 32), second);
  }
#else
  for (size_t i = 0; i < kCodecBlock; i += 64, from += 32) {
    for (size_t j = 0; j < 32; ++j) {
      const auto byte = static_cast<uint8_t>(from[j]);
      codes[i + j] = static_cast<int8_t>((byte & 15) - 8);
      codes[i + j + 32] = static_cast<int8_t>((byte >> 4) - 8);
    }
  }
#endif
}

template <bool kAdd>
void Dequantize(const int8_t* codes, float scale, float* to) {
#if defined(__AVX2__)
  const __m256 by = _mm256_set1_ps(scale);
  for (size_t i = 0; i < kCodecBlock; i += 8) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i));
    __m256 values = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), by);
    if constexpr (kAdd) values = _mm256_add_ps(_mm256_loadu_ps(to + i), values);
    _mm256_storeu_ps(to + i, values);
  }
#else
  for (size_t i = 0; i < kCodecBlock; ++i) {
    const float value = static_cast<float>(codes[i]) * scale;
    to[i] = kAdd ? to[i] + value : value;
  }
#endif
}

void EncodeBlocks(Codec codec, const float* from, size_t blocks, char* to) {
  const auto top = static_cast<int8_t>(codec == Codec::kInt4 ? 7 : 127);
  alignas(64) int8_t halves[kCodecBlock];
  for (size_t b = 0; b < blocks; ++b, from += kCodecBlock, to += EncodedBlockBytes(codec)) {
    char* const body = to + sizeof(float);
    int8_t* const codes = codec == Codec::kInt4 ? halves : reinterpret_cast<int8_t*>(body);
    const uint32_t largest = LargestBits(from);
    float scale;
    if (__builtin_expect(largest >= kInfinityBits, 0)) {
      scale = QuantizeUnusual(from, top, codes);
    } else {
      const BlockScale by = ScaleOf(FloatOf(largest), static_cast<float>(top));
      Quantize(from, by.inverse, codes);
      scale = by.scale;
    }
    memcpy(to, &scale, sizeof(scale));
    if (codec == Codec::kInt4) PackHalves(halves, body);
  }
}

template <bool kAdd>
void DecodeBlocks(Codec codec, const char* from, size_t blocks, float* to) {
  const auto top = static_cast<int8_t>(codec == Codec::kInt4 ? 7 : 127);
  alignas(64) int8_t halves[kCodecBlock];
  for (size_t b = 0; b < blocks; ++b, from += EncodedBlockBytes(codec), to += kCodecBlock) {
    float scale;
    memcpy(&scale, from, sizeof(scale));
    const char* const body = from + sizeof(scale);
    const int8_t* codes = reinterpret_cast<const int8_t*>(body);
    if (codec == Codec::kInt4) {
      UnpackHalves(body, halves);
      codes = halves;
    }
    if (__builtin_expect((BitsOf(scale) & kSignBit) == 0, 1)) {
      Dequantize<kAdd>(codes, scale, to);
      continue;
    }
    const float magnitude = FloatOf(BitsOf(scale) & ~kSignBit);
    for (size_t i = 0; i < kCodecBlock; ++i) {
      const float value = ValueOfUnusual(codes[i], magnitude, top);
      to[i] = kAdd ? to[i] + value : value;
    }
  }
}

}  // namespace
}  // namespace kolovod
