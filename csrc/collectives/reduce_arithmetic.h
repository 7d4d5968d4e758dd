// How each dtype is loaded, combined, scaled and stored. Also included once per
// instruction set, by reduce_kernels.h: see there for why nothing here may have external linkage.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/half.h"

namespace kolovod {
namespace {

struct BoolByte {
  uint8_t value;
};

// An integer whose sum is divided afterwards: added in 64 bits, so that it does not wrap before.
template <class T>
struct Averaged {
  T value;
};

// How a stored type is loaded for arithmetic and stored back. Value: the range that it holds.
template <class T>
struct Arithmetic {
  using Acc = T;
  using Value = T;
  using Factor = double;
  static Acc Load(T v) { return v; }
  static T Store(Acc v) { return v; }
};
template <class T>
struct Arithmetic<Averaged<T>> {
  using Acc = int64_t;
  using Value = T;
  using Factor = double;
  static int64_t Load(Averaged<T> v) { return static_cast<int64_t>(v.value); }
  static Averaged<T> Store(int64_t v) { return Averaged<T>{static_cast<T>(v)}; }
};
template <>
struct Arithmetic<float> {
  using Acc = float;
  using Value = float;
  using Factor = float;
  static float Load(float v) { return v; }
  static float Store(float v) { return v; }
};
template <>
struct Arithmetic<Half> {
  using Acc = float;
  using Value = float;
  using Factor = float;
  static float Load(Half v) { return ToFloat(v); }
  static Half Store(float v) { return ToHalf(v); }
};
template <>
struct Arithmetic<BFloat16> {
  using Acc = float;
  using Value = float;
  using Factor = float;
  static float Load(BFloat16 v) { return ToFloat(v); }
  static BFloat16 Store(float v) { return ToBFloat16(v); }
};
template <>
struct Arithmetic<BoolByte> {
  using Acc = uint8_t;
  using Value = uint8_t;
  using Factor = double;
  static uint8_t Load(BoolByte v) { return v.value != 0; }
  static BoolByte Store(uint8_t v) { return BoolByte{static_cast<uint8_t>(v != 0)}; }
};

template <class T>
constexpr bool kIsFloating = false;
template <>
constexpr bool kIsFloating<float> = true;
template <>
constexpr bool kIsFloating<double> = true;

// Signed sums wrap, as in every peer: computed unsigned, where wrapping is defined.
template <class A>
struct Wrapping {
  using Type = A;
};
template <>
struct Wrapping<int8_t> {
  using Type = uint32_t;
};
template <>
struct Wrapping<int16_t> {
  using Type = uint32_t;
};
template <>
struct Wrapping<uint8_t> {
  using Type = uint32_t;
};
template <>
struct Wrapping<uint16_t> {
  using Type = uint32_t;  // uint16 * uint16 would overflow int
};
template <>
struct Wrapping<int32_t> {
  using Type = uint32_t;
};
template <>
struct Wrapping<int64_t> {
  using Type = uint64_t;
};

struct AddOp {
  template <class A>
  static A Apply(A a, A b) {
    using W = typename Wrapping<A>::Type;
    return static_cast<A>(static_cast<W>(a) + static_cast<W>(b));
  }
};
struct MulOp {
  template <class A>
  static A Apply(A a, A b) {
    using W = typename Wrapping<A>::Type;
    return static_cast<A>(static_cast<W>(a) * static_cast<W>(b));
  }
};
// A NaN on any rank is the result on every rank.
struct MinOp {
  template <class A>
  static A Apply(A a, A b) {
    return (a < b || a != a) ? a : b;
  }
};
struct MaxOp {
  template <class A>
  static A Apply(A a, A b) {
    return (a > b || a != a) ? a : b;
  }
};
struct OrOp {
  template <class A>
  static A Apply(A a, A b) {
    return static_cast<A>(a | b);
  }
};
struct AndOp {
  template <class A>
  static A Apply(A a, A b) {
    return static_cast<A>(a & b);
  }
};

// float -> integer casts outside the range are undefined in C++: clamp first, NaN becomes 0.
template <class T>
T FromScaled(double v) {
  constexpr double kLow = static_cast<double>(
      static_cast<T>(static_cast<T>(-1) < static_cast<T>(0) ? (1ULL << (sizeof(T) * 8 - 1)) : 0));
  constexpr double kHigh =
      static_cast<T>(-1) < static_cast<T>(0) ? -kLow : 2.0 * (1ULL << (sizeof(T) * 8 - 1));
  if (v != v) return 0;
  if (v <= kLow) return static_cast<T>(kLow);
  if (v >= kHigh) return static_cast<T>(~static_cast<T>(0) ^ static_cast<T>(kLow));
  return static_cast<T>(v);
}

template <class T>
T Scaled(T value, typename Arithmetic<T>::Factor factor) {
  using Ar = Arithmetic<T>;
  using A = typename Ar::Acc;
  if constexpr (kIsFloating<A>) {
    return Ar::Store(static_cast<A>(Ar::Load(value) * factor));
  } else {
    const auto scaled = FromScaled<typename Ar::Value>(static_cast<double>(Ar::Load(value)) * factor);
    return Ar::Store(static_cast<A>(scaled));
  }
}

}  // namespace
}  // namespace kolovod
