// The enumerations that cross a layer: dtypes and verbs with their tables, ops and codecs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>

#include "base/dtype_traits.h"
#include "base/verb_traits.h"

namespace kolovod {

// The numbers are part of the wire format (docs/wire.md) and of the Python front end: they never change.
enum class Op : uint8_t { kAverage = 0, kSum = 1, kAdasum = 2, kMin = 3, kMax = 4, kProduct = 5 };
inline constexpr const char* kOpNames[] = {"Average", "Sum", "Adasum", "Min", "Max", "Product"};
inline constexpr int kOpCount = std::size(kOpNames);
constexpr const char* NameOf(Op op) { return kOpNames[static_cast<int>(op)]; }

// Where a tensor's memory is. The numbers are part of the wire format, too.
enum class Device : uint8_t { kHost = 0, kGpu = 1 };
inline constexpr const char* kDeviceNames[] = {"host memory", "GPU memory"};
inline constexpr int kDeviceCount = std::size(kDeviceNames);
constexpr const char* NameOf(Device device) { return kDeviceNames[static_cast<int>(device)]; }

// How floats look on their way between hosts (collectives/codec.h). The numbers are part of the wire format,
// too.
enum class Codec : uint8_t { kNone = 0, kInt8 = 1, kInt4 = 2 };
inline constexpr const char* kCodecNames[] = {"none", "int8", "int4"};
inline constexpr int kCodecCount = std::size(kCodecNames);
constexpr const char* NameOf(Codec codec) { return kCodecNames[static_cast<int>(codec)]; }

// The type in which elements are combined by `op`: float32 for 16-bit floats, int64 for integers that are
// averaged, else `dtype` itself.
constexpr DType AccumulatorOf(DType dtype, Op op) {
  return op == Op::kAverage ? TraitsOf(dtype).mean_accumulator : TraitsOf(dtype).accumulator;
}

inline constexpr size_t kLine = 64;                 // bytes of a cache line
inline constexpr size_t kMaxFrameBytes = 64 << 20;  // of a control message

inline constexpr size_t RoundUp(size_t value, size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace kolovod
