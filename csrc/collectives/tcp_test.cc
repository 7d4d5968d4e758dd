#include "collectives/tcp.h"

#include <cstring>

#include "collectives/adasum.h"
#include "testing/mesh_world.h"
#include "testing/verbs.h"

namespace kolovod {
namespace {

using testing::Bytes;
using testing::Contains;
using testing::FirstDifference;
using testing::RunMesh;
using testing::Wire;

std::vector<int> Everybody(int size) {
  std::vector<int> members(static_cast<size_t>(size));
  std::iota(members.begin(), members.end(), 0);
  return members;
}

// Small portions: many steps from little data.
TcpOptions Options(Algorithm algorithm) {
  TcpOptions options;
  options.algorithm = algorithm;
  options.portion_bytes = 4096;
  return options;
}

void RunTcp(int size, const TcpOptions& options, const std::function<void(TcpBackend&, Mesh&)>& body,
            Wire wire = Wire::kSocketPair) {
  RunMesh(size, wire, [&](Mesh& mesh) {
    TcpBackend backend(mesh, Everybody(size), mesh.rank(), options);
    body(backend, mesh);
  });
}

TEST_CASE("every size of every verb by the algorithm that is chosen") {
  for (const int size : {1, 2, 3, 4, 8}) {
    RunTcp(size, Options(Algorithm::kAuto), [](TcpBackend& backend, Mesh& mesh) {
      testing::CheckAllSizes(backend, mesh.rank(), mesh.size(), testing::Combined);
    });
  }
}

TEST_CASE("over real tcp") {
  TcpOptions options;
  RunTcp(
      3, options,
      [](TcpBackend& backend, Mesh& mesh) {
        testing::CheckAllSizes(backend, mesh.rank(), mesh.size(), testing::Combined);
        testing::CheckAllreduce(backend, mesh.rank(), mesh.size(), testing::Combined, DType::kFloat32,
                                Op::kSum, {}, {1 << 20}, true);
      },
      Wire::kTcp);
}

// The owner, the collectors and the trees add in the order of ranks: the same bits whichever runs.
TEST_CASE("all but the ring give the same bits for every dtype and op") {
  for (const Algorithm algorithm : {Algorithm::kDirect, Algorithm::kTree, Algorithm::kPairwise}) {
    for (const int size : {2, 3, 5}) {
      RunTcp(size, Options(algorithm), [&](TcpBackend& backend, Mesh& mesh) {
        testing::CheckAllReductions(backend, mesh.rank(), size, testing::Combined,
                                    [](DType, Op) { return true; });
        testing::CheckAllSizes(backend, mesh.rank(), size, testing::Combined);
        testing::CheckAlltoall(backend, mesh.rank(), size, 1000, {mesh.rank()});
        CHECK(backend.runs(algorithm) > 100);
      });
    }
  }
}

// Ring: small integers, whose sums are exact in any order.
void CheckRing(TcpBackend& backend, int rank, int size, DType dtype, Op op, const testing::Factors& factors,
               const std::vector<size_t>& counts) {
  const std::string name = "r";
  FusedRange range{dtype, op, factors.prescale, factors.postscale, {}, &name};
  const auto value = [](size_t i, int r) { return static_cast<int>(i + static_cast<size_t>(r)) % 5; };
  std::vector<Bytes> data, wanted;
  const auto encode = [&](double v, char* at) {
    if (dtype == DType::kFloat64) std::memcpy(at, &v, sizeof(v));
    const auto bits = ToBFloat16(static_cast<float>(v)).bits;
    if (dtype == DType::kBFloat16) std::memcpy(at, &bits, sizeof(bits));
    const auto integer = static_cast<int64_t>(v);
    if (dtype == DType::kInt64) std::memcpy(at, &integer, sizeof(integer));
  };
  for (const size_t count : counts) {
    Bytes own(count * SizeOf(dtype)), sum(count * SizeOf(dtype));
    for (size_t i = 0; i < count; ++i) {
      double total = 0;
      for (int r = 0; r < size; ++r) total += value(i, r) * factors.prescale;
      if (op == Op::kAverage) total /= size;
      encode(value(i, rank), own.data() + i * SizeOf(dtype));
      encode(total * factors.postscale, sum.data() + i * SizeOf(dtype));
    }
    data.push_back(std::move(own));
    wanted.push_back(std::move(sum));
  }
  for (size_t t = 0; t < counts.size(); ++t) {
    range.pieces.push_back(Piece{data[t].data(), data[t].data(), counts[t]});
  }
  CHECK_OK(backend.Allreduce(range));
  CHECK(FirstDifference(data, wanted) == "");
}

TEST_CASE("the ring adds and averages") {
  for (const int size : {2, 3, 4, 8}) {
    RunTcp(size, Options(Algorithm::kRing), [&](TcpBackend& backend, Mesh& mesh) {
      for (const std::vector<size_t>& counts :
           {std::vector<size_t>{1}, {7, 0, 2}, {1000, 3, 500}, {60'001}}) {
        CheckRing(backend, mesh.rank(), size, DType::kFloat64, Op::kSum, {}, counts);
        CheckRing(backend, mesh.rank(), size, DType::kBFloat16, Op::kSum, {2.0, 0.5}, counts);
        CheckRing(backend, mesh.rank(), size, DType::kInt64, Op::kSum, {}, counts);
        if (size != 3) CheckRing(backend, mesh.rank(), size, DType::kFloat64, Op::kAverage, {}, counts);
      }
      CHECK(backend.runs(Algorithm::kRing) > 10);
      testing::CheckAllgather(backend, mesh.rank(), testing::UnequalParts(size, 10'000));
      testing::CheckAllgather(backend, mesh.rank(), std::vector<size_t>(static_cast<size_t>(size), 1));
    });
  }
}

TEST_CASE("the ring sends its share to one neighbour and hears from the other") {
  for (const int size : {2, 3, 4, 8}) {
    RunTcp(size, Options(Algorithm::kRing), [&](TcpBackend& backend, Mesh& mesh) {
      constexpr size_t kCount = 3 * 64 * 16 * 8;  // divisible: every slice alike
      CheckRing(backend, mesh.rank(), size, DType::kFloat64, Op::kSum, {}, {kCount});
      const auto n = static_cast<uint64_t>(size);
      const uint64_t share = 2 * (n - 1) * kCount * sizeof(double) / n;
      for (int peer = 0; peer < size; ++peer) {
        const bool is_right = peer == (mesh.rank() + 1) % size;
        const bool is_left = (peer + 1) % size == mesh.rank();
        CHECK(mesh.sent_bytes(peer) == (is_right ? share : 0));
        CHECK(mesh.received_bytes(peer) == (is_left ? share : 0));
      }
    });
  }
}

TEST_CASE("pairwise sends as little as the ring") {
  RunTcp(4, Options(Algorithm::kPairwise), [](TcpBackend& backend, Mesh& mesh) {
    std::vector<float> data(64 * 1024, 1.0f);
    const std::string name = "p";
    const FusedRange range{
        DType::kFloat32, Op::kSum, 1.0, 1.0, {Piece{data.data(), data.data(), data.size()}}, &name};
    CHECK_OK(backend.Allreduce(range));
    uint64_t sent = 0;
    for (int peer = 0; peer < 4; ++peer) sent += mesh.sent_bytes(peer);
    CHECK(sent == 2 * 3 * data.size() * sizeof(float) / 4);
    CHECK(FirstDifference(data, std::vector<float>(data.size(), 4.0f)) == "");
  });
}

TEST_CASE("a ring of integers to be averaged is refused with the reason") {
  RunTcp(3, Options(Algorithm::kRing), [](TcpBackend& backend, Mesh& mesh) {
    testing::CheckAllreduce(backend, mesh.rank(), 3, testing::Combined, DType::kInt8, Op::kAverage, {}, {100},
                            true);
    CHECK(backend.runs(Algorithm::kRing) == 0);
    CHECK(backend.choice().reason == Contains("ring was asked for but cannot"));
  });
}

TEST_CASE("some ranks of a mesh in an order of their own") {
  RunMesh(4, Wire::kSocketPair, [](Mesh& mesh) {
    if (mesh.rank() == 1) return;
    const std::vector<int> members = {3, 0, 2};
    const int index = mesh.rank() == 3 ? 0 : mesh.rank() == 0 ? 1 : 2;
    TcpBackend backend(mesh, members, index, Options(Algorithm::kAuto));
    testing::CheckAllSizes(backend, index, 3, testing::Combined);
  });
}

TEST_CASE("adasum goes through alltoall") {
  RunTcp(4, Options(Algorithm::kAuto), [](TcpBackend& backend, Mesh& mesh) {
    const std::string name = "a";
    std::vector<float> same(5000, 2.0f);  // equal vectors are averaged
    std::vector<float> apart(4, 0.0f);    // orthogonal ones added
    apart[static_cast<size_t>(mesh.rank())] = 3.0f;
    const FusedRange range{
        DType::kFloat32,
        Op::kAdasum,
        1.0,
        1.0,
        {Piece{same.data(), same.data(), same.size()}, Piece{apart.data(), apart.data(), 4}},
        &name};
    CHECK_OK(Adasum(backend, range, mesh.rank(), 4));
    CHECK(FirstDifference(same, std::vector<float>(5000, 2.0f)) == "");
    CHECK(apart == std::vector<float>(4, 3.0f));
  });
}

TEST_CASE("a peer that is gone fails every later verb alike") {
  RunMesh(3, Wire::kSocketPair, [](Mesh& mesh) {
    if (mesh.rank() == 2) return;  // its connections close
    TcpBackend backend(mesh, Everybody(3), mesh.rank(), TcpOptions());
    std::vector<float> data(1000, 1.0f);
    const std::string name = "d";
    const FusedRange range{
        DType::kFloat32, Op::kSum, 1.0, 1.0, {Piece{data.data(), data.data(), 1000}}, &name};
    const Status status = backend.Allreduce(range);
    CHECK(status == Code::kRankLost);
    // The survivor that notices first closes its own connections too.
    CHECK(status.message() == Contains(" on test closed its connection"));
    char byte = 0;
    CHECK(backend.Broadcast(Piece{&byte, &byte, 1}, DType::kUInt8, 0, name).message() == status.message());
  });
}

}  // namespace
}  // namespace kolovod
