// What a leader knows of other hosts' late operations: what they wait for, and who has answered. The clock is
// an argument. Any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "base/thread_annotations.h"
#include "control/stragglers.h"

namespace kolovod {

class StragglerNews {
 public:
  // `hosts`: of all of the world; `host`: this one.
  StragglerNews(int hosts, int host) : host_(host), others_(static_cast<size_t>(hosts)) {}

  // Another host waits for these; ranks are those of the world.
  void Hear(int host, std::vector<OverdueWait> waits, int64_t now_ns);
  // Another host has read what this one told; `blames`: it has found a rank of its own that is late.
  void HearAnswer(int host, bool blames, int64_t now_ns);
  // This host has told the others for what it waits.
  void Told(int64_t now_ns);

  // What other hosts wait for: heard in the last seconds.
  std::vector<OverdueWait> Waits(int64_t now_ns);
  // Whether there are some that were not answered, and from now on they are.
  bool TakeUnanswered();
  enum class Answers { kOutstanding, kBlaming, kSilent, kNone };
  // kBlaming: some host has found who is late. kSilent: `*silent` has not answered for too long; of several
  // the nearest in the tree of leaders, since what lies behind it is heard through it. kNone: all have
  // answered and know nothing.
  Answers Judge(int64_t now_ns, int* silent);

 private:
  struct Other {
    std::vector<OverdueWait> waits;
    int64_t heard_ns = 0;
    int64_t answered_ns = 0;
    bool blames = false;
  };

  const int host_;
  Mutex mutex_;
  std::vector<Other> others_ GUARDED_BY(mutex_);  // by host
  int64_t first_told_ns_ GUARDED_BY(mutex_) = 0;  // of the present trouble
  int64_t last_told_ns_ GUARDED_BY(mutex_) = 0;
  bool unanswered_ GUARDED_BY(mutex_) = false;
};

}  // namespace kolovod
