#include "control/stragglers.h"

#include <algorithm>
#include <cstdio>
#include <unordered_map>

namespace kolovod {
namespace {

constexpr size_t kMaxRanks = 6;  // named as waiting

// One operation that one rank waits for.
struct Wait {
  int rank;
  const OperationRecord* record;
  int64_t since_ns;
};

bool HasStarted(const OperationRecord& record) { return record.state == OperationState::kStarted; }
int64_t SinceNs(const OperationRecord& record) {
  return HasStarted(record) ? record.started_ns : record.submitted_ns;
}

class Judge {
 public:
  Judge(const StragglerView& view, const StragglerLimits& limits) : view_(view), limits_(limits) {
    for (size_t r = 0; r < view.records.size(); ++r) {
      const std::vector<OperationRecord>& records = view.records[r];
      bool joined = false;
      uint64_t last_bucket = 0;
      for (const OperationRecord& record : records) {
        by_name_[record.name_hash].push_back({r, &record});
        joined = joined || (record.verb == Verb::kJoin && record.pending());
        last_bucket = std::max(last_bucket, record.bucket);
      }
      has_joined_.push_back(joined);
      is_busy_.push_back(!records.empty() &&
                         view.now_ns - records.back().submitted_ns < ShortestLimit(limits));
      last_bucket_.push_back(last_bucket);
    }
  }

  StragglerVerdict Run() {
    // What has waited for half the time belongs to the same trouble: it is not worth a report of its own.
    const int64_t least_ns = ShortestLimit(limits_) / 2;
    for (size_t r = 0; r < view_.records.size(); ++r) {
      for (const OperationRecord& record : view_.records[r]) {
        if (!record.pending()) continue;
        const Wait wait{static_cast<int>(r), &record, SinceNs(record)};
        if (view_.now_ns - wait.since_ns < least_ns) continue;
        if (TraitsOf(record.verb).is_transfer) {
          JudgeTransfer(wait);
          continue;
        }
        if (!(HasStarted(record) ? JudgeStarted(wait) : JudgeSubmitted(wait))) unclear_.push_back(wait);
      }
    }
    // What is only behind other trouble says nothing.
    if (verdict_.findings.empty()) {
      for (const Wait& wait : unclear_) Add(-1, StragglerCause::kNoProgress, wait);
    }
    for (StragglerFinding& finding : verdict_.findings) Tidy(finding);
    std::stable_sort(verdict_.findings.begin(), verdict_.findings.end(),
                     [](const StragglerFinding& a, const StragglerFinding& b) {
                       return a.operations.front().waited_ns > b.operations.front().waited_ns;
                     });
    return std::move(verdict_);
  }

 private:
  struct Noted {
    size_t rank;
    const OperationRecord* record;
  };

  // Whether another rank's record is of the same use of its name: names are used again and again. `used`: the
  // bucket of the last use that is over on the rank that waits, 0 unknown.
  bool IsSameUse(const Noted& noted, const Wait& wait, uint64_t used) const {
    if (noted.record->state == OperationState::kSubmitted) {
      return last_bucket_[noted.rank] >= used;  // else it has not come to that bucket yet
    }
    return used > 0 ? noted.record->bucket > used : noted.record->started_ns >= wait.record->submitted_ns;
  }

  // True: it is known whom it waits for.
  bool JudgeSubmitted(const Wait& wait) {
    std::vector<bool> there = view_.incomplete;
    there[static_cast<size_t>(wait.rank)] = true;
    const std::vector<Noted>& uses = by_name_[wait.record->name_hash];
    uint64_t used = 0;
    for (const Noted& noted : uses) {
      if (static_cast<int>(noted.rank) == wait.rank) used = std::max(used, noted.record->bucket);
    }
    for (const Noted& noted : uses) {
      if (IsSameUse(noted, wait, used)) there[noted.rank] = true;
    }
    bool missing = false;
    for (size_t r = 0; r < there.size(); ++r) {
      if (there[r] || has_joined_[r]) continue;
      missing = true;
      // Who has joined waits until the others have no more data, however long that takes.
      if (wait.record->verb == Verb::kJoin && is_busy_[r]) continue;
      Add(static_cast<int>(r), StragglerCause::kNotSubmitted, wait);
    }
    return missing;
  }

  void JudgeTransfer(const Wait& wait) {
    const auto partner = std::find(view_.numbers.begin(), view_.numbers.end(), wait.record->peer);
    const bool known = wait.record->peer >= 0 && partner != view_.numbers.end();
    Add(known ? static_cast<int>(partner - view_.numbers.begin()) : -1, StragglerCause::kNoPartner, wait);
  }

  bool JudgeStarted(const Wait& wait) {
    bool lagging = false;
    for (const Noted& noted : by_name_[wait.record->name_hash]) {
      const bool behind = last_bucket_[noted.rank] < wait.record->bucket;
      if (noted.record->state != OperationState::kSubmitted || !behind || view_.incomplete[noted.rank])
        continue;
      Blame(static_cast<int>(noted.rank), StragglerCause::kNotStarted, wait);
      lagging = true;
    }
    if (lagging) return true;
    if (view_.waits_for[static_cast<size_t>(wait.rank)] < 0) return false;
    Blame(wait.rank, StragglerCause::kNoData, wait);
    return true;
  }

  // A rank that waits for another's data is not to blame: that one is, or whom it waits for in its turn.
  void Blame(int rank, StragglerCause cause, const Wait& wait) {
    for (size_t i = 0; i < view_.waits_for.size(); ++i) {
      const int next = view_.waits_for[static_cast<size_t>(rank)];
      if (next < 0) break;
      rank = next;
      cause = StragglerCause::kNoData;
    }
    Add(rank, cause, wait);
  }

  void Add(int rank, StragglerCause cause, const Wait& wait) {
    auto found = std::find_if(verdict_.findings.begin(), verdict_.findings.end(),
                              [&](const StragglerFinding& f) { return f.rank == rank && f.cause == cause; });
    if (found == verdict_.findings.end()) {
      verdict_.findings.push_back({rank, cause, {}, {}});
      found = verdict_.findings.end() - 1;
    }
    found->operations.push_back(
        {wait.record->name_hash, wait.record->name, wait.record->verb, view_.now_ns - wait.since_ns});
    if (wait.rank != rank) found->waiting.push_back(wait.rank);
    SetDue(wait);
  }

  void SetDue(const Wait& wait) {
    const int64_t age_ns = view_.now_ns - wait.since_ns;
    const int64_t last_ns = view_.last_report_ns;
    const int64_t quiet_ns = last_ns == 0 ? INT64_MAX : view_.now_ns - last_ns;
    const int64_t doubled_ns = last_ns == 0 ? 0 : last_ns - wait.since_ns;
    if (limits_.report_ns > 0 && age_ns >= limits_.report_ns &&
        quiet_ns >= std::max({limits_.report_ns, doubled_ns, kReportGapNs})) {
      verdict_.report = true;
    }
    if (limits_.failure_ns > 0 && age_ns >= limits_.failure_ns && quiet_ns >= kReportGapNs) {
      verdict_.fail = true;
    }
  }

  // One mention for each operation and each rank.
  static void Tidy(StragglerFinding& finding) {
    auto& ops = finding.operations;
    std::stable_sort(ops.begin(), ops.end(), [](const OverdueOperation& a, const OverdueOperation& b) {
      return a.waited_ns > b.waited_ns;
    });
    std::vector<OverdueOperation> once;
    for (OverdueOperation& op : ops) {
      const auto same = [&](const OverdueOperation& other) { return other.name_hash == op.name_hash; };
      if (std::none_of(once.begin(), once.end(), same)) once.push_back(std::move(op));
    }
    ops = std::move(once);
    std::sort(finding.waiting.begin(), finding.waiting.end());
    finding.waiting.erase(std::unique(finding.waiting.begin(), finding.waiting.end()), finding.waiting.end());
  }

  const StragglerView& view_;
  const StragglerLimits& limits_;
  std::unordered_map<uint64_t, std::vector<Noted>> by_name_;
  std::vector<bool> has_joined_;       // by rank: it contributes zeros to whatever the others submit
  std::vector<bool> is_busy_;          // by rank: it has submitted something lately
  std::vector<uint64_t> last_bucket_;  // by rank: the last one that it has started
  StragglerVerdict verdict_;
  std::vector<Wait> unclear_;
};

std::string Seconds(int64_t ns) {
  char text[32];
  const double seconds = static_cast<double>(ns) * 1e-9;
  std::snprintf(text, sizeof(text), seconds < 10 ? "%.1f s" : "%.0f s", seconds);
  return text;
}

std::string Names(const std::vector<OverdueOperation>& operations, size_t max_names) {
  std::string text;
  for (size_t i = 0; i < std::min(operations.size(), max_names); ++i) {
    if (i > 0) text += ", ";
    text += "'" + operations[i].name + "' (" + NameOf(operations[i].verb) + ", " +
            Seconds(operations[i].waited_ns) + ")";
  }
  if (operations.size() > max_names) {
    text += " and " + std::to_string(operations.size() - max_names) + " more";
  }
  return text;
}

// TensorFlow prunes what no result of a graph depends on, and the user sees only that a rank does not come.
std::string Pruned(const std::vector<OverdueOperation>& operations) {
  const auto in_graph = [](const OverdueOperation& operation) { return operation.name.starts_with("tf."); };
  if (std::none_of(operations.begin(), operations.end(), in_graph)) return "";
  return "; a TensorFlow graph leaves out operations whose results it does not use: use them on all ranks";
}

std::string Ranks(const std::vector<int>& ranks, const std::vector<int>& numbers) {
  std::vector<int> called;  // a view's own order begins with the ranks of its host
  for (int rank : ranks) called.push_back(numbers[static_cast<size_t>(rank)]);
  std::sort(called.begin(), called.end());
  std::string text;
  for (size_t i = 0; i < std::min(called.size(), kMaxRanks); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(called[i]);
  }
  if (ranks.size() > kMaxRanks) text += " and " + std::to_string(ranks.size() - kMaxRanks) + " more";
  return (ranks.size() == 1 ? "rank " + text + " waits" : "ranks " + text + " wait");
}

}  // namespace

int64_t ShortestLimit(const StragglerLimits& limits) {
  if (limits.report_ns == 0) return limits.failure_ns;
  if (limits.failure_ns == 0) return limits.report_ns;
  return std::min(limits.report_ns, limits.failure_ns);
}

StragglerVerdict JudgeStragglers(const StragglerView& view, const StragglerLimits& limits) {
  return Judge(view, limits).Run();
}

std::string StragglerText(const StragglerFinding& finding, const RankNames& names, size_t max_names) {
  const std::string operations = Names(finding.operations, max_names);
  const std::string who = finding.rank < 0 ? "" : names.describe(finding.rank);
  const std::string wait = finding.waiting.empty() ? "" : "; " + Ranks(finding.waiting, names.numbers);
  switch (finding.cause) {
    case StragglerCause::kNotSubmitted:
      return who + " has not submitted " + operations + wait + Pruned(finding.operations);
    case StragglerCause::kNotStarted:
      return who + " has submitted " + operations + ", but takes no part in it" + wait;
    case StragglerCause::kNoData:
      return who + " does not deliver its data of " + operations + wait;
    case StragglerCause::kSilentHost:
      return finding.silent + ", which leads its host, does not answer; here every rank has submitted " +
             operations + wait;
    case StragglerCause::kNoPartner:
      return (who.empty() ? "nobody has" : who + " has not") + " sent or received what is waited for by " +
             operations + wait;
    case StragglerCause::kNoProgress:
      break;
  }
  return "every rank has submitted " + operations + ", but nothing happens" + wait;
}

}  // namespace kolovod
