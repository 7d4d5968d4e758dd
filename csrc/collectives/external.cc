#include "collectives/external.h"

#include <chrono>
#include <thread>

namespace kolovod {
namespace {

using std::chrono::duration;
using std::chrono::milliseconds;

constexpr milliseconds kLook{20};

ExternalJob ReductionJob(Verb verb, const FusedRange& range) {
  ExternalJob job;
  job.verb = verb;
  job.dtype = range.dtype;
  job.op = range.op;
  job.prescale = range.prescale;
  job.postscale = range.postscale;
  job.pieces = range.pieces;
  job.name = *range.name;
  return job;
}

ExternalJob MoveJob(Verb verb, const void* in, void* out, const std::vector<size_t>& bytes) {
  ExternalJob job;
  job.verb = verb;
  job.dtype = DType::kUInt8;
  job.pieces = {{in, out, 0}};
  job.sizes = bytes;
  return job;
}

}  // namespace

Status ExternalBackend::Allreduce(const FusedRange& range) {
  if (!handed_over_.load()) return own_->Allreduce(range);
  return Run(ReductionJob(Verb::kAllreduce, range));
}

Status ExternalBackend::Broadcast(const Piece& piece, DType dtype, int root, const std::string& name) {
  if (!handed_over_.load()) return own_->Broadcast(piece, dtype, root, name);
  ExternalJob job;
  job.verb = Verb::kBroadcast;
  job.dtype = dtype;
  job.root = root;
  job.pieces = {piece};
  job.name = name;
  return Run(std::move(job));
}

Status ExternalBackend::Allgather(const void* in, char* out, const std::vector<size_t>& bytes) {
  if (!handed_over_.load()) return own_->Allgather(in, out, bytes);
  return Run(MoveJob(Verb::kAllgather, in, out, bytes));
}

Status ExternalBackend::Alltoall(const char* in, char* out, const Splits& rows, size_t row_bytes) {
  if (!handed_over_.load()) return own_->Alltoall(in, out, rows, row_bytes);
  ExternalJob job = MoveJob(Verb::kAlltoall, in, out, {});
  for (int r = 0; r < rows.size(); ++r) {
    job.sizes.push_back(static_cast<size_t>(rows.sent(rank_, r)) * row_bytes);
    job.received.push_back(static_cast<size_t>(rows.received(r, rank_)) * row_bytes);
  }
  job.total = rows.TotalBytes(row_bytes);
  return Run(std::move(job));
}

Status ExternalBackend::Reducescatter(const FusedRange& range, const std::vector<size_t>& counts) {
  if (!handed_over_.load()) return own_->Reducescatter(range, counts);
  ExternalJob job = ReductionJob(Verb::kReducescatter, range);
  job.sizes = counts;
  return Run(std::move(job));
}

Status ExternalBackend::Run(ExternalJob job) {
  MutexLock lock(mutex_);
  job.token = ++last_token_;
  job.device = device_.load();
  offered_ = std::move(job);
  changed_.notify_all();
  while (finished_token_ != last_token_) {
    changed_.wait_for(lock.native(), kLook);
    lock.Unlock();  // a driver serves signals with the GIL, which the foreign thread has
    const Status status = look_();
    lock.Lock();
    if (status.ok()) continue;
    // The caller may free the tensors once this returns.
    offered_.reset();
    given_up_token_ = last_token_;
    while (memory_open_) changed_.wait(lock.native());
    return status;
  }
  if (error_.empty()) return Status();
  const std::string text = "the external engine failed: " + error_;
  lock.Unlock();
  return Blame(text);
}

Status ExternalBackend::Blame(const std::string& text) {
  const auto deadline = std::chrono::steady_clock::now() + until_death_shows_;
  while (true) {
    // Whether it is over is asked first: this thread may be away for longer than all of that time.
    const bool is_last = std::chrono::steady_clock::now() >= deadline;
    KV_RETURN_IF_ERROR(look_());
    if (is_last) break;
    std::this_thread::sleep_for(kLook);
  }
  segment_.Revoke(Code::kInternal, text);
  return Status(Code::kInternal, text);
}

Status ExternalBackend::NextJob(double timeout_s, ExternalJob* job) {
  const auto deadline = std::chrono::steady_clock::now() + duration<double>(timeout_s);
  MutexLock lock(mutex_);
  while (!offered_.has_value()) {
    if (segment_.revoked()) return segment_.RevokedStatus();
    if (stop_.load()) return Status(Code::kShutDown, "the engine was shut down");
    if (std::chrono::steady_clock::now() >= deadline) return Status(Code::kTimeout, "no bucket yet");
    changed_.wait_for(lock.native(), kLook);
  }
  *job = std::move(*offered_);
  offered_.reset();
  return Status();
}

Status ExternalBackend::OpenMemory(uint64_t token) {
  MutexLock lock(mutex_);
  if (token != last_token_ || token == given_up_token_) {
    return Status(Code::kShutDown, "bucket " + std::to_string(token) + " was given up");
  }
  memory_open_ = true;
  return Status();
}

void ExternalBackend::CloseMemory() {
  MutexLock lock(mutex_);
  memory_open_ = false;
  changed_.notify_all();
}

Status ExternalBackend::JobDone(uint64_t token, const std::string& error) {
  MutexLock lock(mutex_);
  if (token != last_token_) {
    return Status(Code::kInvalidArgument, "bucket_done: token " + std::to_string(token) +
                                              " is not the bucket in flight (" + std::to_string(last_token_) +
                                              ")");
  }
  error_ = error;
  finished_token_ = token;
  changed_.notify_all();
  return Status();
}

}  // namespace kolovod
