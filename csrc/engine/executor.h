// Carries out what all ranks have agreed on: the operations of a bucket, by a backend, into the caller's
// memory or into outputs that it allocates. It holds the backend, one for each device.
//
// What is little is copied into an eager slot (collectives/eager.h) before it is announced, and carried out
// from there. What goes into the slots, and the order of addition, are those of ShmBackend's one exchange:
// the bits of a result do not depend on the way.
#pragma once

#include <memory>
#include <vector>

#include "collectives/backend.h"
#include "collectives/eager.h"
#include "engine/locks.h"
#include "engine/membership.h"
#include "engine/operation.h"

namespace kolovod {

class Executor {
 public:
  // `has_slots`: eager slots are used, on all ranks; of one host only.
  Executor(const Membership& membership, std::unique_ptr<Backend> backend, bool has_slots);

  // Before the operation is announced: what this rank gives goes into its slot, if it is little. True: it can
  // be announced by its slot (engine/announcer.h).
  bool CopyEagerly(Operation& op) REQUIRES(kOperations);
  // Whether what a rank gives is so little that it may go into a slot; of a reduction, the same on all ranks.
  bool FitsSlot(const Operation& op) const;
  // Copies what this rank gives to the operation into a slot of kEagerBytes.
  static void CopyInto(const Operation& op, char* slot);
  // Carries out an operation whose data lie in slots, by rank; of a broadcast, the root's only.
  Status ExecuteFrom(std::vector<const char*> given, Operation& op);
  // The operation is over here, as everything before `position` of the log.
  void Release(const Operation& op, uint64_t position) REQUIRES(kOperations) {
    if (op.claimed != 0) slots_->Release(op.claimed, position);
  }

  // The data of operations that stand next to each other in the log. An error is the end of the world; what
  // concerns this rank alone is in Operation::status. By one thread at a time: who drives, or of operations
  // on a device the thread of its lane.
  Status Execute(const std::vector<OperationPtr>& all);
  // Everything before this position of the log is over here.
  void Executed(uint64_t position) REQUIRES(kLease) {
    if (slots_ != nullptr) slots_->Executed(position);
  }

 private:
  // From the slots, if all that is needed is there; the same on all ranks. Else *done stays false.
  Status ExecuteEager(Operation& op, bool* done);
  Status ExecuteFused(const std::vector<OperationPtr>& ops);
  // What is not fused.
  Status ExecuteAlone(Operation& op, Backend& by);
  Status Broadcast(Operation& op, Backend& by);
  Status Allgather(Operation& op, Backend& by);
  Status Alltoall(Operation& op, Backend& by);
  Status Reducescatter(Operation& op, Backend& by);
  // Where the output of tensor t goes: to the caller's memory if that was given and fits. Without memory the
  // world is aborted, since peers wait for this rank.
  Status OutputFor(Operation& op, size_t t, size_t bytes, char** out);

  const Membership& membership_;
  const std::unique_ptr<Backend> backend_;
  const std::unique_ptr<EagerSlots> slots_;  // Claim to Release: under kOperations
};

}  // namespace kolovod
