#include "collectives/adasum.h"

#include <cfloat>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <vector>

#include "collectives/reduce.h"
#include "collectives/reduce_arithmetic.h"

namespace kolovod {
namespace {

struct Products {
  double ab = 0, aa = 0, bb = 0;
};

// Added in eight lanes, always the same way: the result does not depend on the instruction set.
template <class T>
Products Multiply(const T* a, const T* b, size_t count) {
  using Ar = Arithmetic<T>;
  constexpr size_t kLanes = 8;
  double ab[kLanes] = {}, aa[kLanes] = {}, bb[kLanes] = {};
  const auto add = [&](size_t i, size_t lane) {
    const auto x = static_cast<double>(Ar::Load(a[i]));
    const auto y = static_cast<double>(Ar::Load(b[i]));
    ab[lane] += x * y;
    aa[lane] += x * x;
    bb[lane] += y * y;
  };
  const size_t whole = count / kLanes * kLanes;
  for (size_t i = 0; i < whole; i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) add(i + lane, lane);
  }
  for (size_t i = whole; i < count; ++i) add(i, i - whole);
  Products sum;
  for (size_t lane = 0; lane < kLanes; ++lane) {
    sum.ab += ab[lane];
    sum.aa += aa[lane];
    sum.bb += bb[lane];
  }
  return sum;
}

template <class T>
void PairTyped(const T* a, const T* b, T* out, size_t count) {
  using Ar = Arithmetic<T>;
  using Acc = typename Ar::Acc;
  const Products p = Multiply(a, b, count);
  const double least = std::sqrt(DBL_MIN);
  const auto share_a = static_cast<Acc>(p.aa < least ? 1.0 : 1.0 - p.ab / (2 * p.aa));
  const auto share_b = static_cast<Acc>(p.bb < least ? 1.0 : 1.0 - p.ab / (2 * p.bb));
  for (size_t i = 0; i < count; ++i) {
    out[i] = Ar::Store(share_a * Ar::Load(a[i]) + share_b * Ar::Load(b[i]));
  }
}

void Scale(DType dtype, double factor, const void* in, void* out, size_t count) {
  if (count == 0) return;
  if (factor == 1.0) {
    if (in != out) std::memcpy(out, in, count * SizeOf(dtype));
    return;
  }
  Exchange x;
  x.reduce.dtype = dtype;
  x.reduce.sources = &in;
  x.reduce.source_count = 1;
  x.reduce.scale = factor;
  x.reduce.out = out;
  x.reduce.count = count;
  ActiveKernels().exchange(x);
}

}  // namespace

void AdasumPair(DType dtype, const void* a, const void* b, void* out, size_t count) {
  const auto pair = [&]<class T>(T*) {
    PairTyped(static_cast<const T*>(a), static_cast<const T*>(b), static_cast<T*>(out), count);
  };
  switch (dtype) {
    case DType::kFloat16:
      return pair(static_cast<Half*>(nullptr));
    case DType::kBFloat16:
      return pair(static_cast<BFloat16*>(nullptr));
    case DType::kFloat32:
      return pair(static_cast<float*>(nullptr));
    case DType::kFloat64:
      return pair(static_cast<double*>(nullptr));
    default:
      return;  // refused when it was submitted
  }
}

Status Adasum(Backend& backend, const FusedRange& range, int rank, int size) {
  const size_t item = SizeOf(range.dtype);
  size_t total = 0;
  for (const Piece& piece : range.pieces) total += piece.count * item;
  const std::unique_ptr<char[]> memory(new (std::nothrow) char[2 * total + 1]);
  if (memory == nullptr) {
    return Status(Code::kInternal, "rank " + std::to_string(rank) + " has no memory for " +
                                       std::to_string(2 * total) + " bytes of the Adasum of '" + *range.name +
                                       "'");
  }
  char* own = memory.get();
  char* theirs = own + total;
  size_t at = 0;
  for (const Piece& piece : range.pieces) {
    Scale(range.dtype, range.prescale, piece.in, own + at, piece.count);
    at += piece.count * item;
  }
  const auto n = static_cast<size_t>(size);
  std::vector<int> everybody(n);
  std::iota(everybody.begin(), everybody.end(), 0);
  for (size_t distance = 1; distance < n; distance *= 2) {
    Splits pairs(size, everybody);
    for (size_t r = 0; r < n; ++r) pairs.Set(static_cast<int>(r), static_cast<int>(r ^ distance), 1);
    KV_RETURN_IF_ERROR(backend.Alltoall(own, theirs, pairs, total));
    const bool is_first = (static_cast<size_t>(rank) & distance) == 0;
    at = 0;
    for (const Piece& piece : range.pieces) {
      const char* a = (is_first ? own : theirs) + at;
      const char* b = (is_first ? theirs : own) + at;
      AdasumPair(range.dtype, a, b, own + at, piece.count);
      at += piece.count * item;
    }
  }
  at = 0;
  for (const Piece& piece : range.pieces) {
    Scale(range.dtype, range.postscale, own + at, piece.out, piece.count);
    at += piece.count * item;
  }
  return Status();
}

}  // namespace kolovod
