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

TEST(short_ranges_keep_the_first_guess) {
  for (bool guess : {false, true}) {
    StreamingChooser chooser(guess);
    for (int i = 0; i < 100; ++i) Run(chooser, 63, guess ? 1 : 100, guess ? 100 : 1);
    CHECK(chooser.streaming() == guess);
  }
}

TEST(a_clear_difference_decides_when_it_is_seen_twice) {
  StreamingChooser chooser(false);
  Run(chooser, 64, 500, 100);
  CHECK(!chooser.streaming());
  Run(chooser, 64, 500, 100);
  CHECK(chooser.streaming());
  CHECK(!chooser.trial());
}

TEST(one_disturbed_trial_or_preempted_steps_do_not) {
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

TEST(a_small_difference_does_not) {
  for (bool guess : {false, true}) {
    StreamingChooser chooser(guess);
    for (int i = 0; i < 10; ++i) Run(chooser, 64, i % 2 ? 100 : 105, i % 2 ? 105 : 100);
    CHECK(chooser.streaming() == guess);
  }
}

TEST(a_machine_that_changes_is_noticed) {
  StreamingChooser chooser(false);
  for (int i = 0; i < 10; ++i) Run(chooser, 64, 100, 200);
  CHECK(!chooser.streaming());
  int ranges = 0;
  for (; ranges < 200 && !chooser.streaming(); ++ranges) Run(chooser, 64, 500, 100);
  CHECK(chooser.streaming());
  CHECK(ranges <= 66);
}

TEST(ranks_try_the_same_way_at_the_same_time) {
  StreamingChooser a(false);
  StreamingChooser b(true);
  a.BeginRange(80);
  b.BeginRange(80);
  CHECK(a.trial() && b.trial());
  for (uint64_t i = 0; i < 80; ++i) CHECK(a.Use(i) == b.Use(i));
}

}  // namespace
}  // namespace kolovod

TEST_MAIN()
