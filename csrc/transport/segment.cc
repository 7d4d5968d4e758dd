#include "transport/segment.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <climits>
#include <cstring>
#include <thread>

#include "base/text.h"
#include "base/version.h"

namespace kolovod {

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free,
              "words shared between processes must be lock-free");
static_assert(sizeof(std::atomic<uint32_t>) == 4, "a futex is 32 bits");

SegmentLayout::SegmentLayout(int ranks, int world_ranks, const Config& config)
    : size(ranks), world_size(world_ranks) {
  constexpr size_t kPage = 4096;
  cache_capacity = static_cast<size_t>(std::max<int64_t>(config.cache_capacity, 1));
  // A cached name, and a slot, has at most one entry that some rank has not read. Of negotiated messages
  // there are as many as the ring holds, since a rank takes one out as it reads its entry, and none has less
  // than 16 bytes.
  log_slots = std::bit_ceil(cache_capacity * 2 + kEagerSlots + kBroadcastRingBytes / 16);
  bucket_slots = 2 * log_slots;
  // Every rank's slice of a chunk is at least one cache line.
  const int64_t least = std::max<int64_t>(4096, static_cast<int64_t>(kLine) * ranks);
  const int64_t wanted = config.chunk_bytes > 0 ? config.chunk_bytes : kMostChunkBytes;
  chunk_bytes = RoundUp(static_cast<size_t>(std::max(wanted, least)), kPage);
  chunk_slots = static_cast<size_t>(std::max<int64_t>(config.chunk_slots, 3));
  // A load that follows a store to the same offset in another page waits for it.
  slot_bytes = chunk_bytes + 17 * kLine;
  size_t at = RoundUp(sizeof(SegmentHeader), kPage);
  const auto take = [&at](size_t bytes) {
    const size_t here = at;
    at += RoundUp(bytes, kPage);
    return here;
  };
  ranks_at = take(static_cast<size_t>(size) * Segment::kRankStride);
  left_at = take(static_cast<size_t>(world_size) * sizeof(uint32_t));
  log_at = take(log_slots * sizeof(uint64_t));
  bucket_ends_at = take(bucket_slots * sizeof(uint64_t));
  counters_at = take(cache_capacity * sizeof(uint32_t));
  broadcast_at = take(kBroadcastRingBytes);
  records_at = take(static_cast<size_t>(size) * kRecordSlots * sizeof(OperationSlot));
  eager_at = take(static_cast<size_t>(size) * kEagerSlots * sizeof(EagerSlot));
  instant_at = take(static_cast<size_t>(size) * kInstantSlots * sizeof(InstantSlot));
  inbox_at = take(static_cast<size_t>(size) * kMailSlots * sizeof(InboxSlot));
  notices_at = take(static_cast<size_t>(world_size) * sizeof(WaitNotice));
  staging_at = take(static_cast<size_t>(size) * chunk_slots * slot_bytes);
  total_bytes = at;
}

Status Segment::Map(int fd, const SegmentLayout& layout, std::shared_ptr<Segment>* out) {
  const int flags = fd >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
  void* base = mmap(nullptr, layout.total_bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (base == MAP_FAILED) {
    return Status(Code::kInternal, "cannot map a segment of " + std::to_string(layout.total_bytes) +
                                       " bytes: " + std::strerror(errno));
  }
  // A forked child (a data loader, say) must not hold or touch the world's memory.
  madvise(base, layout.total_bytes, MADV_DONTFORK);
  madvise(base, layout.total_bytes, MADV_HUGEPAGE);
  out->reset(new Segment(static_cast<char*>(base), layout));
  return Status();
}

Segment::~Segment() {
  if (base_ != nullptr) munmap(base_, layout_.total_bytes);
}

void Segment::WriteHeader(uint32_t epoch, const Config& config) {
  SegmentHeader& h = header();
  h.protocol = kProtocolVersion;
  std::strncpy(h.release, ReleaseVersion(), kReleaseBytes - 1);
  h.size = static_cast<uint32_t>(layout_.size);
  h.epoch = epoch;
  h.segment_bytes = layout_.total_bytes;
  size_t field = 0;
  VisitConfig(config, [&](std::string_view, int64_t value) { h.config[field++] = value; });
  h.magic.store(kSegmentMagic, std::memory_order_seq_cst);
}

Status Segment::CheckHeader(uint32_t epoch, Config* config) {
  SegmentHeader& h = header();
  if (h.magic.load() != kSegmentMagic || h.protocol != kProtocolVersion) {
    const bool is_ours = h.magic.load() == kSegmentMagic;
    const std::string release(h.release, strnlen(h.release, kReleaseBytes));
    return Status(Code::kInvalidArgument,
                  "has " + DescribeVersion(kProtocolVersion, ReleaseVersion()) + ", but " +
                      (is_ours ? "the leader of its host, which has made the shared segment, has " +
                                     DescribeVersion(h.protocol, release)
                               : "the shared segment was made by something else") +
                      ": install the same version of Kolovod for all ranks");
  }
  if (h.size != static_cast<uint32_t>(layout_.size) || h.epoch != epoch ||
      h.segment_bytes != layout_.total_bytes) {
    return Status(Code::kInvalidArgument,
                  "finds a shared segment of another world: it has size " + std::to_string(h.size) +
                      ", epoch " + std::to_string(h.epoch) + ", " + std::to_string(h.segment_bytes) +
                      " bytes; this rank expects size " + std::to_string(layout_.size) + ", epoch " +
                      std::to_string(epoch) + ", " + std::to_string(layout_.total_bytes) +
                      " bytes (do all ranks have the same KOLOVOD_* settings?)");
  }
  size_t field = 0;
  VisitConfig(*config, [&](std::string_view, int64_t& value) { value = h.config[field++]; });
  return Status();
}

void Segment::Revoke(Code code, const std::string& text) {
  if (world_ != nullptr) world_->Revoke(code, text);
  SegmentHeader& h = header();
  uint32_t expected = 0;
  if (h.revoked.compare_exchange_strong(expected, 1, std::memory_order_seq_cst)) {
    h.revoke_code = static_cast<uint32_t>(code);
    const std::string shown = ValidUtf8(text, sizeof(h.revoke_text) - 1);
    std::memcpy(h.revoke_text, shown.c_str(), shown.size() + 1);
    h.revoked.store(2, std::memory_order_seq_cst);
  }
  for (int r = 0; r < layout_.size; ++r) {
    WakeDriver(r);
    WakeIdle(r);
  }
}

Status Segment::RevokedStatus() {
  SegmentHeader& h = header();
  if (world_ != nullptr && world_->revoked()) return world_->RevokedStatus();
  for (int i = 0; i < 1000 && h.revoked.load(std::memory_order_acquire) == 1; ++i) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));  // the text is being written
  }
  if (h.revoked.load(std::memory_order_acquire) != 2) {
    return Status(Code::kRankLost, "the world was aborted by a rank that died while saying why");
  }
  return Status(static_cast<Code>(h.revoke_code), h.revoke_text);
}

int Segment::Lacking(int r, const DataWait& wait) {
  if (wait.peer < 0) return -1;
  const auto lacks = [&](int peer) {
    const RankBlock& block = rank(peer);
    return (wait.done ? block.done : block.packed).load(std::memory_order_seq_cst) < wait.value;
  };
  if (wait.peer != DataWait::kAll) return lacks(wait.peer) ? wait.peer : -1;
  for (int step = 1; step < layout_.size; ++step) {
    if (const int peer = (r + step) % layout_.size; lacks(peer)) return peer;
  }
  return -1;
}

void Segment::WakeDriver(int r) {
  RankBlock& block = rank(r);
  block.driver_bell.fetch_add(1, std::memory_order_seq_cst);
  FutexWakeAll(&block.driver_bell);
}

void Segment::WakeIdle(int r) {
  RankBlock& block = rank(r);
  block.idle_bell.fetch_add(1, std::memory_order_seq_cst);
  if (block.idle_sleeping.load(std::memory_order_seq_cst) != 0) FutexWakeAll(&block.idle_bell);
}

// Once, however many find its wait over; and who looks for ranks that could run sees that it can. One that
// waits for data looks at nothing else.
void Segment::RingSleeper(int r, bool for_data) {
  RankBlock& block = rank(r);
  if (block.driver_sleeping.load(std::memory_order_seq_cst) == 0) return;
  const DataWait wait = DataWait::Of(block.waits_for.load(std::memory_order_acquire));
  if ((wait.peer >= 0) != for_data || !Reached(r, wait)) return;
  if (block.driver_sleeping.exchange(0, std::memory_order_seq_cst) != 0) WakeDriver(r);
}

// Of ranks that wait for data only those whose wait is over: every other one would look, and sleep again.
void Segment::RingSleepers(bool for_data) {
  for (int r = 0; r < layout_.size; ++r) RingSleeper(r, for_data);
}

void FutexWait(std::atomic<uint32_t>* word, uint32_t expected, int64_t timeout_ns) {
  timespec timeout{timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT, expected, &timeout, nullptr, 0);
}

void FutexWakeAll(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace kolovod
