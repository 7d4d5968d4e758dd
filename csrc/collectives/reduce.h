// Arithmetic over byte ranges: the one switch over dtype and op. Kernels are compiled once per
// instruction set (reduce_kernels.h) and chosen when the process starts.
#pragma once

#include <cstddef>

#include "base/types.h"

namespace kolovod {

inline constexpr int kMaxSources = 1024;

// out[i] = finish(src[0][i] (op) src[1][i] (op) ... src[sources-1][i]), added in that order. 16-bit
// floats are accumulated in float32 and rounded once. `finish` divides by `divisor` (Average; 1: no),
// multiplies by `scale` and converts back; integers are truncated toward zero.
struct Reduction {
  DType dtype = DType::kFloat32;
  Op op = Op::kSum;
  const void* const* sources = nullptr;
  int source_count = 0;
  int scaled_source = -1;  // this source is multiplied by prescale (and rounded to dtype) as it is read
  double prescale = 1.0;
  double scale = 1.0;
  int divisor = 1;
  void* out = nullptr;     // may be one of the sources
  void* copy = nullptr;    // a second destination, or null
  size_t count = 0;        // elements
  bool streaming = false;  // write `copy` past the cache
};

struct Kernels {
  void (*reduce)(const Reduction& reduction);
  // dst[i] = dtype(factor * src[i]); dst may equal src.
  void (*scale)(DType dtype, double factor, const void* src, void* dst, size_t count);
  // memcpy whose stores bypass the cache; the caller fences before publishing (StreamingFence).
  void (*copy_streaming)(void* dst, const void* src, size_t bytes);
  const char* name;
};

const Kernels& ActiveKernels();
// Every set that this machine can run, for tests.
const Kernels* const* RunnableKernels(int* count);
void StreamingFence();

}  // namespace kolovod
