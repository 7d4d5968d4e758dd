#include "collectives/adasum.h"

#include <cfloat>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <vector>

#include "collectives/combine.h"
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

}  // namespace

void AdasumPair(DType dtype, const void* a, const void* b, void* out, size_t count) {
  // What is no floating dtype was refused when it was submitted.
  VisitElement(dtype, [&]<class T>(T) {
    if constexpr (kIsFloating<typename Arithmetic<T>::Acc>) {
      PairTyped(static_cast<const T*>(a), static_cast<const T*>(b), static_cast<T*>(out), count);
    }
  });
}

Status Adasum(Backend& backend, const FusedRange& range, int rank, int size) {
  const size_t item = SizeOf(range.dtype);
  const PackedRange view(range);
  const size_t total = view.total();
  const Slice all{0, total};
  const std::unique_ptr<char[]> memory(new (std::nothrow) char[2 * total + 1]);
  if (memory == nullptr) {
    return Status(Code::kInternal, "rank " + std::to_string(rank) + " has no memory for " +
                                       std::to_string(2 * total) + " bytes of the Adasum of '" + *range.name +
                                       "'");
  }
  char* own = memory.get();
  char* theirs = own + total;
  PackSlice(Combine::Of(range, 1), view, all, own);
  const auto n = static_cast<size_t>(size);
  std::vector<int> everybody(n);
  std::iota(everybody.begin(), everybody.end(), 0);
  for (size_t distance = 1; distance < n; distance *= 2) {
    Splits pairs(size, everybody);
    for (size_t r = 0; r < n; ++r) pairs.Set(static_cast<int>(r), static_cast<int>(r ^ distance), 1);
    KV_RETURN_IF_ERROR(backend.Alltoall(own, theirs, pairs, total));
    const bool is_first = (static_cast<size_t>(rank) & distance) == 0;
    view.ForEach(all, [&](const PackedRange::Part& part) {
      const char* a = (is_first ? own : theirs) + part.in_slice;
      const char* b = (is_first ? theirs : own) + part.in_slice;
      AdasumPair(range.dtype, a, b, own + part.in_slice, part.bytes / item);
    });
  }
  view.ForEach(all, [&](const PackedRange::Part& part) {
    CopyScaled(range.dtype, range.postscale, own + part.in_slice, part.out, part.bytes);
  });
  return Status();
}

}  // namespace kolovod
