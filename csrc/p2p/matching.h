// Which message is for which receive: by sender, tag and order. What comes first is taken first, on both
// sides, so that messages of one sender with one tag never overtake each other (MPI 4.1, 3.5). PURE.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "transport/envelope.h"

namespace kolovod {

inline constexpr int kAnySource = -1;

// A message, or the offer of one, that came before its receive.
struct Arrival {
  Envelope envelope;
  std::unique_ptr<char[]> data{};  // of an eager one
  bool complete = true;            // else its data are on their way
};

class Matching {
 public:
  // A receive of rank `source`, or kAnySource. What it takes, or nothing: it waits, as `id`.
  std::optional<Arrival> Post(uint64_t id, int source, int64_t tag);
  // A message. The receive that takes it, which waits no longer, or nothing.
  std::optional<uint64_t> Arrive(int source, int64_t tag);
  // One that nobody waits for.
  void Keep(Arrival arrival);
  // The data of what was kept last of that source and tag, incomplete, and is still kept.
  void Complete(int source, int64_t tag, std::unique_ptr<char[]> data);
  // A receive that waits no longer.
  void Withdraw(uint64_t id, int source, int64_t tag);

  size_t waiting() const { return waiting_; }
  size_t kept() const { return kept_; }

 private:
  template <class T>
  struct Ordered {
    uint64_t order;
    T value;
  };
  using Receives = std::deque<Ordered<uint64_t>>;
  using Arrivals = std::deque<Ordered<Arrival>>;

  uint64_t next_ = 0;  // of receives and of arrivals
  size_t waiting_ = 0, kept_ = 0;
  std::map<std::pair<int64_t, int>, Receives> receives_;  // by tag and source
  std::map<int64_t, std::map<int, Arrivals>> arrivals_;   // by tag, then source
};

}  // namespace kolovod
