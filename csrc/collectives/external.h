// Hands buckets to an engine of somebody else (MPI, Gloo, NCCL) that a Python-owned thread drives: the
// core holds no Python object and never takes the GIL. In host memory the native backend carries everything
// until HandOver(): what the other engine's ranks must know to find each other travels that way.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/thread_annotations.h"
#include "collectives/backend.h"
#include "transport/segment.h"

namespace kolovod {

struct ExternalJob {
  uint64_t token = 0;
  Verb verb = Verb::kAllreduce;
  DType dtype = DType::kFloat32;
  Op op = Op::kSum;
  double prescale = 1.0;
  double postscale = 1.0;
  int root = 0;
  std::string name;
  int device = -1;  // number of the GPU on which the tensors are; -1: they are in host memory, or nowhere
  // On a GPU, where a rank that has joined gives zeros there are no addresses, and where the result makes
  // the output it says to what it belongs (OutputBuffer).
  std::vector<Piece> pieces;  // of an allgather and alltoall: one, whose count says nothing
  // Allgather: the bytes of each rank. Alltoall: the bytes that this rank sends to each. Reducescatter: the
  // elements of each rank's part.
  std::vector<size_t> sizes;
  // Alltoall: the bytes that each rank sends to this one; and those of all ranks to all, the same everywhere.
  std::vector<size_t> received;
  size_t total = 0;
};

class ExternalBackend : public Backend {
 public:
  // `own`: carries until HandOver; null: nothing is carried before the foreign thread is there. `look` is
  // called by who waits for that thread, every now and then: whether the world goes on. `until_death_shows`:
  // a foreign engine's connection to a rank that dies may break so long before the system says that it died.
  ExternalBackend(std::unique_ptr<Backend> own, int rank, Segment& segment, std::function<Status()> look,
                  const std::atomic<bool>& stop,
                  std::chrono::milliseconds until_death_shows = std::chrono::seconds(1))
      : own_(std::move(own)),
        rank_(rank),
        handed_over_(own_ == nullptr),
        segment_(segment),
        look_(std::move(look)),
        stop_(stop),
        until_death_shows_(until_death_shows) {}

  Status Allreduce(const FusedRange& range) override;
  Status Broadcast(const Piece& piece, DType dtype, int root, const std::string& name) override;
  Status Allgather(const void* in, char* out, const std::vector<size_t>& bytes) override;
  Status Alltoall(const char* in, char* out, const Splits& rows, size_t row_bytes) override;
  Status Reducescatter(const FusedRange& range, const std::vector<size_t>& counts) override;

  // The foreign engine stands, on every rank: it carries all buckets from now on.
  void HandOver() { handed_over_.store(true); }
  // The GPU of this rank's tensors, from its first one on.
  void SetDevice(int device) { device_.store(device); }
  // The foreign thread: the next job; kTimeout when none came, kShutDown or the revoke reason at the end.
  Status NextJob(double timeout_s, ExternalJob* job);
  // The pieces of a job may be read and written only between these two: a job whose world was aborted is
  // given up at once, however long the foreign engine takes, and its memory may be gone. kShutDown: it was.
  Status OpenMemory(uint64_t token);
  void CloseMemory();
  // An error text fails the operation here and aborts the world: peers may be half-way.
  Status JobDone(uint64_t token, const std::string& error);

 private:
  Status Run(ExternalJob job);
  // Why the foreign engine failed: a peer's death, if that is what it was, else `text`.
  Status Blame(const std::string& text);

  const std::unique_ptr<Backend> own_;
  const int rank_;
  std::atomic<bool> handed_over_;
  std::atomic<int> device_{-1};
  Segment& segment_;
  const std::function<Status()> look_;
  const std::atomic<bool>& stop_;
  const std::chrono::milliseconds until_death_shows_;
  Mutex mutex_;
  std::condition_variable changed_;
  uint64_t last_token_ GUARDED_BY(mutex_) = 0;
  std::optional<ExternalJob> offered_ GUARDED_BY(mutex_);
  uint64_t finished_token_ GUARDED_BY(mutex_) = 0;
  uint64_t given_up_token_ GUARDED_BY(mutex_) = 0;
  bool memory_open_ GUARDED_BY(mutex_) = false;
  std::string error_ GUARDED_BY(mutex_);
};

}  // namespace kolovod
