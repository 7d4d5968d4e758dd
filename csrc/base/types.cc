#include "base/types.h"

namespace kolovod {

size_t SizeOf(DType dtype) {
  static constexpr size_t kSizes[kDTypeCount] = {1, 1, 2, 2, 4, 8, 2, 4, 8, 1, 2};
  return kSizes[static_cast<int>(dtype)];
}

const char* NameOf(DType dtype) {
  static constexpr const char* kNames[kDTypeCount] = {"uint8",   "int8",  "uint16",  "int16",
                                                      "int32",   "int64", "float16", "float32",
                                                      "float64", "bool",  "bfloat16"};
  return kNames[static_cast<int>(dtype)];
}

const char* NameOf(Op op) {
  static constexpr const char* kNames[kOpCount] = {"Average", "Sum", "Adasum", "Min", "Max", "Product"};
  return kNames[static_cast<int>(op)];
}

const char* NameOf(Verb verb) {
  static constexpr const char* kNames[kVerbCount] = {
      "allreduce", "broadcast", "allgather", "barrier", "alltoall", "reducescatter", "join", "send", "recv"};
  return kNames[static_cast<int>(verb)];
}

}  // namespace kolovod
