// The short way of a small operation whose caller waits: from submission to completion without the log
// (collectives/instant.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "collectives/instant.h"
#include "engine/announcer.h"
#include "engine/executor.h"
#include "engine/last_operations.h"
#include "engine/locks.h"
#include "engine/membership.h"
#include "engine/operation.h"
#include "engine/registry.h"

namespace kolovod {

class InstantPath {
 public:
  // Null where ranks share cores or may not spin, so that none goes this way. All must outlive it. `over`:
  // the world is, or this rank shuts down.
  static std::unique_ptr<InstantPath> Make(const Membership& membership, Registry& registry,
                                           Announcer& announcer, Executor& executor,
                                           LastOperations& last_operations, std::function<bool()> over);

  // Whether the operation goes this way, as far as this rank sees. True: Exchange follows.
  bool Begin(const Operation& op) REQUIRES(kOperations);
  // True: it is carried out here and on all ranks. False: it goes by the log. End follows.
  bool Exchange(Operation& op) EXCLUDES(kOperations);
  // `met`: as Exchange said. If so, it is complete from now on; after that: Registry::RunCallbacks, without
  // the mutex.
  void End(const OperationPtr& op, bool met) REQUIRES(kOperations);
  // An operation of that name is between Begin and End.
  bool Carries(const std::string& name) const REQUIRES(kOperations) {
    return op_ != nullptr && op_->request.name == name;
  }

 private:
  InstantPath(const Membership& membership, Registry& registry, Announcer& announcer, Executor& executor,
              LastOperations& last_operations, std::function<bool()> over);
  // Writes what the operation is, and what this rank gives, into the slot.
  void Announce(const Operation& op);
  // False: what the ranks give does not fit together, so it goes by the log.
  bool Execute(Operation& op) const;

  const Membership& membership_;
  Registry& registry_;
  Announcer& announcer_;
  Executor& executor_;
  LastOperations& last_operations_;
  const std::function<bool()> over_;
  const int64_t patience_ns_;
  const Operation* op_ GUARDED_BY(kOperations) = nullptr;
  // From Begin to End one thread's.
  InstantSlots slots_;
  uint64_t tag_ = 0;
  int64_t begun_ns_ = 0, met_ns_ = 0;
};

}  // namespace kolovod
