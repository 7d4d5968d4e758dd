#include "control/fusion.h"

#include <algorithm>

namespace kolovod {

size_t EntriesForBucket(const std::vector<size_t>& entry_bytes, size_t limit_bytes) {
  size_t taken = 0;
  size_t bytes = 0;
  while (taken < entry_bytes.size()) {
    if (taken > 0 && bytes + entry_bytes[taken] > limit_bytes) break;
    bytes += entry_bytes[taken++];
  }
  return taken;
}

std::vector<std::vector<size_t>> GroupByKey(const std::vector<FusionKey>& keys) {
  std::vector<std::vector<size_t>> groups;
  std::vector<FusionKey> group_keys;  // a handful: a linear search is the fastest
  for (size_t i = 0; i < keys.size(); ++i) {
    const auto found = std::find(group_keys.begin(), group_keys.end(), keys[i]);
    if (found == group_keys.end()) {
      group_keys.push_back(keys[i]);
      groups.push_back({i});
    } else {
      groups[static_cast<size_t>(found - group_keys.begin())].push_back(i);
    }
  }
  return groups;
}

ChunkPlan PlanChunks(size_t total, size_t max_chunk_bytes, int size) {
  const size_t unit = kLine * static_cast<size_t>(size);
  const size_t count = std::max<size_t>(1, (total + max_chunk_bytes - 1) / max_chunk_bytes);
  size_t chunk = RoundUp((total + count - 1) / count, unit);
  if (chunk > max_chunk_bytes) chunk = std::max(unit, max_chunk_bytes / unit * unit);
  return ChunkPlan{std::max<size_t>(1, (total + chunk - 1) / std::max<size_t>(chunk, 1)), chunk};
}

Slice SliceOf(size_t length, int size, int rank) {
  const size_t slice = RoundUp((length + static_cast<size_t>(size) - 1) / static_cast<size_t>(size), kLine);
  const auto r = static_cast<size_t>(rank);
  return Slice{std::min(r * slice, length), std::min((r + 1) * slice, length)};
}

size_t PartOf(size_t rows, int size, int rank) {
  const auto n = static_cast<size_t>(size);
  return rows / n + (static_cast<size_t>(rank) < rows % n ? 1 : 0);
}

}  // namespace kolovod
