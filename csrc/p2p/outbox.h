// Messages on their way from this rank: into the inboxes of ranks of its host, in pieces where they are long
// and as there is room, and into the streams to others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/topology.h"
#include "transport/inbox.h"
#include "transport/mesh.h"

namespace kolovod {

// Under the lease.
class Outbox {
 public:
  // `mesh`: null with one host. `inbox`: this rank's, into whose like messages are put.
  Outbox(Segment& segment, Inbox& inbox, const Topology& topology, Mesh* mesh)
      : segment_(segment),
        inbox_(inbox),
        topology_(topology),
        mesh_(mesh),
        queues_(topology.local_ranks.size()) {}

  // Messages to one rank stay in order. The memory at `data` is needed until `number` (not 0) is through.
  void Post(int to, Envelope envelope, const void* data = nullptr, size_t bytes = 0, uint64_t number = 0);
  void PostText(int to, Envelope envelope, std::string text);
  // What was posted with these numbers is through: with the receiver's host, or its connection.
  std::vector<uint64_t> TakeThrough() { return std::exchange(through_, {}); }

  // Whether Flush could do something, or there is something to take.
  bool HasWork();
  // Moves what can be moved without waiting.
  void Flush();
  // Memory of others is not touched any more.
  void Drop();

 private:
  struct Message {
    Envelope envelope;
    const char* data;
    size_t bytes;
    uint64_t number = 0;
    std::unique_ptr<std::string> text{};  // then it is the data
    size_t at = 0;                        // what is before is through
  };
  // In a stream.
  struct Written {
    int peer;
    uint64_t position;
    uint64_t number;
    std::unique_ptr<std::string> text;
  };

  void Post(int to, Message message);
  // To one rank of this host, by its number there.
  void FlushQueue(int to);
  void Reap();

  Segment& segment_;
  Inbox& inbox_;
  const Topology& topology_;
  Mesh* const mesh_;
  std::vector<std::deque<Message>> queues_;  // by number in the segment; what its inbox has had no room for
  int busy_ = 0;                             // of them, not empty
  std::vector<Written> written_;
  std::vector<uint64_t> through_;
};

}  // namespace kolovod
