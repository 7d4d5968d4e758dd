// The sequencer's decision: announcements of all ranks in, one answer per name out. PURE: no clock, no
// socket, no shared memory, so that every case is tested with plain data.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "control/message.h"

namespace kolovod {

class Negotiator {
 public:
  // `ranks`: what messages call each rank (its number in the world). At most `cache_capacity` names get an id
  // (docs/wire.md, "bits").
  Negotiator(std::vector<int> ranks, size_t cache_capacity);

  // `rank` has `request` ready. Returns what every rank must be told now, in this order:
  //   kForget  a cached name came with other metadata: all ranks announce it in full again
  //   kExecute all ranks have it and agree
  //   kError   all ranks have it and do not agree; the text names the values and the ranks
  // A rank that joins has no data left until all have joined: the others' allreduces go on without it, what
  // else they submit is answered with kError, and nothing is announced by bit meanwhile (kForgetAll).
  std::vector<Response> Offer(int rank, Request request);

  // Why `rank` cannot have sent `request`, or empty: until all have joined, one that has joined has nothing
  // to say. A rank that does is out of its mind, and what it says must not be offered.
  std::string FindFault(int rank, const Request& request) const;

  // Whether others have announced `name` in full, and this rank has not.
  bool Lacks(const std::string& name, int rank) const;

  // Ids that may be given out again; their counters must be reset before the next answer is told. No rank can
  // announce by such an id any more: all have announced its name in full since it was forgotten, and
  // drop the id before that operation completes.
  std::vector<int32_t> TakeReleased() { return std::exchange(released_, {}); }

 private:
  struct Waiting {
    std::vector<std::optional<Request>> by_rank;
    int count = 0;
  };

  std::vector<Response> Join(int rank, const std::string& name);
  // Moves a name that has no id any more to the retiring ones.
  void Retire(const std::string& name, int32_t id) { retiring_[name] = id; }
  Response Decide(const std::string& name, const Waiting& waiting);
  std::string FindReason(const Waiting& waiting) const;
  int32_t AssignId(const std::string& name, const Waiting& waiting);

  const std::vector<int> ranks_;
  const size_t cache_capacity_;
  std::vector<bool> joined_;
  int joined_count_ = 0;
  int32_t next_id_ = 0;
  std::unordered_map<std::string, Waiting> waiting_;
  std::unordered_map<std::string, int32_t> cached_;
  std::unordered_map<std::string, int32_t> retiring_;  // forgotten, and not announced by all since
  std::vector<int32_t> free_ids_;
  std::vector<int32_t> released_;
  // Names that were executed before. Only a name that comes again is worth an id; bounded, so that
  // a program that makes up a new name each step does not grow.
  std::unordered_set<uint64_t> seen_;
};

// The first disagreement between the requests of those ranks that have one, or empty. Checked in the order
// verb, number of tensors, dtype, device, shape, op, scale, root, calling lines. `ranks[i]`: what to call
// rank i.
std::string FindMismatch(const std::vector<std::optional<Request>>& by_rank, const std::vector<int>& ranks);

}  // namespace kolovod
