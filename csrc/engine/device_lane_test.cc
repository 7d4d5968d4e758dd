// Tensors on a device, which here is host memory that only a foreign thread of each rank touches.
#include "engine/device_lane.h"

#include <chrono>
#include <condition_variable>
#include <functional>
#include <latch>
#include <map>
#include <mutex>
#include <numeric>
#include <thread>

#include "testing/world.h"

namespace kolovod {
namespace {

using std::chrono::milliseconds;
using testing::Contains;
using testing::Rank;

// Adds what all ranks give, as the engine of a device does: in turns, and only if all come.
class Adder {
 public:
  explicit Adder(int size) : size_(size) {}

  // False: `over` before all had come.
  bool Add(std::vector<float>* values, const std::function<bool()>& over) {
    std::unique_lock<std::mutex> lock(mutex_);
    const uint64_t turn = turn_;
    if (arrived_ == 0) sum_.assign(values->size(), 0);
    CHECK(sum_.size() == values->size());  // else the ranks have cut their batches differently
    for (size_t i = 0; i < sum_.size(); ++i) sum_[i] += (*values)[i];
    if (++arrived_ == size_) {
      arrived_ = 0;
      sums_[turn_++] = sum_;
      sums_.erase(turn_ - 2);
      changed_.notify_all();
    }
    while (turn_ == turn) {
      changed_.wait_for(lock, milliseconds(20));
      if (over()) return false;
    }
    *values = sums_[turn];
    return true;
  }

 private:
  const int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int arrived_ = 0;
  uint64_t turn_ = 1;
  std::vector<float> sum_;
  std::map<uint64_t, std::vector<float>> sums_;  // of the last two turns
};

// The foreign thread of a rank.
class Foreign {
 public:
  using Hook = std::function<void(const ExternalJob&)>;

  // `before` is called for each job.
  Foreign(Rank& rank, Adder& adder, Hook before = nullptr)
      : rank_(rank), adder_(adder), before_(std::move(before)), thread_([this] { Serve(); }) {}
  ~Foreign() {
    rank_.engine().Shutdown();
    thread_.join();
  }

 private:
  void Serve() {
    ExternalBackend& external = *rank_.engine().external();
    ExternalJob job;
    while (external.NextJob(60, &job).ok()) {
      if (before_) before_(job);
      if (!Carry(external, job)) return;
      CHECK_OK(external.JobDone(job.token, ""));
    }
  }
  bool Carry(ExternalBackend& external, const ExternalJob& job) {
    std::vector<float> values;
    if (!external.OpenMemory(job.token).ok()) return false;
    for (const Piece& piece : job.pieces) {
      const auto* const in = static_cast<const float*>(piece.in);
      for (size_t i = 0; i < piece.count; ++i) values.push_back(in == nullptr ? 0 : in[i]);
    }
    external.CloseMemory();
    const auto over = [&] {
      const Status status = external.OpenMemory(job.token);
      if (status.ok()) external.CloseMemory();
      return !status.ok();
    };
    if (!adder_.Add(&values, over) || !external.OpenMemory(job.token).ok()) return false;
    size_t begin = 0;
    for (const Piece& piece : job.pieces) {
      if (piece.out != nullptr) std::copy_n(&values[begin], piece.count, static_cast<float*>(piece.out));
      begin += piece.count;
    }
    external.CloseMemory();
    return true;
  }

  Rank& rank_;
  Adder& adder_;
  const Hook before_;
  std::thread thread_;
};

Status SubmitOnDevice(Rank& rank, const std::string& name, std::vector<float>& data, uint64_t* handle,
                      int gpu = 0) {
  Request request;
  request.name = name;
  request.op = Op::kSum;
  std::vector<SubmittedTensor> tensors(1);
  tensors[0].meta = {DType::kFloat32, {static_cast<int64_t>(data.size())}, Device::kGpu};
  tensors[0].in = tensors[0].out = data.data();
  tensors[0].gpu = gpu;
  return rank.engine().Submit(std::move(request), std::move(tensors), false, handle);
}

Status AddOnDevice(Rank& rank, const std::string& name, std::vector<float>& data, int gpu = 0) {
  uint64_t handle = 0;
  KV_RETURN_IF_ERROR(SubmitOnDevice(rank, name, data, &handle, gpu));
  return rank.Wait(handle);
}

void Run(const std::vector<int>& hosts, const std::function<void(Rank&, Adder&)>& body) {
  Adder adder(static_cast<int>(hosts.size()));
  testing::RunHosts(hosts, [&](Rank& rank) { body(rank, adder); }, testing::SmallConfig(), Device::kGpu);
}

const std::vector<int> kOneHost{0, 0, 0};
const std::vector<int> kTwoHosts{0, 1, 1};

// Small and large, with and without a name, in memory and on the device, each rank at its own pace.
void Mix(Rank& rank, int rounds) {
  const float total = static_cast<float>(rank.size());
  for (int round = 0; round < rounds; ++round) {
    std::vector<std::vector<float>> data;
    std::vector<uint64_t> handles(12);
    for (size_t i = 0; i < handles.size(); ++i) data.emplace_back(i % 5 == 0 ? 9000 : 3, 1.0f);
    for (size_t i = 0; i < handles.size(); ++i) {
      const std::string name = i % 3 == 0 ? "" : "t" + std::to_string(i);
      if ((static_cast<size_t>(rank.rank()) * 5 + i + static_cast<size_t>(round)) % 7 == 0) {
        std::this_thread::sleep_for(milliseconds(1));
      }
      if (i % 4 == 1) {
        CHECK_OK(rank.Submit(name, data[i], false, &handles[i]));
      } else {
        CHECK_OK(SubmitOnDevice(rank, name, data[i], &handles[i]));
      }
    }
    for (size_t i = 0; i < handles.size(); ++i) {
      const size_t turn = (i * 5) % handles.size();
      CHECK_OK(rank.Wait(handles[turn]));
      CHECK(data[turn] == std::vector<float>(data[turn].size(), total));
    }
  }
}

TEST_CASE("all ranks cut the same batches whatever their pace") {
  for (const std::vector<int>& hosts : {std::vector<int>{0}, kOneHost, kTwoHosts, {0, 1, 2, 0}}) {
    Run(hosts, [](Rank& rank, Adder& adder) {
      Foreign foreign(rank, adder);
      Mix(rank, 15);
      std::vector<float> last(1, 1.0f);
      CHECK_OK(rank.Allreduce("last", last));  // the others may be in the lane
    });
  }
}

// The foreign engine connects the ranks that way, while somebody waits for its first operation.
TEST_CASE("operations in host memory go on while one is on the device") {
  for (const std::vector<int>& hosts : {kOneHost, kTwoHosts}) {
    Run(hosts, [](Rank& rank, Adder& adder) {
      Foreign foreign(rank, adder, [&](const ExternalJob&) {
        std::vector<float> addresses(100, 2.0f);
        CHECK_OK(rank.Allreduce("connect", addresses));
        CHECK(addresses[99] == 2.0f * static_cast<float>(rank.size()));
      });
      std::vector<float> data(5, 1.0f);
      CHECK_OK(AddOnDevice(rank, "t", data));
      CHECK(data[0] == static_cast<float>(rank.size()));
      CHECK_OK(rank.Allreduce("last", data));
    });
  }
}

TEST_CASE("what is ready while a batch is on its way goes together") {
  for (const std::vector<int>& hosts : {kOneHost, kTwoHosts}) {
    Run(hosts, [](Rank& rank, Adder& adder) {
      std::atomic<bool> go{false};
      std::vector<size_t> pieces;
      std::vector<std::vector<float>> data(21, std::vector<float>(4, 1.0f));
      std::vector<uint64_t> handles(data.size());
      {
        Foreign foreign(rank, adder, [&](const ExternalJob& job) {
          pieces.push_back(job.pieces.size());
          while (!go.load()) std::this_thread::yield();
        });
        for (size_t i = 0; i < data.size(); ++i) {
          CHECK_OK(SubmitOnDevice(rank, "t" + std::to_string(i), data[i], &handles[i]));
          std::vector<float> beside(1, 1.0f);
          // Every rank has announced it, and is past it.
          CHECK_OK(rank.Allreduce("beside", beside));
        }
        go.store(true);
        for (uint64_t handle : handles) CHECK_OK(rank.Wait(handle));
        std::vector<float> last(1);
        CHECK_OK(rank.Allreduce("last", last));
      }
      CHECK(pieces == std::vector<size_t>{1, 20});
    });
  }
}

TEST_CASE("a tensor on a device here and in host memory there is a mismatch") {
  for (const std::vector<int>& hosts : {kOneHost, kTwoHosts}) {
    Run(hosts, [](Rank& rank, Adder& adder) {
      Foreign foreign(rank, adder);
      std::vector<float> data(5, 1.0f);
      for (const char* name : {"t", "", "t"}) {
        uint64_t handle = 0;
        if (rank.rank() == 1) {
          CHECK_OK(SubmitOnDevice(rank, name, data, &handle));
        } else {
          CHECK_OK(rank.Submit(name, data, true, &handle));
        }
        const Status status = rank.Wait(handle);
        CHECK(status == Code::kMismatch);
        CHECK(status.message() == Contains("device differs: rank 0 has host memory, rank 1 has GPU memory"));
      }
      CHECK_OK(AddOnDevice(rank, "t", data));
      CHECK_OK(rank.Allreduce("last", data));
    });
  }
}

TEST_CASE("what is refused on one rank has its number and leaves nothing") {
  std::latch finished(static_cast<ptrdiff_t>(kOneHost.size()));
  Run(kOneHost, [&](Rank& rank, Adder& adder) {
    Foreign foreign(rank, adder);
    std::vector<float> data(2, 1.0f);
    CHECK_OK(AddOnDevice(rank, "", data, rank.rank()));
    uint64_t handle = 0;
    if (rank.rank() == 1) {
      const Status other = SubmitOnDevice(rank, "", data, &handle, 5);
      CHECK(other.message() == Contains("cuda:5, but this rank has used cuda:1 before"));
      Request request;
      std::vector<SubmittedTensor> tensors(2);
      tensors[0].meta = {DType::kFloat32, {2}, Device::kGpu};
      tensors[1].meta = {DType::kFloat32, {2}};
      CHECK(rank.engine().Submit(request, tensors, true, &handle).message() == Contains("several devices"));
      tensors.pop_back();
      request.op = Op::kAdasum;
      CHECK(rank.engine().Submit(request, tensors, true, &handle) == Code::kInvalidArgument);
      CHECK(rank.engine().Pending() == 0);
    } else {
      std::vector<std::vector<float>> unanswered(3, std::vector<float>(2));
      for (std::vector<float>& one : unanswered)
        CHECK_OK(SubmitOnDevice(rank, "", one, &handle, rank.rank()));
      CHECK_OK(AddOnDevice(rank, "", data, rank.rank()));
      CHECK_OK(rank.Allreduce("last", data));
      finished.arrive_and_wait();  // who leaves with work pending ends the world: not before all are through
      (void)rank.engine().Shutdown();  // before the vectors go
      return;
    }
    CHECK_OK(AddOnDevice(rank, "", data, 1));
    CHECK_OK(rank.Allreduce("last", data));
    finished.count_down();
  });
}

TEST_CASE("a rank that has joined gives zeros and waits for what is on the device") {
  for (const std::vector<int>& hosts : {kOneHost, kTwoHosts}) {
    Run(hosts, [](Rank& rank, Adder& adder) {
      std::atomic<int> nowhere{0};
      {
        Foreign foreign(rank, adder, [&](const ExternalJob& job) {
          for (const Piece& piece : job.pieces) nowhere += piece.in == nullptr;
        });
        for (int turn = 0; turn <= rank.rank(); ++turn) {
          std::vector<float> data(3, 1.0f);
          CHECK_OK(AddOnDevice(rank, "", data));
          CHECK(data[2] == static_cast<float>(rank.size() - turn));
        }
        CHECK(rank.Join() == rank.size() - 1);
        CHECK(nowhere.load() == rank.size() - 1 - rank.rank());
        std::vector<float> data(3, 1.0f);
        CHECK_OK(AddOnDevice(rank, "", data));
        CHECK_OK(rank.Allreduce("last", data));
      }
    });
  }
}

TEST_CASE("a batch is given up when a rank is killed") {
  Run({0, 0}, [](Rank& rank, Adder& adder) {
    Foreign foreign(rank, adder, [&](const ExternalJob&) {
      if (rank.rank() == 0) return;
      rank.world().Kill(1);
      while (!rank.engine().segment()->revoked()) std::this_thread::sleep_for(milliseconds(1));
    });
    std::vector<float> data(5, 1.0f);
    std::vector<float> held(5, 1.0f);
    uint64_t handle = 0;
    (void)SubmitOnDevice(rank, "held", held, &handle);
    const Status status = AddOnDevice(rank, "t", data);
    if (rank.rank() == 0) CHECK(status == Code::kRankLost);
  });
}

// The tensors may be freed as soon as the operation has failed.
TEST_CASE("the world ends while the memory of a batch is touched") {
  Run({0}, [](Rank& rank, Adder&) {
    std::atomic<bool> touching{false};
    std::thread foreign([&] {
      ExternalBackend& external = *rank.engine().external();
      ExternalJob job;
      CHECK_OK(external.NextJob(60, &job));
      CHECK_OK(external.OpenMemory(job.token));
      touching.store(true);
      rank.engine().Abort("enough");
      std::this_thread::sleep_for(milliseconds(60));
      touching.store(false);
      external.CloseMemory();
      CHECK(external.OpenMemory(job.token) == Code::kShutDown);
    });
    std::vector<float> data(5, 1.0f);
    CHECK(AddOnDevice(rank, "t", data).message() == Contains("enough"));
    CHECK(!touching.load());
    foreign.join();
  });
}

TEST_CASE("an error of the device's engine ends the world for all") {
  Run({0, 0}, [](Rank& rank, Adder&) {
    std::thread foreign([&] {
      ExternalBackend& external = *rank.engine().external();
      ExternalJob job;
      if (external.NextJob(60, &job).ok() && rank.rank() == 1) {
        (void)external.JobDone(job.token, "out of memory");
      }
    });
    std::vector<float> data(5, 1.0f);
    CHECK(AddOnDevice(rank, "t", data).message() == Contains("the external engine failed: out of memory"));
    foreign.join();
  });
}

TEST_CASE("outputs on a device have an address and no memory") {
  Run({0}, [](Rank& rank, Adder&) {
    Request request;
    request.verb = Verb::kAllgather;
    std::vector<SubmittedTensor> tensors(2);
    std::vector<float> data(10);
    for (size_t t = 0; t < 2; ++t) {
      tensors[t].meta = {DType::kFloat32, {5}, Device::kGpu};
      tensors[t].in = &data[5 * t];
      tensors[t].gpu = 3;
    }
    uint64_t handle = 0;
    CHECK_OK(rank.engine().Submit(std::move(request), std::move(tensors), false, &handle));
    std::vector<void*> outputs;
    std::thread foreign([&] {
      ExternalBackend& external = *rank.engine().external();
      for (int t = 0; t < 2; ++t) {
        ExternalJob job;
        CHECK_OK(external.NextJob(60, &job));
        CHECK(job.device == 3);
        outputs.push_back(job.pieces[0].out);
        CHECK_OK(external.JobDone(job.token, ""));
      }
    });
    const OperationPtr op = rank.engine().Find(handle);
    CHECK_OK(rank.Wait(handle));
    foreign.join();
    for (size_t t = 0; t < 2; ++t) {
      CHECK(outputs[t] == &op->buffers[t]);
      CHECK(op->buffers[t].bytes == 20);
      CHECK(op->buffers[t].data == nullptr);
    }
  });
}

TEST_CASE("without a lane a tensor on a device is refused") {
  testing::RunRanks(1, [](Rank& rank) {
    std::vector<float> data(3);
    uint64_t handle = 0;
    CHECK(SubmitOnDevice(rank, "t", data, &handle).message() == Contains("no backend for those"));
    CHECK_OK(rank.Allreduce("t", data));
  });
}

}  // namespace
}  // namespace kolovod
