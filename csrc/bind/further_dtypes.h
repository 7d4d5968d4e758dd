// Dtypes of the front ends that the engine itself does not know: it sees the same memory as numbers of a
// dtype that it does, with which some operations come to the same.
#pragma once

#include <cstdint>
#include <string>

#include "base/dtype_traits.h"
#include "base/verb_traits.h"

namespace kolovod {

struct FurtherDType {
  enum class Kind : uint8_t {
    kPair,      // real and imaginary part: added up and scaled by real factors as two numbers
    kUnsigned,  // added and multiplied modulo 2^n as with a sign
    kBits,      // copied only
  };
  const char* name;
  DType dtype;
  Kind kind;
};

// By number, from kFirstFurther on: apart from the engine's own, which are part of the wire format.
inline constexpr int kFirstFurther = 32;
inline constexpr FurtherDType kFurtherDTypes[] = {
    {"complex64", DType::kFloat32, FurtherDType::Kind::kPair},
    {"complex128", DType::kFloat64, FurtherDType::Kind::kPair},
    {"uint32", DType::kInt32, FurtherDType::Kind::kUnsigned},
    {"uint64", DType::kInt64, FurtherDType::Kind::kUnsigned},
    {"float8_e4m3fn", DType::kUInt8, FurtherDType::Kind::kBits},
    {"float8_e5m2", DType::kUInt8, FurtherDType::Kind::kBits},
    {"float8_e4m3fnuz", DType::kUInt8, FurtherDType::Kind::kBits},
    {"float8_e5m2fnuz", DType::kUInt8, FurtherDType::Kind::kBits},
    {"float8_e8m0fnu", DType::kUInt8, FurtherDType::Kind::kBits},
};

// Null for a number of the engine's own.
inline const FurtherDType* FindFurther(int number) {
  const int index = number - kFirstFurther;
  return index >= 0 && index < static_cast<int>(std::size(kFurtherDTypes)) ? &kFurtherDTypes[index] : nullptr;
}

// Why the operation cannot be done with it, or empty.
inline std::string WhyNot(const FurtherDType& dtype, Verb verb, Op op, bool has_factors) {
  using Kind = FurtherDType::Kind;
  if (!TraitsOf(verb).reduces) return "";
  const char* instead = nullptr;
  if (dtype.kind == Kind::kPair && op != Op::kSum && op != Op::kAverage) {
    instead = "complex numbers are combined by Sum or Average";
  } else if (dtype.kind == Kind::kUnsigned && ((op != Op::kSum && op != Op::kProduct) || has_factors)) {
    instead = "they are combined by Sum or Product, without factors; convert to int64 or float64";
  } else if (dtype.kind == Kind::kBits) {
    instead = "they can be sent, but not combined; convert to bfloat16 or another wider type";
  }
  if (instead == nullptr) return "";
  return std::string(NameOf(verb)) + " with op " + NameOf(op) + (has_factors ? " and factors" : "") +
         " is not for tensors of " + dtype.name + ": " + instead;
}

}  // namespace kolovod
