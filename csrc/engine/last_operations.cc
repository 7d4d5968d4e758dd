#include "engine/last_operations.h"

#include <time.h>
#include <unistd.h>

#include <algorithm>

#include "engine/record_file.h"

namespace kolovod {

namespace {

constexpr size_t kLastOperations = 256;

size_t BytesOf(const std::vector<OperationPtr>& ops) {
  size_t bytes = 0;
  for (const OperationPtr& op : ops) bytes += op->bytes;
  return bytes;
}

int64_t WallNs() {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

}  // namespace

LastOperations::LastOperations(const Membership& membership, Waiter& waiter, std::string path_prefix)
    : membership_(membership),
      waiter_(waiter),
      path_prefix_(std::move(path_prefix)),
      records_(membership.segment->records(membership.topology.local_rank), &membership.self().unrecorded) {}

void LastOperations::Submitted(Operation& op, int64_t submitted_ns) {
  const std::vector<TensorMeta>& tensors = op.request.tensors;
  const DType dtype = tensors.empty() ? DType::kUInt8 : tensors.front().dtype;
  Codec codec = Codec::kNone;  // tensors that are too small have none
  for (const TensorMeta& tensor : tensors) codec = std::max(codec, tensor.codec);
  // A transfer is of one tensor; what is noted is with whom.
  const bool transfer = TraitsOf(op.request.verb).is_transfer;
  const size_t tensors_or_peer = transfer ? static_cast<size_t>(op.request.root + 1) : tensors.size();
  op.record = records_.Open(op.request.name, op.request.verb, dtype, op.request.device(), codec,
                            tensors_or_peer, op.bytes, submitted_ns);
}

void LastOperations::Started(const std::vector<OperationPtr>& ops, uint64_t bucket) {
  const int64_t now_ns = Now(BytesOf(ops));
  for (const OperationPtr& op : ops) records_.Started(op->record, bucket, now_ns);
}

void LastOperations::Ended(const std::vector<OperationPtr>& ops) {
  const int64_t now_ns = Now(BytesOf(ops));
  for (const OperationPtr& op : ops) records_.Ended(op->record, op->status.ok(), now_ns);
}

void LastOperations::Carried(Operation& op, int64_t submitted_ns, int64_t started_ns) {
  Submitted(op, submitted_ns);
  records_.Started(op.record, /*bucket=*/0, started_ns);
  records_.Ended(op.record, op.status.ok(), Now(op.bytes));
}

Status LastOperations::WithFile(const Status& status) {
  if (path_prefix_.empty()) return status;
  if (!path_) {
    path_ = Read().empty() ? "" : Write(membership_.rank, "-pid" + std::to_string(getpid()), status);
    // A rank that was killed cannot, but what it noted is in shared memory: the first of the others does.
    const int dead = status.code() == Code::kRankLost ? waiter_.FindLost() : -1;
    if (dead >= 0 && membership_.topology.on_this_host(dead) &&
        membership_.segment->header().lost_written.exchange(1) == 0) {
      Write(dead, "-lost", status);
    }
  }
  if (path_->empty()) return status;
  return Status(status.code(), status.message() + "; the last operations of this rank: " + *path_);
}

std::string LastOperations::Write(int rank, const std::string& suffix, const Status& status) const {
  const auto r = static_cast<size_t>(rank);
  RecordFileHeader header;
  header.rank = membership_.numbers[r];
  header.size = membership_.size;
  header.epoch = membership_.epoch;
  header.who = membership_.Describe(rank);
  header.reason = status.message();
  header.now_ns = NowNs();
  header.wall_ns = WallNs();
  const auto records = ReadRecords(membership_.segment->records(membership_.topology.local_of[r]));
  const std::string path = path_prefix_ + "rank" + std::to_string(header.rank) + suffix + ".jsonl";
  const Status written = WriteNewFile(path, RecordFileText(header, records, kLastOperations));
  return written.ok() ? path : "";  // no disk, no rights: the world's end matters more
}

}  // namespace kolovod
