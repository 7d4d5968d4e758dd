#include "engine/late.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "transport/waiter.h"

namespace kolovod {
namespace {

constexpr int64_t kPatienceNs = 2'000'000'000;  // for a late rank's stack
constexpr int64_t kShortestPeriodNs = 100'000'000;
constexpr int64_t kLongestPeriodNs = 1'000'000'000;
constexpr size_t kMaxNames = 6;         // of operations, in a line of a report
constexpr size_t kMaxFailureNames = 2;  // the text of a failure is short
constexpr size_t kMaxFailureCauses = 2;

int64_t PeriodOf(const LateLimits& limits) {
  int64_t shortest = INT64_MAX;
  for (int64_t limit : {limits.report_ns, limits.failure_ns}) {
    if (limit > 0) shortest = std::min(shortest, limit);
  }
  return std::clamp(shortest / 20, kShortestPeriodNs, kLongestPeriodNs);
}

std::string Indented(const std::string& text) {
  std::string out;
  size_t begin = 0;
  while (begin < text.size()) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    out += "  " + text.substr(begin, end - begin) + "\n";
    begin = end + 1;
  }
  return out;
}

// In one write, so that lines of several ranks do not mix.
void WriteToStandardError(const std::string& text) {
  const char* data = text.data();
  size_t left = text.size();
  while (left > 0) {
    const ssize_t n = write(STDERR_FILENO, data, left);
    if (n <= 0) return;  // nobody listens
    data += n;
    left -= static_cast<size_t>(n);
  }
}

}  // namespace

LateWatch::LateWatch(Segment& segment, int rank, const Config& config, RankNames names, std::string where,
                     std::shared_ptr<StackSource> stacks)
    : segment_(segment),
      rank_(rank),
      size_(segment.layout().size),
      limits_{config.late_report_ms * 1'000'000, config.late_failure_ms * 1'000'000},
      period_ns_(PeriodOf(limits_)),
      names_(std::move(names)),
      where_(where.empty() ? "" : "; " + std::move(where)),
      stacks_(std::move(stacks)) {}

void LateWatch::Tick() {
  if (segment_.layout().world_size == 1 || (limits_.report_ns == 0 && limits_.failure_ns == 0)) return;
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;
  const int64_t now_ns = NowNs();
  Answer(now_ns);
  if (segment_.revoked()) {
    report_.reset();
  } else if (report_) {
    if (HaveAnswered(*report_) || now_ns - report_->begun_ns >= kPatienceNs) Finish(now_ns);
  } else if (now_ns >= next_look_ns_) {
    next_look_ns_ = now_ns + period_ns_;
    Look(now_ns);
  }
}

std::string LateWatch::last_report() {
  std::lock_guard lock(mutex_);
  return last_report_;
}

void LateWatch::Answer(int64_t now_ns) {
  RankBlock& self = segment_.rank(rank_);
  const uint32_t asked = self.asked.load(std::memory_order_acquire);
  if (asked == answered_) return;
  const std::optional<std::string> text =
      stacks_ == nullptr ? "no stack: no faulthandler here\n" : stacks_->Capture(now_ns);
  if (!text) return;
  self.stack_bytes = static_cast<uint32_t>(std::min(text->size(), kStackBytes));
  std::memcpy(self.stack, text->data(), self.stack_bytes);
  answered_ = asked;
  self.answered.store(asked, std::memory_order_release);
}

// Only who waits too long itself looks at what the others have noted: as long as all is well, nobody reads
// another rank's memory.
void LateWatch::Look(int64_t now_ns) {
  int64_t least_ns = INT64_MAX;
  for (int64_t limit : {limits_.report_ns, limits_.failure_ns}) {
    if (limit > 0) least_ns = std::min(least_ns, limit);
  }
  const int64_t oldest_ns = OldestPendingNs(segment_.records(rank_));
  if (oldest_ns > now_ns - least_ns) return;
  std::atomic<int64_t>& last = segment_.header().late_report_ns;
  int64_t last_ns = last.load(std::memory_order_acquire);
  const LateVerdict verdict = JudgeLate(View(now_ns, last_ns), limits_);
  if (!verdict.report && !verdict.fail) return;
  Report report{now_ns, last_ns, std::vector<uint32_t>(static_cast<size_t>(size_))};
  if (!last.compare_exchange_strong(last_ns, now_ns, std::memory_order_acq_rel)) return;
  for (const LateFinding& finding : verdict.findings) {
    for (int r = 0; r < size_; ++r) {
      if (finding.rank < 0 ? r == rank_ : r != finding.rank) continue;
      uint32_t& asked = report.asked[static_cast<size_t>(r)];
      if (asked == 0) asked = segment_.rank(r).asked.fetch_add(1, std::memory_order_acq_rel) + 1;
      segment_.RingIdle(r);
    }
  }
  report_ = std::move(report);
}

LateView LateWatch::View(int64_t now_ns, int64_t last_report_ns) {
  LateView view;
  view.now_ns = now_ns;
  view.last_report_ns = last_report_ns;
  for (int r = 0; r < size_; ++r) {
    RankBlock& block = segment_.rank(r);
    view.records.push_back(ReadRecords(segment_.records(r)));
    view.incomplete.push_back(block.unrecorded.load(std::memory_order_relaxed) > 0);
    view.waits_for.push_back(segment_.WaitsFor(r));
  }
  return view;
}

bool LateWatch::HaveAnswered(const Report& report) {
  for (int r = 0; r < size_; ++r) {
    const uint32_t asked = report.asked[static_cast<size_t>(r)];
    const uint32_t answered = segment_.rank(r).answered.load(std::memory_order_acquire);
    if (asked != 0 && static_cast<int32_t>(answered - asked) < 0) return false;
  }
  return true;
}

void LateWatch::Finish(int64_t now_ns) {
  Report report = *std::move(report_);
  report_.reset();
  // This rank was stopped itself, and somebody else has reported since.
  if (segment_.header().late_report_ns.load(std::memory_order_acquire) != report.begun_ns) return;
  // Again, since a late rank may have come meanwhile.
  LateVerdict verdict = JudgeLate(View(now_ns, report.last_report_ns), limits_);
  if (!verdict.report && !verdict.fail) return;
  for (int r = 0; r < size_; ++r) {
    const uint32_t answered = segment_.rank(r).answered.load(std::memory_order_acquire);
    report.answered.push_back(static_cast<int32_t>(answered - report.asked[static_cast<size_t>(r)]) >= 0);
  }
  const std::vector<LateFinding> findings = BlameSilent(std::move(verdict.findings), report);
  std::string text;
  std::string causes;
  std::vector<bool> told(static_cast<size_t>(size_));
  for (size_t i = 0; i < findings.size(); ++i) {
    const LateFinding& finding = findings[i];
    text += "kolovod: " + LateText(finding, names_, kMaxNames) + where_ + "\n";
    if (i < kMaxFailureCauses) {
      causes += (i == 0 ? "" : "; ") + LateText(finding, names_, kMaxFailureNames) +
                InnermostCall(finding.rank, report);
    }
    if (finding.rank < 0 || told[static_cast<size_t>(finding.rank)]) continue;
    told[static_cast<size_t>(finding.rank)] = true;
    text += WhereIs(finding.rank, report);
  }
  last_report_ = text;
  reports_.fetch_add(1, std::memory_order_relaxed);
  WriteToStandardError(text);
  // Released to the next reporter, who may have the texts overwritten that were read here.
  segment_.header().late_report_ns.store(report.begun_ns, std::memory_order_release);
  if (verdict.fail) {
    char limit[32];
    std::snprintf(limit, sizeof(limit), "%g s", static_cast<double>(limits_.failure_ns) * 1e-9);
    segment_.Revoke(Code::kLate, causes + where_ + "; the limit is " + limit);
  }
}

// Nothing happens, and some do not even answer: it is for them that the others wait.
std::vector<LateFinding> LateWatch::BlameSilent(std::vector<LateFinding> findings, const Report& report) {
  if (findings.front().rank >= 0) return findings;
  const LateFinding unclear = findings.front();
  std::vector<LateFinding> silent;
  for (int r = 0; r < size_; ++r) {
    if (report.asked[static_cast<size_t>(r)] == 0 || report.answered[static_cast<size_t>(r)]) continue;
    silent.push_back(unclear);
    silent.back().rank = r;
    silent.back().cause = LateCause::kNotStarted;
  }
  return silent.empty() ? findings : silent;
}

// Begins with "; ", or is empty.
std::string LateWatch::InnermostCall(int rank, const Report& report) {
  if (rank < 0 || report.asked[static_cast<size_t>(rank)] == 0) return "";
  if (!report.answered[static_cast<size_t>(rank)]) return "; it does not answer";
  const std::string stack = Stack(rank);
  const size_t begin = stack.find("File ");
  if (begin == std::string::npos) return "";
  return "; its main thread is at " + stack.substr(begin, stack.find('\n', begin) - begin);
}

std::string LateWatch::Stack(int rank) {
  const RankBlock& block = segment_.rank(rank);
  return std::string(block.stack, std::min<size_t>(block.stack_bytes, kStackBytes));
}

std::string LateWatch::WhereIs(int rank, const Report& report) {
  const std::string whose = "  rank " + std::to_string(names_.numbers[static_cast<size_t>(rank)]);
  if (report.asked[static_cast<size_t>(rank)] == 0) return "";  // late only since the report was begun
  if (!report.answered[static_cast<size_t>(rank)]) {
    return whose +
           " does not answer: its process is stopped (SIGSTOP, a debugger), or gets no core to run on\n";
  }
  return whose + ", its main thread:\n" + Indented(Stack(rank));
}

}  // namespace kolovod
