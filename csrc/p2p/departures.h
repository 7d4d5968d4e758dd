// Ranks that take part no more, and when what they had sent can no longer come. PURE: times are arguments.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>

#include "base/status.h"

namespace kolovod {

class Departures {
 public:
  struct Departure {
    Status status;
    int64_t since_ns;
    bool left = false;    // it has said so; else its connection closed, and nobody knows why
    bool silent = false;  // nothing more comes from it
  };

  // `silent`: what it has sent is here.
  void Left(int rank, const Status& status, bool silent, int64_t now_ns) {
    Departure& departure = departures_.try_emplace(rank, Departure{status, now_ns}).first->second;
    departure.silent |= silent;
    if (!departure.left) departure.status = status;
    departure.left = true;
  }
  // Its connection has ended, between messages.
  void Closed(int rank, const Status& status, int64_t now_ns) {
    departures_.try_emplace(rank, Departure{status, now_ns}).first->second.silent = true;
  }

  bool empty() const { return departures_.empty(); }
  // One that has said so, or null.
  const Departure* FindLeaver(int rank) const {
    const auto found = departures_.find(rank);
    return found == departures_.end() || !found->second.left ? nullptr : &found->second;
  }
  // One from which nothing can come any more, or null. A rank of another host that leaves has a second for
  // what it sent last; one whose connection closed, for the word that it has left, or died.
  const Departure* FindGone(int rank, int64_t now_ns) const {
    const auto found = departures_.find(rank);
    if (found == departures_.end()) return nullptr;
    const Departure& departure = found->second;
    const bool over = (departure.left && departure.silent) || now_ns >= departure.since_ns + kLastWordsNs;
    return over ? &departure : nullptr;
  }
  // When time alone makes the next of them gone; 0: it does not.
  int64_t NextNs(int64_t now_ns) const {
    int64_t next_ns = 0;
    for (const auto& [rank, departure] : departures_) {
      const int64_t end_ns = departure.since_ns + kLastWordsNs;
      if (now_ns < end_ns && (next_ns == 0 || end_ns < next_ns)) next_ns = end_ns;
    }
    return next_ns;
  }

  static constexpr int64_t kLastWordsNs = 1'000'000'000;

 private:
  std::map<int, Departure> departures_;  // by rank
};

}  // namespace kolovod
