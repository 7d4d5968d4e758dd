// Messages between the leaders of hosts, over the connections that this one has: those to its neighbours in
// the tree of leaders (base/tree.h).
//
// A thread reads, so that an abort arrives while the driver waits for data, and a death is noticed at once.
// It puts everything else aside for the driver and wakes it. A driver that waits for a frame reads by itself
// and is spared the hand-over; as long as it does, the thread leaves the sockets alone, for each of its
// wake-ups takes the core from somebody. Frames are those of the control rings (docs/wire.md).
//
// The thread also sees to it that there is always something for the other host's kernel to acknowledge: a
// beat, a frame without bytes, a few times a second. A host that acknowledges nothing is lost (host_watch.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/status.h"
#include "base/thread_annotations.h"
#include "transport/host_watch.h"
#include "transport/sealer.h"

namespace kolovod {

struct ControlLinkPeer {
  int host;
  int fd;                                        // connected stream socket
  std::shared_ptr<const ConnectionKeys> keys{};  // null: it is not encrypted
};

class ControlLink {
 public:
  struct Frame {
    int host;
    std::string payload;
  };
  struct Events {
    // From whoever reads, one at a time: what must not wait for the driver. True: it is done with, else the
    // driver finds the frame.
    std::function<bool(const Frame&)> read;
    std::function<void()> arrived;
    // The connection ended, or carried bytes that no leader can have written.
    std::function<void(int host, const std::string& reason)> lost;
  };

  // Takes the descriptors over. A host that acknowledges nothing for `host_lost_ms` is lost.
  ControlLink(std::vector<ControlLinkPeer> peers, uint32_t epoch, int64_t host_lost_ms = 1100);
  ~ControlLink();
  ControlLink(const ControlLink&) = delete;
  ControlLink& operator=(const ControlLink&) = delete;

  void Start(Events events);
  // What has been sent goes out, and is acknowledged, for up to `patience_ms`; then no event comes any more.
  void Stop(int patience_ms);
  // In a forked child: closes the descriptors; the thread exists in the parent only.
  void Forget();

  // To leaders that there is a connection to. Any thread; never blocks.
  void Send(std::span<const int> hosts, const std::string& payload);
  void Send(int host, const std::string& payload) { Send({&host, 1}, payload); }
  bool HasData() const { return has_data_.load(std::memory_order_seq_cst); }
  // The driver: the same, after a look at the sockets.
  bool Look();
  // The driver: it goes to sleep, and must be woken when a frame arrives.
  void LookAway();
  std::deque<Frame> Take();
  // Since the connections were made, without beats.
  uint64_t sent_frames() const { return sent_frames_.load(std::memory_order_relaxed); }
  uint64_t received_frames() const { return received_frames_.load(std::memory_order_relaxed); }

 private:
  // The two directions of a connection; both are found under the place of the peer in peers_.
  struct Incoming {
    std::unique_ptr<SealedReader> reader;  // null: nothing is sealed
    std::string bytes{};
    bool ended = false;
  };
  struct Outgoing {
    std::unique_ptr<Sealer> sealer;  // null: nothing is sealed
    std::string bytes{};
    size_t written = 0;  // of them
    bool ended = false;
  };

  // Of the thread, about the host of a peer.
  struct Pulse {
    HostWatch watch;
    int unread = 0;  // beats since data came: if its process reads nothing, they must not fill its room
  };

  void Read();
  // When it is time, or soon and the thread is `awake` anyway: hosts that beat each other then come to wake
  // each other once, not twice. Says when that will be the next time, in ms from now.
  int64_t WatchHosts(bool awake);
  void Beat(size_t peer, const HostSigns& signs);
  bool Receive(size_t peer) REQUIRES(read_mutex_);
  bool Parse(size_t peer) REQUIRES(read_mutex_);
  // What has arrived, opened. An error if that is not possible.
  Status Open(Incoming& incoming) REQUIRES(read_mutex_);
  void End(size_t peer, const std::string& reason) REQUIRES(read_mutex_);
  void Push(size_t peer, const std::string& payload) REQUIRES(mutex_);
  void PushFrame(size_t peer, const std::string& payload) REQUIRES(mutex_);
  void Flush(size_t peer) REQUIRES(mutex_);

  std::vector<ControlLinkPeer> peers_;
  const uint32_t epoch_;
  const int64_t host_lost_ms_;
  const int64_t beat_ms_;  // from one to the next
  std::vector<Pulse> pulses_;
  int64_t next_beat_ns_ = 0;
  Events events_;
  int bell_ = -1;  // eventfd: there is something to write, or it is time to stop
  Mutex read_mutex_;
  std::vector<Incoming> incoming_ GUARDED_BY(read_mutex_);
  Mutex mutex_;
  std::vector<Outgoing> outgoing_ GUARDED_BY(mutex_);
  std::deque<Frame> arrived_ GUARDED_BY(mutex_);
  std::atomic<bool> has_data_{false};
  std::atomic<bool> stop_{false};
  std::atomic<bool> leaving_{false};  // no beats any more
  std::atomic<uint64_t> looks_{0};
  std::atomic<bool> looking_{false};  // the driver, until LookAway
  std::atomic<bool> aside_{false};    // the thread leaves reading to the driver
  std::atomic<uint64_t> sent_frames_{0};
  std::atomic<uint64_t> received_frames_{0};
  std::thread thread_;
};

}  // namespace kolovod
