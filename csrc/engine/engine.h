// One rank of one world. An object without globals: several may live in a process, and starting again
// is destroying one and making another.
//
// Threads. `Submit` may be called by any thread. One lease says who drives: it is held by a blocking
// caller, which then progresses all queued work until its own operation is done, or else by the engine
// thread, which wakes for asynchronous work and otherwise watches the peers. An operation with a callback is
// one that nobody waits for: the engine thread drives until it is done, as a blocking caller would.
//
// The engine is made of parts, each with a header that says what it does: Registry (operations and who waits
// for them), Lease and Driver (who drives, and what that is), Control (announcements out, log in), Executor
// (buckets to a backend), DeviceLane (the same for tensors on a GPU, beside), PointToPoint, HostLinks,
// StragglerWatch, LastOperations; Formation brings the ranks together before that.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/config.h"
#include "base/topology.h"
#include "collectives/external.h"
#include "engine/control.h"
#include "engine/device_lane.h"
#include "engine/driver.h"
#include "engine/executor.h"
#include "engine/host_links.h"
#include "engine/instant_path.h"
#include "engine/last_operations.h"
#include "engine/lease.h"
#include "engine/membership.h"
#include "engine/operation.h"
#include "engine/registry.h"
#include "engine/stack.h"
#include "engine/straggler_watch.h"
#include "engine/wait_board.h"
#include "p2p/point_to_point.h"
#include "transport/connection_broker.h"
#include "transport/control_link.h"
#include "transport/liveness.h"
#include "transport/segment.h"
#include "transport/waiter.h"

namespace kolovod {

struct EngineOptions {
  int rank = 0;
  int size = 1;
  // By rank: a label of its host, equal for those that share a segment. Empty: all do.
  std::vector<int> hosts;
  // Between hosts, connected stream sockets that are this engine's from now on. By host, in the order of
  // their first ranks: from a leader to those of its neighbours in the tree (base/tree.h); else -1.
  std::vector<int> control_fds;
  std::vector<std::shared_ptr<const ConnectionKeys>> control_keys;  // of each; empty: they are not encrypted
  std::shared_ptr<ConnectionBroker> broker;  // between hosts: gives connections for data, by rank
  // Of a process set: the number in the world of each rank, for messages. Empty: the same.
  std::vector<int> ranks;
  uint32_t epoch = 0;
  std::shared_ptr<Segment> segment;
  std::unique_ptr<Liveness> liveness;
  std::shared_ptr<LoopbackFaults> faults;  // loopback only
  Config config;
  // Tensors of this device go to an engine of somebody else (collectives/external.h). Without kGpu, tensors
  // are in host memory.
  std::optional<Device> external;
  std::shared_ptr<StackSource> stacks;  // null: nobody can say where the main thread is
  // What the names of files with last operations begin with, folder included; empty: none are written.
  std::string last_operations_prefix;
  // How long threads sleep at most before they look by themselves for what no rank tells them: deaths,
  // signals, who is late. Operations depend on neither; tests make them long, so that a lost wake-up hangs.
  int64_t driver_sleep_ns = 10'000'000;
  int64_t idle_sleep_ns = 100'000'000;
  // What all ranks of a world of several hosts believe their links to carry when they begin; 0: what they
  // measure. For tests of what follows from a wrong belief.
  double believed_bytes_per_us = 0;
};

struct EngineStats : CompletionStats, LinkStats {
  ControlStats control;
  uint64_t late_reports = 0;  // written by this rank
  uint32_t line_latency_ns = 0;
};

class Engine {
 public:
  // Returns once every rank has attached the segment, or an error that names those missing.
  // `interrupted` is called about every 100 ms on this thread; true gives up.
  static Status Create(EngineOptions options, std::unique_ptr<Engine>* out,
                       const std::function<bool()>& interrupted = nullptr);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  using Callback = std::function<void(const Operation&)>;

  // `request.name` empty: unnamed, matched by order of submission. Buffers must live until completion.
  // `on_done` (see Operation) is called exactly once if this returns OK, else never; with it `handle` may be
  // null, and is written before the callback can run. With it and drive_ns > 0 this thread drives for so long
  // (until the operation has started; then till its end), if it finds nothing else with a callback on its
  // way.
  Status Submit(Request request, std::vector<SubmittedTensor> tensors, bool blocking, uint64_t* handle,
                Callback on_done = nullptr, int64_t drive_ns = 0);
  // Submit and Wait without a limit. *handle: of Submit; 0: none, or none any more, for the operation is
  // complete and has made no outputs. Its status is returned either way.
  Status Run(Request request, std::vector<SubmittedTensor> tensors, const std::function<bool()>& interrupted,
             uint64_t* handle);
  // timeout_s < 0: no limit. `interrupted` is called about every 100 ms on this thread; true gives up.
  Status Wait(uint64_t handle, double timeout_s, const std::function<bool()>& interrupted);
  // Drives like a wait without a limit, and gives up after timeout_s: before the operation has started that
  // is kTimeout for this caller; later the world is over, for its peers have half a result.
  Status WaitDriving(uint64_t handle, double timeout_s, const std::function<bool()>& interrupted);
  Status Poll(uint64_t handle, bool* done);
  // The operation of a handle until Release; null if unknown.
  OperationPtr Find(uint64_t handle) { return registry_.Find(handle); }
  // Forgets the handle; true if it was done, false if pending (and then kept) .
  Status Release(uint64_t handle, bool* done) { return registry_.Release(handle, done); }

  // Operations that were submitted here and are not complete.
  size_t Pending();
  std::shared_ptr<Segment> segment() const { return membership_.segment; }
  void Abort(const std::string& message);
  // Ends the world, as for what ranks did not submit alike: kMismatch on all.
  void Refuse(const std::string& reason) { membership_.segment->Revoke(Code::kMismatch, reason); }
  void Shutdown();
  // In a forked child: this object is inert from now on and its destructor does nothing.
  void Forget();
  EngineStats Stats();
  // By rank: bytes of data, without headers, that this rank has sent over the connection to it.
  std::vector<uint64_t> SentBytes() const;
  // What this rank has submitted last and all that is pending here, by order of submission.
  std::vector<OperationRecord> ReadLastOperations() const { return last_operations_->Read(); }
  // From now on the times in them are exact for small operations, too (see RecordNs).
  void KeepExactTimes(bool exact) { last_operations_->KeepExactTimes(exact); }
  // The last report on late ranks that this rank has written to standard error; empty: none.
  std::string LastLateReport() { return stragglers_->last_report(); }
  // What the ranks say of what they wait for, and how this one does.
  WaitBoard& waits() { return *waits_; }
  const PointToPoint& transfers() const { return *transfers_; }
  // How many buckets have begun: as many on all ranks that have nothing to execute.
  uint64_t buckets() const { return driver_->buckets(); }
  // Whether it has more pending operations than ReadLastOperations can know.
  bool has_unrecorded() const { return membership_.self().unrecorded.load(std::memory_order_relaxed) > 0; }
  // Null without EngineOptions::external.
  ExternalBackend* external() { return external_; }
  int rank() const { return membership_.rank; }
  int size() const { return membership_.size; }
  const Topology& topology() const { return membership_.topology; }

 private:
  explicit Engine(EngineOptions& options);

  // Makes the parts, together with the other ranks.
  Status Form(EngineOptions& options);
  void MakeExecutor(std::optional<Device> external, std::unique_ptr<PeerMemory> peers);
  void MakeStragglerWatch(std::shared_ptr<StackSource> stacks);
  // A leader's connection to the others.
  void StartControlLink();
  Status MeasureLinks(double believed_bytes_per_us);

  // What it is called, and by what tag it is matched.
  void Name(Request& request, Operation& op);
  // Submit. `complete`: gets an operation that is complete and has no handle; null: each gets one.
  Status Start(Request request, std::vector<SubmittedTensor> tensors, bool blocking, uint64_t* handle,
               Callback on_done, int64_t drive_ns, OperationPtr* complete);
  // Why a new operation can never complete, or OK.
  Status RefuseNew(const Operation& op) REQUIRES(kOperations);
  Status WorldStatus(bool for_transfer) const;
  // It is pending from now on. `drives`: this thread does, at once. True if it went into the log at once.
  bool Enter(const OperationPtr& op, uint64_t* handle, bool drives) REQUIRES(kOperations);
  // The same.
  bool Announce(const OperationPtr& op) REQUIRES(kOperations);
  // Drives for what this thread has just submitted; what is left after that is the engine thread's.
  void DriveFor(const Operation& op, int64_t drive_ns);
  // Does what can be done for a message at once.
  void StartTransfer();
  // `wants_lease`: returns early when the lease becomes free.
  Status WaitAsleep(const OperationPtr& op, double timeout_s, bool wants_lease,
                    const std::function<bool()>& interrupted);
  // While the engine thread drives: it hands the lease over between buckets.
  Status WaitForLease(const OperationPtr& op, const std::function<bool()>& interrupted);
  void NudgeForAsync();
  void EngineThread();
  void AnnounceLeave();
  // A leader tells the other hosts that the world is over.
  void SpreadRevocation();

  Membership membership_;  // its configuration: constant once formed
  const int64_t idle_sleep_ns_;
  uint32_t line_latency_ns_ = 0;
  std::atomic<bool> stop_{false};
  std::atomic<bool> forgotten_{false};
  Mutex shutdown_mutex_;
  bool shut_down_ GUARDED_BY(shutdown_mutex_) = false;

  // Constant once formed. Each may refer to those before it.
  Registry registry_;
  Lease lease_;
  const std::shared_ptr<ConnectionBroker> broker_;
  std::unique_ptr<ControlLink> control_link_;  // of a leader in a world of several hosts
  std::unique_ptr<Waiter> waiter_;
  std::unique_ptr<LastOperations> last_operations_;
  std::unique_ptr<StragglerWatch> stragglers_;
  std::unique_ptr<WaitBoard> waits_;
  std::unique_ptr<Control> control_;
  std::unique_ptr<HostLinks> links_;  // of several hosts
  std::unique_ptr<PointToPoint> transfers_;
  std::unique_ptr<Executor> executor_;
  std::unique_ptr<InstantPath> instant_;  // of one host; null: none goes that way
  std::unique_ptr<DeviceLane> lane_;      // where tensors may be on a GPU
  ExternalBackend* external_ = nullptr;   // the executor's or the lane's, if there is one
  std::unique_ptr<Driver> driver_;
  std::thread thread_;
};

}  // namespace kolovod
