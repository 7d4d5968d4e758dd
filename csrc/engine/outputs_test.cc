// Outputs that the caller gives, and waits that drive under a time limit.
#include <numeric>

#include "testing/world.h"

namespace kolovod {
namespace {

using testing::Contains;
using testing::FirstDifference;
using testing::Rank;
using testing::RunRanks;

// Submits one tensor of floats for a verb that makes outputs, and waits.
Status Into(Rank& rank, Verb verb, const float* in, size_t count, std::vector<float>& out,
            std::vector<int64_t> splits = {}) {
  Request request;
  request.verb = verb;
  request.splits = std::move(splits);
  std::vector<SubmittedTensor> tensors(1);
  tensors[0].meta = {DType::kFloat32, {static_cast<int64_t>(count)}};
  tensors[0].in = in;
  tensors[0].out = out.data();
  tensors[0].out_bytes = out.size() * sizeof(float);
  uint64_t handle = 0;
  KV_RETURN_IF_ERROR(rank.engine().Submit(std::move(request), std::move(tensors), true, &handle));
  return rank.Wait(handle);
}

std::vector<float> Numbers(size_t count, float first) {
  std::vector<float> numbers(count);
  std::iota(numbers.begin(), numbers.end(), first);
  return numbers;
}

void CheckResultsInMemoryGiven(int size, const Config& config) {
  RunRanks(
      size,
      [](Rank& rank) {
        const auto ranks = static_cast<size_t>(rank.size());
        const auto self = static_cast<size_t>(rank.rank());
        for (size_t count : {1, 5, 9000}) {
          const std::vector<float> everything = Numbers(ranks * count, 0);
          std::vector<float> gathered(ranks * count, -1.0f);
          CHECK_OK(Into(rank, Verb::kAllgather, everything.data() + self * count, count, gathered));
          CHECK(gathered == everything);
          // In place: the input is this rank's part of the output.
          std::vector<float> whole(ranks * count, -1.0f);
          std::copy_n(everything.begin() + static_cast<std::ptrdiff_t>(self * count), count,
                      whole.begin() + static_cast<std::ptrdiff_t>(self * count));
          CHECK_OK(Into(rank, Verb::kAllgather, whole.data() + self * count, count, whole));
          CHECK(whole == everything);

          std::vector<float> part(count, -1.0f);
          CHECK_OK(Into(rank, Verb::kReducescatter, everything.data(), ranks * count, part));
          for (size_t i = 0; i < count; ++i) {
            CHECK(part[i] == static_cast<float>(ranks) * everything[self * count + i]);
          }
          std::vector<float> received(ranks * count, -1.0f);
          CHECK_OK(Into(rank, Verb::kAlltoall, everything.data(), ranks * count, received,
                        std::vector<int64_t>(ranks, static_cast<int64_t>(count))));
          for (size_t i = 0; i < received.size(); ++i) {
            CHECK(received[i] == everything[self * count + i % count]);
          }
        }
      },
      config);
}

TEST_CASE("results go to the memory given") {
  for (int size : {1, 2, 3}) {
    Config config = testing::SmallConfig();
    for (int64_t bytes : {0, 1, 16 << 10}) {  // staged all, read from the peers all, and some
      config.peer_read_bytes = bytes;
      CheckResultsInMemoryGiven(size, config);
    }
  }
}

// An error of the rank whose memory it is; the others have their results, and the world goes on.
TEST_CASE("memory of another size is an error on its rank") {
  RunRanks(3, [](Rank& rank) {
    const std::vector<float> in(4, static_cast<float>(rank.rank()));
    std::vector<float> out(rank.rank() == 1 ? 11 : 12, -1.0f);
    const Status status = Into(rank, Verb::kAllgather, in.data(), in.size(), out);
    if (rank.rank() == 1) {
      CHECK(status == Code::kInvalidArgument);
      CHECK(status.message() == Contains("output 0 has 44 bytes, but the result has 48"));
      CHECK(out == std::vector<float>(11, -1.0f));
    } else {
      CHECK_OK(status);
      CHECK(out[0] == 0.0f);
      CHECK(out[4] == 1.0f);
      CHECK(out[8] == 2.0f);
    }
    std::vector<float> data(3, 1.0f);
    CHECK_OK(rank.Allreduce("after", data));
    CHECK(data[0] == 3.0f);
  });
}

TEST_CASE("given outputs of a group may not overlap") {
  RunRanks(1, [](Rank& rank) {
    std::vector<float> memory(20);
    Request request;
    request.verb = Verb::kAllgather;
    std::vector<SubmittedTensor> tensors(2);
    for (size_t t = 0; t < 2; ++t) {
      tensors[t].meta = {DType::kFloat32, {4}};
      tensors[t].in = tensors[t].out = memory.data() + 3 * t;
      tensors[t].out_bytes = 4 * sizeof(float);
    }
    uint64_t handle = 0;
    const Status status = rank.engine().Submit(request, tensors, true, &handle);
    CHECK(status.message() == Contains("tensors 0 and 1 of the group share memory"));
    tensors[1].in = tensors[1].out = memory.data() + 4;
    CHECK_OK(rank.engine().Submit(request, tensors, true, &handle));
    CHECK_OK(rank.Wait(handle));
  });
}

TEST_CASE("a driving wait gives up and may be repeated") {
  RunRanks(2, [](Rank& rank) {
    std::vector<float> data(1000, 1.0f);
    std::vector<float> go(1);
    uint64_t handle = 0;
    if (rank.rank() == 0) {
      CHECK_OK(rank.Submit("late", data, true, &handle));
      const Status status = rank.engine().WaitDriving(handle, 0.15, nullptr);
      CHECK(status == Code::kTimeout);
      CHECK(status.message() == Contains("'late' is not complete after 0.15"));
      CHECK_OK(rank.Allreduce("go", go));
    } else {
      CHECK_OK(rank.Allreduce("go", go));
      CHECK_OK(rank.Submit("late", data, true, &handle));
    }
    CHECK_OK(rank.engine().WaitDriving(handle, 60, nullptr));
    CHECK(FirstDifference(data, std::vector<float>(1000, 2.0f)) == "");
  });
}

}  // namespace
}  // namespace kolovod
