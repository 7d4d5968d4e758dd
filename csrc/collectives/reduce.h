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
  int own_source = -1;  // this rank's tensor among them: multiplied by prescale (and rounded) as it is read
  double prescale = 1.0;
  double scale = 1.0;
  int divisor = 1;
  void* out = nullptr;            // may be one of the sources
  void* const* copies = nullptr;  // further destinations; may be sources too
  int copy_count = 0;
  size_t count = 0;        // elements
  bool streaming = false;  // write `copies` past the cache
  // The sources, respectively `out`, are partial results of AccumulatorOf(dtype, op): what passes through
  // several ranks is rounded once, by the last. Without copies; to a partial result also without divisor and
  // scale.
  bool from_partials = false;
  bool to_partials = false;
};

// The three tasks of one pipeline step on contiguous memory, each possibly empty, done a few hundred bytes
// of each in turn: one waits for main memory, another for the peer's cache, and so they wait at the same
// time. To move on level, packing and copying out handle `weight` times the bytes of the reduction.
struct Exchange {
  const char* pack_from = nullptr;  // a tensor; multiplied by reduce.prescale
  char* pack_to = nullptr;          // own staging
  size_t pack_bytes = 0;
  bool pack_streaming = false;  // write past the cache
  Reduction reduce;
  const char* out_from = nullptr;  // own staging, where the owners have put results
  char* out_to = nullptr;          // a tensor
  size_t out_bytes = 0;
  bool out_streaming = false;  // own staging is written past the cache
  int weight = 1;
};

struct Kernels {
  void (*exchange)(const Exchange& exchange);
  // memcpy whose stores bypass the cache; the caller fences before publishing.
  void (*copy_streaming)(void* dst, const void* src, size_t bytes);
  // Stores that bypassed the cache are visible to whoever sees a later one.
  void (*fence)();
  // Whole blocks of codec.h, EncodedBlockBytes each: from floats, to them, and added to them.
  void (*encode)(Codec codec, const float* from, size_t blocks, char* to);
  void (*decode)(Codec codec, const char* from, size_t blocks, float* to);
  void (*decode_add)(Codec codec, const char* from, size_t blocks, float* to);
  const char* name;
};

const Kernels& ActiveKernels();
// Every set that this machine can run, for tests.
const Kernels* const* RunnableKernels(int* count);
void StreamingFence();

}  // namespace kolovod
