// What the ranks of a world say of their waits (transport/wait_notices.h), on all its hosts.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/thread_annotations.h"
#include "base/topology.h"
#include "control/message.h"
#include "transport/wait_notices.h"

namespace kolovod {

class WaitBoard {
 public:
  struct Said {
    int rank;
    uint32_t version;  // another one for each text
    std::string text;
  };

  // `tell_leaders`: of a leader with several hosts.
  WaitBoard(Segment& segment, const Topology& topology, std::function<void(const Note&)> tell_leaders)
      : segment_(segment),
        topology_(topology),
        tell_leaders_(std::move(tell_leaders)),
        notices_(segment),
        relayed_(static_cast<size_t>(topology.local_size())) {}

  // Of this rank; empty: it can go on. False: too long, and what was said before holds. Any thread.
  bool Say(std::string_view text) EXCLUDES(mutex_);
  // Of those that have something to say.
  std::vector<Said> Read() const;

  // A leader's engine thread, when it wakes: tells the other hosts what is new here.
  void Relay();
  // A leader, from another one. Any thread.
  void Hear(const Note& note) EXCLUDES(mutex_);

 private:
  Segment& segment_;
  const Topology& topology_;
  const std::function<void(const Note&)> tell_leaders_;
  WaitNotices notices_;
  Mutex mutex_;                    // what this process writes
  std::vector<uint32_t> relayed_;  // by local rank: the version that the other hosts know
};

}  // namespace kolovod
