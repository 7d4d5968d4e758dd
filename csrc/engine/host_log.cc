#include "engine/host_log.h"

#include <utility>
#include <vector>

namespace kolovod {
namespace {

std::vector<std::atomic<uint64_t>*> TailsOf(Segment& segment, int ranks) {
  std::vector<std::atomic<uint64_t>*> tails;
  for (int r = 0; r < ranks; ++r) tails.push_back(&segment.rank(r).broadcast_tail);
  return tails;
}

}  // namespace

HostLog::HostLog(const Membership& membership, Log& log)
    : membership_(membership),
      log_(log),
      responses_(membership.segment->broadcast_ring(), kBroadcastRingBytes,
                 &membership.segment->header().broadcast_head,
                 TailsOf(*membership.segment, membership.topology.local_size()), membership.epoch) {}

void HostLog::PushResponse(const std::string& body) {
  const uint64_t before = responses_.bytes_pushed();
  responses_.Push(body);
  order_.push_back(kResponse);
  message_bytes_.fetch_add(responses_.bytes_pushed() - before, std::memory_order_relaxed);
}

void HostLog::CloseBucket(uint64_t bucket, BucketEnd end) {
  log_.CloseBucket(bucket, 0, end);
  membership_.segment->WakeWaiting();
  WakeUndriven();
}

void HostLog::Flush() {
  bool moved = false;
  complete_ += responses_.Flush(&moved);
  AppendInOrder();
  if (moved && !responses_.empty()) membership_.segment->WakeWaiting();  // a piece: no entry tells of it
}

// A rank leaves after all it took part in: the ranks here must find that in the log first.
void HostLog::AppendInOrder() {
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

// A rank of another host; those of this host say so themselves (Engine::AnnounceLeave).
void HostLog::MarkLeft(int rank) {
  Segment& segment = *membership_.segment;
  if (membership_.topology.on_this_host(rank)) return;
  if (segment.left(rank).exchange(1, std::memory_order_seq_cst) != 0) return;
  segment.header().left_count.fetch_add(1, std::memory_order_seq_cst);
  segment.WakeWaiting();
}

void HostLog::WakeUndriven() const {
  for (int r = 0; r < membership_.topology.local_size(); ++r) {
    if (r != membership_.topology.local_rank) membership_.segment->WakeUndriven(r);
  }
}

}  // namespace kolovod
