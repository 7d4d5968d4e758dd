// A rank's announcement (docs/wire.md, Request).
#include "control/message.h"
#include "engine/validate.h"
#include "fuzz/fuzz.h"

using namespace kolovod;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const auto request = fuzz::Bounded(bytes, 16, DecodeRequest);
  if (!request) return 0;
  fuzz::Require(EncodeRequest(*request) == bytes, "a request has one encoding");
  for (const TensorMeta& tensor : request->tensors) {
    fuzz::Require(tensor.shape.size() <= kMaxDims, "so many dimensions");
    // Under UBSan a wrapped product would still be silent, since it is unsigned. A long double is exact up to
    // 2^64, and beyond that above the limit.
    const auto wide = static_cast<long double>(ElementsOf(tensor)) * SizeOf(tensor.dtype);
    fuzz::Require(wide <= static_cast<long double>(INT64_MAX), "its bytes can be counted");
  }
  (void)IsSound(*request, 4);
  return 0;
}
