#include "engine/control.h"

#include <utility>

namespace kolovod {

Control::Control(const Membership& membership, OperationsMutex& mutex, ControlLink* link)
    : segment_(*membership.segment),
      topology_(membership.topology),
      link_(link),
      log_(segment_),
      announcer_(membership, mutex, log_),
      responses_in_(segment_.broadcast_ring(), kBroadcastRingBytes, &segment_.header().broadcast_head,
                    &membership.self().broadcast_tail, membership.epoch) {
  if (!topology_.leads()) return;
  for (int r = 0; r < topology_.local_size(); ++r) {
    RankBlock& block = segment_.rank(r);
    from_ranks_.emplace_back(block.control_ring, kControlRingBytes, &block.control_head, &block.control_tail,
                             membership.epoch);
  }
  host_log_ = std::make_unique<HostLog>(membership, log_);
  if (link_ != nullptr) forwarder_ = std::make_unique<Forwarder>(membership, *host_log_, *link_);
  if (topology_.is_root()) root_ = std::make_unique<Root>(membership, *host_log_, link_);
}

ControlStats Control::stats() const {
  ControlStats stats{announcer_.stats()};
  if (host_log_ != nullptr) stats.message_bytes += host_log_->message_bytes();
  if (link_ != nullptr) {
    stats.messages_sent = link_->sent_frames();
    stats.messages_received = link_->received_frames();
  }
  return stats;
}

void Control::SetEagerCopy(std::function<bool(Operation&)> stage) {
  announcer_.SetEagerCopy(std::move(stage));
  if (root_ != nullptr) root_->UseSlots();
}

bool Control::HasInput() {
  if (log_.Read(position_).has_value() || announcer_.CanSend() ||
      (host_log_ != nullptr && host_log_->CanFlush()) || (!arrived_ && responses_in_.HasData()) ||
      (link_ != nullptr && link_->Look())) {
    return true;
  }
  for (const MessageRingReader& reader : from_ranks_) {
    if (reader.HasData()) return true;
  }
  return false;
}

Status Control::Pump() {
  if (topology_.leads()) {
    KV_RETURN_IF_ERROR(Lead());
  } else if (announcer_.CanSend() && announcer_.Flush()) {
    Wake(0);
  }
  return TakeResponse();
}

Status Control::Lead() {
  for (const Note& note : announcer_.TakeOwnNotes()) KV_RETURN_IF_ERROR(PassOn(note));
  KV_RETURN_IF_ERROR(ReadLocalRings());
  if (HasUnread()) KV_RETURN_IF_ERROR(ReadLink());
  host_log_->Flush();
  return Status();
}

Status Control::ReadLocalRings() {
  for (size_t r = 1; r < from_ranks_.size(); ++r) {
    const int rank = topology_.local_ranks[r];
    bool freed = false;
    while (from_ranks_[r].HasData()) {
      std::optional<std::string> payload;
      KV_RETURN_IF_ERROR(from_ranks_[r].Next(&payload, &freed));
      if (!payload) break;  // a message longer than the ring: its writer moves the next piece
      std::optional<Note> note = DecodeNote(*payload);
      if (!note || note->rank != rank) {
        return Status(Code::kInternal, "rank " + std::to_string(rank) + " sent a malformed announcement of " +
                                           std::to_string(payload->size()) + " bytes");
      }
      KV_RETURN_IF_ERROR(PassOn(*note));
    }
    if (freed) Wake(static_cast<int>(r));
  }
  return Status();
}

Status Control::ReadLink() {
  for (const ControlLink::Frame& frame : link_->Take()) {
    const std::optional<Note> note = DecodeNote(frame.payload);
    if (!note) {
      return Status(Code::kInternal, "the leader of host " + std::to_string(frame.host) +
                                         " sent a malformed message of " +
                                         std::to_string(frame.payload.size()) + " bytes");
    }
    KV_RETURN_IF_ERROR(root_ != nullptr ? root_->Decide(frame.host, *note)
                                        : forwarder_->Obey(frame.host, *note));
  }
  return Status();
}

Status Control::PassOn(const Note& note) {
  return root_ != nullptr ? root_->Decide(topology_.host(), note) : forwarder_->PassUp(note);
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
  for (; const auto entry = log_.Read(position_); ++position_) {
    if (!entry->is_message) {
      OperationPtr op;
      KV_RETURN_IF_ERROR(announcer_.TakeBit(entry->id, position_, &op));
      ready->push_back(std::move(op));
      continue;
    }
    // Rank 0 appends the entry after the whole message is in the ring.
    KV_RETURN_IF_ERROR(TakeResponse());
    const std::optional<Response> response = arrived_ ? DecodeResponse(*arrived_) : std::nullopt;
    if (!response) return Status(Code::kInternal, "rank 0 sent a malformed response, or none");
    arrived_.reset();
    KV_RETURN_IF_ERROR(announcer_.Apply(*response, position_, ready));
  }
  return Status();
}

BucketEnd Control::CloseBucket(uint64_t bucket, uint64_t begin, BucketEnd end) {
  const BucketEnd holds = log_.CloseBucket(bucket, begin, end);
  if (root_ != nullptr) root_->TellBucketEnd(bucket, holds);
  return holds;
}

void Control::Wake(int local_rank) {
  segment_.WakeUndriven(local_rank);
  segment_.WakeWaiting();
}

void Control::WakeLagging() {
  if (host_log_ == nullptr) {
    segment_.WakeUndriven(0);
  } else if (host_log_->lags()) {
    host_log_->WakeUndriven();
  }
}

}  // namespace kolovod
