#include "transport/cores.h"

#include "testing/check.h"

namespace kolovod {
namespace {

cpu_set_t Cores(int count) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int c = 0; c < count; ++c) CPU_SET(static_cast<size_t>(c), &set);
  return set;
}

TEST_CASE("exactly one of two leaves a shared core") {
  const cpu_set_t two = Cores(2);
  CHECK(ShouldLeaveCore(0, 1, {-1, 1}, two));
  CHECK(!ShouldLeaveCore(1, 1, {1, -1}, two));
  CHECK(!ShouldLeaveCore(0, 0, {-1, 1}, two));
  CHECK(!ShouldLeaveCore(0, 0, {-1, 0}, Cores(1)));  // nowhere to go
}

TEST_CASE("four ranks on two cores settle two by two") {
  const cpu_set_t two = Cores(2);
  CHECK(ShouldLeaveCore(0, 0, {-1, 0, 0, 1}, two));
  CHECK(!ShouldLeaveCore(1, 0, {0, -1, 0, 1}, two));
  CHECK(!ShouldLeaveCore(0, 0, {-1, 0, 1, 1}, two));
  // Ranks of other machines do not count.
  CHECK(!ShouldLeaveCore(0, 0, {-1, -1, -1, -1}, two));
}

TEST_CASE("a core that is not allowed is no place to go") {
  cpu_set_t only_first = Cores(1);
  CHECK(!ShouldLeaveCore(0, 0, {-1, 0}, only_first));
  CHECK(!ShouldLeaveCore(0, -1, {-1, 0}, Cores(2)));
}

TEST_CASE("leaving keeps the mask") {
  cpu_set_t before, after;
  CHECK(sched_getaffinity(0, sizeof(before), &before) == 0);
  const int own = sched_getcpu();
  const bool left = LeaveSharedCore(0, {-1, own, own});
  CHECK(sched_getaffinity(0, sizeof(after), &after) == 0);
  CHECK(CPU_EQUAL(&before, &after));
  CHECK((!left || CPU_COUNT(&before) > 1));
}

}  // namespace
}  // namespace kolovod
