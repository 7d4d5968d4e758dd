// One rank of one world. An object without globals: several may live in a process, and starting again
// is destroying one and making another.
//
// Threads. `Submit` may be called by any thread. One lease says who drives: it is held by a blocking
// caller, which then progresses all queued work until its own operation is done, or else by the engine
// thread, which wakes for asynchronous work and otherwise watches the peers. An operation with a callback is
// one that nobody waits for: the engine thread drives until it is done, as a blocking caller would.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/config.h"
#include "base/topology.h"
#include "collectives/backend.h"
#include "collectives/eager.h"
#include "collectives/external.h"
#include "collectives/hierarchical.h"
#include "collectives/shm.h"
#include "engine/control.h"
#include "engine/late.h"
#include "engine/operation.h"
#include "engine/stack.h"
#include "p2p/point_to_point.h"
#include "transport/liveness.h"
#include "transport/mesh.h"
#include "transport/segment.h"
#include "transport/switchboard.h"
#include "transport/uplink.h"
#include "transport/waiter.h"

namespace kolovod {

struct EngineOptions {
  int rank = 0;
  int size = 1;
  // By rank: a label of its host, equal for those that share a segment. Empty: all do.
  std::vector<int> hosts;
  // Between hosts, connected stream sockets that are this engine's from now on. By host, in the order of
  // their first ranks: from a leader to those of its neighbours in the tree (base/tree.h); else -1.
  std::vector<int> uplink_fds;
  std::vector<std::shared_ptr<const RecordKeys>> uplink_keys;  // of each; empty: they are not encrypted
  std::shared_ptr<Switchboard> switchboard;  // between hosts: gives connections for data, by rank
  // Of a process set: the number in the world of each rank, for messages. Empty: the same.
  std::vector<int> ranks;
  uint32_t epoch = 0;
  std::shared_ptr<Segment> segment;
  std::unique_ptr<Liveness> liveness;
  std::shared_ptr<LoopbackFaults> faults;  // loopback only
  Config config;
  bool external = false;
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

struct EngineStats {
  ControlStats control;
  uint64_t operations = 0;     // completed without error
  uint64_t staged = 0;         // of them, those whose data came with their announcement
  uint64_t buckets = 0;        // with data
  uint64_t bytes = 0;          // of tensors in completed operations
  uint64_t drives_caller = 0;  // leases taken by blocking callers
  uint64_t drives_thread = 0;  // leases taken by the engine thread
  uint64_t late_reports = 0;   // written by this rank
  uint64_t connections = 0;    // for data, to ranks of other hosts
  uint32_t line_latency_ns = 0;
  uint64_t link_bytes_per_us = 0;  // between hosts, as all ranks estimate with
  uint64_t link_revisions = 0;     // how often they were told so since the world has formed
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
  // timeout_s < 0: no limit. `interrupted` is called about every 100 ms on this thread; true gives up.
  Status Wait(uint64_t handle, double timeout_s, const std::function<bool()>& interrupted);
  // Drives like a wait without a limit, and gives up after timeout_s: before the operation has started that
  // is kTimeout for this caller; later the world is over, for its peers have half a result.
  Status WaitDriving(uint64_t handle, double timeout_s, const std::function<bool()>& interrupted);
  Status Poll(uint64_t handle, bool* done);
  // The operation of a handle until Release; null if unknown.
  OperationPtr Find(uint64_t handle);
  // Forgets the handle; true if it was done, false if pending (and then kept) .
  Status Release(uint64_t handle, bool* done);

  // Operations that were submitted here and are not complete.
  size_t Pending();
  std::shared_ptr<Segment> segment() const { return segment_; }
  void Abort(const std::string& message);
  void Shutdown();
  // In a forked child: this object is inert from now on and its destructor does nothing.
  void Forget();
  EngineStats Stats();
  // By rank: bytes of data, without headers, that this rank has sent over the connection to it.
  std::vector<uint64_t> SentBytes() const;
  // What this rank has submitted last and all that is pending here, by order of submission.
  std::vector<OperationRecord> LastOperations() {
    return ReadRecords(segment_->records(topology_.local_rank));
  }
  // From now on the times in them are exact for small operations, too (see RecordNs).
  void KeepExactTimes(bool exact) { exact_times_.store(exact, std::memory_order_relaxed); }
  // The last report on late ranks that this rank has written to standard error; empty: none.
  std::string LastLateReport() { return late_->last_report(); }
  ExternalBackend* external() { return external_; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  const Topology& topology() const { return topology_; }

 private:
  explicit Engine(EngineOptions options);

  void MakeLateWatch();
  Status Attach(const std::function<bool()>& interrupted);
  // Finds out whether the ranks of this host can read each other's memory.
  Status ProbePeers(PeerMemory& peers, int64_t deadline_ns);
  Status MakeBackend(std::unique_ptr<PeerMemory> peers);
  Status MakeMesh();
  Status MeasureLinks();
  void UseLinks(const LinkCost& cost);
  // A leader's connection to the others.
  void StartUplink();
  void SpreadRevocation();
  RankBlock& self() { return segment_->rank(topology_.local_rank); }
  std::string MissingRanks();
  void ProbeLatency();

  // Why a new operation could never complete, or OK.
  Status WorldStatus(bool for_transfer);
  bool ExactTimes() const { return exact_times_.load(std::memory_order_relaxed); }
  bool TryLease(bool background, std::function<bool()> interrupted);
  void ReleaseLease();
  // Lease. Progresses until `until` is done, `deadline_ns` (0: none) is over, or an error. Null: until there
  // is nothing to do and no operation with a callback is pending.
  Status Drive(const Operation* until, int64_t deadline_ns = 0);
  Status Step(bool* progressed);
  Status ExecuteBucket(bool* progressed);
  Status Execute(const std::vector<OperationPtr>& all);
  Status ExecuteReductions(const std::vector<OperationPtr>& ops);
  // Under mutex_, before it is announced: what this rank gives goes into its slot, if it is little. True: it
  // can be announced by its slot (Control).
  bool Stage(Operation& op);
  // Whether what a rank gives is so little; of a reduction, the same on all ranks.
  bool FitsSlot(const Operation& op) const;
  // From there, if all that is needed is there; the same on all ranks. Else *done stays false.
  Status ExecuteStaged(Operation& op, bool* done);
  // What is no allreduce.
  Status ExecuteMove(Operation& op, Backend& by);
  Status ExecuteAllgather(Operation& op, Backend& by);
  Status ExecuteAlltoall(Operation& op, Backend& by);
  Status ExecuteReducescatter(Operation& op, Backend& by);
  // Where the output of tensor t goes: to the caller's memory if that was given and fits. Without memory the
  // world is aborted, since peers wait for this rank.
  Status OutputFor(Operation& op, size_t t, size_t bytes, char** out);
  void Complete(const std::vector<OperationPtr>& ops);
  // Drives for what this thread has just submitted; what is left after that is the engine thread's.
  void DriveFor(const Operation& op, int64_t drive_ns);
  bool HasWork();
  // For some operations this rank looks by itself, whoever waits: they have a callback, or another host.
  bool MustDrive();
  bool SeesLeavers();
  // The next bucket has its end, or this rank may decide it.
  bool CanExecute();
  // Lease. Messages between two ranks: moves them, and completes those that are through.
  Status StepTransfers(bool* progressed);
  void CompleteTransfers(const std::vector<OperationPtr>& ops);
  // Does what can be done for one at once.
  void StartTransfer();
  // Lease. Fails what can never complete because a rank left.
  void NoticeLeavers();
  // Lease. After this every pending and later operation fails with `status`.
  void Break(const Status& status);
  Status BrokenStatus();
  // Lease. Break, and for all ranks if this one's engine is at fault. Returns why the world is over.
  Status EndBy(const Status& status);
  // A connection for data broke: the world is over.
  Status EndForAll(const Status& broken);
  // Under mutex_. Opens the record of what has just been submitted.
  void KeepRecord(Operation& op, int64_t submitted_ns);
  // Lease.
  void KeepStart(const std::vector<OperationPtr>& ops);
  // Under mutex_, of those whose status is final.
  void KeepEnd(const std::vector<OperationPtr>& ops);
  // Under mutex_. The world is over: writes the last operations down, once, and says where.
  Status WithLastOperations(const Status& status);
  // Of a rank of this host. The path, or empty if it could not be written.
  std::string WriteLastOperations(int rank, const std::string& suffix, const Status& status);
  void FailLocked(const OperationPtr& op, const Status& status);
  void FinishLocked(const OperationPtr& op);
  // Under mutex_. It is pending no more.
  void EraseLocked(const Operation& op);
  // Without the mutex, after whatever may have finished operations.
  void RunCallbacks();
  void NudgeForAsync();
  void AnnounceLeave();
  void EngineThread();
  // `wants_lease`: returns early when the lease becomes free.
  Status WaitAsleep(const OperationPtr& op, double timeout_s, bool wants_lease,
                    const std::function<bool()>& interrupted);

  const int rank_;
  const int size_;
  const Topology topology_;
  const std::vector<int> ranks_;
  const uint32_t epoch_;
  Config config_;
  const std::shared_ptr<Segment> segment_;
  const std::unique_ptr<Liveness> liveness_;
  const std::shared_ptr<LoopbackFaults> faults_;
  const std::shared_ptr<Switchboard> switchboard_;
  const bool use_external_;
  const int64_t driver_sleep_ns_;
  const int64_t idle_sleep_ns_;
  const double believed_bytes_per_us_;
  std::atomic<bool> stop_{false};
  std::atomic<bool> forgotten_{false};
  bool shut_down_ = false;  // guarded by shutdown_mutex_
  std::mutex shutdown_mutex_;

  std::mutex mutex_;
  std::condition_variable changed_;                     // an operation completed or the lease became free
  int sleeping_callers_ = 0;                            // guarded by mutex_
  std::unordered_map<uint64_t, OperationPtr> handles_;  // guarded by mutex_
  uint64_t next_handle_ = 1;                            // guarded by mutex_
  bool joined_ = false;                                 // guarded by mutex_; from a join to its completion
  Status broken_;                                       // guarded by mutex_; not ok: nothing works any more
  const std::string last_operations_prefix_;
  std::optional<std::string> last_operations_path_;  // guarded by mutex_; empty: could not be written
  EngineStats stats_;                                // guarded by mutex_
  std::vector<OperationPtr> finished_;               // guarded by mutex_; their callbacks are due
  std::vector<std::string> abandoned_;               // guarded by mutex_; names that shutting down failed

  std::atomic<bool> exact_times_{false};
  std::atomic<uint64_t> next_unnamed_{1};
  std::atomic<uint64_t> joins_{0};  // that are over
  std::atomic<bool> lease_{false};
  std::atomic<int> lease_wanted_{0};
  std::atomic<int> driven_{0};  // operations with a callback that are not done
  std::atomic<std::thread::id> calling_back_{};
  size_t kick_bytes_ = 0;               // constant after Attach
  int64_t forming_until_ns_ = 0;        // while links are measured: when that has taken too long
  std::atomic<size_t> ready_bytes_{0};  // appended here and not yet in a bucket

  std::unique_ptr<Uplink> uplink_;  // of a leader in a world of several hosts
  std::vector<bool> told_left_;     // lease; by local rank: the other hosts know

  // Lease only.
  std::unique_ptr<RecordRing> records_;  // Open: under mutex_
  std::shared_ptr<StackSource> stacks_;
  std::unique_ptr<LateWatch> late_;  // any thread; constant after Attach
  std::unique_ptr<Waiter> waiter_;
  std::unique_ptr<Control> control_;   // Announce: under mutex_
  std::unique_ptr<EagerSlots> eager_;  // Claim to Release: under mutex_; null: between hosts, or not ours
  std::unique_ptr<Mesh> mesh_;
  std::unique_ptr<PointToPoint> transfers_;  // Submit to Erase: under mutex_
  std::unique_ptr<Backend> backend_;
  HierarchicalBackend* hierarchical_ = nullptr;  // of several hosts
  std::atomic<uint64_t> link_revisions_{0};
  std::atomic<double> link_bytes_per_us_{0};
  ExternalBackend* external_ = nullptr;
  bool background_ = false;
  std::deque<OperationPtr> ready_;
  uint64_t executed_ = 0;  // log position
  uint64_t bucket_ = 0;
  std::atomic<uint32_t> leavers_seen_{0};

  std::thread thread_;
};

}  // namespace kolovod
