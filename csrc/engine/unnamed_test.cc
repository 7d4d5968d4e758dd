// Operations without a name are announced by a slot (control/roll_call.h): with whatever else ranks do
// meanwhile, and where they differ in whether they can go that way.
#include <random>

#include "testing/world.h"

namespace kolovod {
namespace {

using testing::Contains;
using testing::FirstDifference;
using testing::Numbers;
using testing::Rank;
using testing::RunRanks;
using testing::Sums;

// Large ones, too, whose data are no part of it.
TEST_CASE("they send no messages") {
  for (int size : {2, 3, 4}) {
    RunRanks(
        size,
        [](Rank& rank) {
          const EngineStats start = rank.engine().Stats();
          const ControlStats before = start.control;
          for (int step = 0; step < 100; ++step) {
            const bool is_large = step % 10 == 9;
            std::vector<float> data =
                Numbers(is_large ? 30'000 : static_cast<size_t>(step % 7), rank.rank(), step);
            CHECK_OK(rank.Allreduce("", data));
            CHECK(data == Sums(data.size(), rank.size(), step));
            const size_t count = is_large ? 30'000 : 9;
            std::vector<float> given(count, static_cast<float>(rank.rank() + step));
            uint64_t handle = 0;
            const int root = step % rank.size();
            CHECK_OK(rank.Submit("", given, true, &handle, Op::kSum, Verb::kBroadcast, root));
            CHECK_OK(rank.Wait(handle));
            CHECK(FirstDifference(given, std::vector<float>(count, static_cast<float>(root + step))) == "");
          }
          CHECK(rank.engine().Stats().staged == start.staged + 180);
          const ControlStats after = rank.engine().Stats().control;
          CHECK(after.slot_announcements == before.slot_announcements + 200);
          CHECK(after.full_announcements == before.full_announcements);
        },
        testing::ByLogOnly());
  }
}

// What each rank gives, joined; ranks give different numbers of rows, and now and then many.
std::vector<float> Gathered(int size, int step, int rows) {
  std::vector<float> all;
  for (int r = 0; r < size; ++r) {
    const std::vector<float> part = Numbers(static_cast<size_t>(rows * (r + 1) % 7000), r, step);
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

TEST_CASE("what others give is told by their slots") {
  for (int size : {2, 3, 4}) {
    RunRanks(
        size,
        [](Rank& rank) {
          const ControlStats before = rank.engine().Stats().control;
          const int size = rank.size();
          for (int step = 0; step < 60; ++step) {
            const int rows = step % 10 == 9 ? 5000 : step % 4;
            std::vector<float> data =
                Numbers(static_cast<size_t>(rows * (rank.rank() + 1) % 7000), rank.rank(), step);
            std::vector<float> out;
            CHECK_OK(rank.Scatter(Verb::kAllgather, "", data, {}, &out));
            CHECK(out == Gathered(size, step, rows));
            // Rank s sends s + d + rows of its numbers to rank d.
            std::vector<int64_t> splits;
            for (int d = 0; d < size; ++d) splits.push_back(rank.rank() + d + rows);
            data.assign(static_cast<size_t>(rows * size + 50), static_cast<float>(rank.rank() + step));
            CHECK_OK(rank.Scatter(Verb::kAlltoall, "", data, splits, &out));
            std::vector<float> wanted;
            for (int s = 0; s < size; ++s) {
              wanted.insert(wanted.end(), static_cast<size_t>(s + rank.rank() + rows),
                            static_cast<float>(s + step));
            }
            CHECK(FirstDifference(out, wanted) == "");
          }
          const ControlStats after = rank.engine().Stats().control;
          CHECK(after.slot_announcements == before.slot_announcements + 120);
          CHECK(after.full_announcements == before.full_announcements);
        },
        testing::ByLogOnly());
  }
}

// More tensors than a slot has numbers for.
TEST_CASE("what no slot can tell is announced in full") {
  RunRanks(
      2,
      [](Rank& rank) {
        for (const size_t tensors : {kSlotRows, kSlotRows + 1}) {
          const ControlStats before = rank.engine().Stats().control;
          std::vector<float> data(static_cast<size_t>(rank.rank()) + 1, static_cast<float>(rank.rank()));
          Request request;
          request.verb = Verb::kAllgather;
          std::vector<SubmittedTensor> given(tensors);
          for (SubmittedTensor& tensor : given) {
            tensor.meta = {DType::kFloat32, {static_cast<int64_t>(data.size())}};
            tensor.in = data.data();
          }
          uint64_t handle = 0;
          CHECK_OK(rank.engine().Submit(std::move(request), std::move(given), true, &handle));
          const OperationPtr op = rank.engine().Find(handle);
          CHECK_OK(rank.Wait(handle));
          for (const OutputBuffer& made : op->buffers) {
            const float* values = reinterpret_cast<const float*>(made.data.get());
            CHECK(made.bytes == 12);
            CHECK(values[0] == 0.0f);
            CHECK(values[1] == 1.0f);
            CHECK(values[2] == 1.0f);
          }
          const ControlStats after = rank.engine().Stats().control;
          const uint64_t by_slot = tensors <= kSlotRows ? 1 : 0;
          CHECK(after.slot_announcements == before.slot_announcements + by_slot);
          CHECK(after.full_announcements == before.full_announcements + 1 - by_slot);
        }
      },
      testing::ByLogOnly());
}

// One is little on one rank, and not on another, or is not for slots at all: rank 0 sees both and says why.
TEST_CASE("mismatches are told however ranks announce") {
  struct Case {
    size_t count;
    Op op;
    Verb verb;
    const char* says;
  };
  const Case cases[] = {{4, Op::kSum, Verb::kAllreduce, "has (4,)"},
                        {30'000, Op::kSum, Verb::kAllreduce, "has (30000,)"},
                        {3, Op::kMax, Verb::kAllreduce, "reduction op"},
                        {3, Op::kSum, Verb::kAllgather, "kind of operation"},
                        {3, Op::kSum, Verb::kBroadcast, "kind of operation"}};
  for (int odd : {0, 1, 2}) {
    RunRanks(3, [&](Rank& rank) {
      for (const Case& c : cases) {
        for (int again = 0; again < 3; ++again) {
          const Case own = rank.rank() == odd ? c : Case{3, Op::kSum, Verb::kAllreduce, ""};
          std::vector<float> data(own.count), out(own.count * 3);
          uint64_t handle = 0;
          Request request;
          request.verb = own.verb;
          request.op = own.op;
          std::vector<SubmittedTensor> tensors(1);
          tensors[0].meta = {DType::kFloat32, {static_cast<int64_t>(own.count)}};
          tensors[0].in = tensors[0].out = data.data();
          if (own.verb == Verb::kAllgather) {
            tensors[0].out = out.data();
            tensors[0].out_bytes = out.size() * sizeof(float);
          }
          CHECK_OK(rank.engine().Submit(std::move(request), std::move(tensors), true, &handle));
          const Status status = rank.Wait(handle);
          CHECK(status == Code::kMismatch);
          CHECK(status.message() == Contains(c.says));
          std::vector<float> next = Numbers(5, rank.rank(), again);
          CHECK_OK(rank.Allreduce("", next));
          CHECK(next == Sums(5, 3, again));
        }
      }
    });
  }
}

// More at once than there are slots, beside named ones that take slots of their own, while each rank has its
// own way of waiting: which rank finds a slot free is chance.
TEST_CASE("more than there are slots beside named ones") {
  for (int size : {2, 3, 4}) {
    RunRanks(size, [](Rank& rank) {
      std::mt19937 random(static_cast<unsigned>(rank.rank()) + 1);
      constexpr int kSteps = 1500;
      struct Pending {
        std::vector<float> data, wanted;
        uint64_t handle;
      };
      std::vector<std::unique_ptr<Pending>> pending;
      const auto settle = [&](size_t keep) {
        while (pending.size() > keep) {
          const Pending& oldest = *pending.front();
          CHECK_OK(rank.Wait(oldest.handle));
          CHECK(oldest.data == oldest.wanted);
          pending.erase(pending.begin());
        }
      };
      for (int step = 0; step < kSteps; ++step) {
        const std::string name = step % 3 == 2 ? "n" + std::to_string(step % 240) : "";
        const size_t count = name.empty() && step % 13 == 0 ? 3000 : static_cast<size_t>(1 + step % 5);
        const int root = step % 4 == 0 ? step % rank.size() : -1;  // of a broadcast
        auto next = std::make_unique<Pending>(
            Pending{Numbers(count, rank.rank(), step),
                    root < 0 ? Sums(count, rank.size(), step) : Numbers(count, root, step), 0});
        const Verb verb = root < 0 ? Verb::kAllreduce : Verb::kBroadcast;
        CHECK_OK(rank.Submit(name, next->data, false, &next->handle, Op::kSum, verb, std::max(root, 0)));
        pending.push_back(std::move(next));
        settle(random() % 100);
      }
      settle(0);
      CHECK(rank.engine().Stats().control.slot_announcements > 0);
    });
  }
}

TEST_CASE("ranks that join") {
  for (int size : {2, 3, 4}) {
    RunRanks(
        size,
        [](Rank& rank) {
          for (int round = 0; round < 10; ++round) {
            const int steps = 5 + 7 * ((rank.rank() + round) % rank.size());
            for (int step = 0; step < steps; ++step) {
              std::vector<float> data(3, 1.0f);
              CHECK_OK(rank.Allreduce("", data));
              int active = 0;
              for (int r = 0; r < rank.size(); ++r)
                active += step < 5 + 7 * ((r + round) % rank.size()) ? 1 : 0;
              CHECK(data == std::vector<float>(3, static_cast<float>(active)));
            }
            (void)rank.Join();
          }
          CHECK(rank.engine().Stats().control.slot_announcements > 0);
        },
        testing::ByLogOnly());
  }
}

}  // namespace
}  // namespace kolovod
