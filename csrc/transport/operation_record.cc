#include "transport/operation_record.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

namespace kolovod {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;
constexpr auto kAcquire = std::memory_order_acquire;
constexpr auto kRelease = std::memory_order_release;

constexpr std::string_view kGap = "...";

bool IsPending(uint32_t state) {
  return state == static_cast<uint32_t>(OperationState::kSubmitted) ||
         state == static_cast<uint32_t>(OperationState::kStarted);
}

// Writes at most kRecordNameBytes; never cuts a character of UTF-8 in two.
size_t Shorten(std::string_view name, char* out) {
  size_t head = 20;
  size_t tail = name.size() - (kRecordNameBytes - head - kGap.size());
  const auto inside = [&](size_t at) { return (static_cast<unsigned char>(name[at]) & 0xC0) == 0x80; };
  while (head > 0 && inside(head)) --head;
  while (tail < name.size() && inside(tail)) ++tail;
  std::memcpy(out, name.data(), head);
  std::memcpy(out + head, kGap.data(), kGap.size());
  std::memcpy(out + head + kGap.size(), name.data() + tail, name.size() - tail);
  return head + kGap.size() + name.size() - tail;
}

std::optional<OperationRecord> ReadOne(const OperationSlot& slot) {
  // Every word is loaded with acquire: a word of a newer operation brings the newer version along.
  const uint32_t version = slot.version.load(kAcquire);
  OperationRecord record;
  record.state = static_cast<OperationState>(slot.state.load(kAcquire));
  if (version % 2 != 0 || record.state == OperationState::kFree) return std::nullopt;
  record.number = slot.number.load(kAcquire);
  record.name_hash = slot.name_hash.load(kAcquire);
  record.bytes = slot.bytes.load(kAcquire);
  record.bucket = slot.bucket.load(kAcquire);
  record.submitted_ns = slot.submitted_ns.load(kAcquire);
  record.started_ns = slot.started_ns.load(kAcquire);
  record.ended_ns = slot.ended_ns.load(kAcquire);
  const uint64_t kind = slot.kind.load(kAcquire);
  char name[kRecordNameBytes];
  for (size_t i = 0; i < slot.name.size(); ++i) {
    const uint64_t word = slot.name[i].load(kAcquire);
    std::memcpy(name + i * sizeof(word), &word, sizeof(word));
  }
  if (slot.version.load(kRelaxed) != version) return std::nullopt;
  if ((kind & 0xFF) >= kVerbCount || (kind >> 8 & 0xFF) >= kDTypeCount ||
      (kind >> 24 & 0xF) >= kDeviceCount || (kind >> 28 & 0xF) >= kCodecCount)
    return std::nullopt;
  record.verb = static_cast<Verb>(kind & 0xFF);
  record.dtype = static_cast<DType>(kind >> 8 & 0xFF);
  record.device = static_cast<Device>(kind >> 24 & 0xF);
  record.codec = static_cast<Codec>(kind >> 28 & 0xF);
  record.tensors = static_cast<uint32_t>(kind >> 32);
  if (TraitsOf(record.verb).is_transfer)
    record.peer = static_cast<int32_t>(std::exchange(record.tensors, 1)) - 1;
  record.name.assign(name, std::min<size_t>(kind >> 16 & 0xFF, sizeof(name)));
  return record;
}

}  // namespace

const char* NameOf(OperationState state) {
  switch (state) {
    case OperationState::kFree:
      return "free";
    case OperationState::kSubmitted:
      return "submitted";
    case OperationState::kStarted:
      return "started";
    case OperationState::kDone:
      return "done";
    case OperationState::kFailed:
      return "failed";
  }
  return "unknown";
}

// The same in every process of a host, which std::hash does not promise.
uint64_t HashName(std::string_view name) {
  constexpr uint64_t kOdd = 0x9E3779B97F4A7C15ULL;
  uint64_t hash = name.size() * kOdd;
  while (!name.empty()) {
    uint64_t word = 0;
    const size_t n = std::min(name.size(), sizeof(word));
    std::memcpy(&word, name.data(), n);
    hash = (hash ^ word) * kOdd;
    hash ^= hash >> 32;
    name.remove_prefix(n);
  }
  return hash;
}

uint32_t OperationRecorder::Open(std::string_view name, Verb verb, DType dtype, Device device, Codec codec,
                                 size_t tensors, size_t bytes, int64_t now_ns) {
  ++number_;
  size_t tried = 0;
  // With operations unrecorded, the ring was full of pending ones a moment ago: do not search it each time.
  const size_t tries = unrecorded_->load(kRelaxed) > 0 ? 1 : kRecordSlots;
  while (tried < tries && IsPending(slots_[next_].state.load(kRelaxed))) {
    next_ = (next_ + 1) % kRecordSlots;
    ++tried;
  }
  if (tried == tries) {
    unrecorded_->fetch_add(1, kRelaxed);
    return kUnrecorded;
  }
  const uint64_t name_hash = HashName(name);
  char shortened[kRecordNameBytes];
  if (name.size() > kRecordNameBytes) name = std::string_view(shortened, Shorten(name, shortened));
  const auto index = static_cast<uint32_t>(next_);
  next_ = (next_ + 1) % kRecordSlots;
  OperationSlot& slot = slots_[index];
  const uint32_t version = slot.version.load(kRelaxed);
  slot.version.store(version + 1, kRelaxed);
  slot.number.store(number_, kRelease);
  slot.name_hash.store(name_hash, kRelease);
  slot.bytes.store(bytes, kRelease);
  slot.bucket.store(0, kRelease);
  slot.submitted_ns.store(now_ns, kRelease);
  slot.started_ns.store(0, kRelease);
  slot.ended_ns.store(0, kRelease);
  slot.kind.store(static_cast<uint64_t>(verb) | static_cast<uint64_t>(dtype) << 8 |
                      static_cast<uint64_t>(name.size()) << 16 | static_cast<uint64_t>(device) << 24 |
                      static_cast<uint64_t>(codec) << 28 | static_cast<uint64_t>(tensors) << 32,
                  kRelease);
  for (size_t at = 0, i = 0; at < name.size(); at += 8, ++i) {
    uint64_t word = 0;
    std::memcpy(&word, name.data() + at, std::min<size_t>(8, name.size() - at));
    slot.name[i].store(word, kRelease);
  }
  slot.state.store(static_cast<uint32_t>(OperationState::kSubmitted), kRelease);
  slot.version.store(version + 2, kRelease);
  return index;
}

void OperationRecorder::Started(uint32_t slot, uint64_t bucket, int64_t now_ns) {
  if (slot >= kRecordSlots) return;
  slots_[slot].bucket.store(bucket, kRelease);
  slots_[slot].started_ns.store(now_ns, kRelease);
  slots_[slot].state.store(static_cast<uint32_t>(OperationState::kStarted), kRelease);
}

void OperationRecorder::Ended(uint32_t slot, bool ok, int64_t now_ns) {
  if (slot == kUnrecorded) unrecorded_->fetch_sub(1, kRelaxed);
  if (slot >= kRecordSlots) return;
  // Two clocks may have been read (RecordNs).
  slots_[slot].ended_ns.store(std::max(now_ns, slots_[slot].started_ns.load(kRelaxed)), kRelease);
  slots_[slot].state.store(static_cast<uint32_t>(ok ? OperationState::kDone : OperationState::kFailed),
                           kRelease);
}

std::vector<OperationRecord> ReadRecords(const OperationSlot* slots) {
  std::vector<OperationRecord> records;
  for (size_t i = 0; i < kRecordSlots; ++i) {
    if (auto record = ReadOne(slots[i])) records.push_back(std::move(*record));
  }
  std::sort(records.begin(), records.end(),
            [](const OperationRecord& a, const OperationRecord& b) { return a.number < b.number; });
  return records;
}

int64_t OldestPendingNs(const OperationSlot* slots) {
  int64_t oldest_ns = INT64_MAX;
  for (size_t i = 0; i < kRecordSlots; ++i) {
    if (!IsPending(slots[i].state.load(kAcquire))) continue;
    const int64_t started_ns = slots[i].started_ns.load(kAcquire);
    oldest_ns = std::min(oldest_ns, started_ns != 0 ? started_ns : slots[i].submitted_ns.load(kAcquire));
  }
  return oldest_ns;
}

}  // namespace kolovod
