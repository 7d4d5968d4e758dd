// Which algorithm carries an operation between hosts, and why. PURE: the same question has the same answer on
// every rank.
#pragma once

#include <cstddef>
#include <string>

#include "base/status.h"
#include "base/types.h"
#include "collectives/traffic.h"

namespace kolovod {

const char* NameOf(Algorithm algorithm);
// "auto", "direct", ...; else kInvalidArgument with the names that there are.
Status ParseAlgorithm(const std::string& name, Algorithm* out);

// What one message costs (measured when a world forms: measure.h): `latency_us` until it is there,
// `overhead_us` of the sender's and the receiver's time each, and the bytes. Adding up is not hidden behind
// the transfer: sockets take the same core.
struct LinkCost {
  double latency_us = 25;
  double overhead_us = 2;
  double bytes_per_us = 2500;
  double reduced_bytes_per_us = 8000;
  bool confirmed = true;  // bytes_per_us: by operations (link_watch.h); else it may be wrong by any factor
};

inline constexpr double kSlowestBytesPerUs = 0.01;
inline constexpr double kFastestBytesPerUs = 50'000;  // 400 Gbit/s

// Of a message whose reception is followed by work: what the link carries in an eighth of a millisecond,
// within [4 KiB, most_bytes]. Large messages leave a slow link idle at the end of every step; on a fast one
// each is a hand-over between cores, and costs far more. So it is 64 KiB at least from 2 Gbit/s on, and as
// long as nobody knows better. Over long links larger, so that LeadOf needs no more than it may have.
size_t PortionBytes(const LinkCost& cost, size_t most_bytes);

// How many such messages go to each of `peers` before the first answer: one, and what a link holds on the way
// there and back. More would only queue up, unevenly among the peers, and links idle that others wait for. To
// a single peer also what the link carries while a thread waits for its turn among others that compute. Over
// a link of 4 ms or more twice what it holds: its rate is learnt from operations, and what holds them back is
// not to be taken for the link. Not more than 64.
size_t LeadOf(const LinkCost& cost, size_t portion_bytes, int peers);

// The same for blocks of which `block_bytes` go by a link, and of which the next is reduced while one is
// sent: one, and over a long link what it holds twice. Not more than 16.
size_t BlocksAhead(const LinkCost& cost, size_t block_bytes);

// Over how many connections messages between two ranks go: one, and over a link of 4 ms or more as many as
// hold that much on the way, where Linux lets each hold some 3 MiB (tcp_wmem). Not more than 8.
int StripesOf(const LinkCost& cost);

struct SelectQuestion {
  Verb verb;
  size_t bytes;  // allreduce, broadcast, reducescatter: the range; allgather, alltoall: all ranks' parts
  int ranks;
  DType dtype = DType::kFloat32;
  Op op = Op::kSum;
  size_t portion_bytes = 256 << 10;  // of a message
};
struct Choice {
  Algorithm algorithm;
  std::string reason;
};

// In which order the members' data are added, be it little or much. A tensor must have the same bits whatever
// bucket it travels in and however fast the links are today, so the number of members decides alone.
enum class Order {
  kRanks,     // rank after rank: direct, tree, pairwise
  kBalanced,  // balanced.h: doubling, halving
};
Order OrderOf(int ranks);

// `forced`: what the user named; where it cannot do the verb, the reason says so.
Choice Select(const SelectQuestion& question, Algorithm forced, const LinkCost& cost = LinkCost());

}  // namespace kolovod
