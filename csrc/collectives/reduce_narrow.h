// float16 and bfloat16 in blocks. Compilers do not vectorise their conversions by themselves, and then the
// arithmetic takes longer than the memory: with AVX2 they are written out. Also included once per
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

#if defined(__AVX2__)
constexpr size_t kVector = 8;  // elements of a register
constexpr size_t kPair = 2 * kVector;

__m128i LoadBits(const void* src) { return _mm_loadu_si128(static_cast<const __m128i*>(src)); }

__m256 LoadVector(const Half* src) { return _mm256_cvtph_ps(LoadBits(src)); }
__m256 LoadVector(const BFloat16* src) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(LoadBits(src)), 16));
}

// As ToBFloat16 (base/half.h), in the lower half of each element.
__m256i Rounded(__m256i bits) {
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  return _mm256_srli_epi32(sum, 16);
}
__m256i RoundedWithNans(__m256 values) {
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i quiet_nan = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(Rounded(bits), quiet_nan, is_nan);
}

// The elements of `low`, then those of `high`.
__m256i NarrowBits(const Half*, __m256 low, __m256 high) {
  return _mm256_set_m128i(_mm256_cvtps_ph(high, _MM_FROUND_TO_NEAREST_INT),
                          _mm256_cvtps_ph(low, _MM_FROUND_TO_NEAREST_INT));
}
__m256i NarrowBits(const BFloat16*, __m256 low, __m256 high) {
  const bool nans = _mm256_movemask_ps(_mm256_cmp_ps(low, high, _CMP_UNORD_Q)) != 0;
  if (__builtin_expect(nans, 0)) {
    const __m256i packed = _mm256_packus_epi32(RoundedWithNans(low), RoundedWithNans(high));
    return _mm256_permute4x64_epi64(packed, 0xD8);
  }
  const __m256i packed =
      _mm256_packus_epi32(Rounded(_mm256_castps_si256(low)), Rounded(_mm256_castps_si256(high)));
  return _mm256_permute4x64_epi64(packed, 0xD8);
}
void StoreBits(void* dst, __m256i bits) { _mm256_storeu_si256(static_cast<__m256i*>(dst), bits); }

__m256 ApplyVector(AddOp, __m256 a, __m256 b) { return _mm256_add_ps(a, b); }
__m256 ApplyVector(MulOp, __m256 a, __m256 b) { return _mm256_mul_ps(a, b); }
// The instructions give b where either is a NaN.
__m256 ApplyVector(MinOp, __m256 a, __m256 b) {
  return _mm256_blendv_ps(_mm256_min_ps(a, b), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}
__m256 ApplyVector(MaxOp, __m256 a, __m256 b) {
  return _mm256_blendv_ps(_mm256_max_ps(a, b), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}
#endif

// acc = src.
template <class T>
void Widen(const T* src, size_t n, float* acc) {
  size_t i = 0;
#if defined(__AVX2__)
  for (; i + kVector <= n; i += kVector) _mm256_storeu_ps(acc + i, LoadVector(src + i));
#endif
  for (; i < n; ++i) acc[i] = ToFloat(src[i]);
}

// acc = op(acc, src).
template <class T, class OpType>
void FoldNarrow(const T* src, size_t n, float* acc) {
  size_t i = 0;
#if defined(__AVX2__)
  for (; i + kVector <= n; i += kVector) {
    const __m256 folded = ApplyVector(OpType(), _mm256_loadu_ps(acc + i), LoadVector(src + i));
    _mm256_storeu_ps(acc + i, folded);
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
    __m256 loaded = _mm256_loadu_ps(acc + at);
    if (divisor != 1.0f) loaded = _mm256_div_ps(loaded, _mm256_set1_ps(divisor));
    return factor != 1.0f ? _mm256_mul_ps(loaded, _mm256_set1_ps(factor)) : loaded;
  };
  for (; i + kPair <= n; i += kPair) StoreBits(out + i, NarrowBits(out, value(i), value(i + kVector)));
#endif
  for (; i < n; ++i) out[i] = Arithmetic<T>::Store(acc[i] / divisor * factor);
}

// out = op(a, b) * factor; and the same to `copy` if there is one. How many elements are done: the rest is
// the caller's.
template <class T, class OpType, bool kCopy, bool kScales>
size_t PairNarrow(const T* a, const T* b, size_t n, float factor, T* out, T* copy) {
  size_t i = 0;
#if defined(__AVX2__)
  const __m256 factors = _mm256_set1_ps(factor);
  const auto value = [&](size_t at) {
    const __m256 folded = ApplyVector(OpType(), LoadVector(a + at), LoadVector(b + at));
    return kScales ? _mm256_mul_ps(folded, factors) : folded;
  };
  for (; i + kPair <= n; i += kPair) {
    const __m256i bits = NarrowBits(out, value(i), value(i + kVector));
    StoreBits(out + i, bits);
    if constexpr (kCopy) StoreBits(copy + i, bits);
  }
#else
  (void)a, (void)b, (void)n, (void)factor, (void)out, (void)copy;
#endif
  return i;
}

}  // namespace
}  // namespace kolovod
