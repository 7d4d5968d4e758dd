// How each dtype is loaded, combined, scaled and stored. Also included once per
// instruction set, by reduce_kernels.h: see there for why nothing here may have external linkage.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/dtype_traits.h"
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
template <class AccType, class ValueType, class FactorType>
struct ArithmeticTypes {
  using Acc = AccType;
  using Value = ValueType;
  using Factor = FactorType;
};
template <class T, class FactorType>
struct PlainArithmetic : ArithmeticTypes<T, T, FactorType> {
  static T Load(T v) { return v; }
  static T Store(T v) { return v; }
};
template <class T, T (*kNarrow)(float)>
struct NarrowArithmetic : ArithmeticTypes<float, float, float> {
  static float Load(T v) { return ToFloat(v); }
  static T Store(float v) { return kNarrow(v); }
};

template <class T>
struct Arithmetic : PlainArithmetic<T, double> {};
template <>
struct Arithmetic<float> : PlainArithmetic<float, float> {};
template <>
struct Arithmetic<Half> : NarrowArithmetic<Half, ToHalf> {};
template <>
struct Arithmetic<BFloat16> : NarrowArithmetic<BFloat16, ToBFloat16> {};
template <class T>
struct Arithmetic<Averaged<T>> : ArithmeticTypes<int64_t, T, double> {
  static int64_t Load(Averaged<T> v) { return static_cast<int64_t>(v.value); }
  static Averaged<T> Store(int64_t v) { return Averaged<T>{static_cast<T>(v)}; }
};
template <>
struct Arithmetic<BoolByte> : ArithmeticTypes<uint8_t, uint8_t, double> {
  static uint8_t Load(BoolByte v) { return v.value != 0; }
  static BoolByte Store(uint8_t v) { return BoolByte{static_cast<uint8_t>(v != 0)}; }
};

template <class T>
constexpr bool kIsFloating = false;
template <>
constexpr bool kIsFloating<float> = true;
template <>
constexpr bool kIsFloating<double> = true;

// Signed sums wrap, as in every peer: computed unsigned, where wrapping is defined. In 32 bits at least, for
// uint16 * uint16 would overflow int.
template <class A, size_t kBytes = kIsFloating<A> ? 0 : sizeof(A)>
struct Wrapping {
  using Type = uint32_t;
};
template <class A>
struct Wrapping<A, 8> {
  using Type = uint64_t;
};
template <class A>
struct Wrapping<A, 0> {
  using Type = A;
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

// Calls visit(T()) with the type of an element of `dtype`: the one place that knows it.
template <class Visit>
void VisitElement(DType dtype, Visit visit) {
  switch (dtype) {
    case DType::kUInt8:
      return visit(uint8_t());
    case DType::kInt8:
      return visit(int8_t());
    case DType::kUInt16:
      return visit(uint16_t());
    case DType::kInt16:
      return visit(int16_t());
    case DType::kInt32:
      return visit(int32_t());
    case DType::kInt64:
      return visit(int64_t());
    case DType::kFloat16:
      return visit(Half());
    case DType::kFloat32:
      return visit(float());
    case DType::kFloat64:
      return visit(double());
    case DType::kBool:
      return visit(BoolByte());
    case DType::kBFloat16:
      return visit(BFloat16());
  }
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
