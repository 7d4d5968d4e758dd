#include "control/stragglers.h"

#include "testing/check.h"

namespace kolovod {
namespace {

using testing::Contains;

constexpr int64_t kSecond = 1'000'000'000;

// Ranks' records in seconds; the time is 100 s.
struct World {
  explicit World(int size) {
    view.now_ns = 100 * kSecond;
    view.records.resize(static_cast<size_t>(size));
    view.incomplete.resize(static_cast<size_t>(size));
    view.waits_for.assign(static_cast<size_t>(size), -1);
  }
  OperationRecord& Add(int rank, const std::string& name, int64_t submitted_s) {
    std::vector<OperationRecord>& records = view.records[static_cast<size_t>(rank)];
    OperationRecord& record = records.emplace_back();
    record.number = records.size();
    record.name = name;
    record.name_hash = HashName(name);
    record.state = OperationState::kSubmitted;
    record.submitted_ns = submitted_s * kSecond;
    return record;
  }
  void Start(int rank, const std::string& name, int64_t submitted_s, int64_t started_s, uint64_t bucket = 1) {
    OperationRecord& record = Add(rank, name, submitted_s);
    record.bucket = bucket;
    record.state = OperationState::kStarted;
    record.started_ns = started_s * kSecond;
  }
  void Finish(int rank, const std::string& name, int64_t submitted_s, int64_t ended_s, uint64_t bucket = 1) {
    Start(rank, name, submitted_s, ended_s, bucket);
    view.records[static_cast<size_t>(rank)].back().state = OperationState::kDone;
    view.records[static_cast<size_t>(rank)].back().ended_ns = ended_s * kSecond;
  }
  StragglerVerdict Judge(int64_t report_s = 60, int64_t failure_s = 0) const {
    return JudgeStragglers(view, StragglerLimits{report_s * kSecond, failure_s * kSecond});
  }
  static std::string Text(const StragglerFinding& finding, size_t max_names = 6) {
    const RankNames names{{0, 1, 2, 3}, [](int r) { return "rank " + std::to_string(r); }};
    return StragglerText(finding, names, max_names);
  }

  StragglerView view;
};

TEST_CASE("all is well") {
  World w(2);
  CHECK(w.Judge().findings.empty());
  w.Finish(0, "a", 1, 2);
  w.Finish(1, "a", 1, 2);
  w.Add(0, "b", 41);
  const StragglerVerdict verdict = w.Judge();
  CHECK(!verdict.report);
  CHECK(!verdict.fail);
}

TEST_CASE("who has not sent is known by the receive") {
  World w(3);
  w.view.numbers = {4, 5, 7};
  OperationRecord& waits = w.Add(0, "rank 7, tag 3", 10);
  waits.verb = Verb::kRecv;
  waits.peer = 7;
  StragglerVerdict verdict = w.Judge();
  CHECK(verdict.report);
  CHECK(verdict.findings.size() == 1);
  CHECK(verdict.findings[0].rank == 2);
  CHECK(verdict.findings[0].cause == StragglerCause::kNoPartner);
  CHECK(World::Text(verdict.findings[0]) ==
        "rank 2 has not sent or received what is waited for by 'rank 7, tag 3' (recv, 90 s); rank 0 waits");
  w.view.records[0][0].peer = -1;  // any
  verdict = w.Judge();
  CHECK(World::Text(verdict.findings[0]) ==
        "nobody has sent or received what is waited for by 'rank 7, tag 3' (recv, 90 s); rank 0 waits");
}

TEST_CASE("who has not submitted what and who waits") {
  World w(3);
  w.Add(0, "layer1.weight", 39);
  w.Add(1, "layer1.weight", 38);
  w.Add(0, "layer2.weight", 40);
  const StragglerVerdict verdict = w.Judge();
  CHECK(verdict.report);
  CHECK(!verdict.fail);
  CHECK(verdict.findings.size() == 2);
  CHECK(World::Text(verdict.findings[0]) ==
        "rank 2 has not submitted 'layer1.weight' (allreduce, 62 s), 'layer2.weight' (allreduce, 60 s); "
        "ranks 0, 1 wait");
  CHECK(World::Text(verdict.findings[1]) ==
        "rank 1 has not submitted 'layer2.weight' (allreduce, 60 s); rank 0 waits");
}

TEST_CASE("operations known by their place in a graph may have been pruned") {
  World w(2);
  w.Add(0, "tf.kolovod_3", 10);
  CHECK(World::Text(w.Judge().findings[0]) ==
        "rank 1 has not submitted 'tf.kolovod_3' (allreduce, 90 s); rank 0 waits; a TensorFlow graph leaves "
        "out operations whose results it does not use: use them on all ranks");
}

TEST_CASE("different tensors missing on different ranks") {
  World w(3);
  for (int r : {0, 2}) w.Add(r, "x", 10);
  for (int r : {1, 2}) w.Add(r, "y", 20);
  const StragglerVerdict verdict = w.Judge();
  CHECK(verdict.findings.size() == 2);
  CHECK(World::Text(verdict.findings[0]) ==
        "rank 1 has not submitted 'x' (allreduce, 90 s); ranks 0, 2 wait");
  CHECK(World::Text(verdict.findings[1]) ==
        "rank 0 has not submitted 'y' (allreduce, 80 s); ranks 1, 2 wait");
}

TEST_CASE("many names are counted") {
  World w(2);
  for (int i = 0; i < 9; ++i) w.Add(0, "t" + std::to_string(i), 10);
  const StragglerVerdict verdict = w.Judge();
  CHECK(World::Text(verdict.findings[0], 1) ==
        "rank 1 has not submitted 't0' (allreduce, 90 s) and 8 more; rank 0 waits");
  CHECK(World::Text(verdict.findings[0]) == Contains("'t5'"));
  CHECK(World::Text(verdict.findings[0]) == Contains("and 3 more"));
}

TEST_CASE("what has waited for half the time goes with it") {
  World w(2);
  w.Add(0, "old", 40);
  w.Add(0, "younger", 70);
  w.Add(0, "new", 71);
  CHECK(w.Judge().findings[0].operations.size() == 2);
}

TEST_CASE("reports come after twice the time") {
  World w(2);
  w.Add(0, "a", 0);
  const auto due = [&](int64_t now_s, int64_t last_s) {
    w.view.now_ns = now_s * kSecond;
    w.view.last_report_ns = last_s * kSecond;
    return w.Judge(10).report;
  };
  CHECK(!due(9, 0));
  CHECK(due(10, 0));
  CHECK(!due(19, 10));
  CHECK(due(20, 10));
  CHECK(!due(39, 20));
  CHECK(due(40, 20));
  // Another that begins to be late has its own time, but not right after a report.
  w.Add(0, "b", 41);
  CHECK(!due(50, 40));
  CHECK(due(51, 40));
  CHECK(!due(55, 46));
  CHECK(due(56, 46));
}

TEST_CASE("short limits do not make reports overlap") {
  World w(2);
  w.Add(0, "a", 99);
  w.view.last_report_ns = 99 * kSecond;
  CHECK(!w.Judge(1, 1).report);
  CHECK(!w.Judge(1, 1).fail);
  w.view.last_report_ns = 97 * kSecond;
  CHECK(w.Judge(1, 1).report);
  CHECK(w.Judge(1, 1).fail);
}

TEST_CASE("the second limit is independent of the first") {
  World w(2);
  w.Add(0, "a", 50);
  CHECK(!w.Judge(60, 51).fail);
  CHECK(w.Judge(60, 50).fail);
  CHECK(!w.Judge(60, 50).report);
  StragglerVerdict verdict = w.Judge(0, 50);
  CHECK(verdict.fail);
  CHECK(!verdict.report);
  CHECK(verdict.findings[0].rank == 1);
  verdict = w.Judge(50, 0);
  CHECK(!verdict.fail);
  CHECK(verdict.report);
}

TEST_CASE("an earlier use of a name does not count") {
  const std::string wanted = "rank 1 has not submitted 'a' (allreduce, 85 s); rank 0 waits";
  // Rank 1 was through with it a moment after rank 0 had submitted the next.
  World w(2);
  w.Finish(0, "a", 1, 14, 7);
  w.Finish(1, "a", 2, 16, 7);
  w.Add(0, "a", 15);
  CHECK(World::Text(w.Judge().findings.at(0)) == wanted);
  // It hangs in the earlier one, which needs nothing of it.
  World v(2);
  v.Finish(0, "a", 1, 14, 7);
  v.Start(1, "a", 2, 16, 7);
  v.Add(0, "a", 15);
  CHECK(World::Text(v.Judge().findings.at(0)) == wanted);
  // It has not even begun the earlier one.
  World u(2);
  u.Finish(0, "a", 1, 14, 7);
  u.Add(1, "a", 2);
  u.Add(0, "a", 15);
  bool named = false;
  for (const StragglerFinding& finding : u.Judge().findings) named = named || World::Text(finding) == wanted;
  CHECK(named);
  // The same, but in the next one: there is nobody to blame.
  World t(2);
  for (int r : {0, 1}) t.Finish(r, "a", 1, 14, 7);
  for (int r : {0, 1}) t.Add(r, "a", 15);
  CHECK(t.Judge().findings.at(0).cause == StragglerCause::kNoProgress);
}

TEST_CASE("a rank that is through is not late") {
  World w(2);
  w.Add(0, "a", 10);
  w.Finish(1, "a", 11, 12);
  const StragglerVerdict verdict = w.Judge();
  CHECK(verdict.findings.at(0).cause == StragglerCause::kNoProgress);
}

TEST_CASE("a rank with unknown operations is not accused") {
  World w(3);
  w.Add(0, "a", 10);
  w.view.incomplete[1] = true;
  const StragglerVerdict verdict = w.Judge();
  CHECK(verdict.findings.size() == 1);
  CHECK(verdict.findings[0].rank == 2);
}

TEST_CASE("a rank that takes no part in the bucket") {
  World w(3);
  w.Start(0, "a", 1, 20);
  w.Start(1, "a", 1, 21);
  w.Add(2, "a", 5);
  w.view.waits_for[0] = 1;  // which waits for rank 2, but that is not noted
  const StragglerVerdict verdict = w.Judge();
  CHECK(verdict.findings.size() == 1);
  CHECK(World::Text(verdict.findings[0]) ==
        "rank 2 has submitted 'a' (allreduce, 80 s), but takes no part in it; ranks 0, 1 wait");
}

TEST_CASE("data that do not come are followed to their source") {
  World w(4);
  for (int r = 0; r < 4; ++r) w.Start(r, "a", 1, 20);
  w.view.waits_for = {1, 2, -1, 2};
  StragglerVerdict verdict = w.Judge();
  CHECK(verdict.findings.size() == 1);
  CHECK(World::Text(verdict.findings[0]) ==
        "rank 2 does not deliver its data of 'a' (allreduce, 80 s); ranks 0, 1, 3 wait");
  w.view.waits_for = {1, 2, 0, 0};  // a circle: somebody is named, and nothing hangs
  verdict = w.Judge();
  CHECK(!verdict.findings.empty());
  CHECK(verdict.findings[0].cause == StragglerCause::kNoData);
}

TEST_CASE("what waits behind other trouble is not told") {
  World w(2);
  for (int r = 0; r < 2; ++r) w.Start(r, "a", 1, 20);
  for (int r = 0; r < 2; ++r) w.Add(r, "behind", 21);
  w.view.waits_for[0] = 1;
  const StragglerVerdict verdict = w.Judge();
  CHECK(verdict.findings.size() == 1);
  CHECK(verdict.findings[0].operations.size() == 1);
}

TEST_CASE("ranks of a process set have the numbers of the world") {
  World w(3);
  for (int r : {0, 2}) w.Add(r, "a", 10);
  const RankNames names{{4, 6, 9}, [](int r) { return "rank of index " + std::to_string(r); }};
  CHECK(StragglerText(w.Judge().findings.at(0), names, 6) ==
        "rank of index 1 has not submitted 'a' (allreduce, 90 s); ranks 4, 9 wait");
}

// Rank 2 is of another host, which has told for what it waits.
TEST_CASE("a wait of another host") {
  World w(3);
  w.Finish(0, "a", 1, 2, 7);
  w.Finish(1, "a", 1, 2, 7);
  w.Finish(2, "a", 1, 2, 7);
  w.Add(0, "a", 10);
  w.Add(2, "a", 9);
  w.view.incomplete[2] = true;
  CHECK(World::Text(w.Judge().findings.at(0)) ==
        "rank 1 has not submitted 'a' (allreduce, 91 s); ranks 0, 2 wait");
  // It has begun the bucket, and rank 1 has not.
  World v(3);
  v.Start(0, "a", 1, 20, 7);
  v.Add(1, "a", 5);
  v.Start(2, "a", 1, 19, 7);
  v.view.incomplete[2] = true;
  CHECK(World::Text(v.Judge().findings.at(0)) ==
        "rank 1 has submitted 'a' (allreduce, 81 s), but takes no part in it; ranks 0, 2 wait");
  // It waits for nobody here.
  World u(2);
  u.Add(0, "a", 10);
  u.Add(1, "a", 10);
  u.view.incomplete[1] = true;
  CHECK(u.Judge().findings.at(0).cause == StragglerCause::kNoProgress);
}

TEST_CASE("waits survive the way to another host") {
  World w(2);
  w.Finish(1, "a", 1, 2, 7);
  w.Add(1, "a", 30);
  w.Start(0, "b", 1, 20, 8);
  w.Add(0, "new", 99);
  const StragglerLimits limits{60 * kSecond, 0};
  const std::vector<OverdueWait> waits = OverdueWaits(w.view, limits, 2);
  CHECK(waits.size() == 2);
  const std::string bytes = EncodeOverdueWaits(waits, 100 * kSecond);
  const auto there = DecodeOverdueWaits(bytes, 1100 * kSecond);
  CHECK(there.has_value());
  CHECK(there->size() == 2);
  CHECK(there->at(0).rank == 0);
  CHECK(there->at(0).record.state == OperationState::kStarted);
  CHECK(there->at(0).record.started_ns == 1020 * kSecond);
  CHECK(there->at(0).record.bucket == 8);
  CHECK(there->at(1).rank == 1);
  CHECK(there->at(1).used == 7);
  CHECK(there->at(1).record.name == "a");
  CHECK(there->at(1).record.submitted_ns == 1030 * kSecond);
  CHECK(there->at(1).record.started_ns == 0);
  CHECK(there->at(1).record.name_hash == HashName("a"));
  for (size_t n = 0; n < bytes.size(); ++n) CHECK(!DecodeOverdueWaits(bytes.substr(0, n), 0).has_value());
  CHECK(!DecodeOverdueWaits(bytes + "x", 0).has_value());
  for (size_t n = 0; n < bytes.size(); ++n) {
    std::string other = bytes;
    other[n] = static_cast<char>(other[n] ^ 0x80);
    (void)DecodeOverdueWaits(other, 0);  // whatever it says, it reads no byte that is not there
  }
  // An age that no clock has: sums would overflow.
  const size_t second = 4 + (4 + 1 + 1 + 8 * 5 + 4 + waits[0].record.name.size());
  std::string old = bytes;
  old[second + 4 + 1 + 1 + 3 * 8 + 7] = 0x7F;
  CHECK(!DecodeOverdueWaits(old, 0).has_value());
  World many(1);
  for (int i = 0; i < 100; ++i) many.Add(0, "t" + std::to_string(i), 100 - 40 - i % 3);
  CHECK(OverdueWaits(many.view, limits, 1).size() == kMaxOverdueWaits);
}

TEST_CASE("who has joined is not late and waits for long") {
  World w(3);
  w.Add(0, "join", 1).verb = Verb::kJoin;
  w.Finish(1, "a", 85, 86);
  w.Finish(2, "a", 85, 86);
  CHECK(w.Judge().findings.empty());
  // Rank 1 goes on, rank 2 hangs.
  World v(3);
  v.Add(0, "join", 1).verb = Verb::kJoin;
  v.Finish(2, "a", 15, 16);
  v.Add(1, "b", 60);
  const StragglerVerdict verdict = v.Judge();
  CHECK(verdict.findings.size() == 1);
  CHECK(World::Text(verdict.findings[0]) ==
        "rank 2 has not submitted 'join' (join, 99 s), 'b' (allreduce, 40 s); ranks 0, 1 wait");
}

TEST_CASE("nothing happens and nobody is missing") {
  World w(2);
  for (int r = 0; r < 2; ++r) w.Add(r, "a", 10);
  const StragglerVerdict verdict = w.Judge(60, 90);
  CHECK(verdict.report);
  CHECK(verdict.fail);
  CHECK(World::Text(verdict.findings.at(0)) ==
        "every rank has submitted 'a' (allreduce, 90 s), but nothing happens; ranks 0, 1 wait");
}

}  // namespace
}  // namespace kolovod
