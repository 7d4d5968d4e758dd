// Faults that a loopback world injects into its ranks.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace kolovod {

struct LoopbackFaults {
  explicit LoopbackFaults(int size) : killed(size), delay_us(size), drop(size) {}
  std::vector<std::atomic<bool>> killed;
  std::vector<std::atomic<int>> delay_us;  // before every announcement and every data flag
  std::vector<std::atomic<int>> drop;      // announcements still to be lost
  // Not 0: threads are held up here and there, at random from this seed, so that they meet in orders that a
  // quiet machine hardly ever shows.
  std::atomic<uint32_t> shuffle{0};

  // Holds the thread up where it matters who comes first.
  void Pause(int rank) {
    const int us = delay_us[static_cast<size_t>(rank)].load(std::memory_order_relaxed);
    if (us > 0) std::this_thread::sleep_for(std::chrono::microseconds(us));
    if (shuffle.load(std::memory_order_relaxed) != 0) Shuffle();
  }
  // Holds the thread up at random, without the delay.
  void Shuffle() const {
    const uint32_t seed = shuffle.load(std::memory_order_relaxed);
    if (seed == 0) return;
    thread_local uint64_t state = 0;
    if (state == 0)
      state = seed * 0x9e3779b97f4a7c15ULL ^ std::hash<std::thread::id>()(std::this_thread::get_id());
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    const auto drawn = static_cast<uint32_t>(state >> 40);
    if (drawn % 64 == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(drawn / 64 % 200));
    } else if (drawn % 4 == 0) {
      std::this_thread::yield();
    }
  }
};

}  // namespace kolovod
