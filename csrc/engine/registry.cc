#include "engine/registry.h"

#include <string>
#include <utility>

namespace kolovod {

OperationPtr Registry::Find(uint64_t handle) {
  OperationsLock lock(mutex_);
  const auto found = handles_.find(handle);
  return found == handles_.end() ? nullptr : found->second;
}

Status Registry::Release(uint64_t handle, bool* done) {
  OperationsLock lock(mutex_);
  const auto found = handles_.find(handle);
  if (found == handles_.end()) {
    return Status(Code::kInvalidArgument, "handle " + std::to_string(handle) + " is unknown");
  }
  *done = found->second->done.load(std::memory_order_acquire);
  if (*done) handles_.erase(found);
  return Status();
}

void Registry::Finish(const OperationPtr& op) {
  if (op->on_done != nullptr) {
    driven_.fetch_sub(1);
    finished_.push_back(op);
  }
  op->done.store(true, std::memory_order_release);
}

void Registry::Count(const Operation& op) {
  if (!op.status.ok()) return;
  ++stats_.operations;
  if (op.was_eager) ++stats_.staged;
  stats_.bytes += op.bytes;
}

void Registry::CountBucket(bool has_data, bool by_engine_thread) {
  if (has_data) ++stats_.buckets;
  ++(by_engine_thread ? stats_.drives_thread : stats_.drives_caller);
}

void Registry::RunCallbacks() {
  std::vector<OperationPtr> finished;
  {
    OperationsLock lock(mutex_);
    finished.swap(finished_);
  }
  if (finished.empty()) return;
  calling_back_.store(std::this_thread::get_id());
  for (const OperationPtr& op : finished) {
    op->on_done(*op);
    op->on_done = nullptr;  // what it holds on to goes with it, though a handle may keep the operation
  }
  calling_back_.store(std::thread::id());
}

}  // namespace kolovod
