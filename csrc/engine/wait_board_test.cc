// What ranks say of their waits is read by all, on all hosts; and a thread that waits may wait for another
// operation when it looks for signals.
#include "testing/world.h"

namespace kolovod {
namespace {

using testing::Contains;
using testing::Rank;
using testing::RunHosts;

// Until it holds; tests have a limit of their own.
void Await(const std::function<bool()>& holds) {
  while (!holds()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

std::string TextOf(Rank& rank, int other) {
  for (const WaitBoard::Said& said : rank.engine().waits().Read()) {
    if (said.rank == other) return said.text;
  }
  return "";
}

std::string Text(int rank, int round) {
  return "rank " + std::to_string(rank) + std::string(static_cast<size_t>(round * 700), 'x');
}

TEST_CASE("what each rank says is read by all") {
  for (const std::vector<int>& hosts : {std::vector<int>{0, 0, 0}, {0, 0, 1, 1}, {0, 1, 2, 1, 3, 4, 5}}) {
    RunHosts(hosts, [](Rank& rank) {
      for (int round = 0; round < 3; ++round) {
        CHECK(rank.engine().waits().Say(Text(rank.rank(), round)));
        for (int r = 0; r < rank.size(); ++r) {
          Await([&] { return TextOf(rank, r) == Text(r, round); });
        }
        std::vector<float> data(1);
        CHECK_OK(rank.Allreduce("all have read", data));
      }
      CHECK(rank.engine().waits().Say(""));
      Await([&] { return rank.engine().waits().Read().empty(); });
      std::vector<float> all(1);
      CHECK_OK(rank.Allreduce("all have read", all));
      CHECK(!rank.engine().waits().Say(std::string(kNoticeBytes + 1, 'x')));
      CHECK(rank.engine().waits().Say(std::string(kNoticeBytes, 'x')));
      // Who leaves may not take others' reading away.
      std::vector<float> data(1);
      CHECK_OK(rank.Allreduce("over", data));
    });
  }
}

TEST_CASE("a rank that reads while another writes sees whole texts") {
  testing::RunRanks(2, [](Rank& rank) {
    std::vector<float> data(1);
    uint64_t handle = 0;
    CHECK_OK(rank.Submit("over", data, false, &handle));
    bool done = false;
    for (int n = 0; !done; ++n) {
      if (rank.rank() == 0) {
        CHECK(rank.engine().waits().Say(
            std::string(static_cast<size_t>(1 + n % 2000), static_cast<char>('a' + n % 26))));
        if (n == 20'000) break;
      } else {
        const std::string text = TextOf(rank, 0);
        CHECK(text == std::string(text.size(), text.empty() ? ' ' : text[0]));
      }
      CHECK_OK(rank.engine().Poll(handle, &done));
      if (rank.rank() == 1 && n >= 20'000) break;
    }
    CHECK_OK(rank.Wait(handle));
  });
}

TEST_CASE("a wait in a wait") {
  for (const std::vector<int>& hosts : {std::vector<int>{0, 0, 0}, {0, 0, 1}}) {
    RunHosts(hosts, [](Rank& rank) {
      // Rank 0 comes to the first operation when the others have been called to the other one.
      std::vector<float> outer(3, 1.0f), inner(2, 2.0f);
      bool was_called = false;
      const auto handler = [&] {
        if (was_called) return false;
        was_called = true;
        uint64_t handle = 0;
        CHECK_OK(rank.Submit("inner", inner, true, &handle));
        CHECK_OK(rank.Wait(handle));
        return false;
      };
      if (rank.rank() == 0) handler();
      uint64_t handle = 0;
      CHECK_OK(rank.Submit("outer", outer, true, &handle));
      CHECK_OK(rank.engine().Wait(handle, -1, handler));
      CHECK(was_called);
      CHECK(outer == std::vector<float>(3, 3.0f));
      CHECK(inner == std::vector<float>(2, 6.0f));
    });
  }
}

TEST_CASE("who waits in a callback of a bucket is refused") {
  // Rank 1 delays each part of a large operation until rank 0 has looked for signals in the middle of it.
  constexpr size_t kLarge = 40'000;
  testing::RunRanks(2, [](Rank& rank) {
    std::vector<float> large(kLarge, 1.0f), inner(1);
    if (rank.rank() == 1) rank.world().Delay(1, 300'000);
    int refused = 0;
    const auto handler = [&] {
      uint64_t handle = 0;
      const Status status = rank.Submit("inner", inner, true, &handle);
      if (status.ok()) return rank.engine().Abort("it was not in a bucket"), true;
      CHECK(status == Code::kInvalidArgument);
      CHECK(status.message() == Contains("in a signal handler"));
      ++refused;
      rank.world().Delay(1, 0);
      return false;
    };
    uint64_t handle = 0;
    CHECK_OK(rank.Submit("large", large, true, &handle));
    const bool watches = rank.rank() == 0;
    const auto in_bucket = [&] { return rank.engine().buckets() > 0 && handler(); };
    CHECK_OK(rank.engine().Wait(handle, -1, watches ? std::function<bool()>(in_bucket) : nullptr));
    CHECK((refused > 0) == watches);
    CHECK(large == std::vector<float>(kLarge, 2.0f));
  });
}

}  // namespace
}  // namespace kolovod
