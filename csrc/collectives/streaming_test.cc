#include "collectives/streaming.h"

#include "testing/check.h"

namespace kolovod {
namespace {

// One range of `chunks` steps on a machine where each way takes this long.
void Run(StreamingChooser& chooser, uint64_t chunks, int64_t cached_ns, int64_t bypassed_ns) {
  chooser.BeginRange(chunks);
  for (uint64_t i = 0; i < chunks; ++i) chooser.Record(i, chooser.Use(i) ? bypassed_ns : cached_ns);
  chooser.EndRange();
}

// Ranges of `chunks` until the choice is `wanted`, at most `most`.
int Until(StreamingChooser& chooser, bool wanted, uint64_t chunks, int64_t cached_ns, int64_t bypassed_ns,
          int most) {
  int ranges = 0;
  while (chooser.streaming() != wanted && ranges < most) {
    Run(chooser, chunks, cached_ns, bypassed_ns);
    ++ranges;
  }
  return ranges;
}

TEST_CASE("short ranges keep the first guess") {
  for (bool guess : {false, true}) {
    StreamingChooser chooser(guess);
    for (int i = 0; i < 100; ++i) Run(chooser, 15, guess ? 1 : 100, guess ? 100 : 1);
    CHECK(chooser.streaming() == guess);
  }
}

// 16 chunks are an allreduce of 1 MiB, the size of a bucket of gradients.
TEST_CASE("a clear difference decides when two trials have seen it") {
  StreamingChooser small(false);
  CHECK(Until(small, true, 16, 500, 100, 100) == 6);
  StreamingChooser large(false);
  CHECK(Until(large, true, 64, 500, 100, 100) == 2);
  for (int i = 0; i < 2; ++i) Run(large, 64, 500, 100);
  CHECK(!large.trial());
}

TEST_CASE("one disturbed trial or preempted steps do not") {
  StreamingChooser chooser(false);
  for (int i = 0; i < 400; ++i) Run(chooser, 64, i % 2 == 0 ? 500 : 100, 100);
  CHECK(!chooser.streaming());
  for (int range = 0; range < 400; ++range) {
    chooser.BeginRange(64);
    for (uint64_t i = 0; i < 64; ++i) chooser.Record(i, !chooser.Use(i) && i % 3 == 0 ? 1'000'000 : 100);
    chooser.EndRange();
  }
  CHECK(!chooser.streaming());
}

TEST_CASE("a small difference does not") {
  for (bool guess : {false, true}) {
    StreamingChooser chooser(guess);
    for (int i = 0; i < 10; ++i) Run(chooser, 64, i % 2 ? 100 : 105, i % 2 ? 105 : 100);
    CHECK(chooser.streaming() == guess);
  }
}

TEST_CASE("a machine that changes is noticed") {
  StreamingChooser chooser(false);
  for (int i = 0; i < 10; ++i) Run(chooser, 64, 100, 200);
  CHECK(!chooser.streaming());
  CHECK(Until(chooser, true, 64, 500, 100, 200) <= 66);
  CHECK(chooser.streaming());
  CHECK(Until(chooser, false, 16, 100, 500, 1000) <= 264);
  CHECK(!chooser.streaming());
}

// Also when they differ in what they have chosen, and in ranges of all lengths.
TEST_CASE("ranks try the same way at the same time") {
  StreamingChooser a(false);
  StreamingChooser b(true);
  int trials = 0;
  for (uint64_t range = 0; range < 3000; ++range) {
    const uint64_t chunks = 1 + range * 37 % 90;
    a.BeginRange(chunks);
    b.BeginRange(chunks);
    CHECK(a.trial() == b.trial());
    trials += a.trial() ? 1 : 0;
    for (uint64_t i = 0; i < chunks; ++i) {
      if (a.trial()) CHECK(a.Use(i) == b.Use(i));
      a.Record(i, a.Use(i) ? 100 : 300);
      b.Record(i, b.Use(i) ? 300 : 100);
    }
    a.EndRange();
    b.EndRange();
  }
  CHECK(a.streaming());
  CHECK(!b.streaming());
  CHECK(trials > 8);
  CHECK(trials < 200);
}

}  // namespace
}  // namespace kolovod
