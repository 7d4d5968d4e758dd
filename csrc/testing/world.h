// Threads as ranks over the real segment code, for the engine's tests.
#pragma once

#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "engine/engine.h"
#include "testing/check.h"
#include "transport/loopback.h"

namespace kolovod::testing {

// One rank as a test sees it.
class Rank {
 public:
  Rank(int rank, std::shared_ptr<LoopbackWorld> world, std::optional<Device> external = std::nullopt)
      : rank_(rank), world_(std::move(world)) {
    EngineOptions options;
    options.rank = rank;
    options.size = world_->size();
    options.hosts = world_->hosts;
    options.control_fds = world_->TakeControlLinks(rank);
    options.broker = world_->BrokerOf(rank);
    options.config = world_->config;
    options.segment = world_->SegmentOf(rank);
    options.faults = world_->faults;
    options.external = external;
    options.ranks = world_->ranks;
    // As with processes, only those of the same host are seen to die; of others one hears.
    options.liveness = std::make_unique<LoopbackLiveness>(world_->faults, world_->ranks,
                                                          Topology(rank, world_->hosts).local_ranks);
    options.believed_bytes_per_us = world_->believed_bytes_per_us;
    if (std::getenv("KOLOVOD_TEST_LONG_SLEEPS") != nullptr) {
      options.driver_sleep_ns = options.idle_sleep_ns = 3'600'000'000'000;
    }
    CHECK_OK(Engine::Create(std::move(options), &engine_));
    if (const char* seed = std::getenv("KOLOVOD_TEST_SHUFFLE"); seed != nullptr) {
      world_->faults->shuffle = static_cast<uint32_t>(std::atoi(seed));
    }
  }

  int rank() const { return rank_; }
  int size() const { return world_->size(); }
  LoopbackWorld& world() { return *world_; }
  Engine& engine() { return *engine_; }

  // Submits in place; the vector must outlive the operation.
  Status Submit(const std::string& name, std::vector<float>& data, bool blocking, uint64_t* handle,
                Op op = Op::kSum, Verb verb = Verb::kAllreduce, int root = 0) {
    Request request;
    request.name = name;
    request.verb = verb;
    request.op = op;
    request.root = root;
    std::vector<SubmittedTensor> tensors(1);
    tensors[0].meta = {DType::kFloat32, {static_cast<int64_t>(data.size())}};
    tensors[0].in = tensors[0].out = data.data();
    return engine_->Submit(std::move(request), std::move(tensors), blocking, handle);
  }
  Status Wait(uint64_t handle, double timeout_s = -1) {
    const Status status = engine_->Wait(handle, timeout_s, nullptr);
    bool done = false;
    (void)engine_->Release(handle, &done);
    return status;
  }
  // Splits and joins rows of one float.
  Status Scatter(Verb verb, const std::string& name, const std::vector<float>& data,
                 const std::vector<int64_t>& splits, std::vector<float>* result) {
    return Scatter(verb, name, data.data(), data.size(), splits, result);
  }
  Status Scatter(Verb verb, const std::string& name, const float* data, size_t count,
                 const std::vector<int64_t>& splits, std::vector<float>* result) {
    Request request;
    request.name = name;
    request.verb = verb;
    request.splits = splits;
    std::vector<SubmittedTensor> tensors(1);
    tensors[0].meta = {DType::kFloat32, {static_cast<int64_t>(count)}};
    tensors[0].in = data;
    uint64_t handle = 0;
    KV_RETURN_IF_ERROR(engine_->Submit(std::move(request), std::move(tensors), true, &handle));
    const OperationPtr op = engine_->Find(handle);
    KV_RETURN_IF_ERROR(Wait(handle));
    const float* made = reinterpret_cast<const float*>(op->buffers[0].data.get());
    result->assign(made, made + op->buffers[0].bytes / sizeof(float));
    return Status();
  }
  // The rank that joined last.
  int Join() {
    Request request;
    request.verb = Verb::kJoin;
    uint64_t handle = 0;
    CHECK_OK(engine_->Submit(std::move(request), {}, true, &handle));
    const OperationPtr op = engine_->Find(handle);
    CHECK_OK(Wait(handle));
    return static_cast<int>(op->rows[0][0]);
  }
  Status Allreduce(const std::string& name, std::vector<float>& data, Op op = Op::kSum) {
    uint64_t handle = 0;
    KV_RETURN_IF_ERROR(Submit(name, data, true, &handle, op));
    return Wait(handle);
  }

 private:
  const int rank_;
  const std::shared_ptr<LoopbackWorld> world_;
  std::unique_ptr<Engine> engine_;
};

inline Config SmallConfig() {
  Config config;
  config.chunk_bytes = 4096;  // many chunks from little data
  config.kick_bytes = 1 << 14;
  config.spin_us = 5;
  config.cache_capacity = 64;
  config.start_timeout_ms = 20'000;
  config.peer_read_bytes = 16 << 10;
  return config;
}

// What a rank gives in a step, and the sum of what all give.
inline std::vector<float> Numbers(size_t count, int rank, int step) {
  std::vector<float> data(count);
  for (size_t i = 0; i < count; ++i) data[i] = static_cast<float>(rank + step + static_cast<int>(i % 50));
  return data;
}
inline std::vector<float> Sums(size_t count, int size, int step) {
  std::vector<float> data(count);
  for (size_t i = 0; i < count; ++i) {
    data[i] = static_cast<float>(size * (step + static_cast<int>(i % 50)) + size * (size - 1) / 2);
  }
  return data;
}

// Every operation goes by the log, and can be counted there.
inline Config ByLogOnly() {
  Config config = SmallConfig();
  config.spin_us = 0;  // see InstantPath::Make
  return config;
}

inline void RunHosts(const std::vector<int>& hosts, const std::function<void(Rank&)>& body,
                     const Config& config = SmallConfig(), std::optional<Device> external = std::nullopt) {
  std::shared_ptr<LoopbackWorld> world;
  CHECK_OK(LoopbackWorld::Create(hosts, config, &world));
  std::vector<std::thread> threads;
  for (int r = 0; r < world->size(); ++r) {
    threads.emplace_back([&, r] {
      Rank rank(r, world, external);
      body(rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

inline void RunRanks(int size, const std::function<void(Rank&)>& body, const Config& config = SmallConfig()) {
  RunHosts(std::vector<int>(static_cast<size_t>(size)), body, config);
}

}  // namespace kolovod::testing
