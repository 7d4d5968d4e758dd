// Every algorithm at every number of ranks from 2 to 64: its result, and what it sent against its formula.
#include "collectives/traffic.h"

#include <sys/resource.h>

#include <cstring>

#include "collectives/tcp.h"
#include "testing/mesh_world.h"
#include "testing/verbs.h"

namespace kolovod {
namespace {

using testing::Bytes;
using testing::Combined;
using testing::Factors;
using testing::FirstDifference;

constexpr int kMostRanks = 64;
constexpr size_t kPortionBytes = 4096;

// A mesh of 90 threads has 8,010 sockets in this process.
void AllowDescriptors() {
  rlimit limit{};
  CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
  if (limit.rlim_cur >= 8192) return;
  limit.rlim_cur = std::min<rlim_t>(limit.rlim_max, 8192);
  CHECK(limit.rlim_cur == 8192);
  CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
}

std::vector<int> Everybody(int size) {
  std::vector<int> members(static_cast<size_t>(size));
  std::iota(members.begin(), members.end(), 0);
  return members;
}

// One member's values as the partial results that they are, by plain arithmetic.
Bytes Widened(DType dtype, const Bytes& values) {
  const size_t count = values.size() / SizeOf(dtype);
  const auto convert = [&]<class From, class To>(From*, To*, auto one) {
    Bytes out(count * sizeof(To));
    const auto* from = reinterpret_cast<const From*>(values.data());
    for (size_t i = 0; i < count; ++i) reinterpret_cast<To*>(out.data())[i] = one(from[i]);
    return out;
  };
  const auto integer = [&]<class From>(From* type) {
    return convert(type, static_cast<int64_t*>(nullptr), [](From v) { return static_cast<int64_t>(v); });
  };
  constexpr float* kFloats = nullptr;
  switch (dtype) {
    case DType::kUInt8:
      return integer(static_cast<uint8_t*>(nullptr));
    case DType::kInt8:
      return integer(static_cast<int8_t*>(nullptr));
    case DType::kUInt16:
      return integer(static_cast<uint16_t*>(nullptr));
    case DType::kInt16:
      return integer(static_cast<int16_t*>(nullptr));
    case DType::kInt32:
      return integer(static_cast<int32_t*>(nullptr));
    case DType::kFloat16:
      return convert(static_cast<uint16_t*>(nullptr), kFloats, [](uint16_t v) { return ToFloat(Half{v}); });
    default:
      return convert(static_cast<uint16_t*>(nullptr), kFloats,
                     [](uint16_t v) { return ToFloat(BFloat16{v}); });
  }
}

// acc / divisor * scale as a 16-bit float, or an integer cut off toward zero.
Bytes Narrowed(DType dtype, const Factors& factors, const Bytes& partial) {
  const size_t count = partial.size() / SizeOf(AccumulatorOf(dtype, Op::kAverage));
  Bytes out(count * SizeOf(dtype));
  for (size_t i = 0; i < count; ++i) {
    char* const at = out.data() + i * SizeOf(dtype);
    if (dtype == DType::kFloat16 || dtype == DType::kBFloat16) {
      const float value = reinterpret_cast<const float*>(partial.data())[i] /
                          static_cast<float>(factors.divisor) * static_cast<float>(factors.postscale);
      const uint16_t bits = dtype == DType::kFloat16 ? ToHalf(value).bits : ToBFloat16(value).bits;
      std::memcpy(at, &bits, sizeof(bits));
      continue;
    }
    // Whole numbers: factors of the integers here are 1.
    const int64_t value = reinterpret_cast<const int64_t*>(partial.data())[i] / factors.divisor;
    std::memcpy(at, &value, SizeOf(dtype));  // little-endian
  }
  return out;
}

// The order of balanced.h, level by level.
Bytes BalancedReference(DType dtype, Op op, const Factors& factors, std::vector<Bytes> sources) {
  if (sources.size() == 2) return Combined(dtype, op, factors, std::move(sources));
  const DType wide = AccumulatorOf(dtype, op);
  if (factors.prescale != 1.0) {
    for (Bytes& source : sources) {
      std::vector<Bytes> one;
      one.push_back(std::move(source));
      source = Combined(dtype, Op::kSum, Factors{factors.prescale, 1.0, 1}, std::move(one));
    }
  }
  if (wide != dtype) {
    for (Bytes& source : sources) source = Widened(dtype, source);
  }
  const Op plain = op == Op::kAverage ? Op::kSum : op;
  const auto add = [&](Bytes low, Bytes high, const Factors& with) {
    std::vector<Bytes> pair;
    pair.push_back(std::move(low));
    pair.push_back(std::move(high));
    return Combined(wide, plain, with, std::move(pair));
  };
  size_t groups = 1;
  while (groups * 2 <= sources.size()) groups *= 2;
  const size_t pairs = sources.size() - groups;
  std::vector<Bytes> sums;
  for (size_t p = 0; p < pairs; ++p) sums.push_back(add(sources[2 * p], sources[2 * p + 1], {}));
  sums.insert(sums.end(), sources.begin() + static_cast<long>(2 * pairs), sources.end());
  while (sums.size() > 1) {
    const bool last = sums.size() == 2 && wide == dtype;
    std::vector<Bytes> next;
    for (size_t i = 0; i < sums.size(); i += 2) {
      next.push_back(
          add(sums[i], sums[i + 1], last ? Factors{1.0, factors.postscale, factors.divisor} : Factors{}));
    }
    sums = std::move(next);
  }
  return wide == dtype ? sums[0] : Narrowed(dtype, factors, sums[0]);
}

struct Case {
  Algorithm algorithm;
  DType dtype = DType::kFloat32;
  Op op = Op::kSum;
  Factors factors;
  std::vector<size_t> counts;  // elements of each tensor
  bool exact = false;          // the counters must be those of the formula
};

// What all ranks of one case share: made once.
struct Prepared {
  Prepared(const Case& of, int size) {
    Factors factors = of.factors;
    factors.divisor = of.op == Op::kAverage ? size : 1;
    for (size_t t = 0; t < of.counts.size(); ++t) {
      std::vector<Bytes> all;
      for (int r = 0; r < size; ++r) {
        all.push_back(testing::ValuesOf(of.dtype, of.counts[t], r, static_cast<unsigned>(t)));
      }
      inputs.push_back(all);
      const bool balanced = of.algorithm == Algorithm::kDoubling || of.algorithm == Algorithm::kHalving;
      wanted.push_back(balanced ? BalancedReference(of.dtype, of.op, factors, std::move(all))
                                : Combined(of.dtype, of.op, factors, std::move(all)));
    }
  }
  std::vector<std::vector<Bytes>> inputs;  // by tensor, by rank
  std::vector<Bytes> wanted;               // by tensor
};

Traffic CountedBy(const Mesh& mesh) {
  Traffic sum;
  for (int peer = 0; peer < mesh.size(); ++peer) {
    sum.sent_messages += mesh.sent_messages(peer);
    sum.sent_bytes += mesh.sent_bytes(peer);
    sum.received_messages += mesh.received_messages(peer);
    sum.received_bytes += mesh.received_bytes(peer);
  }
  return sum;
}

void CheckTraffic(const Traffic& before, const Traffic& after, const Traffic& formula,
                  const std::string& what, int rank, int size) {
  const Traffic seen{after.sent_messages - before.sent_messages, after.sent_bytes - before.sent_bytes,
                     after.received_messages - before.received_messages,
                     after.received_bytes - before.received_bytes};
  CAPTURE(what);
  CAPTURE(rank);
  CAPTURE(size);
  CHECK(seen.sent_messages == formula.sent_messages);
  CHECK(seen.sent_bytes == formula.sent_bytes);
  CHECK(seen.received_messages == formula.received_messages);
  CHECK(seen.received_bytes == formula.received_bytes);
}

void RunCase(const Case& of, const Prepared& data, Mesh& mesh) {
  const auto rank = static_cast<size_t>(mesh.rank());
  TcpOptions options;
  options.algorithm = of.algorithm;
  options.portion_bytes = kPortionBytes;
  TcpBackend backend(mesh, Everybody(mesh.size()), mesh.rank(), options);
  const std::string name = "t";
  FusedRange range{of.dtype, of.op, of.factors.prescale, of.factors.postscale, {}, &name};
  std::vector<Bytes> in, out;
  size_t bytes = 0;
  for (const auto& by_rank : data.inputs) {
    in.push_back(by_rank[rank]);
    out.push_back(Bytes(in.back().size()));
    bytes += in.back().size();
  }
  const bool in_place = of.counts.size() % 2 == 1;
  for (size_t t = 0; t < in.size(); ++t) {
    range.pieces.push_back(Piece{in[t].data(), in_place ? in[t].data() : out[t].data(), of.counts[t]});
  }
  const Traffic before = CountedBy(mesh);
  CHECK_OK(backend.Allreduce(range));
  const std::string algorithm = NameOf(of.algorithm);
  CAPTURE(algorithm);
  CAPTURE(of.dtype);
  CAPTURE(of.op);
  CAPTURE(rank);
  CAPTURE(mesh.size());
  for (size_t t = 0; t < in.size(); ++t) {
    CHECK(FirstDifference((in_place ? in : out)[t], data.wanted[t]) == "");
  }
  CHECK(backend.runs(of.algorithm) == (bytes > 0 ? 1 : 0));
  if (!of.exact) return;
  const TrafficQuestion question{Verb::kAllreduce, bytes, mesh.size(), of.dtype, of.op, kPortionBytes};
  CheckTraffic(before, CountedBy(mesh), TrafficOf(of.algorithm, question, mesh.rank()), algorithm,
               mesh.rank(), mesh.size());
}

constexpr Algorithm kInOrder[] = {Algorithm::kDirect, Algorithm::kTree, Algorithm::kPairwise};
constexpr Algorithm kBalanced[] = {Algorithm::kDoubling, Algorithm::kHalving};

std::vector<int> RankCounts() {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  // Thousands of threads take a sanitizer minutes; what matters to it is in these.
  return {2, 3, 4, 5, 6, 7, 8, 11, 16, 24, 33};
#else
  std::vector<int> counts;
  for (int size = 2; size <= kMostRanks; ++size) counts.push_back(size);
  return counts;
#endif
}

// 16 KiB in one or several tensors: every part of a halving is a whole number of cache lines.
std::vector<Case> CountedCases() {
  std::vector<Case> cases;
  for (const Algorithm algorithm : kInOrder) {
    cases.push_back({algorithm, DType::kFloat32, Op::kSum, {}, {4096}, true});
  }
  // Of the ring integers, which add up alike in any order.
  cases.push_back({Algorithm::kRing, DType::kInt32, Op::kSum, {}, {4096}, true});
  cases.push_back({Algorithm::kRing, DType::kInt64, Op::kMax, {}, {7, 0, 1365}, true});
  for (const Algorithm algorithm : kBalanced) {
    cases.push_back({algorithm, DType::kFloat32, Op::kSum, {}, {4096}, true});
    cases.push_back({algorithm, DType::kBFloat16, Op::kSum, {}, {8192}, true});
    cases.push_back({algorithm, DType::kInt8, Op::kAverage, {}, {3000, 13384}, true});
  }
  return cases;
}

// Over all numbers of ranks every dtype meets every op, with and without factors, alone and in company.
std::vector<Case> TypedCases(int size) {
  constexpr Op kOps[] = {Op::kAverage, Op::kSum, Op::kMin, Op::kMax, Op::kProduct};
  std::vector<Case> cases;
  for (int d = 0; d < kDTypeCount; ++d) {
    const auto dtype = static_cast<DType>(d);
    const Op op = kOps[(size + d) % 5];
    if (dtype == DType::kBool && op == Op::kAverage) continue;
    const bool integer = AccumulatorOf(dtype, Op::kAverage) == DType::kInt64 || dtype == DType::kBool;
    const Factors factors = integer || size / 5 % 2 == 0 ? Factors{} : Factors{0.5, 3.0};
    const bool alone = size / 10 % 2 == 1;
    for (const Algorithm algorithm : kBalanced) {
      cases.push_back({algorithm, dtype, op, factors,
                       alone ? std::vector<size_t>{1} : std::vector<size_t>{37, 0, 1, 700}});
    }
  }
  return cases;
}

void RunBroadcasts(Mesh& mesh) {
  for (const Algorithm algorithm : {Algorithm::kTree, Algorithm::kChain}) {
    TcpOptions options;
    options.algorithm = algorithm;
    options.portion_bytes = kPortionBytes;
    TcpBackend backend(mesh, Everybody(mesh.size()), mesh.rank(), options);
    constexpr size_t kCount = 2500;  // three messages
    const Traffic before = CountedBy(mesh);
    testing::CheckBroadcast(backend, mesh.rank(), kCount, 0, true);
    const TrafficQuestion question{Verb::kBroadcast, 4 * kCount, mesh.size(),
                                   DType::kFloat32,  Op::kSum,   kPortionBytes};
    CheckTraffic(before, CountedBy(mesh), TrafficOf(algorithm, question, mesh.rank()), NameOf(algorithm),
                 mesh.rank(), mesh.size());
    testing::CheckBroadcast(backend, mesh.rank(), 5, mesh.size() - 1, false);
  }
}

TEST_CASE("every algorithm at every number of ranks gives the result and sends what its formula says") {
  AllowDescriptors();
  for (const int size : RankCounts()) {
    std::vector<Case> cases = CountedCases();
    for (Case& of : TypedCases(size)) cases.push_back(std::move(of));
    std::vector<Prepared> prepared;
    for (const Case& of : cases) prepared.emplace_back(of, size);
    testing::RunMesh(size, testing::Wire::kSocketPair, [&](Mesh& mesh) {
      for (size_t i = 0; i < cases.size(); ++i) RunCase(cases[i], prepared[i], mesh);
      RunBroadcasts(mesh);
    });
  }
}

// What is chosen for little and for much adds alike.
TEST_CASE("a tensor of many ranks has the same bits alone and in a bucket") {
  AllowDescriptors();
  constexpr int kRanks = 90;
  constexpr size_t kCount = 40'000;
  CHECK(OrderOf(kRanks) == Order::kBalanced);
  const Prepared data(Case{Algorithm::kHalving, DType::kBFloat16, Op::kAverage, Factors{0.5, 3.0}, {kCount}},
                      kRanks);
  testing::RunMesh(kRanks, testing::Wire::kSocketPair, [&](Mesh& mesh) {
    TcpBackend backend(mesh, Everybody(kRanks), mesh.rank(), TcpOptions());
    const Bytes& in = data.inputs[0][static_cast<size_t>(mesh.rank())];
    Bytes out(in.size());
    const std::string name = "t";
    const auto reduce = [&](size_t begin, size_t count) {
      const Piece piece{in.data() + 2 * begin, out.data() + 2 * begin, count};
      CHECK_OK(backend.Allreduce({DType::kBFloat16, Op::kAverage, 0.5, 3.0, {piece}, &name}));
    };
    reduce(0, kCount);
    CHECK(FirstDifference(out, data.wanted[0]) == "");
    CHECK(backend.runs(Algorithm::kHalving) == 1);
    out.assign(out.size(), 0);
    for (size_t begin = 0; begin < kCount; begin += 4000) reduce(begin, 4000);
    CHECK(FirstDifference(out, data.wanted[0]) == "");
    CHECK(backend.runs(Algorithm::kDoubling) == 10);
  });
}

// The table in traffic.h.
TEST_CASE("the formulas are those of the literature") {
  constexpr size_t kBytes = size_t{64} << 20;
  for (int n = 2; n <= kMostRanks; n *= 2) {
    const TrafficQuestion q{Verb::kAllreduce, kBytes, n, DType::kFloat32, Op::kSum, kBytes};
    const auto size = static_cast<uint64_t>(n), log = static_cast<uint64_t>(Log2(n));
    for (int m = 0; m < n; ++m) {
      const auto is = [&](Algorithm algorithm, uint64_t messages, uint64_t bytes) {
        const Traffic t = TrafficOf(algorithm, q, m);
        CHECK(t.sent_messages == messages);
        CHECK(t.sent_bytes == bytes);
        CHECK(t.received_messages == messages);
        CHECK(t.received_bytes == bytes);
      };
      is(Algorithm::kDirect, size - 1, (size - 1) * kBytes);
      is(Algorithm::kTree, log, (size - 1) * kBytes);
      is(Algorithm::kPairwise, 2 * (size - 1), 2 * (size - 1) * kBytes / size);
      is(Algorithm::kRing, 2 * (size - 1), 2 * (size - 1) * kBytes / size);
      is(Algorithm::kDoubling, log, log * kBytes);
      is(Algorithm::kHalving, 2 * log, 2 * (size - 1) * kBytes / size);
    }
  }
  for (int n = 3; n <= kMostRanks; ++n) {
    const TrafficQuestion q{Verb::kAllreduce, kBytes, n, DType::kFloat32, Op::kSum, kBytes};
    for (int m = 0; m < n; ++m) {
      // No member sends much more than the bound, whatever the number: nobody rests, nobody serves a resting
      // one.
      const double bound = 2.0 * (n - 1) / n * static_cast<double>(kBytes);
      CHECK(static_cast<double>(TrafficOf(Algorithm::kHalving, q, m).sent_bytes) <= 1.126 * bound);
      CHECK(TrafficOf(Algorithm::kHalving, q, m).sent_messages <= 4 * static_cast<uint64_t>(Log2(n)));
      CHECK(TrafficOf(Algorithm::kDoubling, q, m).received_messages <= static_cast<uint64_t>(Log2(n)));
    }
  }
}

}  // namespace
}  // namespace kolovod
