// What happens to messages in envelopes, and to those of operations, when the peer closes its connection.
#include <sys/socket.h>

#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "testing/mesh_world.h"

namespace kolovod {
namespace {

using testing::Contains;
using testing::Wire;

constexpr Wire kWires[] = {Wire::kSocketPair, Wire::kSealed};

struct Heard : Receiver {
  Status Begin(int, const Envelope& envelope, uint64_t bytes, std::vector<iovec>* places) override {
    text.resize(bytes);
    tags.push_back(envelope.tag);
    if (bytes > 0) places->push_back({text.data(), bytes});
    return Status();
  }
  Status End(int) override {
    texts.push_back(text);
    return Status();
  }
  void Closed(int peer, const Status& status) override {
    CHECK(peer == 1);
    CHECK(status == Code::kRankLost);
    ++closed;
  }
  std::string text;
  std::vector<std::string> texts;
  std::vector<int64_t> tags;
  int closed = 0;
};

// Two ranks of this thread; rank 1 leaves by `ranks[1].reset()`.
struct Two {
  explicit Two(Wire wire) {
    std::vector<std::vector<MeshPeer>> peers = testing::ConnectAll(2, wire);
    for (int r : {0, 1}) {
      CHECK_OK(Mesh::Create(r, std::move(peers[static_cast<size_t>(r)]), MeshOptions(), &ranks[r]));
    }
  }
  std::unique_ptr<Mesh> ranks[2];
};

uint64_t PostText(Mesh& mesh, std::string& text, int64_t tag) {
  Envelope envelope;
  envelope.tag = tag;
  const iovec part{text.data(), text.size()};
  return mesh.PostEnveloped(1 - mesh.rank(), envelope, {&part, 1});
}

void Move(Mesh& mesh) {
  for (int i = 0; i < 1000; ++i) (void)mesh.Background();
}

TEST_CASE("what goes in envelopes to a peer that closed is dropped") {
  for (const Wire wire : kWires) {
    Two two(wire);
    Mesh& mesh = *two.ranks[0];
    std::string large(8 << 20, 'x'), small = "y";  // more than a socket takes, and less
    const uint64_t first = PostText(mesh, large, 1);
    Move(mesh);
    CHECK(!mesh.Sent(1, first));
    two.ranks[1].reset();
    Move(mesh);
    CHECK(mesh.Sent(1, first));
    CHECK(!mesh.broken());
    const uint64_t second = PostText(mesh, small, 2);
    CHECK(mesh.Sent(1, second));
    CHECK(!mesh.broken());
  }
}

// However little it is: all of it may be in one record, which nobody else keeps.
TEST_CASE("data of an operation are never dropped") {
  for (const Wire wire : kWires) {
    for (const size_t bytes : {size_t{100}, size_t{8} << 20}) {
      for (const bool closes_first : {true, false}) {
        Two two(wire);
        Heard heard;
        Mesh& mesh = *two.ranks[0];
        mesh.SetReceiver(&heard);
        std::string data(bytes, 'x'), text = "y";
        if (closes_first) two.ranks[1].reset();
        mesh.BeginOperation(1);
        const iovec part{data.data(), data.size()};
        const uint64_t position = mesh.PostSend(1, {&part, 1});
        if (bytes > 100) PostText(mesh, text, 1);
        two.ranks[1].reset();
        Move(mesh);
        const bool with_the_system = bytes == 100 && !closes_first;  // in the socket before the peer closed
        const Status status = mesh.WaitSent(1, position);
        CHECK(status.ok() == with_the_system);
        if (with_the_system) continue;
        CHECK(status == Code::kRankLost);
        CHECK(status.message() == Contains("rank 1 on test"));
        CHECK(heard.closed == 0);
      }
    }
  }
}

TEST_CASE("a receiver hears once that a peer closed and what it had sent") {
  for (const Wire wire : kWires) {
    Two two(wire);
    Heard heard;
    Mesh& mesh = *two.ranks[0];
    mesh.SetReceiver(&heard);
    std::string hello = "hello", world = "world";
    PostText(*two.ranks[1], hello, 1);
    PostText(*two.ranks[1], world, 2);
    Move(*two.ranks[1]);
    two.ranks[1].reset();
    mesh.Listen(true);
    Move(mesh);
    CHECK(heard.texts == std::vector<std::string>({"hello", "world"}));
    CHECK(heard.tags == std::vector<int64_t>({1, 2}));
    CHECK(heard.closed == 1);
    CHECK(!mesh.broken());
    // Who waits for data of an operation hears of it all the same.
    char byte = 0;
    const ReceivePart part{1, &byte, 1};
    CHECK(mesh.Transfer({}, {&part, 1}) == Code::kRankLost);
  }
}

// In the middle of a message: its receiver waits for the rest.
TEST_CASE("a message in an envelope that breaks off is an error") {
  int ends[2];
  testing::Connect(Wire::kSocketPair, ends);
  std::vector<MeshPeer> peers(2);
  peers[1] = MeshPeer{ends[0], "rank 1 on test"};
  std::unique_ptr<Mesh> mesh;
  CHECK_OK(Mesh::Create(0, std::move(peers), MeshOptions(), &mesh));
  Heard heard;
  mesh->SetReceiver(&heard);
  const MessageHeader header{0, 0, uint64_t{5} | kEnveloped};
  const Envelope envelope;
  CHECK(write(ends[1], &header, sizeof(header)) == sizeof(header));
  CHECK(write(ends[1], &envelope, sizeof(envelope)) == sizeof(envelope));
  CHECK(write(ends[1], "hel", 3) == 3);
  close(ends[1]);
  mesh->Listen(true);
  Move(*mesh);
  CHECK(mesh->status() == Code::kRankLost);
  CHECK(heard.texts.empty());
  CHECK(heard.closed == 0);
}

}  // namespace
}  // namespace kolovod
