// What happens when operations of a bucket are complete, whoever has carried them: they are pending no more,
// are counted, and who waits for them wakes up.
#pragma once

#include <vector>

#include "engine/announcer.h"
#include "engine/last_operations.h"
#include "engine/locks.h"
#include "engine/operation.h"
#include "engine/registry.h"

namespace kolovod {

class Completion {
 public:
  // All must outlive it.
  Completion(Registry& registry, Announcer& announcer, LastOperations& last_operations)
      : registry_(registry), announcer_(announcer), last_operations_(last_operations) {}

  // After that: Registry::RunCallbacks, without the mutex.
  void Complete(const std::vector<OperationPtr>& ops, bool by_engine_thread) REQUIRES(kOperations) {
    bool has_data = false;
    last_operations_.Ended(ops);
    for (const OperationPtr& op : ops) {
      if (op->request.verb == Verb::kJoin) registry_.EndJoin();
      announcer_.Erase(op->request.name);
      registry_.Count(*op);
      has_data = has_data || (op->status.ok() && op->bytes > 0);
      registry_.Finish(op);
    }
    registry_.CountBucket(has_data, by_engine_thread);
    registry_.WakeCallers();
  }

  Registry& registry() { return registry_; }

 private:
  Registry& registry_;
  Announcer& announcer_;
  LastOperations& last_operations_;
};

}  // namespace kolovod
