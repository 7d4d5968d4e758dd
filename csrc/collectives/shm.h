// The verbs over a host's shared segment (each byte is read once and written once).
//
// Allreduce of one chunk with three ranks, slices A B C, owner of A is rank 0 and so on:
//
//   1 pack      rank 0 stages its B C, rank 1 its A C, rank 2 its A B      -> packed
//   2 reduce    rank 0: A = own A + staged A of 1 + staged A of 2, in rank
//               order; into its own tensor and over both staged A          -> done
//   3 copy out  rank 0 takes B and C from its own staging
//
// A staged line goes from the packer to the owner and back, each time with its data and exclusively, so it is
// never written while another cache has a copy: half the transfers of publishing results in the owner's
// staging (docs/design/allreduce.md). Step i of a range packs chunk i, reduces chunk i-1 and copies chunk i-2
// out, a few hundred bytes of each in turn: one waits for main memory, another for the peer's cache, and
// interleaved they wait at the same time; it leaves one point of synchronisation per step instead of three. A
// slot is packed again once every rank is done with it.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <utility>

#include "base/config.h"
#include "collectives/backend.h"
#include "collectives/combine.h"
#include "collectives/reduce.h"
#include "collectives/streaming_trial.h"
#include "control/fusion.h"
#include "transport/peer_memory.h"
#include "transport/segment.h"
#include "transport/waiter.h"

namespace kolovod {

class ShmBackend : public Backend {
 public:
  // `rank`: among those of the segment. `before_post`: called before data flags are set, in a loopback world;
  // else null.
  // `streaming`: the first guess whether stores into staging should bypass the cache.
  // `peers`: null, or how to read the others' memory. `kernels`: as tests have them.
  ShmBackend(Segment& segment, int rank, const Config& config, Waiter& waiter,
             std::function<void()> before_post, bool streaming, std::unique_ptr<PeerMemory> peers,
             const Kernels& kernels = ActiveKernels());

  Status Allreduce(const FusedRange& range) override;
  Status Broadcast(const Piece& piece, DType dtype, int root, const std::string& name) override;
  Status Allgather(const void* in, char* out, const std::vector<size_t>& bytes) override;
  Status Alltoall(const char* in, char* out, const Splits& rows, size_t row_bytes) override;
  Status Reducescatter(const FusedRange& range, const std::vector<size_t>& counts) override;

  static size_t ChunkBytes(const Segment& segment, const Config& config, bool crowded);
  // Bytes up to which every rank reduces everything itself (one exchange instead of two), for dtypes that
  // are converted to be added (DTypeTraits) and for others.
  static size_t OneShotLimit(const Config& config, int size, size_t chunk_bytes, bool converts);

 private:
  struct Walk;
  struct Tasks;

  Status OneShot(const PackedRange& view);
  // In slices, chunk by chunk; `gathers`: every rank gets all results, not only its own slice.
  Status Sliced(const PackedRange& view, const ChunkPlan& plan, bool gathers);
  Status Step(const PackedRange& view, const ChunkPlan& plan, bool gathers, const StreamingTrial& trial,
              uint64_t first, size_t step);
  void Run(const FusedRange& range, Tasks& tasks);
  bool Reads(size_t bytes) const {
    return peers_ != nullptr && peers_->usable() && bytes >= peer_read_bytes_;
  }
  // Lets the others read this rank's input, until FinishReading.
  void Offer(const void* in, size_t bytes);
  // Whether all can be read; the same on all ranks. If not, there is nothing to finish.
  Status AwaitOffers(bool* readable);
  Status ReadPeer(int peer, size_t offset, char* to, size_t bytes);
  Status ReadFailed(int peer, int error);
  // After all that was read, before it is used: an error if a rank has died. Its number may be that of
  // another process by now, which was read in its place.
  Status CheckRead();
  // Returns once nobody reads this rank's memory any more.
  Status FinishReading();
  Status StagedBroadcast(const Piece& piece, size_t total, int root);
  Status StagedAllgather(const void* in, char* own_out, char* out, const std::vector<size_t>& bytes,
                         const std::vector<size_t>& at);
  Status StagedAlltoall(const char* in, char* out, const Splits& rows, size_t row_bytes,
                        const std::vector<size_t>& in_at, const std::vector<size_t>& out_at);
  void StageCopy(char* slot, const char* src, size_t bytes, bool streaming);
  void TakeCopy(char* out, const char* from, size_t bytes, size_t total);

  using Flag = std::atomic<uint64_t> RankBlock::*;
  // Makes the values visible and wakes whoever sleeps for them.
  void Post(std::initializer_list<std::pair<Flag, uint64_t>> flags);
  Status WaitFor(int peer, Flag flag, uint64_t value);
  Status WaitForAll(Flag flag, uint64_t value);
  Status WaitForSlot(uint64_t chunk);

  // Below this, stores that bypass the cache cost more than the line transfers they save.
  static constexpr size_t kStreamingFloor = 32 << 10;
  static constexpr size_t kStreamedMove = 8 << 10;
  static constexpr size_t kStreamedResult = 16 << 20;

  Segment& segment_;
  const int rank_;
  const int size_;
  const bool crowded_;  // fewer cores than ranks: every point of synchronisation is a switch of processes
  const size_t chunk_bytes_;
  const size_t one_shot_bytes_;
  const size_t one_shot_converted_bytes_;  // of dtypes that are converted to be added
  const uint64_t slots_;
  Waiter& waiter_;
  const size_t peer_read_bytes_;  // from which on parts are read from the peers' memory
  const std::unique_ptr<PeerMemory> peers_;
  const std::function<void()> before_post_;
  const Kernels& kernels_;
  StreamingChooser allreduce_;
  StreamingChooser reducescatter_;
  StreamingChooser moves_;  // of what a rank stages and others copy
  uint64_t chunk_ = 0;      // number of the last chunk begun, the same on every rank
};

}  // namespace kolovod
