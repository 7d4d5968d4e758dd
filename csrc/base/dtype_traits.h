// What there is to know of a dtype: one row of a table each. A new dtype is a number and a row here, and the
// arithmetic of its elements (collectives/reduce_arithmetic.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>

namespace kolovod {

// The numbers are part of the wire format (docs/wire.md) and of the Python front end: they never change.
enum class DType : uint8_t {
  kUInt8 = 0,
  kInt8 = 1,
  kUInt16 = 2,
  kInt16 = 3,
  kInt32 = 4,
  kInt64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBool = 9,
  kBFloat16 = 10,
};

enum class DTypeKind : uint8_t { kBool, kInteger, kFloat };

struct DTypeTraits {
  DType dtype;
  const char* name;
  size_t bytes;
  DTypeKind kind;
  DType accumulator;       // the type in which the ranks' elements are combined
  DType mean_accumulator;  // the same for Average: a sum must not wrap before it is divided
  bool scales;             // Average and factors are allowed
  bool adasum;             // Adasum is allowed

  // Arithmetic converts every element to another type and back.
  constexpr bool converts() const { return accumulator != dtype; }
};

inline constexpr DTypeTraits kDTypeTable[] = {
    {DType::kUInt8, "uint8", 1, DTypeKind::kInteger, DType::kUInt8, DType::kInt64, true, false},
    {DType::kInt8, "int8", 1, DTypeKind::kInteger, DType::kInt8, DType::kInt64, true, false},
    {DType::kUInt16, "uint16", 2, DTypeKind::kInteger, DType::kUInt16, DType::kInt64, true, false},
    {DType::kInt16, "int16", 2, DTypeKind::kInteger, DType::kInt16, DType::kInt64, true, false},
    {DType::kInt32, "int32", 4, DTypeKind::kInteger, DType::kInt32, DType::kInt64, true, false},
    {DType::kInt64, "int64", 8, DTypeKind::kInteger, DType::kInt64, DType::kInt64, true, false},
    {DType::kFloat16, "float16", 2, DTypeKind::kFloat, DType::kFloat32, DType::kFloat32, true, true},
    {DType::kFloat32, "float32", 4, DTypeKind::kFloat, DType::kFloat32, DType::kFloat32, true, true},
    {DType::kFloat64, "float64", 8, DTypeKind::kFloat, DType::kFloat64, DType::kFloat64, true, true},
    {DType::kBool, "bool", 1, DTypeKind::kBool, DType::kBool, DType::kBool, false, false},
    {DType::kBFloat16, "bfloat16", 2, DTypeKind::kFloat, DType::kFloat32, DType::kFloat32, true, true},
};
inline constexpr int kDTypeCount = std::size(kDTypeTable);

constexpr const DTypeTraits& TraitsOf(DType dtype) { return kDTypeTable[static_cast<int>(dtype)]; }
constexpr size_t SizeOf(DType dtype) { return TraitsOf(dtype).bytes; }
constexpr const char* NameOf(DType dtype) { return TraitsOf(dtype).name; }

static_assert(
    [] {
      for (int i = 0; i < kDTypeCount; ++i) {
        if (static_cast<int>(kDTypeTable[i].dtype) != i) return false;
      }
      return true;
    }(),
    "the rows are in the order of the numbers");

}  // namespace kolovod
