#include "control/message_ring.h"

#include <algorithm>
#include <cstring>

#include "control/message.h"

namespace kolovod {
namespace {
constexpr size_t kFrameHeader = 2 * sizeof(uint32_t);
}

MessageRingWriter::MessageRingWriter(char* data, size_t capacity, std::atomic<uint64_t>* head,
                                     std::vector<std::atomic<uint64_t>*> tails, uint32_t epoch)
    : data_(data), capacity_(capacity), head_(head), tails_(std::move(tails)), epoch_(epoch) {}

void MessageRingWriter::Push(const std::string& payload) {
  std::string frame(kFrameHeader, '\0');
  const auto length = static_cast<uint32_t>(payload.size());
  std::memcpy(frame.data(), &length, sizeof(length));
  std::memcpy(frame.data() + sizeof(length), &epoch_, sizeof(epoch_));
  frame += payload;
  bytes_pushed_ += frame.size();
  backlog_.push_back(std::move(frame));
}

size_t MessageRingWriter::Room(uint64_t head) const {
  uint64_t oldest = head;
  for (const auto* tail : tails_) oldest = std::min(oldest, tail->load(std::memory_order_seq_cst));
  return capacity_ - static_cast<size_t>(head - oldest);
}

bool MessageRingWriter::HasRoom() const {
  return Room(head_->load(std::memory_order_relaxed)) >= capacity_ / 2;
}

int MessageRingWriter::Flush(bool* moved) {
  int completed = 0;
  uint64_t head = head_->load(std::memory_order_relaxed);
  while (!backlog_.empty()) {
    const std::string& frame = backlog_.front();
    const size_t n = std::min(Room(head), frame.size() - front_written_);
    if (n == 0) break;
    *moved = true;
    for (size_t copied = 0; copied < n;) {
      const size_t at = static_cast<size_t>(head + copied) % capacity_;
      const size_t piece = std::min(n - copied, capacity_ - at);
      std::memcpy(data_ + at, frame.data() + front_written_ + copied, piece);
      copied += piece;
    }
    head += n;
    front_written_ += n;
    head_->store(head, std::memory_order_seq_cst);
    if (front_written_ == frame.size()) {
      backlog_.pop_front();
      front_written_ = 0;
      ++completed;
    }
  }
  return completed;
}

MessageRingReader::MessageRingReader(const char* data, size_t capacity, std::atomic<uint64_t>* head,
                                     std::atomic<uint64_t>* tail, uint32_t epoch)
    : data_(data), capacity_(capacity), head_(head), tail_(tail), epoch_(epoch) {}

Status MessageRingReader::Next(std::optional<std::string>* payload, bool* freed) {
  payload->reset();
  const uint64_t head = head_->load(std::memory_order_seq_cst);
  const uint64_t before = tail_->load(std::memory_order_relaxed);
  uint64_t tail = before;
  if (head - tail > capacity_) return Status(Code::kInternal, "control ring: head is out of range");
  const auto take = [&](size_t wanted) {
    while (partial_.size() < wanted && tail < head) {
      const size_t at = static_cast<size_t>(tail) % capacity_;
      const size_t n = std::min({wanted - partial_.size(), static_cast<size_t>(head - tail), capacity_ - at});
      partial_.append(data_ + at, n);
      tail += n;
    }
    return partial_.size() >= wanted;
  };
  Status status;
  if (take(kFrameHeader)) {
    uint32_t length;
    uint32_t epoch;
    std::memcpy(&length, partial_.data(), sizeof(length));
    std::memcpy(&epoch, partial_.data() + sizeof(length), sizeof(epoch));
    if (length > kMaxFrameBytes || epoch != epoch_) {
      status = Status(Code::kInternal, "control ring: a frame of " + std::to_string(length) +
                                           " bytes, epoch " + std::to_string(epoch) + " (expected epoch " +
                                           std::to_string(epoch_) + ")");
    } else if (take(kFrameHeader + length)) {
      *payload = partial_.substr(kFrameHeader);
      partial_.clear();
    }
  }
  tail_->store(tail, std::memory_order_seq_cst);
  // A writer that waits has filled the ring and has not seen this tail: then this head is its last one.
  const uint64_t written = head_->load(std::memory_order_seq_cst);
  if (written - before > capacity_ / 2 && written - tail <= capacity_ / 2) *freed = true;
  return status;
}

}  // namespace kolovod
