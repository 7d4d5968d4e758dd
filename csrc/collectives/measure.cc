#include "collectives/measure.h"

#include <algorithm>
#include <vector>

namespace kolovod {
namespace {

constexpr size_t kEchoBytes = 8;
constexpr int kEchoes = 12;
constexpr int kLeastEchoes = 4;
constexpr int64_t kEchoesNs = 3'000'000;
constexpr size_t kFirstBurstBytes = 64 << 10;
constexpr size_t kLastBurstBytes = 4 << 20;
constexpr int64_t kBurstNs = 4'000'000;

// first -> second   next: uint64, bytes of what follows, 0: the end; byte[next]
// second -> first   byte[8]
class Link {
 public:
  explicit Link(MeshGroup& group) : group_(group), bytes_(kLastBurstBytes) {}

  Status Measure(LinkCost* cost) {
    int64_t best_ns = INT64_MAX, elapsed_ns = 0;
    KV_RETURN_IF_ERROR(RoundTrip(kEchoBytes, &elapsed_ns));  // the second may come later than the first
    const int64_t start_ns = NowNs();
    for (int i = 0; i < kEchoes && (i < kLeastEchoes || NowNs() - start_ns < kEchoesNs); ++i) {
      KV_RETURN_IF_ERROR(RoundTrip(kEchoBytes, &elapsed_ns));
      best_ns = std::min(best_ns, elapsed_ns);
    }
    size_t burst = kFirstBurstBytes;
    KV_RETURN_IF_ERROR(RoundTrip(burst, &elapsed_ns));
    while (elapsed_ns < kBurstNs && burst < kLastBurstBytes) {
      burst *= 2;
      KV_RETURN_IF_ERROR(RoundTrip(burst, &elapsed_ns));
    }
    // Once more: a process that was late once is no slow link.
    int64_t again_ns = 0;
    KV_RETURN_IF_ERROR(RoundTrip(burst, &again_ns));
    const int64_t carried_ns = std::max<int64_t>(std::min(elapsed_ns, again_ns) - best_ns, 1000);
    cost->latency_us = std::max(1.0, static_cast<double>(best_ns) / 2000);
    cost->bytes_per_us = std::clamp(static_cast<double>(burst) * 1000 / static_cast<double>(carried_ns),
                                    kSlowestBytesPerUs, kFastestBytesPerUs);
    cost->confirmed = false;
    next_ = 0;
    group_.Send(1, &next_, sizeof(next_));
    return group_.mesh().WaitAll();
  }

  Status Help() {
    while (true) {
      const uint64_t told = group_.Receive(0, &next_, sizeof(next_));
      KV_RETURN_IF_ERROR(group_.WaitReceived(0, told));
      if (next_ == 0) return Status();
      if (next_ > bytes_.size()) {
        return Status(Code::kMismatch, "rank " + std::to_string(group_.rank_of(0)) + " announced " +
                                           std::to_string(next_) + " bytes to measure the link with");
      }
      const uint64_t received = group_.Receive(0, bytes_.data(), next_);
      KV_RETURN_IF_ERROR(group_.WaitReceived(0, received));
      const uint64_t sent = group_.Send(0, &echo_, sizeof(echo_));
      KV_RETURN_IF_ERROR(group_.WaitSent(0, sent));
    }
  }

 private:
  Status RoundTrip(size_t bytes, int64_t* elapsed_ns) {
    const int64_t start_ns = NowNs();
    next_ = bytes;
    const uint64_t echoed = group_.Receive(1, &echo_, sizeof(echo_));
    group_.Send(1, &next_, sizeof(next_));
    group_.Send(1, bytes_.data(), bytes);
    KV_RETURN_IF_ERROR(group_.WaitReceived(1, echoed));
    *elapsed_ns = NowNs() - start_ns;
    return Status();
  }

  MeshGroup& group_;
  std::vector<char> bytes_;
  uint64_t next_ = 0;
  uint64_t echo_ = 0;
};

}  // namespace

Status MeasureLink(MeshGroup& group, LinkCost* cost) {
  if (group.size() < 2 || group.index() > 1) return Status();
  Link link(group);
  // As in the operations that are to be estimated: a wait does not sleep at once.
  group.mesh().set_budget(WaitBudget{50'000, 200'000, 0});
  return group.index() == 0 ? link.Measure(cost) : link.Help();
}

}  // namespace kolovod
