// The leading half of Control: what the first rank of a host does for the others, and rank 0 for all.
//
//   rank --ring--> leader --uplink--> ... --> root: negotiates, orders
//   rank <--log--- leader <--uplink-- ... <-- root
//
// On one host leader and root are the same, and cached names are ordered by the ranks themselves
// (control/log.h). Between hosts everything is ordered by the root, so that all logs are alike. What lies
// between a leader and the root is in relay.cc.
#include "engine/control.h"
#include "engine/validate.h"

namespace kolovod {
namespace {

// What `order_` holds beside the bits of cached names: a message, or a rank of another host that has left.
constexpr int64_t kMessage = -1;
constexpr int64_t kLeftBase = -2;

int64_t LeftEntry(int rank) { return kLeftBase - rank; }

Status Malformed(int host, const Note& note) {
  return Status(Code::kInternal, "host " + std::to_string(host) + " sent a malformed message of kind " +
                                     std::to_string(static_cast<int>(note.kind)) + " about rank " +
                                     std::to_string(note.rank));
}

}  // namespace

Status Control::Lead() {
  if (outgoing_.load(std::memory_order_seq_cst)) {
    std::vector<Note> own;
    {
      std::lock_guard lock(mutex_);
      own.swap(inbox_);
      outgoing_.store(false, std::memory_order_relaxed);
    }
    for (const Note& note : own) KV_RETURN_IF_ERROR(PassOn(note));
  }
  KV_RETURN_IF_ERROR(ReadLocalRings());
  if (uplink_ != nullptr && uplink_->HasData()) KV_RETURN_IF_ERROR(ReadUplink());
  bool moved = false;
  complete_ += responses_out_->Flush(&moved);
  AppendInOrder();
  if (moved && !responses_out_->empty()) segment_.RingWaiting();  // a piece: no entry tells of it
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

Status Control::ReadUplink() {
  for (const Uplink::Frame& frame : uplink_->Take()) {
    const std::optional<Note> note = DecodeNote(frame.payload);
    if (!note) {
      return Status(Code::kInternal, "the leader of host " + std::to_string(frame.host) +
                                         " sent a malformed message of " +
                                         std::to_string(frame.payload.size()) + " bytes");
    }
    KV_RETURN_IF_ERROR(topology_.is_root() ? Decide(frame.host, *note) : Obey(frame.host, *note));
  }
  return Status();
}

Status Control::PassOn(const Note& note) {
  if (topology_.is_root()) return Decide(topology_.host(), note);
  if (note.kind == Note::Kind::kId) {
    if (!tally_->Has(note.number)) return Malformed(topology_.host(), note);
    if (!tally_->Count(note.number)) return Status();
  }
  uplink_->Send(tree_.parent, EncodeNote(note));
  return Status();
}

Status Control::Decide(int host, const Note& note) {
  const bool known = note.rank >= 0 && note.rank < topology_.size() &&
                     tree_.Towards(topology_.host_of[static_cast<size_t>(note.rank)]) == host;
  if (note.kind == Note::Kind::kRequest && known) {
    std::optional<Request> request = DecodeRequest(note.body);
    if (request && IsSound(*request, topology_.size())) {
      if (std::string fault = negotiator_->FindFault(note.rank, *request); !fault.empty()) {
        return Status(Code::kInternal, fault);
      }
      const bool numbered = note.number != 0 && roll_call_;
      const std::string name = numbered ? request->name : "";
      Publish(negotiator_->Offer(note.rank, std::move(*request)));
      if (numbered) Recall(name, note.number);
      return Status();
    }
  } else if (note.kind == Note::Kind::kId && known && tally_ != nullptr && tally_->Has(note.number)) {
    if (!tally_->Count(note.number)) return Status();
    order_.push_back(static_cast<int64_t>(note.number));
    SendDown(EncodeNote(note));
    return Status();
  } else if (note.kind == Note::Kind::kLeft && known) {
    order_.push_back(LeftEntry(note.rank));
    SendDown(EncodeNote(note));
    return Status();
  }
  return Malformed(host, note);
}

void Control::Recall(const std::string& name, uint64_t tag) {
  for (int r = 0; r < topology_.size(); ++r) {
    if (!negotiator_->Lacks(name, r) || !roll_call_->Announced(r, tag)) continue;
    Response recall;
    recall.kind = Response::Kind::kForget;
    recall.name = name;
    recall.id = static_cast<int32_t>(segment_.layout().cache_capacity + EagerIndexOf(tag));
    Publish({std::move(recall)});
    return;
  }
}

Status Control::Obey(int host, const Note& note) {
  const bool is_id = note.number < segment_.layout().cache_capacity;
  if (host != tree_.parent) return Malformed(host, note);
  switch (note.kind) {
    case Note::Kind::kResponse:
      if (note.rank != 0 && note.rank != rank_) break;
      PushResponse(note.body);
      return Status();
    case Note::Kind::kId:
      if (!is_id) break;
      order_.push_back(static_cast<int64_t>(note.number));
      return Status();
    case Note::Kind::kReset:
      if (!is_id) break;
      log_.Reset(static_cast<uint32_t>(note.number));
      return Status();
    case Note::Kind::kSeal:
      log_.Seal(note.number, 0, note.end);
      segment_.RingWaiting();
      RingUndriven();
      return Status();
    case Note::Kind::kLeft:
      if (note.rank < 0 || note.rank >= topology_.size()) break;
      order_.push_back(LeftEntry(note.rank));
      return Status();
    default:
      break;
  }
  return Malformed(host, note);
}

void Control::Publish(const std::vector<Response>& responses) {
  for (int32_t id : negotiator_->TakeReleased()) {
    log_.Reset(static_cast<uint32_t>(id));
    if (uplink_ == nullptr) continue;
    tally_->Reset(static_cast<uint64_t>(id));
    SendDown(EncodeNote(Note{Note::Kind::kReset, 0, static_cast<uint64_t>(id), 0, {}}));
  }
  for (const Response& response : responses) {
    if (response.splits != nullptr && uplink_ != nullptr) {
      PublishByHost(response);
      continue;
    }
    std::string body = EncodeResponse(response);
    PushResponse(body);
    if (uplink_ == nullptr) continue;
    SendDown(EncodeNote(Note{Note::Kind::kResponse, 0, 0, 0, std::move(body)}));
  }
}

// In the same place of the same order everywhere; only what it says differs.
void Control::PublishByHost(Response response) {
  const std::shared_ptr<const Splits> all = std::move(response.splits);
  const Hosts hosts(topology_.host_of);
  for (int host = 0; host < topology_.hosts(); ++host) {
    const std::vector<int>& ranks = hosts.ranks[static_cast<size_t>(host)];
    response.splits = std::make_shared<const Splits>(all->For(ranks));
    std::string body = EncodeResponse(response);
    if (host == topology_.host()) {
      PushResponse(body);
    } else {
      uplink_->Send(tree_.Towards(host),
                    EncodeNote(Note{Note::Kind::kResponse, ranks.front(), 0, 0, std::move(body)}));
    }
  }
}

void Control::TellLinks(const LinkCost& cost) {
  Response links;
  links.kind = Response::Kind::kLinks;
  links.rows = {{static_cast<int64_t>(cost.latency_us * 1000), static_cast<int64_t>(cost.bytes_per_us * 1000),
                 cost.confirmed ? 1 : 0}};
  Publish({links});
}

void Control::PushResponse(const std::string& body) {
  const uint64_t before = responses_out_->bytes_pushed();
  responses_out_->Push(body);
  order_.push_back(kMessage);
  std::lock_guard lock(mutex_);
  stats_.message_bytes += responses_out_->bytes_pushed() - before;
}

// A rank leaves after all it took part in: the ranks here must find that in the log first.
void Control::AppendInOrder() {
  while (!order_.empty()) {
    if (order_.front() >= 0) {
      log_.AppendId(static_cast<uint32_t>(order_.front()));
    } else if (order_.front() <= kLeftBase) {
      MarkLeft(static_cast<int>(kLeftBase - order_.front()));
    } else if (complete_ > 0) {
      --complete_;
      log_.AppendMessage();
    } else {
      return;
    }
    order_.pop_front();
  }
}

uint64_t Control::Seal(uint64_t bucket, uint64_t begin, uint64_t end) {
  const uint64_t sealed = log_.Seal(bucket, begin, end);
  if (uplink_ == nullptr) return sealed;
  SendDown(EncodeNote(Note{Note::Kind::kSeal, 0, bucket, sealed, {}}));
  segment_.RingWaiting();
  RingUndriven();
  return sealed;
}

// Ranks of other hosts wait for the data of those of this host that nobody drives.
void Control::RingUndriven() {
  for (int r = 0; r < topology_.local_size(); ++r) {
    if (r != topology_.local_rank) segment_.RingUndriven(r);
  }
}

void Control::Wake(int local_rank) {
  segment_.RingUndriven(local_rank);
  segment_.RingWaiting();
}

void Control::RingLagging() {
  if (!topology_.leads()) {
    segment_.RingUndriven(0);
  } else if (!responses_out_->empty()) {
    RingUndriven();
  }
}

// A rank of another host; those of this host say so themselves (Engine::AnnounceLeave).
void Control::MarkLeft(int rank) {
  if (topology_.on_this_host(rank)) return;
  if (segment_.left(rank).exchange(1, std::memory_order_seq_cst) != 0) return;
  segment_.header().left_count.fetch_add(1, std::memory_order_seq_cst);
  segment_.RingWaiting();
}

}  // namespace kolovod
