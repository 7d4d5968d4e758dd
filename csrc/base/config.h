// What the core may be told. The core never reads the environment: src/kolovod/config.py holds the
// user's names and texts, and a test keeps both tables equal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>

namespace kolovod {

struct Config {
  int64_t chunk_bytes = 0;                  // staged bytes per rank and pipeline step; 0: chosen by cores
  int64_t chunk_slots = 3;                  // pipeline depth, in chunks
  int64_t one_shot_bytes = 0;               // up to this size every rank reduces all; 0: chosen by size
  int64_t fusion_bytes = 64 << 20;          // a bucket takes no further tensor beyond this
  int64_t kick_bytes = 0;                   // ready bytes that start the engine thread; 0: chosen by cores
  int64_t unused_output_bytes = 256 << 20;  // memory of results that is kept to be used again
  int64_t peer_read_bytes = 1 << 20;        // from here on data is read from the peers' memory; 0: never
  int64_t spin_us = 50;                     // busy wait before yielding, when cores are free
  int64_t cores = 0;                        // usable cores on this host; 0: ask the system
  int64_t start_timeout_ms = 60'000;        // for all ranks to attach
  int64_t host_lost_ms = 1100;              // a host that acknowledges nothing for so long is lost
  int64_t cache_capacity = 8192;            // names that may be announced by one bit
  int64_t tcp_algorithm = 0;                // between hosts, as numbered in collectives/select.h; 0: by cost
  int64_t connections = 0;                  // between two ranks of two hosts; 0: by what the link holds
  int64_t late_report_ms = 60'000;          // an operation that waits longer is reported; 0: never
  int64_t late_failure_ms = 0;              // and after this the world ends; 0: never
};

// Calls visit(name, member) for every field, in declaration order.
template <class ConfigType, class Visit>
constexpr void VisitConfig(ConfigType& config, Visit visit) {
  visit(std::string_view("chunk_bytes"), config.chunk_bytes);
  visit(std::string_view("chunk_slots"), config.chunk_slots);
  visit(std::string_view("one_shot_bytes"), config.one_shot_bytes);
  visit(std::string_view("fusion_bytes"), config.fusion_bytes);
  visit(std::string_view("kick_bytes"), config.kick_bytes);
  visit(std::string_view("unused_output_bytes"), config.unused_output_bytes);
  visit(std::string_view("peer_read_bytes"), config.peer_read_bytes);
  visit(std::string_view("spin_us"), config.spin_us);
  visit(std::string_view("cores"), config.cores);
  visit(std::string_view("start_timeout_ms"), config.start_timeout_ms);
  visit(std::string_view("host_lost_ms"), config.host_lost_ms);
  visit(std::string_view("cache_capacity"), config.cache_capacity);
  visit(std::string_view("tcp_algorithm"), config.tcp_algorithm);
  visit(std::string_view("connections"), config.connections);
  visit(std::string_view("late_report_ms"), config.late_report_ms);
  visit(std::string_view("late_failure_ms"), config.late_failure_ms);
}

inline constexpr size_t kConfigFields = [] {
  size_t fields = 0;
  Config config;
  VisitConfig(config, [&](std::string_view, int64_t) { ++fields; });
  return fields;
}();
static_assert(sizeof(Config) == kConfigFields * sizeof(int64_t), "VisitConfig leaves a field out");

}  // namespace kolovod
