#include "engine/control.h"

#include <chrono>
#include <thread>
#include <utility>

#include "engine/validate.h"

namespace kolovod {
namespace {

// Of the n-th announcement by a bit that was given out at `position`; the same on all ranks.
uint64_t TagOf(uint64_t position, uint32_t n) { return ((position + 1) & INT32_MAX) << 32 | n; }

}  // namespace

Control::Control(Segment& segment, const Topology& topology, std::vector<int> ranks, uint32_t epoch,
                 const Config& config, std::mutex& mutex, LoopbackFaults* faults, Uplink* uplink)
    : segment_(segment),
      topology_(topology),
      tree_(topology.hosts(), topology.host()),
      rank_(topology.rank),
      uplink_(uplink),
      mutex_(mutex),
      faults_(faults),
      log_(segment),
      by_id_(segment.layout().cache_capacity + kEagerSlots),
      leaving_(static_cast<size_t>(topology.hosts())),
      responses_in_(segment.broadcast_ring(), kBroadcastRingBytes, &segment.header().broadcast_head,
                    &segment.rank(topology.local_rank).broadcast_tail, epoch) {
  if (!topology_.leads()) {
    RankBlock& self = segment.rank(topology_.local_rank);
    to_leader_ = std::make_unique<RingWriter>(self.control_ring, kControlRingBytes, &self.control_head,
                                              std::vector<std::atomic<uint64_t>*>{&self.control_tail}, epoch);
    return;
  }
  std::vector<std::atomic<uint64_t>*> tails;
  for (int r = 0; r < topology_.local_size(); ++r) {
    RankBlock& block = segment.rank(r);
    tails.push_back(&block.broadcast_tail);
    from_ranks_.emplace_back(block.control_ring, kControlRingBytes, &block.control_head, &block.control_tail,
                             epoch);
  }
  responses_out_ = std::make_unique<RingWriter>(segment.broadcast_ring(), kBroadcastRingBytes,
                                                &segment.header().broadcast_head, std::move(tails), epoch);
  if (uplink_ != nullptr) {
    tally_ = std::make_unique<Tally>(segment.layout().cache_capacity, tree_.children.size() + 1);
  }
  if (!topology_.is_root()) return;
  negotiator_ = std::make_unique<Negotiator>(std::move(ranks), static_cast<size_t>(config.cache_capacity));
}

ControlStats Control::stats() const {
  ControlStats stats = stats_;
  if (uplink_ != nullptr) {
    stats.messages_sent = uplink_->sent_frames();
    stats.messages_received = uplink_->received_frames();
  }
  return stats;
}

bool Control::Announce(const OperationPtr& op) {
  Register(op);
  bool lost = false;
  if (faults_ != nullptr) {
    const auto r = static_cast<size_t>(rank_);
    faults_->Pause(rank_);
    lost = faults_->drop[r].load() > 0 && faults_->drop[r].fetch_sub(1) > 0;
  }
  std::string body = EncodeRequest(op->request);
  const auto cached = cache_.find(op->request.name);
  if (cached != cache_.end() && cached->second.body == body) {
    const auto id = static_cast<uint32_t>(cached->second.id);
    op->announced_id = cached->second.id;
    op->tag = TagOf(cached->second.position, cached->second.announced++);
    if (stage_) (void)stage_(*op);
    by_id_[id] = op;
    ++stats_.bit_announcements;
    if (lost || !log_.AnnounceId(id)) return false;
    if (faults_ != nullptr) faults_->Shuffle();
    if (topology_.hosts() > 1) {
      Tell(Note{Note::Kind::kId, rank_, id, 0, {}});
      return false;
    }
    log_.AppendId(id);
    return true;
  }
  const bool by_slot = stage_ && op->tag != 0 && stage_(*op) && !some_have_joined_;
  if (lost) return false;
  if (by_slot) return AnnounceBySlot(op, std::move(body));
  SendInFull(op, std::move(body));
  return false;
}

bool Control::AnnounceBySlot(const OperationPtr& op, std::string body) {
  const auto id = static_cast<uint32_t>(segment_.layout().cache_capacity + EagerIndexOf(op->tag));
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
  if (faults_ != nullptr) faults_->Shuffle();
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

OperationPtr Control::TakeBySlot(OperationPtr op) {
  if (roll_call_->Agrees(op->tag)) {
    const Request& request = op->request;
    const size_t count = OwnRows(request).size();
    if (count == 0) return op;
    SetRows(request.verb, roll_call_->Rows(op->tag, count), &op->rows, &op->splits);
    // Else rank 0 says what is wrong; on all ranks, which have the same numbers.
    if (RowsFit(request, op->rows, rank_, topology_.size()) &&
        SplitsFit(request, op->splits.get(), topology_)) {
      return op;
    }
    op->rows.clear();
    op->splits.reset();
  }
  SendInFull(op, EncodeRequest(op->request));
  return nullptr;
}

// Before it is announced: who waits for this rank looks whether there is something to wake it for.
void Control::Register(const OperationPtr& op) {
  pending_[op->request.name] = op;
  CountPending();
}

void Control::CountPending() {
  segment_.rank(topology_.local_rank)
      .pending.store(static_cast<uint32_t>(pending_.size() + beside_), std::memory_order_seq_cst);
}

void Control::CountBeside(size_t count) {
  beside_ = count;
  CountPending();
}

void Control::Join(const OperationPtr& op) {
  Register(op);
  join_ = op;
  Erase("");
}

void Control::Erase(const std::string& name) {
  pending_.erase(name);
  CountPending();
  if (join_ != nullptr && pending_.size() == 1) Announce(std::exchange(join_, nullptr));
}

void Control::SendInFull(const OperationPtr& op, std::string body) {
  ++stats_.full_announcements;
  const bool again = std::exchange(op->announced_id, kNoId) != kNoId;
  const uint64_t tag = roll_call_ && !again && (op->tag & kUnnamedTag) != 0 ? op->tag : 0;
  if (tag != 0) roll_call_->InFull(tag);
  if (faults_ != nullptr) faults_->Shuffle();
  Tell(Note{Note::Kind::kRequest, rank_, tag, 0, std::move(body)});
}

void Control::Tell(Note note) {
  if (topology_.leads()) {
    stats_.message_bytes += note.body.size();
    inbox_.push_back(std::move(note));
    outgoing_.store(true, std::memory_order_seq_cst);
  } else {
    const uint64_t before = to_leader_->bytes_pushed();
    to_leader_->Push(EncodeNote(note));
    stats_.message_bytes += to_leader_->bytes_pushed() - before;
    bool moved = false;
    to_leader_->Flush(&moved);
    outgoing_.store(!to_leader_->empty(), std::memory_order_seq_cst);
  }
  segment_.RingWaiting();
  // Ranks of other hosts may wait for this, and cannot wake our leader.
  if (topology_.hosts() > 1) segment_.RingUndriven(0);
}

bool Control::HasInput() {
  if (log_.Read(position_).has_value() || CanSend() || (!arrived_ && responses_in_.HasData()) ||
      (uplink_ != nullptr && uplink_->Look())) {
    return true;
  }
  for (const RingReader& reader : from_ranks_) {
    if (reader.HasData()) return true;
  }
  return false;
}

// What waits for room in a ring can be sent once its readers have read: they wake this rank then.
bool Control::CanSend() {
  if (!topology_.leads()) return outgoing_.load(std::memory_order_seq_cst) && to_leader_->HasRoom();
  return outgoing_.load(std::memory_order_seq_cst) || (!responses_out_->empty() && responses_out_->HasRoom());
}

Status Control::Pump() {
  if (topology_.leads()) {
    KV_RETURN_IF_ERROR(Lead());
  } else if (CanSend()) {
    bool moved = false;
    {
      std::lock_guard lock(mutex_);
      to_leader_->Flush(&moved);
      outgoing_.store(!to_leader_->empty(), std::memory_order_relaxed);
    }
    if (moved) Wake(0);
  }
  return TakeResponse();
}

// One at most, however many have come: what this rank has not executed stays in the ring, whose room thereby
// bounds how far the log runs ahead of the slowest rank.
Status Control::TakeResponse() {
  bool freed = false;
  while (!arrived_ && responses_in_.HasData()) KV_RETURN_IF_ERROR(responses_in_.Next(&arrived_, &freed));
  if (freed) Wake(0);
  return Status();
}

Status Control::ReadLog(std::deque<OperationPtr>* ready) {
  while (const auto entry = log_.Read(position_)) {
    if (!entry->is_message) {
      std::lock_guard lock(mutex_);
      if (entry->id >= by_id_.size() || by_id_[entry->id] == nullptr) {
        return Status(Code::kInternal, "log entry " + std::to_string(position_) + " names bit " +
                                           std::to_string(entry->id) + ", which this rank has not announced");
      }
      OperationPtr op = std::move(by_id_[entry->id]);
      if (entry->id >= segment_.layout().cache_capacity) {
        op = TakeBySlot(std::move(op));
      } else {
        const Cached& cached = cache_[op->request.name];
        op->rows = cached.rows;
        op->splits = cached.splits;
      }
      if (op != nullptr) op->in_log = true;
      ready->push_back(std::move(op));
    } else {
      // Rank 0 appends the entry after the whole message is in the ring.
      KV_RETURN_IF_ERROR(TakeResponse());
      const std::optional<Response> response = arrived_ ? DecodeResponse(*arrived_) : std::nullopt;
      if (!response) return Status(Code::kInternal, "rank 0 sent a malformed response, or none");
      arrived_.reset();
      std::lock_guard lock(mutex_);
      KV_RETURN_IF_ERROR(Apply(*response, ready));
    }
    ++position_;
  }
  return Status();
}

Status Control::Apply(const Response& response, std::deque<OperationPtr>* ready) {
  const auto found = pending_.find(response.name);
  if (response.kind == Response::Kind::kForget) {
    cache_.erase(response.name);
    if (found != pending_.end() && found->second->announced_id == response.id) Forget(found->second);
    ready->push_back(nullptr);
    return Status();
  }
  if (response.kind == Response::Kind::kForgetAll) {
    cache_.clear();
    some_have_joined_ = true;
    for (const auto& [name, op] : pending_) Forget(op);
    ready->push_back(nullptr);
    return Status();
  }
  if (response.kind == Response::Kind::kLinks) {
    if (response.rows.size() != 1 || response.rows[0].size() != 3) {
      return Status(Code::kInternal, "rank 0 sent a malformed cost of links");
    }
    auto told = std::make_shared<Operation>();
    told->links = LinkCost{};
    told->links->latency_us = static_cast<double>(response.rows[0][0]) / 1000;
    told->links->bytes_per_us = static_cast<double>(response.rows[0][1]) / 1000;
    told->links->confirmed = response.rows[0][2] != 0;
    ready->push_back(std::move(told));
    return Status();
  }
  if (found == pending_.end()) {
    OperationPtr zeros = response.request.empty() ? nullptr : MakeZeros(response);
    if (zeros == nullptr && response.kind != Response::Kind::kError) {
      return Status(Code::kInternal, "the log orders '" + response.name + "', which is not pending here");
    }
    ready->push_back(std::move(zeros));  // null: an error of the ranks that have not joined
    return Status();
  }
  OperationPtr op = found->second;
  if (op->request.verb == Verb::kJoin) some_have_joined_ = false;
  op->in_log = true;
  op->rows = response.rows;
  op->splits = response.splits;
  if (response.kind == Response::Kind::kError) {
    op->status = Status(Code::kMismatch, response.error);
  } else if (!RowsFit(op->request, response.rows, rank_, topology_.size()) ||
             !SplitsFit(op->request, response.splits.get(), topology_)) {
    return Status(Code::kInternal, "rank 0 sent a malformed response for '" + response.name + "'");
  } else if (response.id != kNoId) {
    if (response.id < 0 || static_cast<size_t>(response.id) >= by_id_.size()) {
      return Status(Code::kInternal, "rank 0 assigned bit " + std::to_string(response.id) +
                                         ", but there are " + std::to_string(by_id_.size()));
    }
    cache_[response.name] =
        Cached{response.id, EncodeRequest(op->request), response.rows, response.splits, position_};
  }
  ready->push_back(std::move(op));
  return Status();
}

// The bit stands for nothing any more: what was announced by it and is not in the log is announced in full.
void Control::Forget(const OperationPtr& op) {
  if (op->announced_id == kNoId || op->in_log) return;
  by_id_[static_cast<size_t>(op->announced_id)] = nullptr;
  if ((op->tag & kUnnamedTag) == 0) op->tag = 0;  // not all ranks have one
  SendInFull(op, EncodeRequest(op->request));
}

OperationPtr Control::MakeZeros(const Response& response) {
  std::optional<Request> request = DecodeRequest(response.request);
  if (!request || !TraitsOf(request->verb).allows_joined) return nullptr;
  auto op = std::make_shared<Operation>();
  op->request = std::move(*request);
  for (const TensorMeta& meta : op->request.tensors) {
    const size_t count = ElementsOf(meta);
    const size_t bytes = count * SizeOf(meta.dtype);
    OutputBuffer& zeros = op->buffers.emplace_back();
    zeros.bytes = bytes;
    zeros.data.reset(static_cast<char*>(std::calloc(bytes + 1, 1)));
    if (zeros.data == nullptr) return nullptr;
    op->counts.push_back(count);
    op->inputs.push_back(zeros.data.get());
    op->outputs.push_back(zeros.data.get());
    op->bytes += bytes;
  }
  op->in_log = true;
  return op;
}

}  // namespace kolovod
