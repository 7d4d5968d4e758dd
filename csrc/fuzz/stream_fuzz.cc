// A connection of the data plane: the peer may send whatever it likes (docs/wire.md, Between hosts).
#include <sys/socket.h>
#include <unistd.h>

#include <vector>

#include "fuzz/fuzz.h"
#include "transport/stream.h"

using namespace kolovod;

namespace {

constexpr size_t kMaxMessages = 8;

struct Place {
  std::vector<char> memory;  // of exactly its size, so that AddressSanitizer sees a byte too many
  uint64_t end;
};

}  // namespace

// Begins with: the operation, in a byte that also says whether the connection comes after what is expected;
// messages expected, then the bytes of each; the rest is what the peer sends.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr uint32_t kEpoch = 1;
  fuzz::Steering steering(data, size);
  int pair[2];
  fuzz::Require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0, "sockets are to be had");
  {
    Stream stream("rank 1", kEpoch);
    const auto begin = steering.Take<uint8_t>();
    const uint32_t operation = begin & 3;
    const bool connected_late = (begin & 4) != 0;
    const auto connect = [&] { fuzz::Require(stream.Connect(pair[0]).ok(), "the socket can be used"); };
    if (!connected_late) connect();
    stream.BeginOperation(operation);
    std::vector<Place> places(steering.Take<uint8_t>() % (kMaxMessages + 1));
    for (Place& place : places) {
      place.memory.resize(steering.Take<uint16_t>() % 9000);
      const size_t half = place.memory.size() / 2;
      const iovec parts[] = {{place.memory.data(), half},
                             {place.memory.data() + half, place.memory.size() - half}};
      place.end = stream.Receive(parts);
    }
    if (connected_late) connect();
    const std::string sent(steering.rest().substr(0, 60'000));
    if (!sent.empty()) {
      fuzz::Require(send(pair[1], sent.data(), sent.size(), 0) == static_cast<ssize_t>(sent.size()),
                    "it is sent");
    }
    shutdown(pair[1], SHUT_WR);
    Status status;
    bool moved = true;
    while (status.ok() && moved && stream.receiving()) {
      moved = false;
      status = stream.Pull(&moved);
    }
    // What is said to be there is what was sent, after a header that was right.
    size_t at = 0;
    uint32_t sequence = operation << 16;
    for (const Place& place : places) {
      if (place.memory.empty()) continue;
      if (stream.received() < place.end) break;
      const MessageHeader header{kEpoch, sequence++, place.memory.size()};
      fuzz::Require(sent.size() >= at + sizeof(header) + place.memory.size(), "no byte is made up");
      fuzz::Require(std::memcmp(sent.data() + at, &header, sizeof(header)) == 0, "a wrong header is refused");
      at += sizeof(header);
      fuzz::Require(std::memcmp(sent.data() + at, place.memory.data(), place.memory.size()) == 0,
                    "the payload is in its place");
      at += place.memory.size();
    }
    fuzz::Require(!stream.receiving() || !status.ok(), "a stream that ended early is an error");
  }
  close(pair[1]);
  return 0;
}
