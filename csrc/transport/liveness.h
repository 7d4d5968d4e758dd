// Who is alive. The engine asks often and cheaply; it never learns of a death from a closed socket,
// because a forked child of the dead rank may hold that open.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "transport/faults.h"

namespace kolovod {

class Liveness {
 public:
  virtual ~Liveness() = default;
  // The first rank from `from` on whose process has ended, or -1. Never blocks.
  virtual int FindDead(int from) = 0;
  // For messages: "rank 1 on host a (pid 17)".
  virtual std::string Describe(int rank) const = 0;
};

// One pidfd per rank: it becomes readable when the process ends, and it cannot name a later process
// that was given the same pid.
class PidfdLiveness : public Liveness {
 public:
  // Duplicates the descriptors; -1 means that nobody watches that rank here.
  PidfdLiveness(int self, const std::vector<std::pair<int, std::string>>& peers);
  ~PidfdLiveness() override;
  int FindDead(int from) override;
  std::string Describe(int rank) const override;

 private:
  const int self_;
  std::vector<int> fds_;
  std::vector<std::string> descriptions_;
};

class LoopbackLiveness : public Liveness {
 public:
  // `ranks`: what messages call each rank. `watched`: those whose death is noticed; empty: all.
  LoopbackLiveness(std::shared_ptr<LoopbackFaults> faults, std::vector<int> ranks,
                   std::vector<int> watched = {})
      : faults_(std::move(faults)), ranks_(std::move(ranks)), watched_(std::move(watched)) {}
  int FindDead(int from) override;
  std::string Describe(int rank) const override;

 private:
  std::shared_ptr<LoopbackFaults> faults_;
  const std::vector<int> ranks_;
  const std::vector<int> watched_;
};

}  // namespace kolovod
