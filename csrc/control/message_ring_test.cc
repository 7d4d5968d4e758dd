#include "control/message_ring.h"

#include <thread>

#include "testing/check.h"

namespace kolovod {
namespace {

struct Shared {
  std::vector<char> data = std::vector<char>(1000);
  std::atomic<uint64_t> head{0};
  std::atomic<uint64_t> tails[2] = {0, 0};
  std::atomic<uint32_t> told{0};  // how often a reader has freed room
};

std::string Frame(int i) { return std::string(static_cast<size_t>(i * 37 % 3000), static_cast<char>(i)); }

// Frames up to three times the ring's size, read whole and in order by two readers at once.
TEST_CASE("every reader sees every frame in order") {
  Shared shared;
  constexpr int kFrames = 500;
  std::thread writer([&] {
    MessageRingWriter w(shared.data.data(), shared.data.size(), &shared.head,
                        {&shared.tails[0], &shared.tails[1]}, 9);
    int complete = 0;
    bool moved = false;
    for (int i = 0; i < kFrames; ++i) w.Push(Frame(i));
    // Moves something when it is told that there is room, and only then.
    while (complete < kFrames) {
      const uint32_t seen = shared.told.load();
      complete += w.Flush(&moved);
      if (!w.empty() && !w.HasRoom()) shared.told.wait(seen);
    }
    CHECK(moved);
    CHECK(w.empty());
  });
  const auto read = [&](int which) {
    MessageRingReader r(shared.data.data(), shared.data.size(), &shared.head, &shared.tails[which], 9);
    for (int i = 0; i < kFrames;) {
      std::optional<std::string> frame;
      bool freed = false;
      CHECK_OK(r.Next(&frame, &freed));
      if (freed) {
        shared.told.fetch_add(1);
        shared.told.notify_all();
      }
      if (!frame) {
        std::this_thread::yield();
        continue;
      }
      CHECK(*frame == Frame(i));
      ++i;
    }
    CHECK(!r.HasData());
  };
  std::thread first(read, 0);
  std::thread second(read, 1);
  writer.join();
  first.join();
  second.join();
}

TEST_CASE("bytes of another epoch or absurd lengths are refused") {
  for (const uint32_t epoch : {1u, 2u}) {
    Shared shared;
    MessageRingWriter w(shared.data.data(), shared.data.size(), &shared.head, {&shared.tails[0]}, epoch);
    w.Push("hello");
    bool moved = false;
    CHECK(w.Flush(&moved) == 1);
    MessageRingReader r(shared.data.data(), shared.data.size(), &shared.head, &shared.tails[0], 2);
    std::optional<std::string> frame;
    bool freed = false;
    const Status status = r.Next(&frame, &freed);
    CHECK(status.ok() == (epoch == 2));
    CHECK(frame.has_value() == (epoch == 2));
  }
  Shared shared;
  std::fill(shared.data.begin(), shared.data.end(), '\xff');
  shared.head = 100;
  MessageRingReader r(shared.data.data(), shared.data.size(), &shared.head, &shared.tails[0], 0xffffffffu);
  std::optional<std::string> frame;
  bool freed = false;
  CHECK(!r.Next(&frame, &freed).ok());
  shared.head = 5000;  // more than the ring holds
  CHECK(!r.Next(&frame, &freed).ok());
}

}  // namespace
}  // namespace kolovod
