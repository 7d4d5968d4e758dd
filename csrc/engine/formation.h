// How the ranks of one host meet in their segment, before anything is submitted.
#pragma once

#include <memory>
#include <string>

#include "engine/membership.h"
#include "transport/peer_memory.h"
#include "transport/waiter.h"

namespace kolovod {

class Formation {
 public:
  // `membership`: its configuration becomes that of the host's leader.
  Formation(Membership& membership, Waiter& waiter) : membership_(membership), waiter_(waiter) {}

  // Returns once every rank of the host has attached the segment, or an error that names those missing.
  Status Attach();
  // How to read the memory of this host's ranks; null: that is not wanted.
  std::unique_ptr<PeerMemory> TakePeers() { return std::move(peers_); }
  // One way between the cores of local ranks 0 and 1, as all ranks have it; 0: not measured.
  uint32_t MeasureLineLatencyNs();

 private:
  Status Meet(int64_t deadline_ns);
  // Finds out whether the ranks of this host can read each other's memory.
  Status ProbePeers(int64_t deadline_ns);
  std::string MissingRanks() const;

  Membership& membership_;
  Waiter& waiter_;
  std::unique_ptr<PeerMemory> peers_;
};

}  // namespace kolovod
