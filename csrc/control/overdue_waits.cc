// What hosts tell each other about operations that wait for too long.
#include <algorithm>

#include "control/bytes.h"
#include "control/stragglers.h"

namespace kolovod {
namespace {

constexpr int64_t kMaxAgeNs = int64_t{1} << 62;  // 146 years: sums with times of ours do not overflow

uint64_t LastUse(const std::vector<OperationRecord>& records, uint64_t name_hash) {
  uint64_t bucket = 0;
  for (const OperationRecord& record : records) {
    if (record.name_hash == name_hash && !record.pending()) bucket = std::max(bucket, record.bucket);
  }
  return bucket;
}

}  // namespace

std::vector<OverdueWait> OverdueWaits(const StragglerView& view, const StragglerLimits& limits,
                                      size_t ranks) {
  std::vector<OverdueWait> waits;
  for (size_t r = 0; r < ranks; ++r) {
    for (const OperationRecord& record : view.records[r]) {
      const int64_t since_ns =
          record.state == OperationState::kStarted ? record.started_ns : record.submitted_ns;
      if (TraitsOf(record.verb).is_transfer) continue;  // its own rank knows whom it waits for
      if (!record.pending() || view.now_ns - since_ns < ShortestLimit(limits) / 2) continue;
      waits.push_back({static_cast<int>(r), record, 0});
    }
  }
  std::stable_sort(waits.begin(), waits.end(), [](const OverdueWait& a, const OverdueWait& b) {
    return a.record.submitted_ns < b.record.submitted_ns;
  });
  if (waits.size() > kMaxOverdueWaits) waits.resize(kMaxOverdueWaits);
  for (OverdueWait& wait : waits) {
    wait.used = LastUse(view.records[static_cast<size_t>(wait.rank)], wait.record.name_hash);
  }
  return waits;
}

std::string EncodeOverdueWaits(const std::vector<OverdueWait>& waits, int64_t now_ns) {
  Writer w;
  w.Put(static_cast<uint32_t>(waits.size()));
  for (const OverdueWait& wait : waits) {
    const OperationRecord& record = wait.record;
    w.Put(wait.rank);
    w.Put(static_cast<uint8_t>(record.state == OperationState::kStarted));
    w.Put(static_cast<uint8_t>(record.verb));
    w.Put(record.name_hash);
    w.Put(record.bucket);
    w.Put(wait.used);
    w.Put(std::max<int64_t>(now_ns - record.submitted_ns, 0));
    const bool started = record.state == OperationState::kStarted;
    w.Put(started ? std::max<int64_t>(now_ns - record.started_ns, 0) : int64_t{0});
    w.PutString(record.name);
  }
  return w.Take();
}

std::optional<std::vector<OverdueWait>> DecodeOverdueWaits(std::string_view bytes, int64_t now_ns) {
  Reader r(bytes);
  uint32_t count;
  if (!r.GetCount(50, &count) || count > kMaxOverdueWaits) return std::nullopt;
  std::vector<OverdueWait> waits(count);
  for (OverdueWait& wait : waits) {
    OperationRecord& record = wait.record;
    uint8_t started;
    int64_t submitted_ago_ns;
    int64_t started_ago_ns;
    if (!r.Get(&wait.rank) || !r.Get(&started) || started > 1 || !r.GetEnum(kVerbCount, &record.verb) ||
        !r.Get(&record.name_hash) || !r.Get(&record.bucket) || !r.Get(&wait.used) ||
        !r.Get(&submitted_ago_ns) || !r.Get(&started_ago_ns) || !r.GetString(&record.name)) {
      return std::nullopt;
    }
    if (submitted_ago_ns < 0 || submitted_ago_ns > kMaxAgeNs || started_ago_ns < 0 ||
        started_ago_ns > (started != 0 ? kMaxAgeNs : 0) || record.name.size() > kRecordNameBytes) {
      return std::nullopt;
    }
    record.state = started != 0 ? OperationState::kStarted : OperationState::kSubmitted;
    record.submitted_ns = now_ns - submitted_ago_ns;
    record.started_ns = started != 0 ? now_ns - started_ago_ns : 0;
  }
  if (!r.AtEnd()) return std::nullopt;
  return waits;
}

}  // namespace kolovod
