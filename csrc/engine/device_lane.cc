#include "engine/device_lane.h"

#include <pthread.h>

#include <string>
#include <utility>

namespace kolovod {

DeviceLane::DeviceLane(const Membership& membership, Completion completion, const std::atomic<bool>& stop)
    : membership_(membership), completion_(completion), stop_(stop) {
  // Peers that die are noticed by the engine thread, or by who drives.
  auto look = [this] {
    Segment& segment = *membership_.segment;
    if (segment.revoked()) return segment.RevokedStatus();
    if (stop_.load() || stopping_.load()) return Status(Code::kShutDown, "this rank was shut down");
    return Status();
  };
  auto external =
      std::make_unique<ExternalBackend>(nullptr, membership.rank, *membership.segment, look, stop_);
  external_ = external.get();
  executor_ = std::make_unique<Executor>(membership, std::move(external), /*has_slots=*/false);
  thread_ = std::thread([this] {
    pthread_setname_np(pthread_self(), "kv-device");
    Serve();
  });
}

DeviceLane::~DeviceLane() { Stop(); }

Status DeviceLane::Choose(int gpu) {
  if (gpu_ >= 0 && gpu_ != gpu) {
    return Status(Code::kInvalidArgument, "a tensor on cuda:" + std::to_string(gpu) +
                                              ", but this rank has used cuda:" + std::to_string(gpu_) +
                                              " before: with the backend nccl a rank has one GPU; call "
                                              "torch.cuda.set_device(kolovod.local_rank()) first");
  }
  gpu_ = gpu;
  external_->SetDevice(gpu);
  return Status();
}

void DeviceLane::Hold(OperationPtr op) {
  held_bytes_ += op->bytes;
  held_.push_back(std::move(op));
}

bool DeviceLane::ShouldBegin(const std::deque<OperationPtr>& ready, size_t taken) const {
  if (idle()) return true;
  size_t bytes = held_bytes_;
  for (size_t i = 0; i < taken; ++i) {
    if (ready[i] == nullptr || !Takes(*ready[i])) continue;
    if (ready[i]->request.verb == Verb::kJoin) return true;
    bytes += ready[i]->bytes;
  }
  return bytes >= static_cast<size_t>(membership_.config.fusion_bytes);
}

void DeviceLane::Begin() {
  batches_.fetch_add(1, std::memory_order_seq_cst);
  MutexLock lock(mutex_);
  queue_.push_back(std::exchange(held_, {}));
  held_bytes_ = 0;
  changed_.notify_all();
}

void DeviceLane::Serve() {
  while (true) {
    std::vector<OperationPtr> batch;
    {
      MutexLock lock(mutex_);
      while (queue_.empty() && !stopping_.load()) changed_.wait(lock.native());
      if (stopping_.load()) return;
      batch = std::move(queue_.front());
      queue_.pop_front();
    }
    if (!Carry(batch)) return;
    batches_.fetch_sub(1, std::memory_order_seq_cst);
    // Who waits for these, and who begins what is held meanwhile.
    membership_.WakeDriver();
    membership_.WakeIdle();
  }
}

// What fails here, fails with everything else that is pending: the world is over (Driver::Break).
bool DeviceLane::Carry(const std::vector<OperationPtr>& batch) {
  const Status status = executor_->Execute(batch);
  if (!status.ok()) {
    if (status.code() != Code::kShutDown) membership_.segment->Revoke(status.code(), status.message());
    return false;
  }
  OperationsLock lock(completion_.registry().mutex());
  completion_.Complete(batch, /*by_engine_thread=*/true);
  return true;
}

void DeviceLane::Stop() {
  {
    MutexLock lock(mutex_);
    stopping_.store(true);
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void DeviceLane::Forget() {
  if (thread_.joinable()) thread_.detach();
}

}  // namespace kolovod
