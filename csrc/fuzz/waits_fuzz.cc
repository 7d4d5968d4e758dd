// For what the ranks of another host wait (docs/wire.md, waits), judged and put in words.
#include "control/stragglers.h"
#include "fuzz/fuzz.h"

using namespace kolovod;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr int64_t kNowNs = 1'000'000'000'000;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const auto waits =
      fuzz::Bounded(bytes, 16, [](std::string_view b) { return DecodeOverdueWaits(b, kNowNs); });
  if (!waits) return 0;
  fuzz::Require(waits->size() <= kMaxOverdueWaits, "so many waits");
  fuzz::Require(EncodeOverdueWaits(*waits, kNowNs) == bytes, "waits have one encoding");
  // Two ranks here, which have done nothing, and those that wait elsewhere; judged some seconds later.
  StragglerView view;
  view.now_ns = kNowNs + 10'000'000'000;
  view.records.resize(2 + waits->size());
  for (size_t i = 0; i < waits->size(); ++i) view.records[2 + i].push_back((*waits)[i].record);
  view.incomplete.resize(view.records.size());
  view.waits_for.resize(view.records.size(), -1);
  const StragglerVerdict verdict = JudgeStragglers(view, {5'000'000'000, 60'000'000'000});
  RankNames names;
  for (size_t i = 0; i < view.records.size(); ++i) names.numbers.push_back(static_cast<int>(i));
  names.describe = [](int r) { return "rank " + std::to_string(r); };
  for (const StragglerFinding& finding : verdict.findings) {
    fuzz::Require(StragglerText(finding, names, 6).size() < (1 << 16), "a line is short");
  }
  return 0;
}
