// Small operations whose callers wait, beside all others: right results whatever each rank does, and mostly
// without the log.
#include <random>

#include "testing/world.h"

namespace kolovod {
namespace {

using testing::Contains;
using testing::Numbers;
using testing::Rank;
using testing::RunRanks;
using testing::Sums;

Config Patient() {
  Config config = testing::SmallConfig();
  config.cores = 64;  // or ranks that share cores would not go this way
  config.spin_us = 200;
  return config;
}

// Who waits for as long as a test may take waits until all are there.
Config PatientForEver() {
  Config config = Patient();
  config.spin_us = 600'000'000;
  return config;
}

// Each rank waits for an operation at once or later, as it draws: those that all wait for at once, and only
// those, can go the short way, and nobody knows before.
TEST_CASE("operations of all kinds, in ways that differ between ranks") {
  for (int size : {2, 3, 4}) {
    RunRanks(
        size,
        [](Rank& rank) {
          std::mt19937 random(static_cast<unsigned>(rank.rank()) + 1);
          for (int step = 0; step < 2000; ++step) {
            const std::string name = step % 3 == 0 ? "" : "n" + std::to_string(step % 40);
            const bool waits = step % 50 < 40 || random() % 2 == 0;
            if (step % 5 == 4) {
              const size_t rows = static_cast<size_t>((rank.rank() + step) % 4) * (step % 7 == 0 ? 600 : 1);
              std::vector<float> data(rows, static_cast<float>(rank.rank())), out, wanted;
              CHECK_OK(rank.Scatter(Verb::kAllgather, name, data, {}, &out));
              for (int r = 0; r < rank.size(); ++r) {
                wanted.insert(wanted.end(), static_cast<size_t>((r + step) % 4) * (step % 7 == 0 ? 600 : 1),
                              static_cast<float>(r));
              }
              CHECK(out == wanted);
              continue;
            }
            const size_t count = step % 11 == 0 ? 3000 : static_cast<size_t>(step % 9);
            std::vector<float> data = Numbers(count, rank.rank(), step);
            uint64_t handle = 0;
            CHECK_OK(rank.Submit(name, data, waits, &handle));
            CHECK_OK(rank.Wait(handle));
            CHECK(data == Sums(count, rank.size(), step));
          }
        },
        Patient());
  }
}

TEST_CASE("mismatches are told, and the next is right") {
  RunRanks(
      2,
      [](Rank& rank) {
        for (int step = 0; step < 50; ++step) {
          std::vector<float> data(rank.rank() == 0 ? 3 : 4, 1.0f);
          const Status status = rank.Allreduce(step % 2 == 0 ? "x" : "", data);
          CHECK(status == Code::kMismatch);
          CHECK(status.message() == Contains("has (4,)"));
          std::vector<float> next = Numbers(5, rank.rank(), step);
          CHECK_OK(rank.Allreduce("y", next));
          CHECK(next == Sums(5, 2, step));
        }
      },
      Patient());
}

// What one field says is not the same on both ranks, and all else is: nothing may come of it.
TEST_CASE("no field of an operation is left out when ranks compare") {
  const auto differs = [](int field, bool other) {
    Request request;
    request.name = "x";
    std::vector<SubmittedTensor> tensors(1);
    tensors[0].meta = {DType::kInt32, {2, 2}};
    if (field == 1) request.verb = Verb::kBroadcast;  // of both, so that there is a root
    if (!other) return std::pair(request, tensors);
    if (field == 0) request.op = Op::kMax;
    if (field == 1) request.root = 1;
    if (field == 2) request.prescale = 2.0;
    if (field == 3) request.postscale = 2.0;
    if (field == 4) tensors[0].meta.dtype = DType::kFloat32;
    if (field == 5) tensors[0].meta.shape = {4, 1};
    if (field == 6) tensors[0].meta.shape = {4};
    if (field == 7) request.verb = Verb::kBroadcast;
    if (field == 8) tensors.push_back(tensors[0]);
    return std::pair(request, tensors);
  };
  for (int field = 0; field < 9; ++field) {
    CAPTURE(field);
    RunRanks(
        2,
        [&](Rank& rank) {
          for (int step = 0; step < 100; ++step) {
            std::vector<float> same = Numbers(3, rank.rank(), step);  // so that both come at a time
            CHECK_OK(rank.Allreduce("same", same));
            auto [request, tensors] = differs(field, rank.rank() == 1);
            int32_t data[2][4] = {};
            for (size_t t = 0; t < tensors.size(); ++t) tensors[t].in = tensors[t].out = data[t];
            uint64_t handle = 0;
            CHECK_OK(rank.engine().Submit(std::move(request), std::move(tensors), true, &handle));
            CHECK(rank.Wait(handle) == Code::kMismatch);
          }
        },
        Patient());
  }
}

// The order of their operations is not the same on both ranks.
TEST_CASE("several threads of a rank") {
  RunRanks(
      2,
      [](Rank& rank) {
        std::vector<std::thread> threads;
        for (int t = 0; t < 3; ++t) {
          threads.emplace_back([&, t] {
            for (int step = 0; step < 1000; ++step) {
              std::vector<float> data(3, static_cast<float>(100 * t + rank.rank()));
              CHECK_OK(rank.Allreduce("t" + std::to_string(t), data));
              CHECK(data == std::vector<float>(3, static_cast<float>(200 * t + 1)));
            }
          });
        }
        for (std::thread& thread : threads) thread.join();
      },
      Patient());
}

TEST_CASE("memory for results that is of another size is told on its rank") {
  RunRanks(
      2,
      [](Rank& rank) {
        for (int step = 0; step < 100; ++step) {
          std::vector<float> same = Numbers(3, rank.rank(), step);
          CHECK_OK(rank.Allreduce("same", same));
          const std::vector<float> in(4, static_cast<float>(rank.rank()));
          std::vector<float> out(rank.rank() == 1 ? 7 : 8, -1.0f);
          Request request;
          request.name = "x";
          request.verb = Verb::kAllgather;
          std::vector<SubmittedTensor> tensors(1);
          tensors[0].meta = {DType::kFloat32, {4}};
          tensors[0].in = in.data();
          tensors[0].out = out.data();
          tensors[0].out_bytes = out.size() * sizeof(float);
          uint64_t handle = 0;
          CHECK_OK(rank.engine().Submit(std::move(request), std::move(tensors), true, &handle));
          const Status status = rank.Wait(handle);
          CHECK(status == (rank.rank() == 1 ? Code::kInvalidArgument : Code::kOk));
          CHECK(out[0] == (rank.rank() == 1 ? -1.0f : 0.0f));
          CHECK(out[6] == (rank.rank() == 1 ? -1.0f : 1.0f));
        }
      },
      Patient());
}

// Rank 0 has announced one, and waits for the other rank for as long as a test may take.
template <class OnRank0, class OnRank1>
void WhileOneIsAnnounced(const OnRank0& on_rank_0, const OnRank1& on_rank_1) {
  std::atomic<bool> is_announced{false};
  RunRanks(
      2,
      [&](Rank& rank) {
        std::vector<float> data(2, 1.0f);
        if (rank.rank() == 1) {
          while (!is_announced.load()) std::this_thread::yield();
          on_rank_1(rank);
          CHECK_OK(rank.Allreduce("x", data));
        } else {
          std::thread first([&] { CHECK_OK(rank.Allreduce("x", data)); });
          const InstantSlot* const slots = rank.world().SegmentOf(0)->instant(0);
          while (slots[1].tag.load() == 0) std::this_thread::yield();
          is_announced = true;
          on_rank_0(rank);
          first.join();
        }
        CHECK(data == std::vector<float>(2, 2.0f));
      },
      PatientForEver());
}

TEST_CASE("its name is pending meanwhile") {
  std::atomic<bool> told{false};
  WhileOneIsAnnounced(
      [&](Rank& rank) {
        std::vector<float> data(2, 1.0f);
        CHECK(rank.Allreduce("x", data) == Code::kDuplicateName);
        told = true;
      },
      [&](Rank& rank) {
        while (!told.load()) std::this_thread::yield();
        CHECK(rank.engine().Stats().control.instant == 0);
      });
}

TEST_CASE("one of another name that the other rank waits for is not taken for it") {
  const auto other = [](Rank& rank) {
    std::vector<float> data(2, rank.rank() == 0 ? 10.0f : 20.0f);
    CHECK_OK(rank.Allreduce("y", data));
    CHECK(data == std::vector<float>(2, 30.0f));
  };
  WhileOneIsAnnounced(other, other);
}

TEST_CASE("another thread's goes by the log meanwhile") {
  std::atomic<bool> is_pending{false};
  WhileOneIsAnnounced(
      [&](Rank& rank) {
        std::vector<float> data(2, 10.0f);
        std::thread second([&] { CHECK_OK(rank.Allreduce("y", data)); });
        while (rank.engine().Pending() == 0) std::this_thread::yield();
        is_pending = true;
        second.join();
        CHECK(data == std::vector<float>(2, 30.0f));
      },
      [&](Rank& rank) {
        while (!is_pending.load()) std::this_thread::yield();
        std::vector<float> data(2, 20.0f);
        CHECK_OK(rank.Allreduce("y", data));
        CHECK(data == std::vector<float>(2, 30.0f));
      });
}

TEST_CASE("a rank that left, or joined, is noticed") {
  RunRanks(
      3,
      [](Rank& rank) {
        for (int step = 0; step < 20 + rank.rank(); ++step) {
          std::vector<float> data(2, 1.0f);
          CHECK_OK(rank.Allreduce("x", data));
          const float active = step < 20 ? 3.0f : static_cast<float>(2 - (step - 20));
          CHECK(data == std::vector<float>(2, active));
        }
        CHECK(rank.Join() >= 0);
        std::vector<float> data(2, 1.0f);
        CHECK_OK(rank.Allreduce("x", data));
        CHECK(data == std::vector<float>(2, 3.0f));
        if (rank.rank() == 2) return rank.engine().Shutdown();
        Status status;
        while (status.ok()) status = rank.Allreduce("late", data);
        CHECK(status == Code::kRankLeft);
      },
      Patient());
}

TEST_CASE("what all wait for goes that way") {
  for (int size : {2, 3}) {
    RunRanks(
        size,
        [](Rank& rank) {
          for (int step = 0; step < 50; ++step) {
            std::vector<float> data = Numbers(3, rank.rank(), step), out;
            CHECK_OK(rank.Allreduce(step % 2 == 0 ? "" : "x", data));
            CHECK(data == Sums(3, rank.size(), step));
            CHECK_OK(rank.Scatter(Verb::kAllgather, "gathered", {static_cast<float>(step)}, {}, &out));
            CHECK(out == std::vector<float>(static_cast<size_t>(rank.size()), static_cast<float>(step)));
          }
          const ControlStats stats = rank.engine().Stats().control;
          CHECK(stats.instant == 100);
          CHECK(stats.full_announcements + stats.bit_announcements + stats.slot_announcements == 0);
        },
        PatientForEver());
  }
}

TEST_CASE("an operation with a callback whose caller drives goes that way, too") {
  RunRanks(
      2,
      [](Rank& rank) {
        for (int step = 0; step < 200; ++step) {
          std::vector<float> data = Numbers(4, rank.rank(), step);
          std::atomic<bool> done{false};
          Request request;
          request.name = "called back";
          std::vector<SubmittedTensor> tensors(1);
          tensors[0].meta = {DType::kFloat32, {4}};
          tensors[0].in = tensors[0].out = data.data();
          CHECK_OK(rank.engine().Submit(
              std::move(request), std::move(tensors), false, nullptr,
              [&](const Operation& op) {
                CHECK_OK(op.status);
                done = true;
              },
              1'000'000'000));
          while (!done.load()) std::this_thread::yield();
          CHECK(data == Sums(4, 2, step));
        }
        CHECK(rank.engine().Stats().control.instant == 200);
      },
      PatientForEver());
}

}  // namespace
}  // namespace kolovod
