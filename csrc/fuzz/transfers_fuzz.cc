// Messages between two ranks: the peer on another host may send whatever it likes (docs/wire.md, Messages
// between two ranks).
#include <sys/socket.h>
#include <unistd.h>

#include <vector>

#include "fuzz/fuzz.h"
#include "p2p/point_to_point.h"

using namespace kolovod;

namespace {

// Of exactly its size, so that AddressSanitizer sees a byte too many.
OperationPtr Make(Verb verb, int peer, int64_t tag, std::vector<char>& memory) {
  auto op = std::make_shared<Operation>();
  op->request.verb = verb;
  op->request.root = peer;
  op->request.splits = {tag};
  op->request.tensors = {{DType::kUInt8, {static_cast<int64_t>(memory.size())}}};
  op->inputs = {memory.data()};
  op->outputs = {memory.data()};
  op->counts = {memory.size()};
  op->bytes = memory.size();
  return op;
}

}  // namespace

// Begins with the size of what is expected; the rest is what the peer sends.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr uint32_t kEpoch = 1;
  fuzz::Steering steering(data, size);
  int pair[2];
  fuzz::Require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) == 0,
                "sockets are to be had");
  {
    std::shared_ptr<Segment> segment;
    Config config;
    config.cache_capacity = 1;
    config.chunk_bytes = 4096;
    fuzz::Require(Segment::Map(-1, SegmentLayout(1, 2, config), &segment).ok(), "there is memory");
    MeshOptions options;
    options.epoch = kEpoch;
    std::unique_ptr<Mesh> mesh;
    fuzz::Require(Mesh::Create(0, {{-1, "rank 0"}, {pair[0], "rank 1"}}, options, &mesh).ok(), "it connects");
    OperationsMutex mutex;
    PointToPoint transfers(*segment, mutex, {Topology(0, {0, 1}), {0, 1}, false, mesh.get()});
    std::vector<char> first(steering.Take<uint16_t>() % 9000), second(20), large(100'000);
    {
      OperationsLock lock(mutex);
      transfers.Submit(Make(Verb::kRecv, 1, 0, first));
      transfers.Submit(Make(Verb::kRecv, kAnySource, 0, second));
      transfers.Submit(Make(Verb::kSend, 1, 0, large));
    }
    const std::string sent(steering.rest().substr(0, 60'000));
    if (!sent.empty()) {
      fuzz::Require(send(pair[1], sent.data(), sent.size(), 0) == static_cast<ssize_t>(sent.size()),
                    "it is sent");
    }
    shutdown(pair[1], SHUT_WR);
    size_t done = 0;
    Status status;
    for (int i = 0; i < 200 && status.ok(); ++i) {
      char answer[4096];
      while (recv(pair[1], answer, sizeof(answer), MSG_DONTWAIT) > 0) {
      }
      status = transfers.Progress();
      for (const OperationPtr& op : transfers.TakeDone()) {
        ++done;
        OperationsLock lock(mutex);
        transfers.Erase(*op);
      }
      if (!transfers.HasWork() && i > 20) break;
    }
    fuzz::Require(done <= 3, "nothing completes twice");
  }
  close(pair[1]);
  return 0;
}
