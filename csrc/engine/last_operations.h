// What this rank notes of its operations in the segment (transport/operation_record.h), and the file that
// they are written to when the world ends.
#pragma once

#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "engine/locks.h"
#include "engine/membership.h"
#include "engine/operation.h"
#include "transport/operation_record.h"
#include "transport/waiter.h"

namespace kolovod {

class LastOperations {
 public:
  // `path_prefix`: what the names of files begin with, folder included; empty: none are written.
  LastOperations(const Membership& membership, Waiter& waiter, std::string path_prefix);

  // The time for a record of an operation of `bytes`.
  int64_t Now(size_t bytes) const { return RecordNs(bytes, keeps_exact_times()); }
  void Submitted(Operation& op, int64_t submitted_ns) REQUIRES(kOperations);
  void Started(const std::vector<OperationPtr>& ops, uint64_t bucket) REQUIRES(kLease);
  // Of those whose status is final.
  void Ended(const std::vector<OperationPtr>& ops) REQUIRES(kOperations);

  // Of one that is over: when it was submitted, and when its data were there.
  void Carried(Operation& op, int64_t submitted_ns, int64_t started_ns) REQUIRES(kOperations);
  bool keeps_exact_times() const { return exact_times_.load(std::memory_order_relaxed) > 0; }

  // What this rank has submitted last and all that is pending here, by order of submission.
  std::vector<OperationRecord> Read() const {
    return ReadRecords(membership_.segment->records(membership_.topology.local_rank));
  }
  // Any thread. While anybody wants it the times are exact for small operations, too (see RecordNs): a call
  // with false takes back one with true.
  void KeepExactTimes(bool exact) { exact_times_.fetch_add(exact ? 1 : -1, std::memory_order_relaxed); }

  // The world is over, as `status` says: writes the last operations down, once. Returns the status, and where
  // they are.
  Status WithFile(const Status& status) REQUIRES(kOperations);

 private:
  // Of a rank of this host. The path, or empty if it could not be written.
  std::string Write(int rank, const std::string& suffix, const Status& status) const;

  const Membership& membership_;
  Waiter& waiter_;
  const std::string path_prefix_;
  std::atomic<int> exact_times_{0};
  OperationRecorder records_;
  std::optional<std::string> path_ GUARDED_BY(kOperations);  // empty: could not be written
};

}  // namespace kolovod
