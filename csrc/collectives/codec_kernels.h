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

// How a codec's groups are made (codec.h). What is stored of a scale is a float's upper bytes.
struct Int8 {
  static constexpr size_t kGroup = kCodecBlock, kScaleBytes = 4;
  static constexpr int8_t kTop = 127;
};
struct Int4 {
  static constexpr size_t kGroup = 64, kScaleBytes = 2;
  static constexpr int8_t kTop = 7;
};

// What is stored of the scale by which `top` stands for `largest`, and what to multiply by instead of
// dividing; zeros for a group that is too small for that.
struct GroupScale {
  float stored, inverse;
};
template <class Form>
GroupScale ScaleOf(float largest, int8_t top) {
  const auto whole = static_cast<float>(top);
  float inverse = whole / largest;
  if (!(inverse <= kLargestFloat)) return {0.0f, 0.0f};
  if constexpr (Form::kScaleBytes == 2) {
    // Rounded to zero: `largest` is at most 1 + 2^-7 times that, so its nearest code is still `whole`.
    const float stored = FloatOf(BitsOf(largest) & 0xffff0000u);
    inverse = whole / stored;
    if (!(inverse <= kLargestFloat)) return {0.0f, 0.0f};
    return {stored, inverse};
  }
  float scale = largest / whole;
  if (!(scale * whole <= kLargestFloat)) scale = FloatOf(BitsOf(scale) - 1);
  return {scale, inverse};
}

// The scale, of what is stored.
template <class Form>
float ScaleIn(float stored, int8_t top) {
  return Form::kScaleBytes == 2 ? stored * (1.0f / static_cast<float>(top)) : stored;
}

template <class Form>
void StoreScale(float stored, char* to) {
  const uint32_t bits = BitsOf(stored) >> (32 - 8 * Form::kScaleBytes);
  memcpy(to, &bits, Form::kScaleBytes);  // the low bytes come first: packages are for such machines
}

template <class Form>
float LoadScale(const char* from) {
  uint32_t bits = 0;
  memcpy(&bits, from, Form::kScaleBytes);
  return FloatOf(bits << (32 - 8 * Form::kScaleBytes));
}

// Codes of a group with elements that are not finite; returns what is stored, with its sign bit set.
template <class Form>
float QuantizeUnusual(const float* from, int8_t* codes) {
  constexpr int8_t top = Form::kTop;
  uint32_t largest = 0;
  for (size_t i = 0; i < Form::kGroup; ++i) {
    const uint32_t magnitude = BitsOf(from[i]) & ~kSignBit;
    if (magnitude < kInfinityBits && magnitude > largest) largest = magnitude;
  }
  const GroupScale by = ScaleOf<Form>(FloatOf(largest), top - 1);
  for (size_t i = 0; i < Form::kGroup; ++i) {
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
  return FloatOf(BitsOf(by.stored) | kSignBit);
}

float ValueOfUnusual(int8_t code, float scale, int8_t top) {
  if (code < -top) return FloatOf(kNanBits);
  if (code == top) return FloatOf(kInfinityBits);
  if (code == -top) return FloatOf(kInfinityBits | kSignBit);
  return static_cast<float>(code) * scale;
}

// The bits of a group's largest magnitude: as whole numbers they are in the order of the magnitudes, NaNs
// last.
template <class Form>
uint32_t LargestBits(const float* from) {
#if defined(__AVX2__)
  const __m256i magnitude = _mm256_set1_epi32(INT32_MAX);
  __m256i largest[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(),
                        _mm256_setzero_si256()};
  for (size_t i = 0; i < Form::kGroup; i += 32) {
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
  for (size_t i = 0; i < Form::kGroup; ++i) {
    const uint32_t bits = BitsOf(from[i]) & ~kSignBit;
    largest = bits > largest ? bits : largest;
  }
  return largest;
#endif
}

// Codes of a group whose elements are finite.
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

template <class Form>
void Quantize(const float* from, float inverse, int8_t* codes) {
#if defined(__AVX2__)
  const __m256 by = _mm256_set1_ps(inverse);
  for (size_t i = 0; i < Form::kGroup; i += 32) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i), Codes(from + i, by));
  }
#else
  for (size_t i = 0; i < Form::kGroup; ++i) {
    codes[i] =
        static_cast<int8_t>(static_cast<int32_t>(BitsOf(from[i] * inverse + kRounder) - BitsOf(kRounder)));
  }
#endif
}

// Four bits each of a group's codes.
void PackHalves(const int8_t* codes, char* to) {
#if defined(__AVX2__)
  const __m256i eight = _mm256_set1_epi8(8);
  const auto load = [&](size_t at) {
    return _mm256_add_epi8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + at)), eight);
  };
  // No bit crosses into another byte: what is shifted is below 16.
  const __m256i bytes = _mm256_or_si256(load(0), _mm256_slli_epi16(load(32), 4));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bytes);
#else
  for (size_t j = 0; j < 32; ++j) {
    to[j] = static_cast<char>((codes[j] + 8) | (codes[j + 32] + 8) << 4);
  }
#endif
}

void UnpackHalves(const char* from, int8_t* codes) {
#if defined(__AVX2__)
  const __m256i eight = _mm256_set1_epi8(8), low = _mm256_set1_epi8(15);
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  const __m256i first = _mm256_sub_epi8(_mm256_and_si256(bytes, low), eight);
  const __m256i second = _mm256_sub_epi8(_mm256_and_si256(_mm256_srli_epi16(bytes, 4), low), eight);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), first);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + 32), second);
#else
  for (size_t j = 0; j < 32; ++j) {
    const auto byte = static_cast<uint8_t>(from[j]);
    codes[j] = static_cast<int8_t>((byte & 15) - 8);
    codes[j + 32] = static_cast<int8_t>((byte >> 4) - 8);
  }
#endif
}

template <class Form, bool kAdd>
void Dequantize(const int8_t* codes, float scale, float* to) {
#if defined(__AVX2__)
  const __m256 by = _mm256_set1_ps(scale);
  for (size_t i = 0; i < Form::kGroup; i += 8) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i));
    __m256 values = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), by);
    if constexpr (kAdd) values = _mm256_add_ps(_mm256_loadu_ps(to + i), values);
    _mm256_storeu_ps(to + i, values);
  }
#else
  for (size_t i = 0; i < Form::kGroup; ++i) {
    const float value = static_cast<float>(codes[i]) * scale;
    to[i] = kAdd ? to[i] + value : value;
  }
#endif
}

// The block at `from` as codec.h says, its scales at `scales` and its codes at `body`.
template <class Form>
void EncodeBlock(const float* from, char* scales, char* body) {
  alignas(64) int8_t halves[Form::kGroup];
  constexpr bool kHalves = Form::kTop == Int4::kTop;
  for (size_t at = 0; at < kCodecBlock; at += Form::kGroup, scales += Form::kScaleBytes) {
    int8_t* const codes = kHalves ? halves : reinterpret_cast<int8_t*>(body);
    const uint32_t largest = LargestBits<Form>(from + at);
    float stored;
    if (__builtin_expect(largest >= kInfinityBits, 0)) {
      stored = QuantizeUnusual<Form>(from + at, codes);
    } else {
      const GroupScale by = ScaleOf<Form>(FloatOf(largest), Form::kTop);
      Quantize<Form>(from + at, by.inverse, codes);
      stored = by.stored;
    }
    StoreScale<Form>(stored, scales);
    if constexpr (kHalves) PackHalves(halves, body + at / 2);
  }
}

template <class Form, bool kAdd>
void DecodeBlock(const char* scales, const char* body, float* to) {
  alignas(64) int8_t halves[Form::kGroup];
  for (size_t at = 0; at < kCodecBlock; at += Form::kGroup, scales += Form::kScaleBytes) {
    const int8_t* codes = reinterpret_cast<const int8_t*>(body);
    if constexpr (Form::kTop == Int4::kTop) {
      UnpackHalves(body + at / 2, halves);
      codes = halves;
    }
    const float stored = LoadScale<Form>(scales);
    if (__builtin_expect((BitsOf(stored) & kSignBit) == 0, 1)) {
      Dequantize<Form, kAdd>(codes, ScaleIn<Form>(stored, Form::kTop), to + at);
      continue;
    }
    const float scale = ScaleIn<Form>(FloatOf(BitsOf(stored) & ~kSignBit), Form::kTop - 1);
    for (size_t i = 0; i < Form::kGroup; ++i) {
      const float value = ValueOfUnusual(codes[i], scale, Form::kTop);
      to[at + i] = kAdd ? to[at + i] + value : value;
    }
  }
}

template <class Form>
constexpr size_t kScalesBytes = kCodecBlock / Form::kGroup * Form::kScaleBytes;

void EncodeBlocks(Codec codec, const float* from, size_t blocks, char* to) {
  for (size_t b = 0; b < blocks; ++b, from += kCodecBlock, to += EncodedBlockBytes(codec)) {
    if (codec == Codec::kInt4) {
      EncodeBlock<Int4>(from, to, to + kScalesBytes<Int4>);
    } else {
      EncodeBlock<Int8>(from, to, to + kScalesBytes<Int8>);
    }
  }
}

template <bool kAdd>
void DecodeBlocks(Codec codec, const char* from, size_t blocks, float* to) {
  for (size_t b = 0; b < blocks; ++b, from += EncodedBlockBytes(codec), to += kCodecBlock) {
    if (codec == Codec::kInt4) {
      DecodeBlock<Int4, kAdd>(from, from + kScalesBytes<Int4>, to);
    } else {
      DecodeBlock<Int8, kAdd>(from, from + kScalesBytes<Int8>, to);
    }
  }
}

}  // namespace
}  // namespace kolovod
