#include "engine/straggler_news.h"

#include <climits>
#include <utility>

#include "base/tree.h"

namespace kolovod {
namespace {

constexpr int64_t kFreshNs = 5'000'000'000;     // waits are told again every second, while they last
constexpr int64_t kPatienceNs = 3'000'000'000;  // for an answer

}  // namespace

void StragglerNews::Hear(int host, std::vector<OverdueWait> waits, int64_t now_ns) {
  MutexLock lock(mutex_);
  Other& other = others_[static_cast<size_t>(host)];
  other.waits = std::move(waits);
  other.heard_ns = now_ns;
  unanswered_ = true;
}

void StragglerNews::HearAnswer(int host, bool blames, int64_t now_ns) {
  MutexLock lock(mutex_);
  Other& other = others_[static_cast<size_t>(host)];
  other.answered_ns = now_ns;
  other.blames = blames;
}

void StragglerNews::Told(int64_t now_ns) {
  MutexLock lock(mutex_);
  if (now_ns - last_told_ns_ > kFreshNs) first_told_ns_ = now_ns;
  last_told_ns_ = now_ns;
}

std::vector<OverdueWait> StragglerNews::Waits(int64_t now_ns) {
  MutexLock lock(mutex_);
  std::vector<OverdueWait> waits;
  for (const Other& other : others_) {
    if (now_ns - other.heard_ns <= kFreshNs)
      waits.insert(waits.end(), other.waits.begin(), other.waits.end());
  }
  return waits;
}

bool StragglerNews::TakeUnanswered() {
  MutexLock lock(mutex_);
  return std::exchange(unanswered_, false);
}

StragglerNews::Answers StragglerNews::Judge(int64_t now_ns, int* silent) {
  MutexLock lock(mutex_);
  if (now_ns - first_told_ns_ < kPatienceNs) return Answers::kOutstanding;
  for (const Other& other : others_) {
    if (other.blames && now_ns - other.answered_ns <= kFreshNs) return Answers::kBlaming;
  }
  int nearest = INT_MAX;
  for (size_t i = 0; i < others_.size(); ++i) {
    const auto host = static_cast<int>(i);
    if (host == host_ || now_ns - others_[i].answered_ns <= kFreshNs) continue;
    const int distance = Tree::Distance(host_, host);
    if (distance >= nearest) continue;
    nearest = distance;
    *silent = host;
  }
  return nearest == INT_MAX ? Answers::kNone : Answers::kSilent;
}

}  // namespace kolovod
