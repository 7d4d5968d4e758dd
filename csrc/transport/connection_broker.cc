#include "transport/connection_broker.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <utility>

namespace kolovod {

ConnectionBroker::ConnectionBroker(Ask ask) : ask_(std::move(ask)) {
  news_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  wanted_bell_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
}

ConnectionBroker::~ConnectionBroker() { Forget(); }

void ConnectionBroker::Want(int peer, int stripe) {
  if (ask_) return ask_(peer, stripe);
  MutexLock lock(mutex_);
  wanted_.emplace_back(peer, stripe);
  eventfd_write(wanted_bell_, 1);
}

std::vector<std::pair<int, int>> ConnectionBroker::TakeWanted() {
  MutexLock lock(mutex_);
  eventfd_t rings;
  if (!closed_.load()) eventfd_read(wanted_bell_, &rings);
  return std::exchange(wanted_, {});
}

std::vector<MadeConnection> ConnectionBroker::Take() {
  MutexLock lock(mutex_);
  has_news_.store(false, std::memory_order_relaxed);
  eventfd_t rings;
  eventfd_read(news_, &rings);
  return std::exchange(connected_, {});
}

void ConnectionBroker::Connected(MadeConnection made) {
  MutexLock lock(mutex_);
  if (closed_.load()) {
    close(made.fd);
    return;
  }
  connected_.push_back(std::move(made));
  has_news_.store(true, std::memory_order_release);
  eventfd_write(news_, 1);
}

void ConnectionBroker::Failed(const std::string& text) {
  {
    MutexLock lock(mutex_);
    if (failure_) return;
    failure_ = text;
  }
  if (on_failure_) on_failure_(text);
}

std::optional<std::string> ConnectionBroker::failure() const {
  MutexLock lock(mutex_);
  return failure_;
}

void ConnectionBroker::Close() {
  MutexLock lock(mutex_);
  closed_.store(true);
  for (const MadeConnection& made : connected_) close(made.fd);
  connected_.clear();
  eventfd_write(wanted_bell_, 1);
}

void ConnectionBroker::Forget() {
  closed_.store(true);
  for (const MadeConnection& made : connected_) close(made.fd);
  connected_.clear();
  for (int* fd : {&news_, &wanted_bell_}) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
  }
}

}  // namespace kolovod
