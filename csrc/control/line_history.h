// From which lines of the script a rank has called operations without a name.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/memory_facts.h"

namespace kolovod {

// "loss.py:12" of "loss.py:12, from train.py:40".
inline std::string_view InnermostLine(std::string_view lines) {
  return lines.substr(0, lines.find(", from "));
}

// Not negative: 63 bits.
inline int64_t HashLines(std::string_view lines) {
  return static_cast<int64_t>(HashMemory(lines.data(), lines.size(), 0) >> 1);
}

// PURE. What other ranks need to tell two calls of one helper from one call of it that depends on the rank.
class LineHistory {
 public:
  void Add(std::string_view lines) {
    const std::string_view innermost = InnermostLine(lines);
    if (innermost.size() == lines.size()) return;
    if (hashes_.size() >= kMostPlaces) hashes_.clear();
    std::vector<int64_t>& hashes = hashes_[HashLines(innermost)];
    const int64_t hash = HashLines(lines);
    if (std::find(hashes.begin(), hashes.end(), hash) != hashes.end()) return;
    if (hashes.size() >= kMostCallers) hashes.erase(hashes.begin());
    hashes.push_back(hash);
  }

  // Hashes of the lines with the same innermost one.
  std::vector<int64_t> Of(std::string_view lines) const {
    const auto found = hashes_.find(HashLines(InnermostLine(lines)));
    return found == hashes_.end() ? std::vector<int64_t>() : found->second;
  }

 private:
  static constexpr size_t kMostPlaces = 4096;
  static constexpr size_t kMostCallers = 64;

  std::unordered_map<int64_t, std::vector<int64_t>> hashes_;  // by the innermost line
};

}  // namespace kolovod
