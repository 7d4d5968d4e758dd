// Two ranks of two hosts, moved by hand; with an engine around them: engine/transfers_test.cc.
#include "p2p/point_to_point.h"

#include "base/config.h"
#include "testing/mesh_world.h"

namespace kolovod {
namespace {

using testing::FirstDifference;

struct Two {
  Two() {
    std::vector<std::vector<MeshPeer>> peers = testing::ConnectAll(2, testing::Wire::kSocketPair);
    for (int r : {0, 1}) {
      CHECK_OK(Mesh::Create(r, std::move(peers[static_cast<size_t>(r)]), MeshOptions(), &meshes[r]));
      CHECK_OK(Segment::Map(-1, SegmentLayout(1, 2, Config()), &segments[r]));
      PointToPointOptions options;
      options.topology = Topology(r, {0, 1});
      options.numbers = {0, 1};
      options.mesh = meshes[r].get();
      ranks[r] = std::make_unique<PointToPoint>(*segments[r], mutexes[r], std::move(options));
    }
  }
  // As the engine: as long as there is something to do, and connections have something to bring.
  void Drive(int r) {
    for (int i = 0; i < 100; ++i) {
      if (ranks[r]->HasWork()) CHECK_OK(ranks[r]->Progress());
      (void)meshes[r]->Background();
    }
  }
  OperationPtr Start(int r, Verb verb, char* data, size_t bytes) {
    auto op = std::make_shared<Operation>();
    op->request.verb = verb;
    op->request.root = 1 - r;
    op->request.splits = {0};
    op->request.tensors = {{DType::kUInt8, {static_cast<int64_t>(bytes)}}};
    op->counts = {bytes};
    op->inputs = {data};
    op->outputs = {data};
    op->bytes = bytes;
    OperationsLock lock(mutexes[r]);
    ranks[r]->Submit(op);
    return op;
  }
  void Take(int r, const OperationPtr& op) {
    CHECK(ranks[r]->TakeDone() == std::vector<OperationPtr>({op}));
    CHECK_OK(op->status);
    OperationsLock lock(mutexes[r]);
    ranks[r]->Erase(*op);
  }

  std::unique_ptr<Mesh> meshes[2];
  std::shared_ptr<Segment> segments[2];
  OperationsMutex mutexes[2];
  std::unique_ptr<PointToPoint> ranks[2];
};

// Else whoever waits for anything would look at the connections every 200 us for ever after.
TEST_CASE("connections are listened to while something may come over them") {
  for (const size_t bytes : {size_t{8}, size_t{1} << 20}) {
    Two two;
    std::vector<char> sent(bytes, 'x'), received(bytes);
    for (int round = 0; round < 2; ++round) {
      CHECK(!two.meshes[0]->Background());
      const OperationPtr recv = two.Start(0, Verb::kRecv, received.data(), bytes);
      two.Drive(0);
      CHECK(two.meshes[0]->Background());
      const OperationPtr send = two.Start(1, Verb::kSend, sent.data(), bytes);
      for (int turn = 0; turn < 100; ++turn) {  // each moves what a socket takes
        two.Drive(1);
        two.Drive(0);
      }
      two.Take(0, recv);
      two.Take(1, send);
      CHECK(FirstDifference(received, sent) == "");
      received.assign(bytes, 0);
      for (int r : {0, 1}) {
        two.Drive(r);
        CHECK(!two.meshes[r]->Background());
        CHECK(!two.ranks[r]->HasWork());
      }
    }
  }
}

}  // namespace
}  // namespace kolovod
