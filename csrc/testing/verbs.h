// What every backend must give, for every verb: a table over dtypes, ops, sizes and pieces. Expected bits
// come from one reduction of all ranks' data in one place, by the kernels that reduce_test.cc checks.
#pragma once

#include <functional>
#include <numeric>
#include <vector>

#include "base/half.h"
#include "collectives/backend.h"
#include "collectives/reduce.h"
#include "testing/check.h"

namespace kolovod::testing {

using Bytes = std::vector<char>;

// Small values of a rank, well mixed; the same for whoever asks.
inline Bytes ValuesOf(DType dtype, size_t count, int rank, unsigned salt = 0) {
  const uint32_t seed = static_cast<uint32_t>(rank) * 7919 + salt * 104729;
  Bytes bytes(count * SizeOf(dtype));
  const auto fill = [&]<class T>(T*, auto make) {
    T* at = reinterpret_cast<T*>(bytes.data());
    for (size_t i = 0; i < count; ++i) {
      const uint32_t mixed = (static_cast<uint32_t>(i) + seed) * 2654435761u;
      at[i] = make(static_cast<int>((mixed >> 16) % 41) - 20);
    }
  };
  const auto integer = [&]<class T>(T* type) { fill(type, [](int v) { return static_cast<T>(v); }); };
  switch (dtype) {
    case DType::kUInt8:
      integer(static_cast<uint8_t*>(nullptr));
      break;
    case DType::kInt8:
      integer(static_cast<int8_t*>(nullptr));
      break;
    case DType::kUInt16:
      integer(static_cast<uint16_t*>(nullptr));
      break;
    case DType::kInt16:
      integer(static_cast<int16_t*>(nullptr));
      break;
    case DType::kInt32:
      fill(static_cast<int32_t*>(nullptr), [](int v) { return v * 100'000'007; });
      break;
    case DType::kInt64:
      fill(static_cast<int64_t*>(nullptr), [](int v) { return v * 10'000'000'019LL; });
      break;
    case DType::kFloat16:
      fill(static_cast<uint16_t*>(nullptr), [](int v) { return ToHalf(static_cast<float>(v) * 0.37f).bits; });
      break;
    case DType::kBFloat16:
      fill(static_cast<uint16_t*>(nullptr),
           [](int v) { return ToBFloat16(static_cast<float>(v) * 0.37f).bits; });
      break;
    case DType::kFloat32:
      fill(static_cast<float*>(nullptr), [](int v) { return static_cast<float>(v) * 0.37f; });
      break;
    case DType::kFloat64:
      fill(static_cast<double*>(nullptr), [](int v) { return v * 0.37; });
      break;
    case DType::kBool:
      fill(static_cast<uint8_t*>(nullptr), [](int v) { return static_cast<uint8_t>(v > 0); });
      break;
  }
  return bytes;
}

struct Factors {
  double prescale = 1.0;
  double postscale = 1.0;
  int divisor = 1;
  Codec codec = Codec::kNone;
};

// All sources added in their order.
inline Bytes Combined(DType dtype, Op op, const Factors& factors, std::vector<Bytes> sources) {
  const size_t count = sources[0].size() / SizeOf(dtype);
  std::vector<const void*> at;
  for (Bytes& source : sources) {
    if (factors.prescale != 1.0) {
      Exchange scale;
      scale.reduce.dtype = dtype;
      scale.reduce.prescale = factors.prescale;
      scale.pack_from = scale.pack_to = source.data();
      scale.pack_bytes = source.size();
      ActiveKernels().exchange(scale);
    }
    at.push_back(source.data());
  }
  Bytes out(sources[0].size());
  Exchange x;
  x.reduce.dtype = dtype;
  x.reduce.op = op;
  x.reduce.scale = factors.postscale;
  x.reduce.divisor = factors.divisor;
  x.reduce.sources = at.data();
  x.reduce.source_count = static_cast<int>(at.size());
  x.reduce.out = out.data();
  x.reduce.count = count;
  ActiveKernels().exchange(x);
  return out;
}

// What an allreduce must give from all ranks' inputs.
using Reference = std::function<Bytes(DType, Op, const Factors&, std::vector<Bytes>)>;

// One allreduce of tensors with `counts` elements.
inline void CheckAllreduce(Backend& backend, int rank, int size, const Reference& reference, DType dtype,
                           Op op, const Factors& given, const std::vector<size_t>& counts, bool in_place) {
  Factors factors = given;
  factors.divisor = op == Op::kAverage ? size : 1;
  const std::string name = "t";
  FusedRange range{dtype, op, factors.prescale, factors.postscale, {}, &name, factors.codec};
  std::vector<Bytes> in, out, wanted;
  for (size_t t = 0; t < counts.size(); ++t) {
    std::vector<Bytes> all;
    for (int r = 0; r < size; ++r) all.push_back(ValuesOf(dtype, counts[t], r, static_cast<unsigned>(t)));
    in.push_back(all[static_cast<size_t>(rank)]);
    out.push_back(Bytes(in.back().size()));
    wanted.push_back(reference(dtype, op, factors, std::move(all)));
  }
  const std::vector<Bytes> before = in;
  for (size_t t = 0; t < counts.size(); ++t) {
    range.pieces.push_back(Piece{in[t].data(), in_place ? in[t].data() : out[t].data(), counts[t]});
  }
  CHECK_OK(backend.Allreduce(range));
  for (size_t t = 0; t < counts.size(); ++t) {
    CAPTURE(t);
    CHECK(FirstDifference((in_place ? in : out)[t], wanted[t]) == "");
    if (!in_place) CHECK(FirstDifference(in[t], before[t]) == "");
  }
}

inline void CheckReducescatter(Backend& backend, int rank, int size, const Reference& reference, DType dtype,
                               Op op, const Factors& given, const std::vector<size_t>& counts) {
  Factors factors = given;
  factors.divisor = op == Op::kAverage ? size : 1;
  const std::string name = "t";
  const size_t total = std::accumulate(counts.begin(), counts.end(), size_t{0});
  const size_t begin = std::accumulate(counts.begin(), counts.begin() + rank, size_t{0});
  std::vector<Bytes> all;
  for (int r = 0; r < size; ++r) all.push_back(ValuesOf(dtype, total, r));
  const Bytes in = all[static_cast<size_t>(rank)];
  const Bytes sum = reference(dtype, op, factors, std::move(all));
  const auto at = [&](size_t elements) { return sum.begin() + static_cast<long>(elements * SizeOf(dtype)); };
  const size_t own = counts[static_cast<size_t>(rank)];
  Bytes out(own * SizeOf(dtype));
  FusedRange range{dtype, op, factors.prescale, factors.postscale, {Piece{in.data(), out.data(), total}},
                   &name};
  CHECK_OK(backend.Reducescatter(range, counts));
  CHECK(FirstDifference(out, Bytes(at(begin), at(begin + own))) == "");
}

inline void CheckBroadcast(Backend& backend, int rank, size_t count, int root, bool in_place) {
  const std::string name = "b";
  const Bytes wanted = ValuesOf(DType::kFloat32, count, root);
  Bytes in = ValuesOf(DType::kFloat32, count, rank);
  Bytes out(in.size());
  Bytes& result = in_place ? in : out;
  CHECK_OK(backend.Broadcast(Piece{in.data(), result.data(), count}, DType::kFloat32, root, name));
  CHECK(FirstDifference(result, wanted) == "");
}

inline void CheckAllgather(Backend& backend, int rank, const std::vector<size_t>& bytes) {
  Bytes wanted;
  for (size_t r = 0; r < bytes.size(); ++r) {
    const Bytes part = ValuesOf(DType::kUInt8, bytes[r], static_cast<int>(r));
    wanted.insert(wanted.end(), part.begin(), part.end());
  }
  const Bytes in = ValuesOf(DType::kUInt8, bytes[static_cast<size_t>(rank)], rank);
  Bytes out(wanted.size());
  CHECK_OK(backend.Allgather(in.data(), out.data(), bytes));
  CHECK(FirstDifference(out, wanted) == "");
}

// Rank s sends `unit` * ((s * 3 + d * 5) % 7) bytes to d. `local`: the ranks of this host, which are all that
// the backend may ask about; empty: all.
inline void CheckAlltoall(Backend& backend, int rank, int size, size_t unit, std::vector<int> local = {}) {
  if (local.empty()) {
    local.resize(static_cast<size_t>(size));
    std::iota(local.begin(), local.end(), 0);
  }
  std::vector<std::vector<int64_t>> by_rank(static_cast<size_t>(size));
  for (size_t s = 0; s < by_rank.size(); ++s) {
    for (size_t d = 0; d < by_rank.size(); ++d)
      by_rank[s].push_back(static_cast<int64_t>((s * 3 + d * 5) % 7));
  }
  const auto part = [&](int s, int d) {
    const auto rows = static_cast<size_t>(by_rank[static_cast<size_t>(s)][static_cast<size_t>(d)]);
    return ValuesOf(DType::kUInt8, unit * rows, s * size + d);
  };
  Bytes in, wanted;
  for (int r = 0; r < size; ++r) {
    const Bytes to = part(rank, r), from = part(r, rank);
    in.insert(in.end(), to.begin(), to.end());
    wanted.insert(wanted.end(), from.begin(), from.end());
  }
  Bytes out(wanted.size());
  CHECK_OK(backend.Alltoall(in.data(), out.data(), Splits::OfAll(by_rank).For(local), unit));
  CHECK(FirstDifference(out, wanted) == "");
}

// Part sizes that differ by rank, some zero.
inline std::vector<size_t> UnequalParts(int size, size_t unit) {
  std::vector<size_t> parts;
  for (int r = 0; r < size; ++r) parts.push_back(unit * (static_cast<size_t>(r) * 3 % 4));
  return parts;
}

// Every dtype and op, with and without factors, small.
inline void CheckAllReductions(Backend& backend, int rank, int size, const Reference& reference,
                               const std::function<bool(DType, Op)>& covers) {
  for (int d = 0; d < kDTypeCount; ++d) {
    const auto dtype = static_cast<DType>(d);
    for (const Op op : {Op::kAverage, Op::kSum, Op::kMin, Op::kMax, Op::kProduct}) {
      if ((dtype == DType::kBool && op == Op::kAverage) || !covers(dtype, op)) continue;
      for (const Factors& factors : {Factors{}, Factors{0.5, 3.0}}) {
        if (dtype == DType::kBool && factors.prescale != 1.0) continue;
        CheckAllreduce(backend, rank, size, reference, dtype, op, factors, {37, 0, 1, 3000}, d % 2 == 0);
        CheckReducescatter(backend, rank, size, reference, dtype, op, factors, UnequalParts(size, 65));
      }
    }
  }
}

// Every verb, from no bytes to many portions.
inline void CheckAllSizes(Backend& backend, int rank, int size, const Reference& reference) {
  for (const size_t count : {0, 1, 17, 1000, 20'001}) {
    for (const bool in_place : {false, true}) {
      CheckAllreduce(backend, rank, size, reference, DType::kFloat32, Op::kSum, {}, {count}, in_place);
      CheckAllreduce(backend, rank, size, reference, DType::kFloat16, Op::kAverage, {2.0, 0.25},
                     {count, 5, count / 3, 1}, in_place);
      CheckBroadcast(backend, rank, count, static_cast<int>(count) % size, in_place);
    }
    CheckReducescatter(backend, rank, size, reference, DType::kFloat32, Op::kSum, {},
                       std::vector<size_t>(static_cast<size_t>(size), count));
    CheckReducescatter(backend, rank, size, reference, DType::kInt32, Op::kSum, {},
                       UnequalParts(size, count));
    CheckAllgather(backend, rank, std::vector<size_t>(static_cast<size_t>(size), count));
    CheckAllgather(backend, rank, UnequalParts(size, count));
    CheckAlltoall(backend, rank, size, count / 4);
  }
  for (int root = 0; root < size; ++root) CheckBroadcast(backend, rank, 1000, root, false);
}

}  // namespace kolovod::testing
