#include "collectives/external.h"

#include <atomic>
#include <chrono>
#include <thread>

#include "engine/engine.h"
#include "testing/check.h"
#include "transport/loopback.h"

using namespace kolovod;
using namespace kolovod::testing;

namespace {

// The only rank of a world, with an engine that is external.
class Alone {
 public:
  Alone() {
    Config config;
    config.start_timeout_ms = 20'000;
    CHECK_OK(LoopbackWorld::Create({0}, config, &world_));
    EngineOptions options;
    options.size = 1;
    options.config = config;
    options.external = Device::kHost;
    options.segment = world_->SegmentOf(0);
    options.liveness = std::make_unique<LoopbackLiveness>(world_->faults, world_->ranks);
    CHECK_OK(Engine::Create(std::move(options), &engine_));
  }

  ExternalBackend& external() { return *engine_->external(); }
  Engine& engine() { return *engine_; }

  uint64_t Submit(Verb verb, std::vector<float>& data) {
    Request request;
    request.name = "t";
    request.verb = verb;
    request.op = Op::kSum;
    if (verb == Verb::kAlltoall) request.splits = {static_cast<int64_t>(data.size())};
    std::vector<SubmittedTensor> tensors(1);
    tensors[0].meta = {DType::kFloat32, {static_cast<int64_t>(data.size())}};
    tensors[0].in = data.data();
    if (!TraitsOf(verb).makes_outputs) tensors[0].out = data.data();
    uint64_t handle = 0;
    CHECK_OK(engine_->Submit(std::move(request), std::move(tensors), true, &handle));
    return handle;
  }
  Status Run(Verb verb, std::vector<float>& data) {
    const uint64_t handle = Submit(verb, data);
    const Status status = engine_->Wait(handle, 60, nullptr);
    bool done = false;
    CHECK_OK(engine_->Release(handle, &done));
    return status;
  }

 private:
  std::shared_ptr<LoopbackWorld> world_;
  std::unique_ptr<Engine> engine_;
};

constexpr Verb kVerbs[] = {Verb::kAllreduce, Verb::kBroadcast, Verb::kAllgather, Verb::kAlltoall,
                           Verb::kReducescatter};

ExternalJob Next(ExternalBackend& external) {
  ExternalJob job;
  CHECK_OK(external.NextJob(60, &job));
  return job;
}

}  // namespace

TEST_CASE("the native backend carries everything until the foreign one stands") {
  Alone alone;
  std::vector<float> data(7, 1);
  for (Verb verb : kVerbs) CHECK_OK(alone.Run(verb, data));
  ExternalJob job;
  CHECK(alone.external().NextJob(0, &job) == Code::kTimeout);
}

TEST_CASE("then every verb goes to the foreign thread with the sizes of all ranks") {
  Alone alone;
  alone.external().HandOver();
  std::thread foreign([&] {
    for (Verb verb : kVerbs) {
      const ExternalJob job = Next(alone.external());
      CHECK(job.verb == verb);
      CHECK(job.pieces.size() == 1);
      if (verb == Verb::kAllgather || verb == Verb::kAlltoall) {
        CHECK(job.dtype == DType::kUInt8);
        CHECK(job.sizes == std::vector<size_t>{28});
      } else {
        CHECK(job.dtype == DType::kFloat32);
        CHECK(job.pieces[0].count == 7);
      }
      if (verb == Verb::kAlltoall) {
        CHECK(job.received == std::vector<size_t>{28});
        CHECK(job.total == 28);
      }
      if (verb == Verb::kReducescatter) CHECK(job.sizes == std::vector<size_t>{7});
      CHECK_OK(alone.external().OpenMemory(job.token));
      *static_cast<float*>(job.pieces[0].out) = 5;
      alone.external().CloseMemory();
      CHECK_OK(alone.external().JobDone(job.token, ""));
    }
  });
  for (Verb verb : kVerbs) {
    std::vector<float> data(7, 1);
    CHECK_OK(alone.Run(verb, data));
    CHECK(data[0] == (TraitsOf(verb).makes_outputs ? 1 : 5));
  }
  foreign.join();
}

TEST_CASE("a bucket is given up at once but not while its memory is touched") {
  for (Verb verb : kVerbs) {
    Alone alone;
    alone.external().HandOver();
    std::atomic<bool> touching{false};
    std::thread foreign([&] {
      const ExternalJob job = Next(alone.external());
      CHECK_OK(alone.external().OpenMemory(job.token));
      touching.store(true);
      alone.engine().Abort("enough");
      std::this_thread::sleep_for(std::chrono::milliseconds(60));
      *static_cast<float*>(job.pieces[0].out) = 5;
      touching.store(false);
      alone.external().CloseMemory();
      CHECK(alone.external().OpenMemory(job.token) == Code::kShutDown);
      ExternalJob none;
      CHECK(alone.external().NextJob(60, &none).message() == Contains("enough"));
    });
    {
      std::vector<float> data(7, 1);
      const Status status = alone.Run(verb, data);
      CHECK(status.message() == Contains("enough"));
      CHECK(!touching.load());
    }
    foreign.join();
  }
}

TEST_CASE("an error of the foreign engine ends the world") {
  Alone alone;
  alone.external().HandOver();
  std::thread foreign([&] {
    const ExternalJob job = Next(alone.external());
    CHECK(alone.external().JobDone(job.token + 1, "") == Code::kInvalidArgument);
    CHECK_OK(alone.external().JobDone(job.token, "no route"));
  });
  std::vector<float> data(7, 1);
  const Status status = alone.Run(Verb::kAllreduce, data);
  CHECK(status == Code::kInternal);
  CHECK(status.message() == Contains("the external engine failed: no route"));
  foreign.join();
}

// The rank dies only after the foreign engine has failed, and at the last look, if there is no time for more.
TEST_CASE("a reason that comes soon after is a better one") {
  for (const int patience_ms : {0, 60'000}) {
    std::shared_ptr<LoopbackWorld> world;
    CHECK_OK(LoopbackWorld::Create({0}, Config(), &world));
    Segment& segment = *world->SegmentOf(0);
    std::atomic<bool> failed{false};
    std::atomic<bool> stop{false};
    int looks = 0;
    const auto look = [&] {
      if (failed.load()) ++looks;
      if (looks == (patience_ms == 0 ? 2 : 4)) segment.Revoke(Code::kRankLost, "a rank was killed");
      return segment.revoked() ? segment.RevokedStatus() : Status();
    };
    ExternalBackend external(nullptr, 0, segment, look, stop, std::chrono::milliseconds(patience_ms));
    std::thread foreign([&] {
      const ExternalJob job = Next(external);
      failed.store(true);  // who waits for the job looks once more when it is done, or more often
      CHECK_OK(external.JobDone(job.token, "connection closed by peer"));
    });
    std::vector<float> data(7, 1);
    const std::string name = "t";
    const FusedRange range{DType::kFloat32, Op::kSum, 1, 1, {{data.data(), data.data(), data.size()}}, &name};
    const Status status = external.Allreduce(range);
    CHECK(status == Code::kRankLost);
    CHECK(status.message() == Contains("a rank was killed"));
    foreign.join();
  }
}
