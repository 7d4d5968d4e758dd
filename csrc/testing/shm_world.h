// Threads as ranks over one segment, each with a backend of its own and no engine.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "collectives/shm.h"
#include "testing/check.h"
#include "transport/liveness.h"

namespace kolovod::testing {

// What the ranks of one host share.
struct TestHost {
  explicit TestHost(int size, const Config& config) : faults(std::make_shared<LoopbackFaults>(size)) {
    CHECK_OK(Segment::Map(-1, SegmentLayout(size, size, config), &segment));
  }
  std::shared_ptr<LoopbackFaults> faults;
  std::shared_ptr<Segment> segment;
};

// One of them.
struct Member {
  Member(TestHost& host, int place, const Config& config, bool streaming = false,
         const Kernels& kernels = ActiveKernels(), std::unique_ptr<PeerMemory> peers = nullptr)
      : liveness(host.faults, Numbers(*host.segment)),
        waiter(*host.segment,
               Topology(place, std::vector<int>(static_cast<size_t>(host.segment->layout().size))), liveness,
               stop, nullptr),
        shm(std::make_unique<ShmBackend>(*host.segment, place, config, waiter, nullptr, streaming,
                                         std::move(peers), kernels)) {
    WaitBudget budget;
    budget.yield_ns = 200'000;
    waiter.Configure(budget, nullptr);
  }
  static std::vector<int> Numbers(Segment& segment) {
    std::vector<int> numbers(static_cast<size_t>(segment.layout().size));
    std::iota(numbers.begin(), numbers.end(), 0);
    return numbers;
  }
  LoopbackLiveness liveness;
  std::atomic<bool> stop{false};
  Waiter waiter;
  std::unique_ptr<ShmBackend> shm;
};

inline void RunShm(int size, const Config& config, bool streaming, const Kernels& kernels,
                   const std::function<void(ShmBackend&, int rank)>& body) {
  TestHost host(size, config);
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      Member member(host, r, config, streaming, kernels);
      body(*member.shm, r);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace kolovod::testing
