// float16 and bfloat16 <-> float32, round to nearest even. IEEE 754 layouts; scalar, branch-light, so
// that a compiler can vectorise the loops of reduce_kernels.h. Internal linkage and builtins only: the
// file is compiled for several instruction sets, and the linker must not mix the copies.
#pragma once

#include <cstdint>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace kolovod {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

[[maybe_unused]] static inline float ToFloat(BFloat16 value) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(value.bits) << 16);
}

[[maybe_unused]] static inline BFloat16 ToBFloat16(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40u;  // rounding could turn a NaN into infinity
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return BFloat16{static_cast<uint16_t>(is_nan ? quiet_nan : rounded)};
}

[[maybe_unused]] static inline float ToFloat(Half value) {
#if defined(__F16C__)
  return _cvtsh_ss(value.bits);
#else
  // Exponent re-biased by a multiplication, which also normalises subnormals.
  const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fffu) << 13;
  const float scaled = __builtin_bit_cast(float, magnitude) * 0x1p112f;
  uint32_t bits = __builtin_bit_cast(uint32_t, scaled);
  if ((value.bits & 0x7c00u) == 0x7c00u) bits = magnitude | 0x7f800000u;  // infinity or NaN
  return __builtin_bit_cast(float, bits | (static_cast<uint32_t>(value.bits & 0x8000u) << 16));
#endif
}

[[maybe_unused]] static inline Half ToHalf(float value) {
#if defined(__F16C__)
  return Half{static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT))};
#else
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t result;
  if (magnitude > 0x7f800000u) {
    result = 0x7e00u | ((magnitude >> 13) & 0x3ffu);  // NaN stays NaN
  } else if (magnitude >= 0x477ff000u) {
    result = 0x7c00u;  // 65520 and above round to infinity
  } else if (magnitude < 0x38800000u) {
    // Subnormal: adding 0.5 aligns the mantissa so that the addition itself rounds to even.
    const float shifted = __builtin_bit_cast(float, magnitude) + 0.5f;
    result = __builtin_bit_cast(uint32_t, shifted) - 0x3f000000u;
  } else {
    result = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  return Half{static_cast<uint16_t>(result | sign)};
#endif
}

}  // namespace kolovod
