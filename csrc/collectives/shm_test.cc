#include "collectives/shm.h"

#include <chrono>
#include <cstring>
#include <string_view>
#include <thread>

#include "testing/shm_world.h"
#include "testing/verbs.h"

namespace kolovod {
namespace {

using testing::Bytes;
using testing::Contains;

// A processor whose stores that bypass the cache become visible at the fence and not before. The real one is
// free to do so, and hardly ever does where a test could see it.
struct Deferred {
  struct Store {
    void* to;
    Bytes bytes;
  };
  static std::vector<Store>& Pending() {
    thread_local std::vector<Store> pending;
    return pending;
  }
  static char* Instead(void* to, size_t bytes) {
    Pending().push_back({to, Bytes(bytes)});
    return Pending().back().bytes.data();
  }

  static void CopyStreaming(void* to, const void* from, size_t bytes) {
    std::memcpy(Instead(to, bytes), from, bytes);
  }
  static void Run(const Exchange& exchange) {
    Exchange x = exchange;
    if (x.pack_streaming && x.pack_bytes > 0) x.pack_to = Instead(x.pack_to, x.pack_bytes);
    std::vector<void*> copies;
    const size_t bytes = x.reduce.count * SizeOf(x.reduce.dtype);
    for (int c = 0; c < x.reduce.copy_count && x.reduce.streaming && bytes > 0; ++c) {
      copies.push_back(Instead(x.reduce.copies[c], bytes));
    }
    if (!copies.empty()) x.reduce.copies = copies.data();
    ActiveKernels().exchange(x);
  }
  static void Fence() {
    for (const Store& store : Pending()) std::memcpy(store.to, store.bytes.data(), store.bytes.size());
    Pending().clear();
  }
};

constexpr Kernels kDeferred = {
    Deferred::Run, Deferred::CopyStreaming, Deferred::Fence, nullptr, nullptr, nullptr, "deferred"};

// Large enough for streaming and for trials of the chooser, which do both; and with the smallest in one
// exchange, which chooses for itself.
TEST_CASE("what bypasses the cache is fenced before it is published") {
#if defined(__SANITIZE_THREAD__)
  const std::vector<size_t> counts = {9'000, 50'000};  // each element takes it fifty times as long
#else
  const std::vector<size_t> counts = {9'000, 100'000, 300'000};
#endif
  Config config;
  config.cores = 8;
  config.chunk_bytes = 64 << 10;
  for (const int64_t one_shot_bytes : {0, 64 << 10}) {
    config.one_shot_bytes = one_shot_bytes;
    for (const int size : {2, 3}) {
      testing::RunShm(size, config, /*streaming=*/true, kDeferred, [&](ShmBackend& backend, int rank) {
        for (const size_t count : counts) {
          for (int again = 0; again < 3; ++again) {
            testing::CheckAllreduce(backend, rank, size, testing::Combined, DType::kFloat32, Op::kSum, {},
                                    {count, 5}, again == 0);
            testing::CheckReducescatter(backend, rank, size, testing::Combined, DType::kFloat32, Op::kSum, {},
                                        std::vector<size_t>(static_cast<size_t>(size), count));
            testing::CheckBroadcast(backend, rank, count, again % size, false);
            testing::CheckAllgather(backend, rank, std::vector<size_t>(static_cast<size_t>(size), count));
            testing::CheckAlltoall(backend, rank, size, count);
          }
        }
      });
    }
  }
}

#if !defined(__SANITIZE_THREAD__)  // of which each element takes fifty times as long: minutes here
// Results that are written past the cache are there when the verb has ended.
TEST_CASE("large results are fenced before they are given out") {
  Config config;
  config.cores = 8;
  constexpr size_t kBytes = (16 << 20) + 4;
  for (const int size : {2, 3}) {
    testing::RunShm(size, config, /*streaming=*/true, kDeferred, [&](ShmBackend& backend, int rank) {
      for (const bool in_place : {false, true}) {
        testing::CheckBroadcast(backend, rank, kBytes / sizeof(float), 1, in_place);
      }
      const auto ranks = static_cast<size_t>(size);
      testing::CheckAllgather(backend, rank, std::vector<size_t>(ranks, kBytes / ranks + 1));
      testing::CheckAlltoall(backend, rank, size, kBytes / 3 + 1);
    });
  }
}
#endif

// Stores that bypass the cache, which take as long as among cores that share a large one.
struct Slow {
  static void CopyStreaming(void* to, const void* from, size_t bytes) {
    ++Count();
    std::this_thread::sleep_for(std::chrono::microseconds(100));
    std::memcpy(to, from, bytes);
  }
  static void Fence() {}
  static int& Count() {
    thread_local int count = 0;
    return count;
  }
};

constexpr Kernels kSlow = {nullptr, Slow::CopyStreaming, Slow::Fence, nullptr, nullptr, nullptr, "slow"};

TEST_CASE("what is moved bypasses the cache as guessed, until trials show that it should not") {
  Config config;
  config.cores = 8;
  config.chunk_bytes = 16 << 10;
  constexpr int kRoot = 1;
  for (const bool streaming : {false, true}) {
    testing::RunShm(2, config, streaming, kSlow, [&](ShmBackend& backend, int rank) {
      const auto counted = [&](size_t chunks) {
        const int before = Slow::Count();
        testing::CheckBroadcast(backend, rank, chunks * (16 << 10) / sizeof(float), kRoot, true);
        return Slow::Count() - before;
      };
      const int stores = counted(2);  // too short for a trial
      CHECK(stores == (streaming && rank == kRoot ? 2 : 0));
      const int tried = counted(32);
      if (rank == kRoot) CHECK(tried == 16);
      for (int range = 0; range < 20; ++range) counted(32);
      CHECK(counted(2) == 0);
    });
  }
}

TEST_CASE("every verb with and without cores for all") {
  for (const int size : {2, 3, 5}) {
    for (const int64_t cores : {1, 16}) {
      for (const int64_t chunk_bytes : {0, 4096}) {
        Config config;
        config.cores = cores;
        config.chunk_bytes = chunk_bytes;
        testing::RunShm(size, config, false, ActiveKernels(), [&](ShmBackend& backend, int rank) {
          testing::CheckAllSizes(backend, rank, size, testing::Combined);
        });
      }
    }
  }
}

// Rank 0 of two, which reads what rank 1 has. Rank 1 is played here: all that the other waits for is there.
struct Reading {
  Reading(const Config& config, const Bytes& theirs, const Kernels& kernels = ActiveKernels())
      : host(2, config), peer(*host.segment, 1) {
    auto own = std::make_unique<PeerMemory>(*host.segment, 0);
    peer.Announce();
    own->Announce();
    peer.Probe();
    own->Probe();
    CHECK(own->AllHaveProbed());
    CHECK(own->usable());
    member = std::make_unique<testing::Member>(host, 0, config, false, kernels, std::move(own));
    peer.Offer(theirs.data(), theirs.size());
    host.segment->rank(1).packed.store(1);
    host.segment->rank(1).done.store(1);
  }
  // Each rank has as many bytes for each.
  Status Run(Verb verb, const Bytes& ours, Bytes* out) {
    const size_t bytes = ours.size() / 2;
    ShmBackend& shm = *member->shm;
    if (verb == Verb::kBroadcast) {
      return shm.Broadcast({out->data(), out->data(), out->size()}, DType::kUInt8, 1, "b");
    }
    if (verb == Verb::kAllgather) return shm.Allgather(ours.data(), out->data(), {bytes, bytes});
    return shm.Alltoall(ours.data(), out->data(), Splits::OfAll({{1, 1}, {1, 1}}), bytes);
  }
  testing::TestHost host;
  PeerMemory peer;
  std::unique_ptr<testing::Member> member;
};

// Another process may have the number of one that has ended, and be read in its place.
TEST_CASE("what was read of a rank that died is no result") {
  Config config;
  config.cores = 1;  // so that broadcast reads, too
  config.peer_read_bytes = 1;
  constexpr size_t kBytes = 50'000;
  const Bytes theirs(2 * kBytes, 'x'), ours(2 * kBytes, 'y');
  for (const bool dies : {false, true}) {
    for (const Verb verb : {Verb::kBroadcast, Verb::kAllgather, Verb::kAlltoall}) {
      Reading reading(config, theirs);
      reading.host.faults->killed[1] = dies;
      Bytes out(2 * kBytes);
      const Status status = reading.Run(verb, ours, &out);
      CHECK(out.back() == 'x');  // it was read
      CHECK(status.ok() == !dies);
      if (!dies) continue;
      CHECK(status == Code::kRankLost);
      CHECK(status.message() == Contains("rank 1"));
    }
  }
}

TEST_CASE("a rank's own part of a large result is fenced where the others' are read") {
  Config config;
  config.peer_read_bytes = 1;
  constexpr size_t kBytes = 9 << 20;
  const Bytes theirs(2 * kBytes, 'x'), ours(2 * kBytes, 'y');
  for (const Verb verb : {Verb::kAllgather, Verb::kAlltoall}) {
    Reading reading(config, theirs, kDeferred);
    Bytes out(2 * kBytes);
    CHECK(reading.Run(verb, ours, &out).ok());
    CHECK(Deferred::Pending().empty());
    CHECK(std::string_view(out.data(), kBytes) == std::string_view(ours.data(), kBytes));
    CHECK(std::string_view(out.data() + kBytes, kBytes) == std::string_view(theirs.data(), kBytes));
  }
}

// Who has left is dead, too, and no reason to overlook another.
TEST_CASE("a death is found behind a rank that has left") {
  Config config;
  testing::TestHost host(3, config);
  testing::Member member(host, 0, config);
  host.faults->killed[1] = true;
  host.segment->left(1).store(1);
  CHECK(!member.waiter.CheckPeers());
  host.faults->killed[2] = true;
  CHECK(member.waiter.CheckPeers());
  CHECK(host.segment->RevokedStatus().message() == Contains("rank 2"));
}

// The rank is asleep while both come about, so that it learns of them at once.
TEST_CASE("data that have come count though their sender has died") {
  for (const bool is_told : {false, true}) {
    for (const bool in_bucket : {false, true}) {
      for (const bool come : {false, true}) {
        Config config;
        testing::TestHost host(2, config);
        testing::Member member(host, 0, config);
        bool ready = false;
        member.waiter.set_before_sleep([&] {
          ready = come;
          host.faults->killed[1] = true;
          if (is_told) host.segment->Revoke(Code::kRankLost, "rank 1 died");
        });
        const Status status = member.waiter.Wait([&] { return ready; }, [] {}, in_bucket);
        CHECK(status.ok() == (in_bucket && come));
        if (!status.ok()) CHECK(status == Code::kRankLost);
      }
    }
  }
}

}  // namespace
}  // namespace kolovod
