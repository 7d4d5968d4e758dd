#include "engine/forwarder.h"

#include <utility>

#include "engine/root.h"

namespace kolovod {

Forwarder::Forwarder(const Membership& membership, HostLog& log, ControlLink& link)
    : membership_(membership),
      log_(log),
      link_(link),
      tree_(membership.topology.hosts(), membership.topology.host()),
      tally_(membership.segment->layout().cache_capacity, tree_.children.size() + 1),
      leaving_(static_cast<size_t>(membership.topology.hosts())) {}

bool Forwarder::Forward(const ControlLink::Frame& frame) {
  const std::optional<Note> note = DecodeNote(frame.payload);
  if (!note) return false;  // the driver will say so
  const auto host = static_cast<size_t>(frame.host);
  if (note->kind == Note::Kind::kLeft && note->rank == membership_.topology.leaders[host])
    leaving_[host].store(true);
  if (note->kind == Note::Kind::kOverdue || note->kind == Note::Kind::kOverdueSeen ||
      note->kind == Note::Kind::kWaits) {
    SendToOthers(frame.host, frame.payload);
    on_news_(*note);
    return true;
  }
  if (note->kind == Note::Kind::kRevoked) {
    TellRevokedOnce([&] { SendToOthers(frame.host, frame.payload); });
    const bool known = note->number > 0 && note->number <= static_cast<uint64_t>(Code::kLate);
    membership_.segment->Revoke(known ? static_cast<Code>(note->number) : Code::kInternal, note->body);
    return true;
  }
  if (membership_.topology.is_root()) return false;
  return frame.host == tree_.parent ? ForwardDown(*note, frame.payload) : ForwardUp(*note, frame.payload);
}

bool Forwarder::ForwardUp(const Note& note, const std::string& payload) {
  if (note.kind == Note::Kind::kId && tally_.Has(note.number)) {
    if (tally_.Count(note.number)) {
      link_.Send(tree_.parent, EncodeNote(Note{Note::Kind::kId, membership_.rank, note.number, 0, {}}));
    }
    return true;
  }
  if (note.kind != Note::Kind::kRequest && note.kind != Note::Kind::kLeft) return false;
  link_.Send(tree_.parent, payload);
  return true;
}

bool Forwarder::ForwardDown(const Note& note, const std::string& payload) {
  if (note.kind == Note::Kind::kResponse && note.rank != 0) {
    const int child = ChildTowards(note.rank);
    if (child >= 0) link_.Send(child, payload);
    return child >= 0;
  }
  if (note.kind == Note::Kind::kReset && tally_.Has(note.number)) tally_.Reset(note.number);
  link_.Send(tree_.children, payload);
  return false;
}

int Forwarder::ChildTowards(int leader) const {
  if (leader < 0 || leader >= membership_.topology.size() || leader == membership_.rank) return -1;
  const int host = membership_.topology.host_of[static_cast<size_t>(leader)];
  const int towards = tree_.Towards(host);
  const bool is_leader = membership_.topology.leaders[static_cast<size_t>(host)] == leader;
  return is_leader && towards != tree_.parent ? towards : -1;
}

void Forwarder::SendToOthers(int host, const std::string& payload) {
  for (const int other : tree_.neighbours) {
    if (other != host) link_.Send(other, payload);
  }
}

// By way of the root, which puts it in order. A leader that leaves cuts its subtree off from the root, so it
// tells its children itself, after all that it has passed on to them.
void Forwarder::TellLeft(int rank) {
  const std::string payload = EncodeNote(Note{Note::Kind::kLeft, rank, 0, 0, {}});
  if (!membership_.topology.is_root()) link_.Send(tree_.parent, payload);
  if (membership_.topology.is_root() || rank == membership_.rank) link_.Send(tree_.children, payload);
}

void Forwarder::TellLeaders(const Note& note) { link_.Send(tree_.neighbours, EncodeNote(note)); }

void Forwarder::TellRevoked(const Status& status) {
  TellRevokedOnce([&] {
    TellLeaders(Note{Note::Kind::kRevoked, membership_.rank, static_cast<uint64_t>(status.code()), 0,
                     status.message()});
  });
}

void Forwarder::TellRevokedOnce(const std::function<void()>& send) {
  MutexLock lock(telling_);
  if (!std::exchange(told_revoked_, true)) send();
}

void Forwarder::Lost(int host, const std::string& reason, const std::string& leader) {
  if (leaving_[static_cast<size_t>(host)].load() || membership_.segment->revoked()) return;
  membership_.segment->Revoke(Code::kRankLost, leader + " died, or its host is out of reach: " + reason);
}

Status Forwarder::PassUp(const Note& note) {
  if (note.kind == Note::Kind::kId) {
    if (!tally_.Has(note.number)) return Malformed(membership_.topology.host(), note);
    if (!tally_.Count(note.number)) return Status();
  }
  link_.Send(tree_.parent, EncodeNote(note));
  return Status();
}

Status Forwarder::Obey(int host, const Note& note) {
  const bool is_id = note.number < membership_.segment->layout().cache_capacity;
  if (host != tree_.parent) return Malformed(host, note);
  switch (note.kind) {
    case Note::Kind::kResponse:
      if (note.rank != 0 && note.rank != membership_.rank) break;
      log_.PushResponse(note.body);
      return Status();
    case Note::Kind::kId:
      if (!is_id) break;
      log_.PushBit(static_cast<uint32_t>(note.number));
      return Status();
    case Note::Kind::kReset:
      if (!is_id) break;
      log_.Reset(static_cast<uint32_t>(note.number));
      return Status();
    case Note::Kind::kBucketEnd:
      log_.CloseBucket(note.number, BucketEnd::Of(note.end));
      return Status();
    case Note::Kind::kLeft:
      if (note.rank < 0 || note.rank >= membership_.size) break;
      log_.PushLeft(note.rank);
      return Status();
    default:
      break;
  }
  return Malformed(host, note);
}

}  // namespace kolovod
