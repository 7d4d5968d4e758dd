// Which rank keeps the others waiting, since when, and is it time to say so or to give up? PURE: what the
// ranks have noted (transport/operation_record.h), the time and the limits in; findings and their text out.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "transport/operation_record.h"

namespace kolovod {

struct StragglerLimits {
  int64_t report_ns = 0;   // 0: never
  int64_t failure_ns = 0;  // 0: never
};

// Of those that are set; 0: none is.
int64_t ShortestLimit(const StragglerLimits& limits);

struct StragglerView {
  int64_t now_ns = 0;
  int64_t last_report_ns = 0;                         // by whatever rank; 0 never
  std::vector<std::vector<OperationRecord>> records;  // by rank
  // By rank: it has more operations than its records say, and is not accused.
  std::vector<bool> incomplete;
  std::vector<int> waits_for;  // by rank: whose data it waits for in a bucket, or -1
  std::vector<int> numbers;    // by rank: what records of transfers call it
};

enum class StragglerCause {
  kNotSubmitted,  // the rank has not come to the operation
  kNotStarted,    // it has submitted it, and does not take part in the bucket
  kNoData,        // it is in the bucket, and others wait for its data
  kNoProgress,    // nobody in particular: all have submitted it, and nothing happens
  kSilentHost,    // the same, and the leader of another host does not answer
  kNoPartner,     // the rank has not sent or received what another waits for; -1: it is on another host
};

struct OverdueOperation {
  uint64_t name_hash;
  std::string name;
  Verb verb;
  int64_t waited_ns;
};

struct StragglerFinding {
  int rank;  // who is late; -1: kNoProgress, kSilentHost, kNoPartner
  StragglerCause cause;
  std::vector<OverdueOperation> operations;  // longest wait first
  std::vector<int> waiting;                  // who waits, ascending
  std::string silent{};                      // kSilentHost: "rank 4 on host b (pid 17)"
};

struct StragglerVerdict {
  bool report = false;
  bool fail = false;
  std::vector<StragglerFinding> findings;  // longest wait first; not empty if `report` or `fail`
};

// A report is due when an operation has waited for the limit, and again after twice, four times, ... that
// time: the ranks share last_report_ns, so that one of them reports, and all follow the same times.
StragglerVerdict JudgeStragglers(const StragglerView& view, const StragglerLimits& limits);

// What messages call the ranks of a view.
struct RankNames {
  std::vector<int> numbers;
  std::function<std::string(int)> describe;  // "rank 1 on host a (pid 17)"
};

// One line, with at most so many operations' names.
std::string StragglerText(const StragglerFinding& finding, const RankNames& names, size_t max_names);

// What a rank waits for, told to other hosts: they look whether a rank of their own is late.
struct OverdueWait {
  int rank = 0;
  OperationRecord record;  // pending; of its fields: state, verb, bucket, times, name
  uint64_t used = 0;       // the bucket of the last use of the name that is over on that rank; 0 unknown
};

// The oldest waits, at most kMaxOverdueWaits, of the first `ranks` ranks of a view, as (docs/wire.md) bytes
// and back. Times are sent as ages, since hosts have different clocks.
inline constexpr size_t kMaxOverdueWaits = 32;
std::vector<OverdueWait> OverdueWaits(const StragglerView& view, const StragglerLimits& limits, size_t ranks);
std::string EncodeOverdueWaits(const std::vector<OverdueWait>& waits, int64_t now_ns);
std::optional<std::vector<OverdueWait>> DecodeOverdueWaits(std::string_view bytes, int64_t now_ns);

// Reports follow each other by this at least, however short the limit: one takes a while to make.
inline constexpr int64_t kReportGapNs = 2'500'000'000;

}  // namespace kolovod
