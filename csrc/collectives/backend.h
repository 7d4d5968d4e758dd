// The seam for engines: what carries the bytes of a bucket. Negotiation, order and fusion are decided
// before; every rank calls the same verb with the same metadata in the same order.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/splits.h"
#include "base/status.h"
#include "base/types.h"

namespace kolovod {

struct Piece {
  const void* in;
  void* out;     // may equal in
  size_t count;  // elements
};

// Tensors reduced as one range.
struct FusedRange {
  DType dtype;
  Op op;
  double prescale;
  double postscale;
  std::vector<Piece> pieces;
  const std::string* name;  // the first tensor's, for traces
  // Between hosts; of an allreduce by Sum or Average, whose dtype is accumulated in float32.
  Codec codec = Codec::kNone;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual Status Allreduce(const FusedRange& range) = 0;
  // On `root` in is read; elsewhere out is written. On root out receives a copy if it differs from in.
  virtual Status Broadcast(const Piece& piece, DType dtype, int root, const std::string& name) = 0;
  // `out` receives every rank's bytes in rank order; `bytes[r]` is rank r's share.
  virtual Status Allgather(const void* in, char* out, const std::vector<size_t>& bytes) = 0;
  // `in` holds this rank's parts for ranks 0, 1, ... in turn, `out` receives the parts of ranks 0, 1, ...
  // `rows`, of row_bytes each, hold what the ranks send and receive with which this one shares memory.
  virtual Status Alltoall(const char* in, char* out, const Splits& rows, size_t row_bytes) = 0;
  // The range has one piece: all of `in` is reduced, and out receives this rank's part. counts[r]: elements
  // of rank r's part; the parts follow each other in rank order.
  virtual Status Reducescatter(const FusedRange& range, const std::vector<size_t>& counts) = 0;
};

}  // namespace kolovod
