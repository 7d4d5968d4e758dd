#include "transport/liveness.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

namespace kolovod {

PidfdLiveness::PidfdLiveness(int self, const std::vector<std::pair<int, std::string>>& peers) : self_(self) {
  for (const auto& [fd, description] : peers) {
    fds_.push_back(fd >= 0 ? fcntl(fd, F_DUPFD_CLOEXEC, 0) : -1);
    descriptions_.push_back(description);
  }
}

PidfdLiveness::~PidfdLiveness() {
  for (int fd : fds_) {
    if (fd >= 0) close(fd);
  }
}

int PidfdLiveness::FindDead(int from) {
  const auto first = static_cast<size_t>(from);
  std::vector<pollfd> polled(fds_.size());
  for (size_t r = 0; r < fds_.size(); ++r) {
    polled[r] = {r < first || static_cast<int>(r) == self_ ? -1 : fds_[r], POLLIN, 0};
  }
  if (poll(polled.data(), polled.size(), 0) <= 0) return -1;
  for (size_t r = first; r < polled.size(); ++r) {
    if (polled[r].revents & (POLLIN | POLLHUP)) return static_cast<int>(r);
  }
  return -1;
}

std::string PidfdLiveness::Describe(int rank) const { return descriptions_[static_cast<size_t>(rank)]; }

int LoopbackLiveness::FindDead(int from) {
  for (const int r : watched_) {
    if (r >= from && faults_->killed[static_cast<size_t>(r)].load()) return r;
  }
  for (auto r = static_cast<size_t>(from); watched_.empty() && r < faults_->killed.size(); ++r) {
    if (faults_->killed[r].load()) return static_cast<int>(r);
  }
  return -1;
}

std::string LoopbackLiveness::Describe(int rank) const {
  return "rank " + std::to_string(ranks_[static_cast<size_t>(rank)]) + " (loopback)";
}

}  // namespace kolovod
