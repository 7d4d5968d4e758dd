#include "base/splits.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <utility>

namespace kolovod {
namespace {

int64_t SaturatingAdd(int64_t a, int64_t b) {
  int64_t sum;
  return __builtin_add_overflow(a, b, &sum) ? INT64_MAX : sum;
}

std::vector<int> Everybody(size_t size) {
  std::vector<int> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

Splits::Splits(int size, std::vector<int> ranks)
    : Splits(size, ranks, std::vector<int64_t>(CountOf(static_cast<uint64_t>(size), ranks.size()))) {}

Splits::Splits(int size, std::vector<int> ranks, std::vector<int64_t> numbers)
    : ranks_(std::move(ranks)), where_(static_cast<size_t>(size), -1), numbers_(std::move(numbers)) {
  for (size_t place = 0; place < ranks_.size(); ++place) {
    where_[static_cast<size_t>(ranks_[place])] = static_cast<int>(place);
  }
  int others = 0;
  for (int& where : where_) {
    if (where < 0) where = -1 - others++;
  }
}

Splits Splits::OfAll(const std::vector<std::vector<int64_t>>& by_rank) {
  Splits all(static_cast<int>(by_rank.size()), Everybody(by_rank.size()));
  auto next = all.numbers_.begin();
  for (const std::vector<int64_t>& sent : by_rank) next = std::copy(sent.begin(), sent.end(), next);
  all.total_ = all.SumSent();
  return all;
}

std::optional<Splits> Splits::Of(int size, std::vector<int> ranks, int64_t total,
                                 std::vector<int64_t> numbers) {
  if (ranks.empty() || ranks.front() < 0 || ranks.back() >= size || total < 0) return std::nullopt;
  for (size_t place = 1; place < ranks.size(); ++place) {
    if (ranks[place] <= ranks[place - 1]) return std::nullopt;
  }
  if (numbers.size() != CountOf(static_cast<uint64_t>(size), ranks.size())) return std::nullopt;
  for (const int64_t rows : numbers) {
    if (rows < 0) return std::nullopt;
  }
  Splits made(size, std::move(ranks), std::move(numbers));
  made.total_ = total;
  const bool of_all = made.ranks_.size() == made.where_.size();
  if (of_all ? total != made.SumSent() : total < made.SumSent()) return std::nullopt;
  return made;
}

size_t Splits::TotalBytes(size_t row_bytes) const {
  size_t bytes;
  return __builtin_mul_overflow(static_cast<size_t>(total_), row_bytes, &bytes) ? SIZE_MAX : bytes;
}

int64_t Splits::SumSent() const {
  int64_t sum = 0;
  for (size_t i = 0; i < ranks_.size() * where_.size(); ++i) sum = SaturatingAdd(sum, numbers_[i]);
  return sum;
}

void Splits::Set(int from, int to, int64_t rows) {
  int64_t& number = numbers_[Holds(from) ? SentAt(from, to) : ReceivedAt(from, to)];
  total_ = SaturatingAdd(total_ - number, rows);
  number = rows;
}

Splits Splits::For(const std::vector<int>& ranks) const {
  Splits part(size(), ranks);
  auto next = part.numbers_.begin();
  for (const int from : ranks) {
    for (int to = 0; to < size(); ++to) *next++ = sent(from, to);
  }
  for (int from = 0; from < size(); ++from) {
    for (const int to : ranks) {
      if (!part.Holds(from)) *next++ = received(from, to);
    }
  }
  part.total_ = total_;
  return part;
}

Splits Splits::Within(const std::vector<int>& ranks) const {
  Splits inside(static_cast<int>(ranks.size()), Everybody(ranks.size()));
  auto next = inside.numbers_.begin();
  for (const int from : ranks) {
    for (const int to : ranks) *next++ = sent(from, to);
  }
  inside.total_ = inside.SumSent();
  return inside;
}

void Splits::NotHeld(int from, int to) const {
  std::fprintf(
      stderr,
      "kolovod: what rank %d of %d sends to rank %d in an alltoall is not known here, of which rank %d "
      "is the first of %zu\n",
      from, size(), to, ranks_.empty() ? -1 : ranks_.front(), ranks_.size());
  std::abort();
}

}  // namespace kolovod
