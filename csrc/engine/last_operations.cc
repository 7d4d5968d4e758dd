// The end of a world: what its ranks did last, written down.
#include <time.h>
#include <unistd.h>

#include <algorithm>

#include "engine/engine.h"
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

void Engine::MakeLateWatch() {
  std::string where;
  if (segment_->belongs()) {
    for (int rank : ranks_) where += (where.empty() ? "process set [" : ", ") + std::to_string(rank);
    where += "]";
  }
  LateOptions options;
  options.topology = topology_;
  options.names = {ranks_, [this](int r) { return liveness_->Describe(r); }};
  options.where = std::move(where);
  options.stacks = std::move(stacks_);
  options.tell_leaders = [this](const Note& note) { control_->TellLeaders(note); };
  late_ = std::make_unique<LateWatch>(*segment_, config_, std::move(options));
  waiter_->SetWatch([this] { late_->Tick(); });
}

void Engine::KeepRecord(Operation& op, int64_t submitted_ns) {
  const std::vector<TensorMeta>& tensors = op.request.tensors;
  const DType dtype = tensors.empty() ? DType::kUInt8 : tensors.front().dtype;
  // A transfer is of one tensor; what is noted is with whom.
  const bool transfer = TraitsOf(op.request.verb).is_transfer;
  const size_t tensors_or_peer = transfer ? static_cast<size_t>(op.request.root + 1) : tensors.size();
  op.record =
      records_->Open(op.request.name, op.request.verb, dtype, tensors_or_peer, op.bytes, submitted_ns);
}

void Engine::KeepStart(const std::vector<OperationPtr>& ops) {
  const int64_t now_ns = RecordNs(BytesOf(ops), ExactTimes());
  for (const OperationPtr& op : ops) records_->Started(op->record, bucket_, now_ns);
}

void Engine::KeepEnd(const std::vector<OperationPtr>& ops) {
  const int64_t now_ns = RecordNs(BytesOf(ops), ExactTimes());
  for (const OperationPtr& op : ops) records_->Ended(op->record, op->status.ok(), now_ns);
}

Status Engine::WithLastOperations(const Status& status) {
  if (last_operations_prefix_.empty()) return status;
  if (!last_operations_path_) {
    const std::string suffix = "-pid" + std::to_string(getpid());
    last_operations_path_ = LastOperations().empty() ? "" : WriteLastOperations(rank_, suffix, status);
    // A rank that was killed cannot, but what it noted is in shared memory: the first of the others does.
    const int dead = status.code() == Code::kRankLost ? waiter_->FindLost() : -1;
    if (dead >= 0 && topology_.on_this_host(dead) && segment_->header().lost_written.exchange(1) == 0) {
      WriteLastOperations(dead, "-lost", status);
    }
  }
  if (last_operations_path_->empty()) return status;
  return Status(status.code(),
                status.message() + "; the last operations of this rank: " + *last_operations_path_);
}

std::string Engine::WriteLastOperations(int rank, const std::string& suffix, const Status& status) {
  const std::vector<int>& local = topology_.local_ranks;
  const auto index = std::find(local.begin(), local.end(), rank) - local.begin();
  RecordFileHeader header;
  header.rank = ranks_[static_cast<size_t>(rank)];
  header.size = size_;
  header.epoch = epoch_;
  header.who = liveness_->Describe(rank);
  header.reason = status.message();
  header.now_ns = NowNs();
  header.wall_ns = WallNs();
  const auto records = ReadRecords(segment_->records(static_cast<int>(index)));
  const std::string path = last_operations_prefix_ + "rank" + std::to_string(header.rank) + suffix + ".jsonl";
  const Status written = WriteNewFile(path, RecordFileText(header, records, kLastOperations));
  return written.ok() ? path : "";  // no disk, no rights: the world's end matters more
}

}  // namespace kolovod
