// float16 and bfloat16 in blocks. Compilers do not vectorise their conversions by themselves, and then the
// arithmetic takes longer than the memory: with AVX2 and AVX-512 they are written out. Also included once per
// instruction set, by reduce_kernels.h: see there for why nothing here may have external linkage.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "collectives/reduce_arithmetic.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace kolovod {
namespace {

template <class T>
constexpr bool kIsNarrow = false;
template <>
constexpr bool kIsNarrow<Half> = true;
template <>
constexpr bool kIsNarrow<BFloat16> = true;

#if defined(__AVX512BW__)
using Floats = __m512;
using Words = __m512i;
using HalfWords = __m256i;  // as many 16-bit elements as Floats has

HalfWords LoadHalfWords(const void* src) { return _mm256_loadu_si256(static_cast<const __m256i*>(src)); }
Words LoadWords(const void* src) { return _mm512_loadu_si512(src); }
void StoreWords(void* dst, Words words) { _mm512_storeu_si512(dst, words); }
Floats LoadFloats(const float* src) { return _mm512_loadu_ps(src); }
void StoreFloats(float* dst, Floats values) { _mm512_storeu_ps(dst, values); }
Floats Splat(float value) { return _mm512_set1_ps(value); }
Floats Times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
Floats Over(Floats a, Floats b) { return _mm512_div_ps(a, b); }
bool AnyNan(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q) != 0; }

Floats Widened(const Half* src) { return _mm512_cvtph_ps(LoadHalfWords(src)); }
Floats Widened(const BFloat16* src) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(LoadHalfWords(src)), 16));
}
Floats Evens(Words words) { return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16)); }
Floats Odds(Words words) {
  return _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

// As ToBFloat16 (base/half.h) but for NaNs, in the upper half of each element.
Words Rounded(Floats values) {
  const Words bits = _mm512_castps_si512(values);
  const Words odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  return _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
}
Words RoundedWithNans(Floats values) {
  const Words quiet_nan = _mm512_or_si512(_mm512_castps_si512(values), _mm512_set1_epi32(0x400000));
  return _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q), Rounded(values),
                                 quiet_nan);
}
Words Interleaved(Words evens, Words odds) {
  return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(evens, 16), odds);
}
Words Joined(HalfWords low, HalfWords high) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
Words JoinedUpper(Words low, Words high) {
  return Joined(_mm512_cvtepi32_epi16(_mm512_srli_epi32(low, 16)),
                _mm512_cvtepi32_epi16(_mm512_srli_epi32(high, 16)));
}
HalfWords ToHalves(Floats values) { return _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT); }

Floats ApplyVector(AddOp, Floats a, Floats b) { return _mm512_add_ps(a, b); }
Floats ApplyVector(MulOp, Floats a, Floats b) { return _mm512_mul_ps(a, b); }
// The instructions give b where either is a NaN.
Floats ApplyVector(MinOp, Floats a, Floats b) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), _mm512_min_ps(a, b), a);
}
Floats ApplyVector(MaxOp, Floats a, Floats b) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), _mm512_max_ps(a, b), a);
}
#elif defined(__AVX2__)
using Floats = __m256;
using Words = __m256i;
using HalfWords = __m128i;  // as many 16-bit elements as Floats has

HalfWords LoadHalfWords(const void* src) { return _mm_loadu_si128(static_cast<const __m128i*>(src)); }
Words LoadWords(const void* src) { return _mm256_loadu_si256(static_cast<const __m256i*>(src)); }
void StoreWords(void* dst, Words words) { _mm256_storeu_si256(static_cast<__m256i*>(dst), words); }
Floats LoadFloats(const float* src) { return _mm256_loadu_ps(src); }
void StoreFloats(float* dst, Floats values) { _mm256_storeu_ps(dst, values); }
Floats Splat(float value) { return _mm256_set1_ps(value); }
Floats Times(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
Floats Over(Floats a, Floats b) { return _mm256_div_ps(a, b); }
bool AnyNan(Floats a, Floats b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_UNORD_Q)) != 0; }

Floats Widened(const Half* src) { return _mm256_cvtph_ps(LoadHalfWords(src)); }
Floats Widened(const BFloat16* src) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(LoadHalfWords(src)), 16));
}
Floats Evens(Words words) { return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16)); }
Floats Odds(Words words) {
  return _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}

// As ToBFloat16 (base/half.h) but for NaNs, in the upper half of each element.
Words Rounded(Floats values) {
  const Words bits = _mm256_castps_si256(values);
  const Words odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
}
Words RoundedWithNans(Floats values) {
  const Words quiet_nan = _mm256_or_si256(_mm256_castps_si256(values), _mm256_set1_epi32(0x400000));
  const Words is_nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(Rounded(values), quiet_nan, is_nan);
}
Words Interleaved(Words evens, Words odds) {
  return _mm256_blend_epi16(_mm256_srli_epi32(evens, 16), odds, 0xaa);
}
Words Joined(HalfWords low, HalfWords high) { return _mm256_set_m128i(high, low); }
Words JoinedUpper(Words low, Words high) {
  return _mm256_permute4x64_epi64(
      _mm256_packus_epi32(_mm256_srli_epi32(low, 16), _mm256_srli_epi32(high, 16)), 0xD8);
}
HalfWords ToHalves(Floats values) { return _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT); }

Floats ApplyVector(AddOp, Floats a, Floats b) { return _mm256_add_ps(a, b); }
Floats ApplyVector(MulOp, Floats a, Floats b) { return _mm256_mul_ps(a, b); }
// The instructions give b where either is a NaN.
Floats ApplyVector(MinOp, Floats a, Floats b) {
  return _mm256_blendv_ps(_mm256_min_ps(a, b), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}
Floats ApplyVector(MaxOp, Floats a, Floats b) {
  return _mm256_blendv_ps(_mm256_max_ps(a, b), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}
#endif

#if defined(__AVX2__)
constexpr bool kHasNarrowVectors = true;
constexpr size_t kVector = sizeof(Floats) / sizeof(float);
constexpr size_t kPair = 2 * kVector;

// The elements of `low`, then those of `high`.
Words NarrowWords(const Half*, Floats low, Floats high) { return Joined(ToHalves(low), ToHalves(high)); }
Words NarrowWords(const BFloat16*, Floats low, Floats high) {
  return __builtin_expect(AnyNan(low, high), 0) ? JoinedUpper(RoundedWithNans(low), RoundedWithNans(high))
                                                : JoinedUpper(Rounded(low), Rounded(high));
}

// kPair elements, in an order that suits the type as long as they are only combined with others of that
// order: every second bfloat16 is in the upper half of its word already, and none needs to be moved across a
// register.
struct Pair {
  Floats first;
  Floats second;
};
Pair LoadPair(const Half* src) { return {Widened(src), Widened(src + kVector)}; }
Pair LoadPair(const BFloat16* src) {
  const Words words = LoadWords(src);
  return {Evens(words), Odds(words)};
}
Words NarrowPair(const Half* type, Pair pair) { return NarrowWords(type, pair.first, pair.second); }
Words NarrowPair(const BFloat16*, Pair pair) {
  return __builtin_expect(AnyNan(pair.first, pair.second), 0)
             ? Interleaved(RoundedWithNans(pair.first), RoundedWithNans(pair.second))
             : Interleaved(Rounded(pair.first), Rounded(pair.second));
}
#else
constexpr bool kHasNarrowVectors = false;
#endif

// acc = src.
template <class T>
void Widen(const T* src, size_t n, float* acc) {
  size_t i = 0;
#if defined(__AVX2__)
  for (; i + kVector <= n; i += kVector) StoreFloats(acc + i, Widened(src + i));
#endif
  for (; i < n; ++i) acc[i] = ToFloat(src[i]);
}

// acc = op(acc, src).
template <class T, class OpType>
void FoldNarrow(const T* src, size_t n, float* acc) {
  size_t i = 0;
#if defined(__AVX2__)
  for (; i + kVector <= n; i += kVector) {
    StoreFloats(acc + i, ApplyVector(OpType(), LoadFloats(acc + i), Widened(src + i)));
  }
#endif
  for (; i < n; ++i) acc[i] = OpType::Apply(acc[i], ToFloat(src[i]));
}

// out = acc / divisor * factor, each rounded to float.
template <class T>
void Narrow(const float* acc, size_t n, float divisor, float factor, T* out) {
  size_t i = 0;
#if defined(__AVX2__)
  const auto value = [&](size_t at) {
    Floats loaded = LoadFloats(acc + at);
    if (divisor != 1.0f) loaded = Over(loaded, Splat(divisor));
    return factor != 1.0f ? Times(loaded, Splat(factor)) : loaded;
  };
  for (; i + kPair <= n; i += kPair) StoreWords(out + i, NarrowWords(out, value(i), value(i + kVector)));
#endif
  for (; i < n; ++i) out[i] = Arithmetic<T>::Store(acc[i] / divisor * factor);
}

// out = op(sources[0], sources[1], ...) / divisor * factor in one pass, from element `at` of the sources on;
// and the same to `copy` if there is one. Returns how many elements are done: the rest is the caller's.
// `kSources`: the number of sources; 0: `count`. `kDivides`: whether the divisor is not 1. Asked at run time,
// Clang divides by 1 as well, which takes longer than all the rest.
template <class T, class OpType, bool kCopy, int kSources, bool kDivides>
size_t CombineNarrow(const void* const* sources, int count, size_t at, size_t n, float divisor, float factor,
                     T* out, T* copy) {
  size_t i = 0;
#if defined(__AVX2__)
  const Floats divisors = Splat(divisor), factors = Splat(factor);
  const auto finished = [&](Floats value) {
    return Times(kDivides ? Over(value, divisors) : value, factors);
  };
  const auto source = [&](int s) { return LoadPair(static_cast<const T*>(sources[s]) + at + i); };
  for (; i + kPair <= n; i += kPair) {
    Pair sum = source(0);
    for (int s = 1; s < (kSources > 0 ? kSources : count); ++s) {
      const Pair next = source(s);
      sum = {ApplyVector(OpType(), sum.first, next.first), ApplyVector(OpType(), sum.second, next.second)};
    }
    const Words words = NarrowPair(out, {finished(sum.first), finished(sum.second)});
    StoreWords(out + i, words);
    if constexpr (kCopy) StoreWords(copy + i, words);
  }
#else
  (void)sources, (void)count, (void)at, (void)n, (void)divisor, (void)factor, (void)out, (void)copy;
#endif
  return i;
}

}  // namespace
}  // namespace kolovod
