// A stream of frames through a ring of shared bytes: one writer, and one or more readers that each see
// everything. A frame is uint32 length, uint32 epoch, payload (docs/wire.md).
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"

namespace kolovod {

// Frames longer than the ring go through in pieces; what does not fit now waits in `backlog_`.
class MessageRingWriter {
 public:
  MessageRingWriter(char* data, size_t capacity, std::atomic<uint64_t>* head,
                    std::vector<std::atomic<uint64_t>*> tails, uint32_t epoch);

  void Push(const std::string& payload);
  // Moves what fits. Returns how many frames have become complete in the ring by this call. `moved`: whether
  // any byte was moved; readers may wait for the next piece of a frame that is longer than the ring.
  int Flush(bool* moved);
  bool empty() const { return backlog_.empty(); }
  // Whether a Flush is worth while if there is something to move: half of the ring is free, of which the
  // reader tells (MessageRingReader::Next). May be asked while another thread pushes.
  bool HasRoom() const;
  uint64_t bytes_pushed() const { return bytes_pushed_; }

 private:
  // Bytes that every reader has read.
  size_t Room(uint64_t head) const;

  char* const data_;
  const size_t capacity_;
  std::atomic<uint64_t>* const head_;
  const std::vector<std::atomic<uint64_t>*> tails_;
  const uint32_t epoch_;
  std::deque<std::string> backlog_;
  size_t front_written_ = 0;
  uint64_t bytes_pushed_ = 0;
};

class MessageRingReader {
 public:
  MessageRingReader(const char* data, size_t capacity, std::atomic<uint64_t>* head,
                    std::atomic<uint64_t>* tail, uint32_t epoch);

  bool HasData() const {
    return head_->load(std::memory_order_seq_cst) != tail_->load(std::memory_order_relaxed);
  }
  // Takes what has arrived. A complete frame, or nullopt and an OK status, or an error for bytes that
  // no rank of this world can have written. `freed` is set if this made room for which the writer may wait.
  Status Next(std::optional<std::string>* payload, bool* freed);

 private:
  const char* const data_;
  const size_t capacity_;
  std::atomic<uint64_t>* const head_;
  std::atomic<uint64_t>* const tail_;
  const uint32_t epoch_;
  std::string partial_;
};

}  // namespace kolovod
