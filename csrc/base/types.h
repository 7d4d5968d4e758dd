// The one enumeration of each thing that crosses a layer. Numbers are part of the wire format
// (docs/wire.md) and of the Python front end, so they never change.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kolovod {

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
inline constexpr int kDTypeCount = 11;

enum class Op : uint8_t { kAverage = 0, kSum = 1, kAdasum = 2, kMin = 3, kMax = 4, kProduct = 5 };
inline constexpr int kOpCount = 6;

enum class Verb : uint8_t {
  kAllreduce = 0,
  kBroadcast = 1,
  kAllgather = 2,
  kBarrier = 3,
  kAlltoall = 4,
  kReducescatter = 5,
  kJoin = 6,
  kSend = 7,
  kRecv = 8,
};
inline constexpr int kVerbCount = 9;
// Between two ranks, which need nobody else for it.
inline constexpr bool IsTransfer(Verb verb) { return verb == Verb::kSend || verb == Verb::kRecv; }
// The engine allocates the outputs: only it knows how large they are.
inline constexpr bool MakesOutputs(Verb verb) {
  return verb == Verb::kAllgather || verb == Verb::kAlltoall || verb == Verb::kReducescatter;
}
inline constexpr bool IsReduction(Verb verb) {
  return verb == Verb::kAllreduce || verb == Verb::kReducescatter;
}

size_t SizeOf(DType dtype);
const char* NameOf(DType dtype);
const char* NameOf(Op op);
const char* NameOf(Verb verb);

inline constexpr size_t kLine = 64;                 // bytes of a cache line
inline constexpr size_t kMaxFrameBytes = 64 << 20;  // of a control message

inline constexpr size_t RoundUp(size_t value, size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace kolovod
