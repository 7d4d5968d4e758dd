// What ranks send to each other in an alltoall, as far as those of one host need to know it. PURE.
//
// A world of n ranks has n * n numbers, and a rank of it uses 2 * n: what it sends, and what it receives.
// The ranks of one host use each other's numbers, too, since they share memory (docs/design/engine.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace kolovod {

class Splits {
 public:
  // Of a world of `size` ranks, what `ranks` (ascending, not empty) send and receive; all 0.
  Splits(int size, std::vector<int> ranks);
  // All numbers of a world; by_rank[s][d]: the rows that s sends to d.
  static Splits OfAll(const std::vector<std::vector<int64_t>>& by_rank);
  // From what size(), ranks(), total() and numbers() say of another; nullopt if they do not belong together.
  static std::optional<Splits> Of(int size, std::vector<int> ranks, int64_t total,
                                  std::vector<int64_t> numbers);

  int size() const { return static_cast<int>(where_.size()); }
  const std::vector<int>& ranks() const { return ranks_; }
  // The rows that `from` sends to `to`. In the first `from` is one of ranks(), in the second `to`: who asks
  // for anything else is wrong, and the process ends with a message.
  int64_t sent(int from, int to) const { return numbers_[SentAt(from, to)]; }
  int64_t received(int from, int to) const { return numbers_[ReceivedAt(from, to)]; }
  // All rows of the world, the same on every rank; INT64_MAX if they are that many or more.
  int64_t total() const { return total_; }
  // The bytes of all rows, or SIZE_MAX.
  size_t TotalBytes(size_t row_bytes) const;
  // What of total() the ranks here send.
  int64_t SumSent() const;
  // First what ranks() send, each to all ranks; then what the ranks that are not among them send, each to
  // ranks().
  const std::vector<int64_t>& numbers() const { return numbers_; }
  static uint64_t CountOf(uint64_t size, uint64_t ranks) { return ranks * size + (size - ranks) * ranks; }

  // `from` or `to` is one of ranks().
  void Set(int from, int to, int64_t rows);
  // What concerns some of ranks(), in the same world.
  Splits For(const std::vector<int>& ranks) const;
  // What some of ranks() send to each other, as a world of their own: numbered from 0 in this order.
  Splits Within(const std::vector<int>& ranks) const;

 private:
  Splits(int size, std::vector<int> ranks, std::vector<int64_t> numbers);
  bool Holds(int rank) const { return InWorld(rank) && where_[static_cast<size_t>(rank)] >= 0; }
  bool InWorld(int rank) const { return rank >= 0 && rank < size(); }
  size_t SentAt(int from, int to) const {
    if (!Holds(from) || !InWorld(to)) NotHeld(from, to);
    return static_cast<size_t>(where_[static_cast<size_t>(from)]) * where_.size() + static_cast<size_t>(to);
  }
  size_t ReceivedAt(int from, int to) const {
    if (!Holds(to) || !InWorld(from)) NotHeld(from, to);
    if (Holds(from)) return SentAt(from, to);
    const auto stranger = static_cast<size_t>(-1 - where_[static_cast<size_t>(from)]);
    return ranks_.size() * (where_.size() + stranger) + static_cast<size_t>(where_[static_cast<size_t>(to)]);
  }
  [[noreturn]] void NotHeld(int from, int to) const;

  std::vector<int> ranks_;
  std::vector<int> where_;  // by rank: its place in ranks_, or -1 - its place among the others
  std::vector<int64_t> numbers_;
  int64_t total_ = 0;
};

}  // namespace kolovod
