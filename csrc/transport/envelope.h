// What is said about a message from one rank to another (send, recv), whichever way it goes: through an inbox
// of the segment, or a stream. The protocol is in docs/wire.md.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/status.h"
#include "base/types.h"

namespace kolovod {

struct Envelope {
  enum class Kind : uint8_t {
    kEager = 0,    // the message itself
    kOffer = 1,    // there is a message; `id` is the sender's; `value` where its memory may be read, or 0
    kGrant = 2,    // to the sender: send it; `id` is the sender's, `value` the receiver's
    kData = 3,     // the message that was granted, from byte `value` on; `id` is the receiver's
    kTaken = 4,    // to the sender: it has been read; `id` is the sender's
    kRefused = 5,  // to the sender: nobody can take it, the text says why; `id` is the sender's
    kCredit = 6,   // to a sender: `value` bytes of what it sent eagerly have been received
  };
  static constexpr int kKindCount = 7;

  Kind kind = Kind::kEager;
  DType dtype = DType::kUInt8;
  uint16_t reserved = 0;
  int32_t source = 0;  // who sends this
  int64_t tag = 0;
  uint64_t bytes = 0;  // of the whole message
  uint64_t id = 0;
  uint64_t value = 0;
};
static_assert(sizeof(Envelope) == 40);

// Who takes envelopes that streams bring.
class Receiver {
 public:
  virtual ~Receiver() = default;
  // `bytes` follow from `peer`; they go to `places`, which hold so many. An error for what no rank of this
  // world can have sent.
  virtual Status Begin(int peer, const Envelope& envelope, uint64_t bytes, std::vector<iovec>* places) = 0;
  // They are all there.
  virtual Status End(int peer) = 0;
  // The connection to `peer` is closed, between messages: nothing more comes. `status` says how.
  virtual void Closed(int peer, const Status& status) = 0;
};

}  // namespace kolovod
