// Messages between two ranks, as the engine drives them.
#include "engine/engine.h"

namespace kolovod {

Status Engine::StepTransfers(bool* progressed) {
  if (!transfers_->HasWork()) return Status();
  *progressed = true;
  const Status status = transfers_->Progress();
  const std::vector<OperationPtr> done = transfers_->TakeDone();
  if (!done.empty()) CompleteTransfers(done);
  return status.code() == Code::kRankLost && !segment_->revoked() ? EndForAll(status) : status;
}

void Engine::CompleteTransfers(const std::vector<OperationPtr>& ops) {
  {
    std::lock_guard lock(mutex_);
    KeepEnd(ops);
    for (const OperationPtr& op : ops) {
      EraseLocked(*op);
      if (op->status.ok()) {
        ++stats_.operations;
        stats_.bytes += op->bytes;
      }
      FinishLocked(op);
    }
    if (sleeping_callers_ > 0) changed_.notify_all();
  }
  RunCallbacks();
}

// Not Drive: that would stay in a bucket until the others have done their part.
void Engine::StartTransfer() {
  if (TryLease(/*background=*/false, nullptr)) {
    bool progressed = false;
    const Status status = waiter_->MustStop() ? waiter_->Stopped() : StepTransfers(&progressed);
    if (!status.ok()) (void)EndBy(status);
    ReleaseLease();
    return;
  }
  if (self().driver_sleeping.load(std::memory_order_seq_cst) != 0) segment_->RingDriver(topology_.local_rank);
  segment_->RingIdle(topology_.local_rank);
}

}  // namespace kolovod
