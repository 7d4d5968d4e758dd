#include "collectives/eager.h"

#include "testing/slots_world.h"
#include "testing/verbs.h"

namespace kolovod {
namespace {

using testing::FirstDifference;

constexpr int kSize = 3;

struct World : testing::SlotsWorld<EagerSlots> {
  World() : SlotsWorld(kSize) {}
  void Publish(int rank, uint64_t tag, char value) {
    char* const slot = ranks[static_cast<size_t>(rank)].Claim(tag);
    CHECK(slot != nullptr);
    slot[0] = value;
    ranks[static_cast<size_t>(rank)].Publish(tag);
  }
  void Execute(int rank, uint64_t tag, uint64_t position) {
    ranks[static_cast<size_t>(rank)].Executed(position);
    ranks[static_cast<size_t>(rank)].Release(tag, position);
  }
};

TEST_CASE("what one rank has not published nobody finds") {
  World world;
  world.Publish(0, 5, 'a');
  world.Publish(2, 5, 'c');
  for (int r = 0; r < kSize; ++r) {
    CHECK(!world.ranks[static_cast<size_t>(r)].Find(5, -1).has_value());
    CHECK(world.ranks[static_cast<size_t>(r)].Find(5, 2).has_value());  // a broadcast wants its root's only
    CHECK(!world.ranks[static_cast<size_t>(r)].Find(5, 1).has_value());
  }
  world.Publish(1, 5, 'b');
  for (const EagerSlots& rank : world.ranks) CHECK(rank.Find(5, -1).has_value());
}

// A rank that is ahead must not write over what a slow one still reads.
TEST_CASE("a slot is used again when all have executed what was in it") {
  World world;
  const uint64_t first = 7, second = first + kEagerSlots;  // share a slot
  for (int r = 0; r < kSize; ++r) world.Publish(r, first, 'x');
  CHECK(world.ranks[0].Claim(second) == nullptr);  // it is pending here
  world.Execute(0, first, 1);
  world.Execute(1, first, 1);
  CHECK(world.ranks[0].Claim(second) == nullptr);  // rank 2 may be reading
  const auto given = world.ranks[2].Find(first, -1);
  REQUIRE(given.has_value());
  EagerBackend slow(2, *given);
  testing::Bytes got(kSize);
  CHECK_OK(slow.Allgather(nullptr, got.data(), {1, 1, 1}));
  CHECK(FirstDifference(got, testing::Bytes(kSize, 'x')) == "");
  world.Execute(2, first, 1);
  CHECK(world.ranks[0].Claim(second) != nullptr);
  CHECK(world.ranks[0].Claim(second + 1) != nullptr);  // others were free all the time
}

// On every rank, against the reduction of all data in one place: bit by bit.
TEST_CASE("the verbs that reduce over staged data") {
  const testing::Reference reference = testing::Combined;
  for (int d = 0; d < kDTypeCount; ++d) {
    const auto dtype = static_cast<DType>(d);
    for (const Op op : {Op::kAverage, Op::kSum, Op::kMin, Op::kMax, Op::kProduct}) {
      if (dtype == DType::kBool && op == Op::kAverage) continue;
      const double prescale = dtype == DType::kBool ? 1.0 : 0.5;
      const testing::Factors factors{prescale, dtype == DType::kBool ? 1.0 : 3.0,
                                     op == Op::kAverage ? kSize : 1};
      std::vector<std::vector<char>> slots(kSize, std::vector<char>(kEagerBytes));
      std::vector<testing::Bytes> wanted;
      const std::vector<size_t> counts = {7, 0, 33};
      std::vector<char*> ends;
      for (auto& slot : slots) ends.push_back(slot.data());
      for (unsigned t = 0; t < counts.size(); ++t) {
        std::vector<testing::Bytes> all;
        for (int r = 0; r < kSize; ++r) {
          all.push_back(testing::ValuesOf(dtype, counts[t], r, t));
          char*& end = ends[static_cast<size_t>(r)];
          end = EagerBackend::Copy(all.back().data(), counts[t], dtype, prescale, end);
        }
        wanted.push_back(reference(dtype, op, factors, std::move(all)));
      }
      for (int r = 0; r < kSize; ++r) {
        EagerBackend backend(r, {slots[0].data(), slots[1].data(), slots[2].data()});
        const std::string name = "t";
        for (size_t t = 0; t < counts.size(); ++t) {
          testing::Bytes out(wanted[t].size());
          CHECK_OK(backend.Allreduce(
              {dtype, op, prescale, factors.postscale, {Piece{nullptr, out.data(), counts[t]}}, &name}));
          CHECK(FirstDifference(out, wanted[t]) == "");
        }
        // The first tensor again, of which each rank keeps a part.
        EagerBackend scattering(r, {slots[0].data(), slots[1].data(), slots[2].data()});
        const std::vector<size_t> parts = {3, 0, 4};
        const size_t item = SizeOf(dtype);
        const size_t begin = r == 2 ? 3 * item : 0;
        testing::Bytes part(parts[static_cast<size_t>(r)] * item);
        CHECK_OK(scattering.Reducescatter(
            {dtype, op, prescale, factors.postscale, {Piece{nullptr, part.data(), 7}}, &name}, parts));
        CHECK(std::equal(part.begin(), part.end(), wanted[0].begin() + static_cast<long>(begin)));
      }
    }
  }
}

TEST_CASE("a broadcast of staged data") {
  const std::vector<size_t> counts = {7, 0, 33};
  const std::string name = "t";
  for (int root = 0; root < kSize; ++root) {
    std::vector<std::vector<char>> slots(kSize, std::vector<char>(kEagerBytes, '?'));  // of others: anything
    char* end = slots[static_cast<size_t>(root)].data();
    std::vector<testing::Bytes> wanted;
    for (unsigned t = 0; t < counts.size(); ++t) {
      wanted.push_back(testing::ValuesOf(DType::kInt32, counts[t], root, t));
      end = EagerBackend::Copy(wanted.back().data(), counts[t], DType::kInt32, 1.0, end);
    }
    for (int r = 0; r < kSize; ++r) {
      EagerBackend backend(r, {slots[0].data(), slots[1].data(), slots[2].data()});
      for (size_t t = 0; t < counts.size(); ++t) {
        testing::Bytes out(wanted[t].size());
        CHECK_OK(backend.Broadcast(Piece{nullptr, out.data(), counts[t]}, DType::kInt32, root, name));
        CHECK(FirstDifference(out, wanted[t]) == "");
      }
    }
    // In place the root's are there already: they are not written, since others may look at them.
    EagerBackend backend(root, {slots[0].data(), slots[1].data(), slots[2].data()});
    testing::Bytes own(wanted[0].size(), 'o');
    CHECK_OK(backend.Broadcast(Piece{own.data(), own.data(), counts[0]}, DType::kInt32, root, name));
    CHECK(FirstDifference(own, testing::Bytes(own.size(), 'o')) == "");
    testing::Bytes last(wanted[2].size());
    CHECK_OK(backend.Broadcast(Piece{nullptr, last.data(), counts[2]}, DType::kInt32, root, name));
    CHECK(FirstDifference(last, wanted[2]) == "");
  }
}

TEST_CASE("an alltoall of staged data") {
  const std::vector<std::vector<int64_t>> by_rank = {{2, 0, 3}, {1, 4, 0}, {0, 0, 0}};
  constexpr size_t kRowBytes = 5;
  std::vector<std::vector<char>> slots(kSize, std::vector<char>(kEagerBytes, '?'));
  std::vector<testing::Bytes> wanted(kSize);
  for (size_t from = 0; from < kSize; ++from) {
    testing::Bytes in;
    for (size_t to = 0; to < kSize; ++to) {
      for (size_t i = 0; i < static_cast<size_t>(by_rank[from][to]) * kRowBytes; ++i) {
        const auto value = static_cast<char>(1 + 60 * from + 20 * to + i);  // once in all of them
        in.push_back(value);
        wanted[to].push_back(value);
      }
    }
    (void)EagerBackend::Copy(in.data(), in.size(), DType::kUInt8, 1.0, slots[from].data());
  }
  for (int r = 0; r < kSize; ++r) {
    EagerBackend backend(r, {slots[0].data(), slots[1].data(), slots[2].data()});
    testing::Bytes out(wanted[static_cast<size_t>(r)].size());
    CHECK_OK(backend.Alltoall(nullptr, out.data(), Splits::OfAll(by_rank), kRowBytes));
    CHECK(FirstDifference(out, wanted[static_cast<size_t>(r)]) == "");
  }
}

}  // namespace
}  // namespace kolovod
