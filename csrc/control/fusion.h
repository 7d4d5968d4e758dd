// What goes into one bucket and how it is cut. PURE.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/types.h"

namespace kolovod {

// How many of the entries that are ready (in log order) the next bucket takes: all, up to limit_bytes,
// at least one. Whoever closes a bucket decides this alone and writes the result into the log.
size_t EntriesForBucket(const std::vector<size_t>& entry_bytes, size_t limit_bytes);

// Tensors with equal keys are reduced as one byte range.
struct FusionKey {
  DType dtype;
  Op op;
  double prescale;
  double postscale;
  Codec codec;
  bool operator==(const FusionKey&) const = default;
};

// Groups indices by key: groups in order of first appearance, indices in order within a group.
std::vector<std::vector<size_t>> GroupByKey(const std::vector<FusionKey>& keys);

// One pipeline step of a fused range of `total` bytes.
struct ChunkPlan {
  size_t count;        // chunks
  size_t chunk_bytes;  // all but the last; a multiple of 64 * size
};
ChunkPlan PlanChunks(size_t total, size_t max_chunk_bytes, int size);

// The slice of a chunk of `length` bytes that rank `rank` owns: [begin, end), cut at cache lines.
struct Slice {
  size_t begin, end;
};
Slice SliceOf(size_t length, int size, int rank);

// Rows of `rows` that rank `rank` gets in a reducescatter: all alike, the first ones one more.
size_t PartOf(size_t rows, int size, int rank);

}  // namespace kolovod
