#include "transport/operation_record.h"

#include <atomic>
#include <memory>
#include <thread>

#include "testing/check.h"

namespace kolovod {

static doctest::String toString(OperationState value) { return NameOf(value); }

namespace {

struct Ring {
  std::unique_ptr<OperationSlot[]> slots = std::make_unique<OperationSlot[]>(kRecordSlots);
  std::atomic<uint32_t> unrecorded{0};
  OperationRecorder ring{slots.get(), &unrecorded};

  uint32_t Open(const std::string& name, int64_t now_ns) {
    return ring.Open(name, Verb::kAllgather, DType::kInt32, Device::kGpu, Codec::kInt4, 2, 24, now_ns);
  }
  std::vector<OperationRecord> Read() const { return ReadRecords(slots.get()); }
};

TEST_CASE("an operation is read as it was written") {
  Ring r;
  CHECK(r.Read().empty());
  const uint32_t slot = r.Open("layer1.weight", 100);
  OperationRecord record = r.Read().at(0);
  CHECK(record.number == 1);
  CHECK(record.name == "layer1.weight");
  CHECK(record.verb == Verb::kAllgather);
  CHECK(record.dtype == DType::kInt32);
  CHECK(record.device == Device::kGpu);
  CHECK(record.codec == Codec::kInt4);
  CHECK(record.tensors == 2);
  CHECK(record.bytes == 24);
  CHECK(record.state == OperationState::kSubmitted);
  CHECK(record.submitted_ns == 100);
  CHECK(record.bucket == 0);
  CHECK(record.started_ns == 0);
  CHECK(record.ended_ns == 0);
  CHECK(record.name_hash == HashName("layer1.weight"));
  r.ring.Started(slot, 7, 200);
  record = r.Read().at(0);
  CHECK(record.state == OperationState::kStarted);
  CHECK(record.started_ns == 200);
  CHECK(record.bucket == 7);
  CHECK(record.pending());
  r.ring.Ended(slot, true, 300);
  record = r.Read().at(0);
  CHECK(record.state == OperationState::kDone);
  CHECK(record.ended_ns == 300);
  CHECK(!record.pending());
  r.ring.Ended(r.Open("b", 400), false, 500);
  CHECK(r.Read().at(1).state == OperationState::kFailed);
}

TEST_CASE("long names are shortened and still told apart") {
  Ring r;
  const std::string common(100, 'x');
  r.Open(common + "1" + common, 1);
  r.Open(common + "2" + common, 1);
  std::string accents;
  for (int i = 0; i < 60; ++i) accents += "\xC3\xA9";
  r.Open("a" + accents, 1);
  r.Open(accents, 1);
  r.Open(std::string(kRecordNameBytes, 'y'), 1);
  const auto records = r.Read();
  CHECK(records[0].name == std::string(20, 'x') + "..." + std::string(33, 'x'));
  CHECK(records[0].name == records[1].name);
  CHECK(records[0].name_hash != records[1].name_hash);
  CHECK(records[2].name == "a" + accents.substr(0, 18) + "..." + accents.substr(0, 32));
  CHECK(records[3].name == accents.substr(0, 20) + "..." + accents.substr(0, 32));
  CHECK(records[4].name == std::string(kRecordNameBytes, 'y'));
}

TEST_CASE("finished operations are overwritten and pending ones stay") {
  Ring r;
  const uint32_t pending = r.Open("pending", 5);
  for (size_t i = 0; i < 3 * kRecordSlots; ++i) r.ring.Ended(r.Open("short", 10), true, 20);
  const auto records = r.Read();
  CHECK(records.size() == kRecordSlots);
  CHECK(records.front().name == "pending");
  CHECK(records.front().number == 1);
  CHECK(records.back().number == 3 * kRecordSlots + 1);
  CHECK(records[1].number == 2 * kRecordSlots + 3);
  CHECK(OldestPendingNs(r.slots.get()) == 5);
  r.ring.Started(pending, 1, 50);
  CHECK(OldestPendingNs(r.slots.get()) == 50);
  r.ring.Ended(pending, true, 60);
  CHECK(OldestPendingNs(r.slots.get()) == INT64_MAX);
}

TEST_CASE("more pending operations than slots are counted") {
  Ring r;
  std::vector<uint32_t> open;
  for (size_t i = 0; i < kRecordSlots + 3; ++i) open.push_back(r.Open("p", 1));
  CHECK(r.unrecorded.load() == 3);
  CHECK(open.back() == kUnrecorded);
  CHECK(open[kRecordSlots - 1] < kRecordSlots);
  for (uint32_t slot : open) r.ring.Ended(slot, true, 2);
  CHECK(r.unrecorded.load() == 0);
  CHECK(r.Open("q", 3) < kRecordSlots);
  r.ring.Ended(kNoRecord, true, 2);
  CHECK(r.unrecorded.load() == 0);
  CHECK(r.Read().back().number == kRecordSlots + 4);
}

// Under ThreadSanitizer: readers of a ring that is written all the time see whole records.
TEST_CASE("a record is never torn") {
  Ring r;
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (uint64_t i = 1; !stop.load(); ++i) {
      const std::string name = std::string(i % 40, static_cast<char>('a' + i % 26));
      r.ring.Ended(r.ring.Open(name, Verb::kAllreduce, DType::kFloat32, Device::kHost, Codec::kNone, i % 40,
                               i, static_cast<int64_t>(i)),
                   true, static_cast<int64_t>(i));
    }
  });
  for (int round = 0; round < 100; ++round) {
    for (const OperationRecord& record : r.Read()) {
      CHECK(record.bytes == record.number);
      CHECK(record.tensors == record.number % 40);
      CHECK(record.name == std::string(record.number % 40, static_cast<char>('a' + record.number % 26)));
      CHECK(record.name_hash == HashName(record.name));
      CHECK(record.submitted_ns == static_cast<int64_t>(record.number));
    }
  }
  stop.store(true);
  writer.join();
}

}  // namespace
}  // namespace kolovod
