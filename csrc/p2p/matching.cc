#include "p2p/matching.h"

#include <algorithm>

namespace kolovod {

std::optional<Arrival> Matching::Post(uint64_t id, int source, int64_t tag) {
  const auto tagged = arrivals_.find(tag);
  if (tagged != arrivals_.end()) {
    std::map<int, Arrivals>& by_source = tagged->second;
    auto best = by_source.find(source);
    if (source == kAnySource) {
      best = std::min_element(by_source.begin(), by_source.end(), [](const auto& a, const auto& b) {
        return a.second.front().order < b.second.front().order;
      });
    }
    if (best != by_source.end()) {
      Arrival taken = std::move(best->second.front().value);
      best->second.pop_front();
      if (best->second.empty()) by_source.erase(best);
      if (by_source.empty()) arrivals_.erase(tagged);
      --kept_;
      return taken;
    }
  }
  receives_[{tag, source}].push_back({next_++, id});
  ++waiting_;
  return std::nullopt;
}

std::optional<uint64_t> Matching::Arrive(int source, int64_t tag) {
  const auto from_it = receives_.find({tag, source});
  const auto from_any = receives_.find({tag, kAnySource});
  auto taken = from_it;
  if (taken == receives_.end() ||
      (from_any != receives_.end() && from_any->second.front().order < from_it->second.front().order)) {
    taken = from_any;
  }
  if (taken == receives_.end()) return std::nullopt;
  const uint64_t id = taken->second.front().value;
  taken->second.pop_front();
  if (taken->second.empty()) receives_.erase(taken);
  --waiting_;
  return id;
}

void Matching::Keep(Arrival arrival) {
  const Envelope& envelope = arrival.envelope;
  Arrivals& kept = arrivals_[envelope.tag][envelope.source];
  kept.push_back({next_++, std::move(arrival)});
  ++kept_;
}

void Matching::Complete(int source, int64_t tag, std::unique_ptr<char[]> data) {
  Arrival& last = arrivals_.at(tag).at(source).back().value;
  last.data = std::move(data);
  last.complete = true;
}

void Matching::Withdraw(uint64_t id, int source, int64_t tag) {
  const auto found = receives_.find({tag, source});
  if (found == receives_.end()) return;
  Receives& posted = found->second;
  const auto it = std::find_if(posted.begin(), posted.end(), [&](const auto& r) { return r.value == id; });
  if (it == posted.end()) return;
  posted.erase(it);
  --waiting_;
  if (posted.empty()) receives_.erase(found);
}

}  // namespace kolovod
