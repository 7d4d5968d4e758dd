#include "engine/root.h"

#include <utility>

#include "engine/validate.h"

namespace kolovod {

Status Malformed(int host, const Note& note) {
  return Status(Code::kInternal, "host " + std::to_string(host) + " sent a malformed message of kind " +
                                     std::to_string(static_cast<int>(note.kind)) + " about rank " +
                                     std::to_string(note.rank));
}

Root::Root(const Membership& membership, HostLog& log, ControlLink* link)
    : membership_(membership),
      log_(log),
      link_(link),
      tree_(membership.topology.hosts(), membership.topology.host()),
      tally_(link == nullptr ? 0 : membership.segment->layout().cache_capacity, tree_.children.size() + 1),
      negotiator_(membership.numbers, static_cast<size_t>(membership.config.cache_capacity)) {}

bool Root::Knows(int host, int rank) const {
  return rank >= 0 && rank < membership_.size &&
         tree_.Towards(membership_.topology.host_of[static_cast<size_t>(rank)]) == host;
}

Status Root::Decide(int host, const Note& note) {
  if (!Knows(host, note.rank)) return Malformed(host, note);
  if (note.kind == Note::Kind::kRequest) return DecideRequest(host, note);
  if (note.kind == Note::Kind::kLeft) {
    log_.PushLeft(note.rank);
  } else if (note.kind == Note::Kind::kId && tally_.Has(note.number)) {
    if (!tally_.Count(note.number)) return Status();
    log_.PushBit(static_cast<uint32_t>(note.number));
  } else {
    return Malformed(host, note);
  }
  SendDown(note);
  return Status();
}

Status Root::DecideRequest(int host, const Note& note) {
  std::optional<Request> request = DecodeRequest(note.body);
  if (!request || !IsSound(*request, membership_.size)) return Malformed(host, note);
  if (std::string fault = negotiator_.FindFault(note.rank, *request); !fault.empty()) {
    return Status(Code::kInternal, fault);
  }
  const bool numbered = note.number != 0 && roll_call_;
  const std::string name = numbered ? request->name : "";
  Publish(negotiator_.Offer(note.rank, std::move(*request)));
  if (numbered) Recall(name, note.number);
  return Status();
}

void Root::Recall(const std::string& name, uint64_t tag) {
  for (int r = 0; r < membership_.size; ++r) {
    if (!negotiator_.Lacks(name, r) || !roll_call_->Announced(r, tag)) continue;
    Response recall;
    recall.kind = Response::Kind::kForget;
    recall.name = name;
    recall.id = static_cast<int32_t>(membership_.segment->layout().cache_capacity + EagerIndexOf(tag));
    Publish({std::move(recall)});
    return;
  }
}

void Root::Publish(const std::vector<Response>& responses) {
  for (int32_t id : negotiator_.TakeReleased()) {
    log_.Reset(static_cast<uint32_t>(id));
    if (link_ == nullptr) continue;
    tally_.Reset(static_cast<uint64_t>(id));
    SendDown(Note{Note::Kind::kReset, 0, static_cast<uint64_t>(id), 0, {}});
  }
  for (const Response& response : responses) {
    if (response.splits != nullptr && link_ != nullptr) {
      PublishByHost(response);
      continue;
    }
    std::string body = EncodeResponse(response);
    log_.PushResponse(body);
    SendDown(Note{Note::Kind::kResponse, 0, 0, 0, std::move(body)});
  }
}

// In the same place of the same order everywhere; only what it says differs.
void Root::PublishByHost(Response response) {
  const Topology& topology = membership_.topology;
  const std::shared_ptr<const Splits> all = std::move(response.splits);
  const Hosts hosts(topology.host_of);
  for (int host = 0; host < topology.hosts(); ++host) {
    const std::vector<int>& ranks = hosts.ranks[static_cast<size_t>(host)];
    response.splits = std::make_shared<const Splits>(all->For(ranks));
    std::string body = EncodeResponse(response);
    if (host == topology.host()) {
      log_.PushResponse(body);
    } else {
      link_->Send(tree_.Towards(host),
                  EncodeNote(Note{Note::Kind::kResponse, ranks.front(), 0, 0, std::move(body)}));
    }
  }
}

void Root::TellLinks(const LinkCost& cost) {
  Response links;
  links.kind = Response::Kind::kLinks;
  links.rows = {{static_cast<int64_t>(cost.latency_us * 1000), static_cast<int64_t>(cost.bytes_per_us * 1000),
                 cost.confirmed ? 1 : 0}};
  Publish({links});
}

void Root::TellBucketEnd(uint64_t bucket, BucketEnd end) {
  if (link_ == nullptr) return;
  SendDown(Note{Note::Kind::kBucketEnd, 0, bucket, end.Word(), {}});
  membership_.segment->WakeWaiting();
  log_.WakeUndriven();
}

void Root::SendDown(const Note& note) {
  if (link_ != nullptr) link_->Send(tree_.children, EncodeNote(note));
}

}  // namespace kolovod
