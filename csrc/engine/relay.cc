// The passing half of Control: what a leader does with messages that are on their way between others
// (base/tree.h).
//
// Whoever reads the uplink passes on, before the driver sees the frame: a leader that computes, or is in the
// middle of a bucket, holds nobody up. What goes to a driver is queued after it went to the children, and
// they are read under the same lock, so whatever a child answers comes later than what it answers to.
//
// Up go requests as they are, and a bit once all of the subtree have announced it: one message for each
// connection, however many hosts. Down goes what the root says, as it is; what is for one host alone, to the
// child behind which that is. The end of the world, and what
// concerns late ranks, goes in all directions, since the way by the root may be what is broken.
#include "engine/control.h"

namespace kolovod {

bool Control::Relay(const Uplink::Frame& frame) {
  const std::optional<Note> note = DecodeNote(frame.payload);
  if (!note) return false;  // the driver will say so
  const auto host = static_cast<size_t>(frame.host);
  if (note->kind == Note::Kind::kLeft && note->rank == topology_.leaders[host]) leaving_[host].store(true);
  if (note->kind == Note::Kind::kLate || note->kind == Note::Kind::kLateSeen) {
    SendToOthers(frame.host, frame.payload);
    on_late_(*note);
    return true;
  }
  if (note->kind == Note::Kind::kRevoked) {
    if (!told_revoked_.exchange(true)) SendToOthers(frame.host, frame.payload);
    const bool known = note->number > 0 && note->number <= static_cast<uint64_t>(Code::kLate);
    segment_.Revoke(known ? static_cast<Code>(note->number) : Code::kInternal, note->body);
    return true;
  }
  if (topology_.is_root()) return false;
  return frame.host == tree_.parent ? RelayDown(*note, frame.payload) : RelayUp(*note, frame.payload);
}

bool Control::RelayUp(const Note& note, const std::string& payload) {
  if (note.kind == Note::Kind::kId && tally_->Has(note.number)) {
    if (tally_->Count(note.number)) {
      uplink_->Send(tree_.parent, EncodeNote(Note{Note::Kind::kId, rank_, note.number, 0, {}}));
    }
    return true;
  }
  if (note.kind != Note::Kind::kRequest && note.kind != Note::Kind::kLeft) return false;
  uplink_->Send(tree_.parent, payload);
  return true;
}

bool Control::RelayDown(const Note& note, const std::string& payload) {
  if (note.kind == Note::Kind::kResponse && note.rank != 0) {
    const int child = ChildTowards(note.rank);
    if (child >= 0) uplink_->Send(child, payload);
    return child >= 0;
  }
  if (note.kind == Note::Kind::kReset && tally_->Has(note.number)) tally_->Reset(note.number);
  SendDown(payload);
  return false;
}

int Control::ChildTowards(int leader) const {
  if (leader < 0 || leader >= topology_.size() || leader == rank_) return -1;
  const int host = topology_.host_of[static_cast<size_t>(leader)];
  const int towards = tree_.Towards(host);
  const bool is_leader = topology_.leaders[static_cast<size_t>(host)] == leader;
  return is_leader && towards != tree_.parent ? towards : -1;
}

void Control::SendToOthers(int host, const std::string& payload) {
  for (const int other : tree_.neighbours) {
    if (other != host) uplink_->Send(other, payload);
  }
}

// By way of the root, which puts it in order. A leader that leaves cuts its subtree off from the root, so it
// tells its children itself, after all that it has passed on to them.
void Control::TellLeft(int rank) {
  if (uplink_ == nullptr) return;
  const std::string payload = EncodeNote(Note{Note::Kind::kLeft, rank, 0, 0, {}});
  if (!topology_.is_root()) uplink_->Send(tree_.parent, payload);
  if (topology_.is_root() || rank == rank_) SendDown(payload);
}

void Control::TellLeaders(const Note& note) {
  if (uplink_ != nullptr) uplink_->Send(tree_.neighbours, EncodeNote(note));
}

void Control::TellRevoked(const Status& status) {
  if (uplink_ == nullptr || told_revoked_.exchange(true)) return;
  TellLeaders(Note{Note::Kind::kRevoked, rank_, static_cast<uint64_t>(status.code()), 0, status.message()});
}

void Control::Lost(int host, const std::string& reason, const std::string& leader) {
  if (leaving_[static_cast<size_t>(host)].load() || segment_.revoked()) return;
  segment_.Revoke(Code::kRankLost, leader + " died, or its host is out of reach: " + reason);
}

}  // namespace kolovod
