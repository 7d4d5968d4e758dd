#include "engine/announcer.h"

#include <cstdlib>
#include <utility>

#include "engine/validate.h"

namespace kolovod {
namespace {

// Of the n-th announcement by a bit that was given out at `position`; the same on all ranks.
uint64_t TagOf(uint64_t position, uint32_t n) { return ((position + 1) & INT32_MAX) << 32 | n; }

std::unique_ptr<MessageRingWriter> RingToLeader(const Membership& membership) {
  if (membership.topology.leads()) return nullptr;
  RankBlock& self = membership.self();
  return std::make_unique<MessageRingWriter>(self.control_ring, kControlRingBytes, &self.control_head,
                                             std::vector<std::atomic<uint64_t>*>{&self.control_tail},
                                             membership.epoch);
}

}  // namespace

Announcer::Announcer(const Membership& membership, OperationsMutex& mutex, Log& log)
    : membership_(membership),
      leads_(membership.topology.leads()),
      hosts_(membership.topology.hosts()),
      mutex_(mutex),
      log_(log),
      by_id_(membership.segment->layout().cache_capacity + kEagerSlots),
      to_leader_(RingToLeader(membership)) {}

bool Announcer::Announce(const OperationPtr& op) {
  Register(op);
  if (!op->request.called_from.empty()) lines_.Add(op->request.called_from);
  bool lost = false;
  if (membership_.faults != nullptr) {
    const auto r = static_cast<size_t>(membership_.rank);
    membership_.faults->Pause(membership_.rank);
    lost = membership_.faults->drop[r].load() > 0 && membership_.faults->drop[r].fetch_sub(1) > 0;
  }
  std::string body = EncodeRequest(op->request);
  const auto cached = cache_.find(op->request.name);
  if (cached != cache_.end() && cached->second.body == body) {
    const auto id = static_cast<uint32_t>(cached->second.id);
    op->announced_id = cached->second.id;
    op->tag = TagOf(cached->second.position, cached->second.announced++);
    if (eager_copy_) (void)eager_copy_(*op);
    by_id_[id] = op;
    ++stats_.bit_announcements;
    if (lost || !log_.AnnounceId(id)) return false;
    if (membership_.faults != nullptr) membership_.faults->Shuffle();
    if (hosts_ > 1) {
      Tell(Note{Note::Kind::kId, membership_.rank, id, 0, {}});
      return false;
    }
    log_.AppendId(id);
    return true;
  }
  const bool by_slot = eager_copy_ && op->tag != 0 && eager_copy_(*op) && !some_have_joined_;
  if (lost) return false;
  if (by_slot) return AnnounceBySlot(op, std::move(body));
  SendInFull(op, std::move(body));
  return false;
}

bool Announcer::AnnounceBySlot(const OperationPtr& op, std::string body) {
  const auto id = static_cast<uint32_t>(membership_.segment->layout().cache_capacity + EagerIndexOf(op->tag));
  op->announced_id = static_cast<int32_t>(id);
  by_id_[id] = op;
  const std::vector<int64_t> rows = OwnRows(op->request);
  const std::hash<std::string> hash;
  if (rows.empty()) {
    roll_call_->Announce(op->tag, hash(body), rows);
  } else {
    Request alike = op->request;
    alike.splits.clear();
    for (TensorMeta& tensor : alike.tensors) tensor.shape.front() = 0;
    roll_call_->Announce(op->tag, hash(EncodeRequest(alike)), rows);
  }
  if (membership_.faults != nullptr) membership_.faults->Shuffle();
  const RollCall::Seen seen = roll_call_->Look(op->tag);
  if (seen == RollCall::Seen::kInFull) {
    by_id_[id] = nullptr;
    SendInFull(op, std::move(body));
    return false;
  }
  ++stats_.slot_announcements;
  if (seen != RollCall::Seen::kAll || !roll_call_->First(op->tag)) return false;
  log_.AppendId(id);
  return true;
}

OperationPtr Announcer::TakeBySlot(OperationPtr op) {
  if (roll_call_->Agrees(op->tag)) {
    const Request& request = op->request;
    const size_t count = OwnRows(request).size();
    if (count == 0) return op;
    SetRows(request.verb, roll_call_->Rows(op->tag, count), &op->rows, &op->splits);
    // Else rank 0 says what is wrong; on all ranks, which have the same numbers.
    if (RowsAreSound(*op)) return op;
    op->rows.clear();
    op->splits.reset();
  }
  SendInFull(op, EncodeRequest(op->request));
  return nullptr;
}

// Before it is announced: who waits for this rank looks whether there is something to wake it for.
void Announcer::Register(const OperationPtr& op) {
  pending_[op->request.name] = op;
  CountPending();
}

void Announcer::CountPending() {
  membership_.segment->rank(membership_.topology.local_rank)
      .pending.store(static_cast<uint32_t>(pending_.size() + beside_), std::memory_order_seq_cst);
}

void Announcer::CountBeside(size_t count) {
  beside_ = count;
  CountPending();
}

void Announcer::CountInstant(const Operation& op) {
  if (!op.request.called_from.empty()) lines_.Add(op.request.called_from);
  ++stats_.instant;
}

void Announcer::Join(const OperationPtr& op) {
  Register(op);
  join_ = op;
  Erase("");
}

void Announcer::Erase(const std::string& name) {
  passed_ += pending_.erase(name);
  CountPending();
  if (join_ != nullptr && pending_.size() == 1) Announce(std::exchange(join_, nullptr));
}

void Announcer::SendInFull(const OperationPtr& op, std::string body) {
  ++stats_.full_announcements;
  const bool again = std::exchange(op->announced_id, kNoId) != kNoId;
  const uint64_t tag = roll_call_ && !again && (op->tag & kUnnamedTag) != 0 ? op->tag : 0;
  if (tag != 0) roll_call_->InFull(tag);
  if (!op->request.called_from.empty()) {
    Request request = op->request;
    request.callers = lines_.Of(request.called_from);
    body = EncodeRequest(request);
  }
  if (membership_.faults != nullptr) membership_.faults->Shuffle();
  Tell(Note{Note::Kind::kRequest, membership_.rank, tag, 0, std::move(body)});
}

void Announcer::Tell(Note note) {
  if (leads_) {
    stats_.message_bytes += note.body.size();
    own_notes_.push_back(std::move(note));
    outgoing_.store(true, std::memory_order_seq_cst);
  } else {
    const uint64_t before = to_leader_->bytes_pushed();
    to_leader_->Push(EncodeNote(note));
    stats_.message_bytes += to_leader_->bytes_pushed() - before;
    bool moved = false;
    to_leader_->Flush(&moved);
    outgoing_.store(!to_leader_->empty(), std::memory_order_seq_cst);
  }
  membership_.segment->WakeWaiting();
  // Ranks of other hosts may wait for this, and cannot wake our leader.
  if (hosts_ > 1) membership_.segment->WakeUndriven(0);
}

bool Announcer::CanSend() const {
  return outgoing_.load(std::memory_order_seq_cst) && (leads_ || to_leader_->HasRoom());
}

bool Announcer::Flush() {
  bool moved = false;
  OperationsLock lock(mutex_);
  to_leader_->Flush(&moved);
  outgoing_.store(!to_leader_->empty(), std::memory_order_relaxed);
  return moved;
}

std::vector<Note> Announcer::TakeOwnNotes() {
  if (!outgoing_.load(std::memory_order_seq_cst)) return {};
  OperationsLock lock(mutex_);
  outgoing_.store(false, std::memory_order_relaxed);
  return std::exchange(own_notes_, {});
}

Status Announcer::TakeBit(uint32_t id, uint64_t position, OperationPtr* op) {
  OperationsLock lock(mutex_);
  if (id >= by_id_.size() || by_id_[id] == nullptr) {
    return Status(Code::kInternal, "log entry " + std::to_string(position) + " names bit " +
                                       std::to_string(id) + ", which this rank has not announced");
  }
  *op = std::move(by_id_[id]);
  if (id >= membership_.segment->layout().cache_capacity) {
    *op = TakeBySlot(std::move(*op));
  } else {
    const Cached& cached = cache_[(*op)->request.name];
    (*op)->rows = cached.rows;
    (*op)->splits = cached.splits;
  }
  if (*op != nullptr) (*op)->in_log = true;
  return Status();
}

Status Announcer::Apply(const Response& response, uint64_t position, std::deque<OperationPtr>* ready) {
  OperationsLock lock(mutex_);
  const auto found = pending_.find(response.name);
  OperationPtr op = found == pending_.end() ? nullptr : found->second;
  switch (response.kind) {
    case Response::Kind::kForget:
      cache_.erase(response.name);
      if (op != nullptr && op->announced_id == response.id) Forget(op);
      op = nullptr;
      break;
    case Response::Kind::kForgetAll:
      cache_.clear();
      some_have_joined_ = true;
      for (const auto& [name, pending] : pending_) Forget(pending);
      op = nullptr;
      break;
    case Response::Kind::kLinks:
      if (response.rows.size() != 1 || response.rows[0].size() != 3) {
        return Status(Code::kInternal, "rank 0 sent a malformed cost of links");
      }
      op = std::make_shared<Operation>();
      op->links = LinkCost{};
      op->links->latency_us = static_cast<double>(response.rows[0][0]) / 1000;
      op->links->bytes_per_us = static_cast<double>(response.rows[0][1]) / 1000;
      op->links->confirmed = response.rows[0][2] != 0;
      break;
    case Response::Kind::kExecute:
    case Response::Kind::kError:
      if (op != nullptr) {
        KV_RETURN_IF_ERROR(Execute(op, response, position));
        break;
      }
      // Null: an error of the ranks that have not joined.
      if (!response.request.empty()) op = MakeZeros(response);
      if (op == nullptr && response.kind != Response::Kind::kError) {
        return Status(Code::kInternal, "the log orders '" + response.name + "', which is not pending here");
      }
      break;
  }
  ready->push_back(std::move(op));
  return Status();
}

Status Announcer::Execute(const OperationPtr& op, const Response& response, uint64_t position) {
  if (op->request.verb == Verb::kJoin) some_have_joined_ = false;
  op->in_log = true;
  op->rows = response.rows;
  op->splits = response.splits;
  if (response.kind == Response::Kind::kError) {
    op->status = Status(Code::kMismatch, response.error);
    return Status();
  }
  if (!RowsAreSound(*op)) {
    return Status(Code::kInternal, "rank 0 sent a malformed response for '" + response.name + "'");
  }
  if (response.id == kNoId) return Status();
  if (response.id < 0 || static_cast<size_t>(response.id) >= by_id_.size()) {
    return Status(Code::kInternal, "rank 0 assigned bit " + std::to_string(response.id) + ", but there are " +
                                       std::to_string(by_id_.size()));
  }
  cache_[response.name] =
      Cached{response.id, EncodeRequest(op->request), response.rows, response.splits, position};
  return Status();
}

bool Announcer::RowsAreSound(const Operation& op) const {
  return RowsFit(op.request, op.rows, membership_.rank, membership_.size) &&
         SplitsFit(op.request, op.splits.get(), membership_.topology);
}

// The bit stands for nothing any more: what was announced by it and is not in the log is announced in full.
void Announcer::Forget(const OperationPtr& op) {
  if (op->announced_id == kNoId || op->in_log) return;
  by_id_[static_cast<size_t>(op->announced_id)] = nullptr;
  if ((op->tag & kUnnamedTag) == 0) op->tag = 0;  // not all ranks have one
  SendInFull(op, EncodeRequest(op->request));
}

OperationPtr Announcer::MakeZeros(const Response& response) {
  std::optional<Request> request = DecodeRequest(response.request);
  if (!request || !TraitsOf(request->verb).allows_joined) return nullptr;
  auto op = std::make_shared<Operation>();
  op->request = std::move(*request);
  for (const TensorMeta& meta : op->request.tensors) {
    const size_t count = ElementsOf(meta);
    const size_t bytes = count * SizeOf(meta.dtype);
    OutputBuffer& zeros = op->buffers.emplace_back();
    zeros.bytes = bytes;
    if (meta.device == Device::kHost) {
      zeros.data.reset(static_cast<char*>(std::calloc(bytes + 1, 1)));
      if (zeros.data == nullptr) return nullptr;
    }
    op->counts.push_back(count);
    op->inputs.push_back(zeros.data.get());
    op->outputs.push_back(zeros.data.get());
    op->bytes += bytes;
  }
  op->in_log = true;
  return op;
}

}  // namespace kolovod
