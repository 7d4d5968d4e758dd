#include "transport/peer_memory.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <numeric>
#include <vector>

#include "testing/world.h"

namespace kolovod {
namespace {

using testing::FirstDifference;
using testing::Rank;
using testing::RunRanks;

constexpr size_t kPage = 4096;

std::shared_ptr<Segment> SegmentOfTwo() {
  std::shared_ptr<Segment> segment;
  CHECK_OK(Segment::Map(-1, SegmentLayout(2, 2, testing::SmallConfig()), &segment));
  return segment;
}

TEST_CASE("all read or none") {
  const std::shared_ptr<Segment> segment = SegmentOfTwo();
  PeerMemory a(*segment, 0);
  PeerMemory b(*segment, 1);
  a.Announce();
  b.Announce();
  a.Probe();
  CHECK(!a.AllHaveProbed());
  CHECK(!a.usable());
  b.Probe();
  CHECK(a.AllHaveProbed());
  CHECK(a.usable());
  CHECK(b.AllHaveProbed());
  CHECK(b.usable());

  // A process of that number that is somebody else: what it has there is not the token.
  segment->rank(1).token ^= 1;
  a.Probe();
  b.Probe();
  CHECK(a.AllHaveProbed());
  CHECK(!a.usable());
  CHECK(b.AllHaveProbed());
  CHECK(!b.usable());
}

TEST_CASE("a process that is gone cannot be read") {
  const std::shared_ptr<Segment> segment = SegmentOfTwo();
  PeerMemory a(*segment, 0);
  a.Announce();
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) _exit(0);
  CHECK(waitpid(child, nullptr, 0) == child);
  segment->rank(1).pid = child;
  char byte;
  CHECK(a.Read(1, reinterpret_cast<uint64_t>(&byte), &byte, 1) == ESRCH);
  a.Probe();
  CHECK(segment->rank(0).reads_peers.load() == 2);
}

TEST_CASE("memory is read whole or with an error") {
  const std::shared_ptr<Segment> segment = SegmentOfTwo();
  PeerMemory a(*segment, 0);
  PeerMemory b(*segment, 1);
  a.Announce();
  b.Announce();
  std::vector<char> from(5 * kPage);
  std::iota(from.begin(), from.end(), char{3});
  a.Offer(from.data(), from.size());
  std::vector<char> to(from.size());
  CHECK(b.Read(0, b.Offered(0), to.data(), to.size()) == 0);
  CHECK(FirstDifference(to, from) == "");
  CHECK(b.Read(0, b.Offered(0) + 7, to.data(), 2) == 0);
  CHECK(to[1] == from[8]);
  a.Offer(nullptr, 0);
  CHECK(b.Offered(0) != 0);  // nothing to read, which is no obstacle

  // The second of two pages may be written only: the processor lets this process read it, the system nobody
  // else.
  char* const pages = static_cast<char*>(
      mmap(nullptr, 2 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  CHECK(pages != MAP_FAILED);
  CHECK(mprotect(pages + kPage, kPage, PROT_WRITE) == 0);
  CHECK(b.Read(0, reinterpret_cast<uint64_t>(pages), to.data(), 2 * kPage) == EFAULT);
  a.Offer(pages, kPage);
  CHECK(b.Offered(0) != 0);
  a.Offer(pages, kPage + 1);
  CHECK(b.Offered(0) == 0);
  CHECK(munmap(pages, 2 * kPage) == 0);
}

std::vector<float> Broadcast(Rank& rank, const float* in, size_t count, int root) {
  std::vector<float> out(count);
  Request request;
  request.verb = Verb::kBroadcast;
  request.root = root;
  std::vector<SubmittedTensor> tensors(1);
  tensors[0].meta = {DType::kFloat32, {static_cast<int64_t>(count)}};
  tensors[0].in = in;
  tensors[0].out = out.data();
  uint64_t handle = 0;
  CHECK_OK(rank.engine().Submit(std::move(request), std::move(tensors), true, &handle));
  CHECK_OK(rank.Wait(handle));
  return out;
}

#if defined(__x86_64__)
// As above; one rank's input suffices for all to stage.
TEST_CASE("what cannot be read is staged") {
  Config config = testing::SmallConfig();
  config.peer_read_bytes = 1;
  config.cores = 1;  // so that broadcast reads, too
  constexpr size_t kCount = 3 * kPage / sizeof(float);
  RunRanks(
      3,
      [](Rank& rank) {
        for (int blocked : {1, 3, 0}) {  // 3: none
          float* const input = static_cast<float*>(mmap(
              nullptr, kCount * sizeof(float), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
          CHECK(input != MAP_FAILED);
          for (size_t i = 0; i < kCount; ++i)
            input[i] = static_cast<float>(i + 10 * static_cast<size_t>(rank.rank()));
          if (rank.rank() == blocked) CHECK(mprotect(input, kCount * sizeof(float), PROT_WRITE) == 0);
          for (const Verb verb : {Verb::kAllgather, Verb::kAlltoall}) {
            std::vector<float> out;
            const size_t part = verb == Verb::kAllgather ? kCount : kCount / 3;
            std::vector<int64_t> splits;
            if (verb == Verb::kAlltoall) splits.assign(3, static_cast<int64_t>(part));
            CHECK_OK(rank.Scatter(verb, NameOf(verb), input, kCount, splits, &out));
            const size_t at = verb == Verb::kAllgather ? 0 : part * static_cast<size_t>(rank.rank());
            CHECK(out.size() == 3 * part);
            for (size_t i = 0; i < out.size(); ++i) {
              CHECK(out[i] == static_cast<float>(at + i % part + 10 * (i / part)));
            }
          }
          for (int root : {1, 2}) {
            const std::vector<float> out = Broadcast(rank, input, kCount, root);
            for (size_t i = 0; i < kCount; ++i)
              CHECK(out[i] == static_cast<float>(i + 10 * static_cast<size_t>(root)));
          }
          CHECK(munmap(input, kCount * sizeof(float)) == 0);
        }
      },
      config);
}

// Many at once, so that a rank that gets nothing from a slow one may go on to the next: it must not offer
// anew before that has seen that all stage.
TEST_CASE("one rank may be ahead of another") {
  Config config = testing::SmallConfig();
  config.peer_read_bytes = 1;
  constexpr size_t kCount = kPage / sizeof(float);
  RunRanks(
      4,
      [](Rank& rank) {
        float* const pages = static_cast<float*>(
            mmap(nullptr, 2 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        CHECK(pages != MAP_FAILED);
        for (size_t i = 0; i < 2 * kCount; ++i) pages[i] = static_cast<float>(rank.rank());
        if (rank.rank() == 0) CHECK(mprotect(pages, kPage, PROT_WRITE) == 0);
        const std::vector<float> wanted(kCount, static_cast<float>((rank.rank() + 3) % 4));
        for (int round = 0; round < 20; ++round) {
          std::vector<uint64_t> handles(50);
          std::vector<OperationPtr> ops;
          for (size_t i = 0; i < handles.size(); ++i) {
            Request request;
            request.name = "a" + std::to_string(i);
            request.verb = Verb::kAlltoall;
            request.splits.resize(4);  // everything to the next rank
            request.splits[static_cast<size_t>(rank.rank() + 1) % 4] = kCount;
            std::vector<SubmittedTensor> tensors(1);
            tensors[0].meta = {DType::kFloat32, {kCount}};
            tensors[0].in = pages + (i % 2) * kCount;
            CHECK_OK(rank.engine().Submit(std::move(request), std::move(tensors), false, &handles[i]));
            ops.push_back(rank.engine().Find(handles[i]));
          }
          for (size_t i = 0; i < handles.size(); ++i) {
            CHECK_OK(rank.Wait(handles[i]));
            const float* made = reinterpret_cast<const float*>(ops[i]->buffers[0].data.get());
            CHECK(std::vector<float>(made, made + kCount) == wanted);
          }
        }
        CHECK(munmap(pages, 2 * kPage) == 0);
      },
      config);
}
#endif

}  // namespace
}  // namespace kolovod
