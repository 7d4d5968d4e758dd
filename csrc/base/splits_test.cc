#include "base/splits.h"

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <functional>

#include "testing/check.h"

namespace kolovod {
namespace {

// s sends 10 s + d rows to d.
std::vector<std::vector<int64_t>> Numbered(int size) {
  std::vector<std::vector<int64_t>> by_rank(static_cast<size_t>(size));
  for (int s = 0; s < size; ++s) {
    for (int d = 0; d < size; ++d) by_rank[static_cast<size_t>(s)].push_back(10 * s + d);
  }
  return by_rank;
}

bool Aborts(const std::function<void()>& body) {
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    (void)std::freopen("/dev/null", "w", stderr);
    body();
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

TEST_CASE("a part holds what concerns its ranks") {
  const Splits all = Splits::OfAll(Numbered(7));
  CHECK(all.size() == 7);
  CHECK(all.ranks().size() == 7);
  CHECK(all.total() == 7 * 210 + 7 * 21);
  for (const std::vector<int>& ranks :
       {std::vector<int>{0}, {6}, {2, 3}, {0, 3, 6}, {0, 1, 2, 3, 4, 5}, {0, 1, 2, 3, 4, 5, 6}}) {
    const Splits part = all.For(ranks);
    CHECK(part.ranks() == ranks);
    CHECK(part.size() == 7);
    CHECK(part.total() == all.total());
    CHECK(part.numbers().size() == ranks.size() * 7 + (7 - ranks.size()) * ranks.size());
    for (const int r : ranks) {
      for (int peer = 0; peer < 7; ++peer) {
        CHECK(part.sent(r, peer) == 10 * r + peer);
        CHECK(part.received(peer, r) == 10 * peer + r);
      }
    }
    const Splits inside = part.Within(ranks);
    int64_t sum = 0;
    for (size_t s = 0; s < ranks.size(); ++s) {
      for (size_t d = 0; d < ranks.size(); ++d) {
        CHECK(inside.sent(static_cast<int>(s), static_cast<int>(d)) == 10 * ranks[s] + ranks[d]);
        sum += 10 * ranks[s] + ranks[d];
      }
    }
    CHECK(inside.total() == sum);
    CHECK(inside.size() == static_cast<int>(ranks.size()));
    const auto same = Splits::Of(7, ranks, part.total(), part.numbers());
    CHECK(same.has_value());
    CHECK(same->numbers() == part.numbers());
    CHECK(same->ranks() == ranks);
    CHECK(part.For({ranks.back()}).sent(ranks.back(), 0) == 10 * ranks.back());
  }
}

TEST_CASE("what is not held cannot be asked for") {
  const Splits part = Splits::OfAll(Numbered(4)).For({1, 2});
  CHECK(part.sent(1, 3) == 13);
  CHECK(part.received(0, 2) == 2);
  CHECK(Aborts([&] { (void)part.sent(0, 1); }));
  CHECK(Aborts([&] { (void)part.received(1, 3); }));
  CHECK(Aborts([&] { (void)part.sent(1, 4); }));
  CHECK(Aborts([&] { (void)part.sent(-1, 1); }));
  CHECK(Aborts([&] { (void)part.received(-1, 1); }));
  CHECK(Aborts([&] { (void)part.For({0}); }));
}

TEST_CASE("what does not belong together is refused") {
  const Splits part = Splits::OfAll(Numbered(3)).For({1, 2});
  const std::vector<int64_t>& numbers = part.numbers();
  CHECK(Splits::Of(3, {1, 2}, part.total(), numbers).has_value());
  for (const std::vector<int>& ranks :
       {std::vector<int>{}, {1}, {2, 1}, {1, 1}, {1, 3}, {-1, 1}, {0, 1, 2}}) {
    CHECK(!Splits::Of(3, ranks, part.total(), numbers).has_value());
  }
  CHECK(!Splits::Of(2, {0, 1}, part.total(), numbers).has_value());
  CHECK(!Splits::Of(3, {1, 2}, part.SumSent() - 1, numbers).has_value());
  std::vector<int64_t> negative = numbers;
  negative.back() = -1;
  CHECK(!Splits::Of(3, {1, 2}, part.total(), negative).has_value());
  // All are known, so the sum is, too.
  const Splits all = Splits::OfAll(Numbered(3));
  CHECK(!Splits::Of(3, {0, 1, 2}, all.total() + 1, all.numbers()).has_value());
}

TEST_CASE("sums stop at the largest number") {
  const Splits all = Splits::OfAll({{INT64_MAX, 1}, {0, 0}});
  CHECK(all.total() == INT64_MAX);
  CHECK(all.TotalBytes(1) == INT64_MAX);
  CHECK(all.TotalBytes(4) == SIZE_MAX);
  CHECK(all.TotalBytes(0) == 0);
  Splits pairs(2, {0, 1});
  pairs.Set(0, 1, 3);
  pairs.Set(1, 0, 5);
  pairs.Set(0, 1, 4);
  CHECK(pairs.total() == 9);
  CHECK(pairs.sent(0, 1) == 4);
  CHECK(pairs.TotalBytes(8) == 72);
}

}  // namespace
}  // namespace kolovod
