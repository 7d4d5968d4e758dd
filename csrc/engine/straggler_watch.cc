#include "engine/straggler_watch.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>

#include "transport/waiter.h"

namespace kolovod {
namespace {

constexpr int64_t kPatienceNs = 2'000'000'000;  // for a late rank's stack
constexpr int64_t kShortestPeriodNs = 100'000'000;
constexpr int64_t kLongestPeriodNs = 1'000'000'000;
constexpr size_t kMaxNames = 6;         // of operations, in a line of a report
constexpr size_t kMaxFailureNames = 2;  // the text of a failure is short
constexpr size_t kMaxFailureCauses = 2;

int64_t PeriodOf(const StragglerLimits& limits) {
  return std::clamp(ShortestLimit(limits) / 20, kShortestPeriodNs, kLongestPeriodNs);
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

// Whether a signal or a debugger has stopped the process, which then answers nothing.
bool IsStopped(int pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(file, line);
  const size_t name_end = line.rfind(')');  // a name may have any character
  const size_t state = name_end == std::string::npos ? line.size() : name_end + 2;
  return state < line.size() && (line[state] == 'T' || line[state] == 't');
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

StragglerWatch::StragglerWatch(Segment& segment, const Config& config, StragglerOptions options)
    : segment_(segment),
      options_(std::move(options)),
      rank_(options_.topology.local_rank),
      size_(options_.topology.local_size()),
      limits_{config.late_report_ms * 1'000'000, config.late_failure_ms * 1'000'000},
      period_ns_(PeriodOf(limits_)),
      news_(options_.topology.hosts(), options_.topology.host()) {}

void StragglerWatch::Tick() {
  if (options_.topology.size() == 1 || ShortestLimit(limits_) == 0) return;
  if (!mutex_.try_lock()) return;
  TickLocked();
  mutex_.unlock();
}

void StragglerWatch::TickLocked() {
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

std::string StragglerWatch::last_report() {
  MutexLock lock(mutex_);
  return last_report_;
}

void StragglerWatch::Answer(int64_t now_ns) {
  RankBlock& self = segment_.rank(rank_);
  const uint32_t asked = self.asked.load(std::memory_order_acquire);
  if (asked == answered_) return;
  const std::optional<std::string> text =
      options_.stacks == nullptr ? "no stack: no faulthandler here\n" : options_.stacks->Capture(now_ns);
  if (!text) return;
  self.stack_bytes = static_cast<uint32_t>(std::min(text->size(), kStackBytes));
  std::memcpy(self.stack, text->data(), self.stack_bytes);
  answered_ = asked;
  self.answered.store(asked, std::memory_order_release);
}

// Only who waits too long itself looks at what the others have noted: as long as all is well, nobody reads
// another rank's memory. With several hosts its leader looks as well, and who hears that others wait.
bool StragglerWatch::HasReasonToLook(int64_t now_ns) {
  const bool overdue = OldestPendingNs(segment_.records(rank_)) <= now_ns - ShortestLimit(limits_);
  if (!several_hosts()) return overdue;
  std::atomic<uint32_t>& wanted = segment_.header().late_elsewhere;
  if (options_.topology.leads()) {
    const bool is_wanted = wanted.exchange(0, std::memory_order_relaxed) != 0;
    return overdue || is_wanted || !news_.Waits(now_ns).empty();
  }
  if (overdue) {
    wanted.store(1, std::memory_order_relaxed);
    segment_.WakeIdle(0);
  }
  return overdue;
}

void StragglerWatch::Look(int64_t now_ns) {
  if (!HasReasonToLook(now_ns)) return;
  const int64_t last_ns = segment_.header().late_report_ns.load(std::memory_order_acquire);
  const StragglerView view = View(now_ns, last_ns);
  StragglerVerdict verdict = JudgeStragglers(view, limits_);
  if (several_hosts()) {
    if (options_.topology.leads()) TellOthers(view, verdict);
    LeaveToOthers(&verdict, now_ns);
  }
  if (verdict.report || verdict.fail) Begin(verdict, now_ns, last_ns);
}

void StragglerWatch::Begin(const StragglerVerdict& verdict, int64_t now_ns, int64_t last_ns) {
  Report report{now_ns, last_ns, std::vector<uint32_t>(static_cast<size_t>(size_))};
  report.is_clear =
      !verdict.findings.empty() && verdict.findings.front().cause != StragglerCause::kNoProgress;
  if (!segment_.header().late_report_ns.compare_exchange_strong(last_ns, now_ns, std::memory_order_acq_rel)) {
    return;
  }
  for (const StragglerFinding& finding : verdict.findings) {
    for (int r = 0; r < size_; ++r) {
      if (finding.rank < 0 ? r == rank_ : r != finding.rank) continue;
      uint32_t& asked = report.asked[static_cast<size_t>(r)];
      if (asked == 0) asked = segment_.rank(r).asked.fetch_add(1, std::memory_order_acq_rel) + 1;
      segment_.WakeIdle(r);
    }
  }
  report_ = std::move(report);
}

StragglerView StragglerWatch::View(int64_t now_ns, int64_t last_report_ns) {
  StragglerView view;
  view.now_ns = now_ns;
  view.last_report_ns = last_report_ns;
  shown_ = options_.topology.local_ranks;
  view.numbers = shown_;
  for (int r = 0; r < size_; ++r) {
    RankBlock& block = segment_.rank(r);
    view.records.push_back(ReadRecords(segment_.records(r)));
    view.incomplete.push_back(block.unrecorded.load(std::memory_order_relaxed) > 0);
    view.waits_for.push_back(segment_.WaitsFor(r));
  }
  for (const OverdueWait& wait : news_.Waits(now_ns)) {
    const auto found = std::find(shown_.begin() + size_, shown_.end(), wait.rank);
    const auto index = static_cast<size_t>(found - shown_.begin());
    if (found == shown_.end()) {
      shown_.push_back(wait.rank);
      view.records.emplace_back();
      view.incomplete.push_back(true);
      view.waits_for.push_back(-1);
    }
    view.records[index].push_back(wait.record);
    if (wait.used == 0) continue;
    OperationRecord& used = view.records[index].emplace_back(wait.record);
    used.state = OperationState::kDone;
    used.bucket = wait.used;
  }
  return view;
}

void StragglerWatch::TellOthers(const StragglerView& view, const StragglerVerdict& verdict) {
  std::vector<OverdueWait> waits = OverdueWaits(view, limits_, static_cast<size_t>(size_));
  Note note;
  note.rank = options_.topology.rank;
  if (!waits.empty()) {
    for (OverdueWait& wait : waits) wait.rank = shown_[static_cast<size_t>(wait.rank)];
    note.kind = Note::Kind::kOverdue;
    note.body = EncodeOverdueWaits(waits, view.now_ns);
    options_.tell_leaders(note);
    news_.Told(view.now_ns);
  }
  if (!news_.TakeUnanswered()) return;
  note.kind = Note::Kind::kOverdueSeen;
  note.number = !verdict.findings.empty() && verdict.findings.front().rank >= 0;
  note.body.clear();
  options_.tell_leaders(note);
}

void StragglerWatch::Hear(const Note& note) {
  const Topology& topology = options_.topology;
  if (note.rank < 0 || note.rank >= topology.size() || topology.on_this_host(note.rank)) return;
  const int host = topology.host_of[static_cast<size_t>(note.rank)];
  const int64_t now_ns = NowNs();
  if (note.kind == Note::Kind::kOverdueSeen) return news_.HearAnswer(host, note.number != 0, now_ns);
  std::optional<std::vector<OverdueWait>> waits = DecodeOverdueWaits(note.body, now_ns);
  if (!waits) return;
  for (const OverdueWait& wait : *waits) {
    if (wait.rank < 0 || wait.rank >= topology.size()) return;
  }
  news_.Hear(host, std::move(*waits), now_ns);
  segment_.WakeIdle(rank_);
}

void StragglerWatch::LeaveToOthers(StragglerVerdict* verdict, int64_t now_ns) {
  if (verdict->findings.empty() || verdict->findings.front().rank >= 0 ||
      verdict->findings.front().cause == StragglerCause::kNoPartner) {
    return;
  }
  StragglerFinding& finding = verdict->findings.front();
  int silent = -1;
  const bool waits_here =
      std::any_of(finding.waiting.begin(), finding.waiting.end(), [this](int r) { return r < size_; });
  const StragglerNews::Answers answers = options_.topology.leads() && waits_here
                                             ? news_.Judge(now_ns, &silent)
                                             : StragglerNews::Answers::kOutstanding;
  if (answers == StragglerNews::Answers::kOutstanding || answers == StragglerNews::Answers::kBlaming) {
    *verdict = StragglerVerdict();
  } else if (answers == StragglerNews::Answers::kSilent) {
    finding.cause = StragglerCause::kSilentHost;
    finding.silent = options_.names.describe(options_.topology.leaders[static_cast<size_t>(silent)]);
  }
}

bool StragglerWatch::HaveAnswered(const Report& report) {
  for (int r = 0; r < size_; ++r) {
    const uint32_t asked = report.asked[static_cast<size_t>(r)];
    const uint32_t answered = segment_.rank(r).answered.load(std::memory_order_acquire);
    const bool is_missing = asked != 0 && static_cast<int32_t>(answered - asked) < 0;
    if (is_missing && !IsStopped(segment_.rank(r).pid)) return false;
  }
  return true;
}

void StragglerWatch::Finish(int64_t now_ns) {
  Report report = *std::move(report_);
  report_.reset();
  // This rank was stopped itself, and somebody else has reported since.
  if (segment_.header().late_report_ns.load(std::memory_order_acquire) != report.begun_ns) return;
  // Again, since a late rank may have come meanwhile.
  StragglerVerdict verdict = JudgeStragglers(View(now_ns, report.last_report_ns), limits_);
  if (several_hosts()) LeaveToOthers(&verdict, now_ns);
  if (!verdict.report && !verdict.fail) return;
  for (int r = 0; r < size_; ++r) {
    const uint32_t answered = segment_.rank(r).answered.load(std::memory_order_acquire);
    report.answered.push_back(static_cast<int32_t>(answered - report.asked[static_cast<size_t>(r)]) >= 0);
  }
  const std::vector<StragglerFinding> findings = BlameSilent(std::move(verdict.findings), report);
  // What was waited for has come, and the next is not waited for yet: things go on.
  if (report.is_clear && findings.front().cause == StragglerCause::kNoProgress) return;
  RankNames names;
  for (int rank : shown_) names.numbers.push_back(options_.names.numbers[static_cast<size_t>(rank)]);
  names.describe = [this](int r) {
    AssumeHeld(mutex_);
    return options_.names.describe(shown_[static_cast<size_t>(r)]);
  };
  const std::string where = options_.where.empty() ? "" : "; " + options_.where;
  std::string text;
  std::string causes;
  std::vector<bool> told(static_cast<size_t>(size_));
  for (size_t i = 0; i < findings.size(); ++i) {
    const StragglerFinding& finding = findings[i];
    text += "kolovod: " + StragglerText(finding, names, kMaxNames) + where + "\n";
    if (i < kMaxFailureCauses) {
      causes += (i == 0 ? "" : "; ") + StragglerText(finding, names, kMaxFailureNames) +
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
    segment_.Revoke(Code::kLate, causes + where + "; the limit is " + limit);
  }
}

// Nothing happens, and some do not even answer: it is for them that the others wait.
std::vector<StragglerFinding> StragglerWatch::BlameSilent(std::vector<StragglerFinding> findings,
                                                          const Report& report) {
  if (findings.front().cause != StragglerCause::kNoProgress) return findings;
  const StragglerFinding unclear = findings.front();
  std::vector<StragglerFinding> silent;
  for (int r = 0; r < size_; ++r) {
    if (report.asked[static_cast<size_t>(r)] == 0 || report.answered[static_cast<size_t>(r)]) continue;
    silent.push_back(unclear);
    silent.back().rank = r;
    silent.back().cause = StragglerCause::kNotStarted;
  }
  return silent.empty() ? findings : silent;
}

// Begins with "; ", or is empty.
std::string StragglerWatch::InnermostCall(int rank, const Report& report) {
  if (rank < 0 || report.asked[static_cast<size_t>(rank)] == 0) return "";
  if (!report.answered[static_cast<size_t>(rank)]) return "; it does not answer";
  const std::string stack = Stack(rank);
  const size_t begin = stack.find("File ");
  if (begin == std::string::npos) return "";
  return "; its main thread is at " + stack.substr(begin, stack.find('\n', begin) - begin);
}

std::string StragglerWatch::Stack(int rank) {
  const RankBlock& block = segment_.rank(rank);
  return std::string(block.stack, std::min<size_t>(block.stack_bytes, kStackBytes));
}

std::string StragglerWatch::WhereIs(int rank, const Report& report) {
  const std::string whose =
      "  rank " +
      std::to_string(options_.names.numbers[static_cast<size_t>(shown_[static_cast<size_t>(rank)])]);
  if (report.asked[static_cast<size_t>(rank)] == 0) return "";  // late only since the report was begun
  if (!report.answered[static_cast<size_t>(rank)]) {
    return whose +
           " does not answer: its process is stopped (SIGSTOP, a debugger), or gets no core to run on\n";
  }
  return whose + ", its main thread:\n" + Indented(Stack(rank));
}

}  // namespace kolovod
