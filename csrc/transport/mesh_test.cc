#include "transport/mesh.h"

#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <thread>
#include <tuple>
#include <utility>

#include "testing/mesh_world.h"

namespace kolovod {
namespace {

using std::chrono::steady_clock;
using testing::Contains;
using testing::FirstDifference;
using testing::RunMesh;
using testing::StartsWith;
using testing::Wire;

constexpr Wire kWires[] = {Wire::kSocketPair, Wire::kTcp, Wire::kSealed};

std::vector<char> Pattern(size_t bytes, int seed) {
  std::vector<char> data(bytes);
  for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<char>(i * 31 + static_cast<size_t>(seed) * 7);
  return data;
}

double SecondsSince(steady_clock::time_point start) {
  return std::chrono::duration<double>(steady_clock::now() - start).count();
}

// A mesh of two, of which this end is rank 0 and the test itself plays rank 1 on the raw socket.
struct Raw {
  explicit Raw(MeshOptions options = MeshOptions(), Wire wire = Wire::kSocketPair) {
    int ends[2];
    testing::Connect(wire, ends);
    fd = ends[1];
    std::vector<MeshPeer> peers(2);
    peers[1] = MeshPeer{ends[0], "rank 1 on raw"};
    CHECK_OK(Mesh::Create(0, std::move(peers), std::move(options), &mesh));
  }
  ~Raw() {
    if (fd >= 0) close(fd);
  }
  void Write(uint32_t epoch, uint32_t sequence, uint64_t bytes, const std::string& payload) {
    const MessageHeader header{epoch, sequence, bytes};
    CHECK(write(fd, &header, sizeof(header)) == sizeof(header));
    CHECK(write(fd, payload.data(), payload.size()) == static_cast<ssize_t>(payload.size()));
  }
  Status Receive(char* to, size_t bytes) {
    const ReceivePart part{1, to, bytes};
    return mesh->Transfer({}, {&part, 1});
  }

  int fd = -1;
  std::unique_ptr<Mesh> mesh;
};

TEST_CASE("everybody to everybody at once however large") {
  for (const Wire wire : kWires) {
    for (const int size : {2, 3, 5}) {
      RunMesh(size, wire, [&](Mesh& mesh) {
        for (const size_t bytes : {0, 1, 4000, 4096, 5000, 1'000'000}) {
          std::vector<std::vector<char>> in, out;
          std::vector<SendPart> sends;
          std::vector<ReceivePart> receives;
          for (int peer = 0; peer < size; ++peer) {
            in.push_back(Pattern(bytes, mesh.rank() * 10 + peer));
            out.emplace_back(bytes);
          }
          for (int peer = 0; peer < size; ++peer) {
            if (peer == mesh.rank()) continue;
            const auto p = static_cast<size_t>(peer);
            sends.push_back({peer, in[p].data(), bytes});
            receives.push_back({peer, out[p].data(), bytes});
          }
          CHECK_OK(mesh.Transfer(sends, receives));
          for (int peer = 0; peer < size; ++peer) {
            if (peer == mesh.rank()) continue;
            CHECK(out[static_cast<size_t>(peer)] == Pattern(bytes, peer * 10 + mesh.rank()));
          }
        }
        uint64_t sent = 0;
        for (int peer = 0; peer < size; ++peer) {
          sent += mesh.sent_bytes(peer);
          CHECK(mesh.sent_messages(peer) == (peer == mesh.rank() ? 0 : 5));  // no bytes, no message
        }
        CHECK(sent == static_cast<uint64_t>(size - 1) * (1 + 4000 + 4096 + 5000 + 1'000'000));
      });
    }
  }
}

TEST_CASE("messages are gathered and scattered in the order of posting") {
  RunMesh(2, Wire::kSocketPair, [](Mesh& mesh) {
    mesh.BeginOperation(7);
    constexpr size_t kParts = 300;  // more than one system call takes
    std::vector<uint64_t> in(kParts * 3), out(kParts * 3);
    std::iota(in.begin(), in.end(), mesh.rank() == 0 ? 0 : 100'000);
    const int peer = 1 - mesh.rank();
    for (size_t m = 0; m < 3; ++m) {
      std::vector<iovec> from, to;
      for (size_t i = 0; i < kParts; ++i) {
        from.push_back({&in[m * kParts + i], 8});
        to.push_back({&out[m * kParts + i], i % 2 == 0 ? size_t{16} : size_t{0}});  // other parts, same bytes
      }
      mesh.PostReceive(peer, to);
      const uint64_t position = mesh.PostSend(peer, from);
      CHECK_OK(mesh.WaitSent(peer, position));
    }
    CHECK_OK(mesh.WaitAll());
    std::vector<uint64_t> wanted(kParts * 3);
    std::iota(wanted.begin(), wanted.end(), mesh.rank() == 0 ? 100'000 : 0);
    CHECK(FirstDifference(out, wanted) == "");
    CHECK(mesh.sent_messages(peer) == 3);
  });
}

TEST_CASE("what comes before it is expected waits") {
  Raw raw;
  raw.Write(0, 0, 3, "abc");
  raw.Write(0, 1, 2, "de");
  char text[6] = {};
  CHECK_OK(raw.Receive(text, 3));
  CHECK_OK(raw.Receive(text + 3, 2));
  CHECK(std::string(text) == "abcde");
}

TEST_CASE("wrong headers are errors that write nothing") {
  struct Case {
    uint32_t epoch, sequence;
    uint64_t bytes;
    const char* text;
  };
  for (const Case& c :
       {Case{5, 9 << 16, 4, "data of world 5; this rank is in world 6"},
        Case{6, 8 << 16, 4, "message 0 of operation 8; this rank expects message 0 of operation 9"},
        Case{6, 9 << 16, 1ULL << 60, "1152921504606846976 bytes"},
        Case{6, (9 << 16) + 1, 4, "message 1 of operation 9"}}) {
    MeshOptions options;
    options.epoch = 6;
    Raw raw(options);
    raw.mesh->BeginOperation(9);
    raw.Write(c.epoch, c.sequence, c.bytes, "xxxx");
    char data[4] = {};
    const Status status = raw.Receive(data, 4);
    CHECK(status == Code::kMismatch);
    CHECK(status.message() == StartsWith("rank 1 on raw sent "));
    CHECK(status.message() == Contains(c.text));
    CHECK(data[0] == 0);
    CHECK(raw.mesh->broken());
    CHECK(raw.Receive(data, 4).message() == status.message());
  }
}

TEST_CASE("a peer that closes is named at once") {
  for (const Wire wire : kWires) {
    for (const bool sends : {false, true}) {
      Raw raw(MeshOptions(), wire);
      std::thread closer([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        close(raw.fd);
        raw.fd = -1;
      });
      std::vector<char> data(64 << 20);  // more than the socket takes
      const auto start = steady_clock::now();
      const SendPart part{1, data.data(), data.size()};
      const Status status = sends ? raw.mesh->Transfer({&part, 1}, {}) : raw.Receive(data.data(), 8);
      closer.join();
      CHECK(SecondsSince(start) < 30);
      CHECK(status == Code::kRankLost);
      CHECK(status.message() == StartsWith("rank 1 on raw closed its connection"));
    }
  }
}

TEST_CASE("a check ends a wait") {
  for (const int64_t spin_ns : {int64_t{0}, int64_t{60'000'000'000}}) {
    const auto start = steady_clock::now();
    MeshOptions options;
    options.budget.spin_ns = spin_ns;
    options.check = [&] {
      return SecondsSince(start) < 0.1 ? Status() : Status(Code::kInterrupted, "interrupted by a signal");
    };
    Raw raw(options);
    char byte = 0;
    const Status status = raw.Receive(&byte, 1);
    CHECK(status == Code::kInterrupted);
    CHECK(SecondsSince(start) < 30);
    CHECK(raw.mesh->broken());
    raw.Write(0, 0, 1, "x");
    CHECK(!raw.Receive(&byte, 1).ok());
    CHECK(byte == 0);  // nothing is written once a wait has failed
  }
}

TEST_CASE("background moves bytes without waiting") {
  RunMesh(2, Wire::kSocketPair, [](Mesh& mesh) {
    const std::vector<char> in = Pattern(5'000'000, mesh.rank());
    std::vector<char> out(in.size());
    const int peer = 1 - mesh.rank();
    const iovec from{const_cast<char*>(in.data()), in.size()}, to{out.data(), out.size()};
    mesh.PostReceive(peer, {&to, 1});
    mesh.PostSend(peer, {&from, 1});
    while (mesh.Background()) std::this_thread::yield();
    CHECK_OK(mesh.WaitAll());
    CHECK(out == Pattern(5'000'000, peer));
  });
}

TEST_CASE("no connection is an error") {
  std::unique_ptr<Mesh> mesh;
  CHECK_OK(Mesh::Create(0, std::vector<MeshPeer>(3), MeshOptions(), &mesh));
  char byte = 0;
  const SendPart part{2, &byte, 1};
  CHECK(mesh->Transfer({&part, 1}, {}).message() == "rank 0 has no connection to rank 2");
  CHECK(mesh->connections() == 0);
  std::vector<MeshPeer> peers(2);
  peers[1] = MeshPeer{1 << 20, "rank 1"};
  CHECK(Mesh::Create(0, std::move(peers), MeshOptions(), &mesh).message() == Contains("rank 1"));
}

// Ranks without connections. A thread of its own makes them, a while after the first of two has asked.
struct Operator {
  explicit Operator(int size) {
    for (int r = 0; r < size; ++r) {
      boards.push_back(std::make_shared<ConnectionBroker>([this, r](int peer, int stripe) {
        std::lock_guard lock(mutex);
        if (!asked.insert({std::min(r, peer), std::max(r, peer), stripe}).second) return;
        threads.emplace_back([this, r, peer, stripe] {
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
          int ends[2];
          testing::Connect(Wire::kTcp, ends);
          boards[static_cast<size_t>(r)]->Connected({peer, ends[0], nullptr, stripe});
          boards[static_cast<size_t>(peer)]->Connected({r, ends[1], nullptr, stripe});
        });
      }));
    }
  }
  ~Operator() {
    for (std::thread& thread : threads) thread.join();
  }
  std::unique_ptr<Mesh> Join(int rank) {
    std::vector<MeshPeer> peers(boards.size());
    for (MeshPeer& peer : peers) peer.description = "a rank on test";
    MeshOptions options;
    options.broker = boards[static_cast<size_t>(rank)];
    std::unique_ptr<Mesh> mesh;
    CHECK_OK(Mesh::Create(rank, std::move(peers), std::move(options), &mesh));
    return mesh;
  }
  std::vector<std::shared_ptr<ConnectionBroker>> boards;
  std::mutex mutex;
  std::set<std::tuple<int, int, int>> asked;
  std::vector<std::thread> threads;
};

TEST_CASE("connections are made on first use") {
  constexpr int kSize = 6;
  constexpr size_t kBytes = 300'000;
  Operator exchange(kSize);
  std::vector<std::thread> ranks;
  for (int r = 0; r < kSize; ++r) {
    ranks.emplace_back([&, r] {
      const std::unique_ptr<Mesh> mesh = exchange.Join(r);
      CHECK(mesh->connections() == 0);
      // To the right and from the left: two of five peers.
      const int right = (r + 1) % kSize;
      const int left = (r + kSize - 1) % kSize;
      for (uint32_t operation = 1; operation <= 3; ++operation) {
        mesh->BeginOperation(operation);
        const std::vector<char> out = Pattern(kBytes, r + static_cast<int>(operation));
        std::vector<char> in(kBytes);
        const SendPart send{right, out.data(), kBytes};
        const ReceivePart receive{left, in.data(), kBytes};
        CHECK_OK(mesh->Transfer({&send, 1}, {&receive, 1}));
        CHECK(in == Pattern(kBytes, left + static_cast<int>(operation)));
      }
      CHECK(mesh->connections() == 2);
      CHECK(mesh->sent_bytes(right) == 3 * kBytes);
      CHECK(mesh->sent_bytes(left) == 0);
    });
  }
  for (std::thread& rank : ranks) rank.join();
  CHECK(exchange.asked.size() == kSize);
}

// Operations of ever other numbers and sizes of messages, over ever other numbers of connections.
TEST_CASE("messages go over several connections by turns") {
  constexpr int kSize = 3;
  Operator exchange(kSize);
  std::vector<std::thread> ranks;
  for (int r = 0; r < kSize; ++r) {
    ranks.emplace_back([&, r] {
      const std::unique_ptr<Mesh> mesh = exchange.Join(r);
      std::minstd_rand draw(7);  // alike on all ranks
      const int right = (r + 1) % kSize, left = (r + kSize - 1) % kSize;
      uint64_t all_bytes = 0;
      for (uint32_t operation = 1; operation <= 60; ++operation) {
        mesh->set_stripes(static_cast<int>(draw() % 5));  // 0 counts as 1
        mesh->BeginOperation(operation);
        const size_t messages = draw() % 12;
        std::vector<std::vector<char>> out, in;
        std::vector<uint64_t> sent, received;
        for (size_t m = 0; m < messages; ++m) {
          const size_t bytes = draw() % 4 == 0 ? 0 : draw() % 700'000;
          out.push_back(Pattern(bytes, static_cast<int>(operation + m) * kSize + r));
          in.emplace_back(bytes);
          all_bytes += bytes;
        }
        for (size_t m = 0; m < messages; ++m) {
          const iovec from{in[m].data(), in[m].size()}, to{out[m].data(), out[m].size()};
          received.push_back(mesh->PostReceive(left, {&from, 1}));
          sent.push_back(mesh->PostSend(right, {&to, 1}));
        }
        // A position is reached when all before it are, whichever is looked at first.
        if (messages > 0) {
          const size_t some = draw() % messages;
          CHECK_OK(mesh->WaitReceived(left, received[some]));
          for (size_t m = 0; m <= some; ++m) {
            CHECK(mesh->Received(left, received[m]));
            CHECK(in[m] == Pattern(in[m].size(), static_cast<int>(operation + m) * kSize + left));
          }
          CHECK_OK(mesh->WaitSent(right, sent.back()));
          for (const uint64_t position : sent) CHECK(mesh->Sent(right, position));
          CHECK_OK(mesh->WaitReceived(left, received.back()));
        }
        for (size_t m = 0; m < messages; ++m)
          CHECK(in[m] == Pattern(in[m].size(), static_cast<int>(operation + m) * kSize + left));
      }
      CHECK_OK(mesh->WaitAll());
      CHECK(mesh->connections() == 2 * 4);
      CHECK(mesh->sent_bytes(right) == all_bytes);
      CHECK(mesh->received_bytes(left) == all_bytes);
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

TEST_CASE("a connection may come before it is wanted") {
  Operator exchange(3);
  const std::unique_ptr<Mesh> mesh = exchange.Join(0);
  int ends[2];
  testing::Connect(Wire::kSocketPair, ends);
  exchange.boards[0]->Connected({1, ends[0]});
  exchange.boards[0]->Connected({0, dup(ends[1])});  // nobody that it could be: closed
  exchange.boards[0]->Connected({1, dup(ends[1]), nullptr, Mesh::kMostStripes});
  const MessageHeader header{0, 0, 2};
  CHECK(write(ends[1], &header, sizeof(header)) == sizeof(header));
  CHECK(write(ends[1], "ab", 2) == 2);
  char got[2] = {};
  const ReceivePart part{1, got, 2};
  CHECK_OK(mesh->Transfer({}, {&part, 1}));
  CHECK(got[0] == 'a');
  CHECK(got[1] == 'b');
  CHECK(exchange.asked.empty());
  close(ends[1]);
}

TEST_CASE("who cannot be reached is said") {
  auto board = std::make_shared<ConnectionBroker>();
  std::string told;
  board->set_on_failure([&](const std::string& text) { told += text; });
  std::vector<MeshPeer> peers(3);
  MeshOptions options;
  options.broker = board;
  std::unique_ptr<Mesh> mesh;
  CHECK_OK(Mesh::Create(0, std::move(peers), std::move(options), &mesh));
  char byte = 0;
  std::thread caller([&] {
    while (board->TakeWanted() != std::vector<std::pair<int, int>>{{2, 0}})
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    board->Failed("rank 2 is behind a wall");
    board->Failed("and so is rank 1");
  });
  const ReceivePart part{2, &byte, 1};
  const Status status = mesh->Transfer({}, {&part, 1});
  caller.join();
  CHECK(status == Code::kRankLost);
  CHECK(status.message() == "rank 2 is behind a wall");
  CHECK(told == "rank 2 is behind a wall");
  CHECK(mesh->broken());
}

TEST_CASE("a closed broker takes no connections") {
  ConnectionBroker board;
  int ends[4];
  testing::Connect(Wire::kSocketPair, ends);
  testing::Connect(Wire::kSocketPair, ends + 2);
  board.Connected({1, ends[0]});
  board.Close();
  board.Connected({2, ends[2]});
  for (const int other : {ends[1], ends[3]}) {
    char byte;
    CHECK(read(other, &byte, 1) == 0);
    close(other);
  }
  CHECK(board.closed());
  CHECK(board.Take().empty());
}

TEST_CASE("a closed mesh says so") {
  Raw raw;
  raw.mesh->Close();
  char byte = 0;
  CHECK(raw.Receive(&byte, 1) == Code::kShutDown);
  CHECK(recv(raw.fd, &byte, 1, 0) == 0);
}

}  // namespace
}  // namespace kolovod
