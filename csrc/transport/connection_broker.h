// Where a mesh asks for a connection that it has not got yet, and where it finds it: connections between
// ranks are made when an algorithm first wants them, by somebody else, while the world goes on.
//
// Who connects is agreed upon by the two ranks alone: among processes the later one of the two
// (src/kolovod/rendezvous/mesh.py), for both will ask. A connection may come before it is asked for.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/thread_annotations.h"
#include "transport/keys.h"

namespace kolovod {

struct MadeConnection {
  int peer;
  int fd;                                        // a connected stream socket
  std::shared_ptr<const ConnectionKeys> keys{};  // null: it is not encrypted
  int stripe = 0;                                // which of several to that peer (mesh.h)
};

// Any thread, except where it says otherwise.
class ConnectionBroker {
 public:
  using Ask = std::function<void(int peer, int stripe)>;
  // `ask`: called by the mesh, must not block. Null: `wanted_fd` and `TakeWanted` tell instead.
  explicit ConnectionBroker(Ask ask = nullptr);
  ~ConnectionBroker();
  ConnectionBroker(const ConnectionBroker&) = delete;
  ConnectionBroker& operator=(const ConnectionBroker&) = delete;

  // The mesh: it needs this connection to `peer`. Once for each.
  void Want(int peer, int stripe);
  bool HasNews() const { return has_news_.load(std::memory_order_acquire); }
  // The mesh: connections that were made, which are its own from now on.
  std::vector<MadeConnection> Take();
  // Readable while there are some to take.
  int news_fd() const { return news_; }

  // Whoever connects: readable while there are peers to take, or after Close.
  int wanted_fd() const { return wanted_bell_; }
  std::vector<std::pair<int, int>> TakeWanted();  // peers, and which connection to each
  // Takes the descriptor over.
  void Connected(MadeConnection made);
  // There will be no connection; `text` names the peer and says why. The first one counts.
  void Failed(const std::string& text);
  // Before the first use: told of it at once.
  void set_on_failure(std::function<void(const std::string&)> on_failure) {
    on_failure_ = std::move(on_failure);
  }
  std::optional<std::string> failure() const;

  // No connection is made any more: what comes is closed.
  void Close();
  bool closed() const { return closed_.load(); }
  // In a forked child: closes the descriptors. Without the lock, which a thread that does not exist there may
  // hold.
  void Forget() NO_THREAD_SAFETY_ANALYSIS;

 private:
  const Ask ask_;
  std::function<void(const std::string&)> on_failure_;
  int news_ = -1;         // eventfd
  int wanted_bell_ = -1;  // eventfd
  std::atomic<bool> has_news_{false};
  std::atomic<bool> closed_{false};
  mutable Mutex mutex_;
  std::vector<MadeConnection> connected_ GUARDED_BY(mutex_);    // not taken yet
  std::vector<std::pair<int, int>> wanted_ GUARDED_BY(mutex_);  // not taken yet
  std::optional<std::string> failure_ GUARDED_BY(mutex_);
};

}  // namespace kolovod
