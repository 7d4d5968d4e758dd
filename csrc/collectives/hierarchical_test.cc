#include "collectives/hierarchical.h"

#include <chrono>
#include <mutex>

#include "collectives/codec.h"
#include "testing/mesh_world.h"
#include "testing/shm_world.h"
#include "testing/verbs.h"
#include "testing/world.h"

namespace kolovod {
namespace {

using testing::Bytes;
using testing::Factors;
using testing::FirstDifference;
using testing::Member;
using testing::StartsWith;
using testing::TestHost;
using testing::Wire;

TcpOptions SmallOptions() {
  TcpOptions options;
  options.portion_bytes = 4096;
  return options;
}

// Of which many blocks are on their way.
TcpOptions LongOptions() {
  TcpOptions options = SmallOptions();
  options.cost.latency_us = 20'000;
  return options;
}

void RunHosts(const std::vector<int>& host_of, const TcpOptions& options,
              const std::function<void(HierarchicalBackend&, Mesh&)>& body) {
  const Config config = testing::SmallConfig();
  const Hosts hosts(host_of);
  std::vector<std::unique_ptr<TestHost>> machines;
  for (const std::vector<int>& here : hosts.ranks) {
    machines.push_back(std::make_unique<TestHost>(static_cast<int>(here.size()), config));
  }
  testing::RunMesh(static_cast<int>(host_of.size()), Wire::kSocketPair, [&](Mesh& mesh) {
    const auto self = static_cast<size_t>(mesh.rank());
    Member member(*machines[static_cast<size_t>(hosts.host[self])], hosts.local[self], config);
    member.waiter.set_background([&mesh] { return mesh.Background(); });  // kept moving while it waits here
    HierarchicalBackend backend(std::move(member.shm), mesh, host_of, options);
    body(backend, mesh);
  });
}

// First the ranks of each host, then the hosts; what must be added in one place, in the order of ranks.
testing::Reference TwoLevels(const std::vector<int>& host_of) {
  return [hosts = Hosts(host_of)](DType dtype, Op op, const Factors& factors, std::vector<Bytes> all) {
    if (hosts.ranks.size() == 1 || NeedsOnePlace(dtype, op)) {
      return testing::Combined(dtype, op, factors, std::move(all));
    }
    std::vector<Bytes> sums;
    for (const std::vector<int>& here : hosts.ranks) {
      std::vector<Bytes> sources;
      for (const int r : here) sources.push_back(all[static_cast<size_t>(r)]);
      sums.push_back(testing::Combined(dtype, op == Op::kAverage ? Op::kSum : op,
                                       Factors{factors.prescale, 1.0, 1}, std::move(sources)));
    }
    return testing::Combined(dtype, op, Factors{1.0, factors.postscale, factors.divisor}, std::move(sums));
  };
}

// Of floats: each tensor by itself, in whole blocks.
void Code(Codec codec, std::vector<float>& values) {
  const size_t count = values.size();
  values.resize(RoundUp(count, kCodecBlock));
  const size_t blocks = values.size() / kCodecBlock;
  std::vector<char> bytes(blocks * EncodedBlockBytes(codec));
  ActiveKernels().encode(codec, values.data(), blocks, bytes.data());
  ActiveKernels().decode(codec, bytes.data(), blocks, values.data());
  values.resize(count);
}

std::vector<float> Widened(DType dtype, const Bytes& values) {
  std::vector<float> wide(values.size() / SizeOf(dtype));
  const void* const source = values.data();
  Exchange x;
  x.reduce.dtype = dtype;
  x.reduce.sources = &source;
  x.reduce.source_count = 1;
  x.reduce.to_partials = true;
  x.reduce.out = wide.data();
  x.reduce.count = wide.size();
  ActiveKernels().exchange(x);
  return wide;
}

Bytes AsBytes(const std::vector<float>& values) {
  const char* begin = reinterpret_cast<const char*>(values.data());
  return Bytes(begin, begin + values.size() * sizeof(float));
}

Bytes Narrowed(DType dtype, const std::vector<float>& values) {
  Bytes narrow(values.size() * SizeOf(dtype));
  const void* const source = values.data();
  Exchange x;
  x.reduce.dtype = dtype;
  x.reduce.sources = &source;
  x.reduce.source_count = 1;
  x.reduce.from_partials = true;
  x.reduce.out = narrow.data();
  x.reduce.count = values.size();
  ActiveKernels().exchange(x);
  return narrow;
}

// The sums of the hosts are encoded, and their sum is.
testing::Reference Coded(const std::vector<int>& host_of, Codec codec) {
  return [hosts = Hosts(host_of), codec](DType dtype, Op op, const Factors& factors, std::vector<Bytes> all) {
    std::vector<Bytes> sums;
    for (const std::vector<int>& here : hosts.ranks) {
      std::vector<Bytes> sources;
      for (const int r : here) sources.push_back(all[static_cast<size_t>(r)]);
      const Bytes sum =
          testing::Combined(dtype, Op::kSum, Factors{factors.prescale, 1.0, 1}, std::move(sources));
      std::vector<float> wide = Widened(dtype, sum);
      Code(codec, wide);
      sums.push_back(AsBytes(wide));
    }
    const Factors between{1.0, factors.postscale, factors.divisor};
    const Bytes sum = testing::Combined(DType::kFloat32, op, between, std::move(sums));
    std::vector<float> wide = Widened(DType::kFloat32, sum);
    Code(codec, wide);
    return Narrowed(dtype, wide);
  };
}

const std::vector<std::vector<int>> kPlacements = {
    {0},                       // alone
    {0, 0, 0},                 // one host
    {4, 7, 9},                 // nobody shares
    {0, 0, 1, 1},              // equal
    {0, 1, 0, 1},              // dealt round
    {0, 0, 0, 1},              // unequal
    {1, 0, 0, 2, 0, 1},        // unequal and mixed
    {0, 0, 1, 1, 2, 2, 3, 3},  // four hosts
};

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
// Some elements of several blocks of every host are as good as many to a sanitizer, which takes minutes.
constexpr size_t kLarge = 10'000, kLargest = 23'456;
#else
constexpr size_t kLarge = 40'000, kLargest = 123'456;
#endif

TEST_CASE("what is encoded between hosts depends on its tensor alone") {
  for (const std::vector<int>& host_of : kPlacements) {
    if (Hosts(host_of).ranks.size() == 1) continue;
    const auto size = static_cast<int>(host_of.size());
    RunHosts(host_of, SmallOptions(), [&](HierarchicalBackend& backend, Mesh& mesh) {
      for (const Codec codec : {Codec::kInt8, Codec::kInt4}) {
        const testing::Reference reference = Coded(host_of, codec);
        const auto check = [&](DType dtype, Op op, double factor, const std::vector<size_t>& counts) {
          const Factors factors{factor, factor == 1.0 ? 1.0 : 0.7, 1, codec};
          for (const bool in_place : {true, false}) {
            testing::CheckAllreduce(backend, mesh.rank(), size, reference, dtype, op, factors, counts,
                                    in_place);
          }
        };
        for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
          check(dtype, Op::kSum, 1.0, {2048});
          check(dtype, Op::kAverage, 1.0, {1, 255, 256, 257, 1024, 3000});
          check(dtype, Op::kAverage, 1.5, {kLarge, 5});
          check(dtype, Op::kSum, 1.0, {7, kLargest});
        }
      }
    });
  }
}

// What the codec saves, and what it costs for the tail of a tensor.
TEST_CASE("over a long link more blocks are on their way") {
  for (const std::vector<int>& host_of : kPlacements) {
    const auto size = static_cast<int>(host_of.size());
    const testing::Reference reference = TwoLevels(host_of);
    RunHosts(host_of, LongOptions(), [&](HierarchicalBackend& backend, Mesh& mesh) {
      for (const size_t count : {size_t{1'000}, size_t{5'000}, kLarge / 2, kLarge, kLargest}) {
        for (const Codec codec : {Codec::kNone, Codec::kInt8, Codec::kInt4}) {
          if (codec != Codec::kNone && Hosts(host_of).ranks.size() == 1) continue;
          const testing::Reference wanted = codec == Codec::kNone ? reference : Coded(host_of, codec);
          const Factors factors{1.0, 1.0, 1, codec};
          for (int again = 0; again < 3; ++again) {
            testing::CheckAllreduce(backend, mesh.rank(), size, wanted, DType::kFloat32, Op::kAverage,
                                    factors, {count, 3'000}, again > 0);
          }
        }
      }
    });
  }
}

TEST_CASE("an encoded allreduce sends a quarter or an eighth of the bytes") {
  constexpr size_t kCount = 1 << 20;
  for (const Codec codec : {Codec::kNone, Codec::kInt8, Codec::kInt4}) {
    RunHosts({0, 1}, TcpOptions(), [&](HierarchicalBackend& backend, Mesh& mesh) {
      const std::string name = "t";
      std::vector<float> data(kCount, 1.0f);
      const uint64_t before = mesh.sent_bytes(1 - mesh.rank());
      CHECK_OK(backend.Allreduce(FusedRange{
          DType::kFloat32, Op::kSum, 1.0, 1.0, {Piece{data.data(), data.data(), kCount}}, &name, codec}));
      const double sent = static_cast<double>(mesh.sent_bytes(1 - mesh.rank()) - before);
      const double ratio = static_cast<double>(kCount * sizeof(float)) / sent;
      CAPTURE(ratio);
      if (codec == Codec::kNone) CHECK((ratio > 0.98 && ratio <= 1.0));
      if (codec == Codec::kInt8) CHECK(ratio > 3.8);
      if (codec == Codec::kInt4) CHECK(ratio > 7.4);
      CHECK(data[kCount / 2] == 2.0f);
    });
  }
}

TEST_CASE("every size of every verb in every placement") {
  for (const std::vector<int>& host_of : kPlacements) {
    const auto size = static_cast<int>(host_of.size());
    const testing::Reference reference = TwoLevels(host_of);
    RunHosts(host_of, SmallOptions(), [&](HierarchicalBackend& backend, Mesh& mesh) {
      testing::CheckAllSizes(backend, mesh.rank(), size, reference);
    });
  }
}

TEST_CASE("an alltoall needs only what concerns the ranks of its host") {
  for (const std::vector<int>& host_of : kPlacements) {
    const auto size = static_cast<int>(host_of.size());
    RunHosts(host_of, SmallOptions(), [&](HierarchicalBackend& backend, Mesh& mesh) {
      const Topology topology(mesh.rank(), host_of);
      for (const size_t unit : {0, 1, 1000, 30'000}) {
        testing::CheckAlltoall(backend, mesh.rank(), size, unit, topology.local_ranks);
      }
    });
  }
}

TEST_CASE("every dtype and op") {
  for (const std::vector<int>& host_of : {std::vector<int>{0, 0, 1, 1}, {0, 1, 0, 0}, {0, 1, 2}}) {
    const auto size = static_cast<int>(host_of.size());
    const testing::Reference reference = TwoLevels(host_of);
    RunHosts(host_of, SmallOptions(), [&](HierarchicalBackend& backend, Mesh& mesh) {
      testing::CheckAllReductions(backend, mesh.rank(), size, reference, [](DType, Op) { return true; });
    });
  }
}

// Bytes that this rank has sent to ranks of other hosts, and to its own host's.
std::pair<uint64_t, uint64_t> SentOutAndIn(const Mesh& mesh, const Hosts& hosts) {
  uint64_t out = 0, in = 0;
  for (int peer = 0; peer < mesh.size(); ++peer) {
    const bool here = hosts.host[static_cast<size_t>(peer)] == hosts.host[static_cast<size_t>(mesh.rank())];
    (here ? in : out) += mesh.sent_bytes(peer);
  }
  return {out, in};
}

TEST_CASE("every lane carries its share and no byte goes by network inside a host") {
  const std::vector<int> host_of = {0, 0, 1, 1};
  RunHosts(host_of, TcpOptions(), [&](HierarchicalBackend& backend, Mesh& mesh) {
    std::vector<float> data(1 << 20, 1.0f);  // 4 MiB: every block and lane alike
    const std::string name = "t";
    const FusedRange range{
        DType::kFloat32, Op::kSum, 1.0, 1.0, {Piece{data.data(), data.data(), data.size()}}, &name};
    CHECK_OK(backend.Allreduce(range));
    CHECK(FirstDifference(data, std::vector<float>(data.size(), 4.0f)) == "");
    // Two hosts: 2 (2-1)/2 of the lane, which is half of the range.
    CHECK(SentOutAndIn(mesh, backend.hosts()) == (std::pair<uint64_t, uint64_t>(2 << 20, 0)));
  });
}

TEST_CASE("a broadcast and an allgather cross once") {
  const std::vector<int> host_of = {0, 0, 1, 1};
  std::atomic<uint64_t> crossed{0};
  constexpr size_t kBytes = 100'000;
  RunHosts(host_of, SmallOptions(), [&](HierarchicalBackend& backend, Mesh& mesh) {
    testing::CheckBroadcast(backend, mesh.rank(), kBytes / 4, 1, true);
    crossed += SentOutAndIn(mesh, backend.hosts()).first;
    CHECK(SentOutAndIn(mesh, backend.hosts()).second == 0);
  });
  CHECK(crossed == kBytes);
  crossed = 0;
  RunHosts(host_of, SmallOptions(), [&](HierarchicalBackend& backend, Mesh& mesh) {
    testing::CheckAllgather(backend, mesh.rank(), std::vector<size_t>(4, kBytes));
    crossed += SentOutAndIn(mesh, backend.hosts()).first;
    CHECK(SentOutAndIn(mesh, backend.hosts()).second == 0);
  });
  CHECK(crossed == 4 * kBytes);
}

TEST_CASE("sixteen bits have the same bits in any bucket") {
  const std::vector<int> host_of = {0, 0, 0, 1, 1};
  RunHosts(host_of, SmallOptions(), [](HierarchicalBackend& backend, Mesh& mesh) {
    constexpr size_t kCount = 20'000;
    const std::string name = "t";
    const Bytes in = testing::ValuesOf(DType::kBFloat16, kCount, mesh.rank());
    Bytes whole(in.size()), pieces(in.size());
    const FusedRange one{
        DType::kBFloat16, Op::kSum, 1.0, 1.0, {Piece{in.data(), whole.data(), kCount}}, &name};
    CHECK_OK(backend.Allreduce(one));
    for (size_t begin = 0; begin < kCount; begin += 3333) {
      const size_t count = std::min<size_t>(3333, kCount - begin);
      const FusedRange part{DType::kBFloat16,
                            Op::kSum,
                            1.0,
                            1.0,
                            {Piece{in.data() + 2 * begin, pieces.data() + 2 * begin, count}},
                            &name};
      CHECK_OK(backend.Allreduce(part));
    }
    CHECK(FirstDifference(whole, pieces) == "");
  });
}

TEST_CASE("a named algorithm is used between the hosts") {
  for (const Algorithm algorithm : {Algorithm::kRing, Algorithm::kTree, Algorithm::kPairwise,
                                    Algorithm::kDoubling, Algorithm::kHalving}) {
    TcpOptions options = SmallOptions();
    options.algorithm = algorithm;
    RunHosts({0, 0, 1, 1, 2, 2}, options, [&](HierarchicalBackend& backend, Mesh& mesh) {
      std::vector<float> data(10'000);
      for (size_t i = 0; i < data.size(); ++i)
        data[i] = static_cast<float>(i % 7) + static_cast<float>(mesh.rank());
      const std::string name = "t";
      const FusedRange range{
          DType::kFloat32, Op::kSum, 1.0, 1.0, {Piece{data.data(), data.data(), data.size()}}, &name};
      CHECK_OK(backend.Allreduce(range));
      for (size_t i = 0; i < data.size(); ++i) CHECK(data[i] == 6 * static_cast<float>(i % 7) + 15);
      CHECK(backend.runs(algorithm) > 0);
      const int place = backend.hosts().local[static_cast<size_t>(mesh.rank())];
      for (int peer = 0; peer < mesh.size(); ++peer) {  // nobody talks to another lane
        CHECK((mesh.sent_bytes(peer) == 0 || peer % 2 == place));
      }
    });
  }
}

TEST_CASE("what rank 0 measures is everybodys") {
  std::mutex mutex;
  std::vector<LinkCost> costs;
  RunHosts({0, 0, 1, 1, 2}, TcpOptions(), [&](HierarchicalBackend& backend, Mesh& mesh) {
    CHECK_OK(backend.MeasureLinks());
    testing::CheckAllreduce(backend, mesh.rank(), 5, TwoLevels({0, 0, 1, 1, 2}), DType::kFloat32, Op::kSum,
                            {}, {100'000}, true);
    std::lock_guard lock(mutex);
    costs.push_back(backend.cost());
  });
  for (const LinkCost& cost : costs) {
    CHECK(cost.latency_us == costs[0].latency_us);
    CHECK(cost.bytes_per_us == costs[0].bytes_per_us);
    CHECK(cost.latency_us != LinkCost().latency_us);
    CHECK(cost.latency_us >= 1.0);
    CHECK(cost.bytes_per_us != LinkCost().bytes_per_us);
    CHECK(cost.bytes_per_us >= 0.01);
  }
}

// The ranks of the dead rank's host wait in shared memory until whoever noticed has revoked the world, as the
// engine does.
TEST_CASE("a lost host fails the others") {
  const std::vector<int> host_of = {0, 0, 1};
  const Config config = testing::SmallConfig();
  TestHost machine(2, config);
  const auto start = std::chrono::steady_clock::now();
  testing::RunMesh(3, Wire::kSocketPair, [&](Mesh& mesh) {
    if (mesh.rank() == 2) return;
    Member member(machine, mesh.rank(), config);
    HierarchicalBackend backend(std::move(member.shm), mesh, host_of, TcpOptions());
    std::vector<float> data(1 << 20, 1.0f);
    const std::string name = "t";
    const FusedRange range{
        DType::kFloat32, Op::kSum, 1.0, 1.0, {Piece{data.data(), data.data(), data.size()}}, &name};
    const Status status = backend.Allreduce(range);
    if (!status.ok()) machine.segment->Revoke(status.code(), status.message());
    CHECK(status == Code::kRankLost);
    CHECK(status.message() == StartsWith("rank 2 on test closed its connection"));
  });
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(60));
}

TEST_CASE("agents and runs") {
  const Hosts hosts({5, 3, 5, 5, 3, 8});
  CHECK(hosts.ranks == std::vector<std::vector<int>>{{0, 2, 3}, {1, 4}, {5}});
  CHECK(hosts.host == std::vector<int>{0, 1, 0, 0, 1, 2});
  CHECK(hosts.local == std::vector<int>{0, 0, 1, 2, 1, 0});
  CHECK(hosts.fewest == 1);
  CHECK(hosts.most == 3);
  CHECK(hosts.Agent(1, 0) == 1);
  CHECK(hosts.Agent(1, 2) == 4);
  CHECK(hosts.Agent(1, 3) == 1);
  CHECK(hosts.Agent(2, 3) == 5);
  const auto is = [](const Hosts::Run& run, int rank, int agent, int length) {
    return run.first_rank == rank && run.first_agent == agent && run.length == length;
  };
  const std::vector<Hosts::Run> in_threes = hosts.RunsOf(0, 3), in_twos = hosts.RunsOf(0, 2);
  CHECK(in_threes.size() == 2);
  CHECK(is(in_threes[0], 0, 0, 1));
  CHECK(is(in_threes[1], 2, 1, 2));
  CHECK(in_twos.size() == 3);
  CHECK(is(in_twos[2], 3, 0, 1));
}

}  // namespace
}  // namespace kolovod
