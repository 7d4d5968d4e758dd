#include "p2p/outbox.h"

#include <algorithm>

namespace kolovod {

void Outbox::Post(int to, Envelope envelope, const void* data, size_t bytes, uint64_t number) {
  Post(to, Message{envelope, static_cast<const char*>(data), bytes, number});
}

void Outbox::PostText(int to, Envelope envelope, std::string text) {
  auto kept = std::make_unique<std::string>(std::move(text));
  const std::string& data = *kept;
  Post(to, Message{envelope, data.data(), data.size(), 0, std::move(kept)});
}

void Outbox::Post(int to, Message message) {
  message.envelope.source = topology_.rank;
  if (!topology_.on_this_host(to)) {
    const iovec part{const_cast<char*>(message.data), message.bytes};
    const std::span<const iovec> parts(&part, message.bytes > 0 ? 1 : 0);
    const uint64_t position = mesh_->PostEnveloped(to, message.envelope, parts);
    if (message.number == 0 && message.text == nullptr) return;
    written_.push_back({to, position, message.number, std::move(message.text)});
    return;
  }
  const int local = topology_.local_of[static_cast<size_t>(to)];
  std::deque<Message>& queue = queues_[static_cast<size_t>(local)];
  queue.push_back(std::move(message));
  if (queue.size() > 1) return;
  ++busy_;
  FlushQueue(local);
}

void Outbox::FlushQueue(int to) {
  std::deque<Message>& queue = queues_[static_cast<size_t>(to)];
  bool moved = false;
  while (!queue.empty()) {
    Message& next = queue.front();
    const size_t piece = std::min(next.bytes - next.at, kMailBytes);
    if (next.envelope.kind == Envelope::Kind::kData) next.envelope.value = next.at;
    if (!inbox_.Put(to, next.envelope, piece > 0 ? next.data + next.at : nullptr, piece)) {
      inbox_.WantRoom(to);
      if (inbox_.HasRoom(to)) continue;
      // With nothing of its own pending its thread sleeps, and nobody else wakes it.
      if (segment_.rank(to).driving.load(std::memory_order_seq_cst) == 0) segment_.WakeIdle(to);
      break;
    }
    moved = true;
    next.at += piece;
    if (next.at < next.bytes) continue;
    if (next.number != 0) through_.push_back(next.number);
    queue.pop_front();
    if (queue.empty()) --busy_;
  }
  if (moved && to != topology_.local_rank) segment_.WakeReceiver(to);
}

bool Outbox::HasWork() {
  if (!through_.empty()) return true;
  for (size_t r = 0; busy_ > 0 && r < queues_.size(); ++r) {
    if (!queues_[r].empty() && inbox_.HasRoom(static_cast<int>(r))) return true;
  }
  return std::any_of(written_.begin(), written_.end(), [this](const Written& written) {
    return mesh_->broken() || mesh_->Sent(written.peer, written.position);
  });
}

void Outbox::Flush() {
  for (size_t r = 0; busy_ > 0 && r < queues_.size(); ++r) {
    if (!queues_[r].empty()) FlushQueue(static_cast<int>(r));
  }
  if (mesh_ != nullptr && mesh_->broken()) written_.clear();  // whoever waits for them hears of it
  Reap();
}

void Outbox::Reap() {
  for (size_t i = 0; i < written_.size();) {
    Written& written = written_[i];
    if (!mesh_->Sent(written.peer, written.position)) {
      ++i;
      continue;
    }
    if (written.number != 0) through_.push_back(written.number);
    std::swap(written, written_.back());
    written_.pop_back();
  }
}

void Outbox::Drop() {
  for (std::deque<Message>& queue : queues_) queue.clear();
  busy_ = 0;
  written_.clear();
  through_.clear();
}

}  // namespace kolovod
