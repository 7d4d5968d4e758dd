// The verbs over TCP, among ranks of which no two share memory, or as if.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "collectives/backend.h"
#include "collectives/combine.h"
#include "collectives/group.h"
#include "collectives/select.h"

namespace kolovod {

struct TcpOptions {
  Algorithm algorithm = Algorithm::kAuto;
  LinkCost cost;
  int stripes = 0;                   // connections to each rank; 0: by cost
  size_t portion_bytes = 256 << 10;  // at most, of a message: what is sent while the one before is reduced
};

// Not thread-safe, like the mesh. Every rank has the same options.
class TcpBackend : public Backend {
 public:
  // `members`: ranks of the mesh; the backend's rank r is members[r], this rank is members[index].
  TcpBackend(Mesh& mesh, std::vector<int> members, int index, const TcpOptions& options);

  Status Allreduce(const FusedRange& range) override;
  Status Broadcast(const Piece& piece, DType dtype, int root, const std::string& name) override;
  Status Allgather(const void* in, char* out, const std::vector<size_t>& bytes) override;
  Status Alltoall(const char* in, char* out, const Splits& rows, size_t row_bytes) override;
  Status Reducescatter(const FusedRange& range, const std::vector<size_t>& counts) override;

  // An allreduce whose factors are given, not derived from the number of members: a level of several.
  Status Reduce(PackedRange& range, const Combine& combine);
  MeshGroup& group() { return group_; }
  // Between two verbs; the same on every rank.
  void set_cost(const LinkCost& cost) { options_.cost = cost; }

  // Somebody else ran an algorithm over group().
  void Count(Algorithm algorithm) {
    runs_[static_cast<size_t>(algorithm)].fetch_add(1, std::memory_order_relaxed);
  }

  // How often an algorithm ran; may be read by any thread.
  uint64_t runs(Algorithm algorithm) const { return runs_[static_cast<size_t>(algorithm)].load(); }
  // The last operation's.
  const Choice& choice() const { return choice_; }

 private:
  Algorithm Choose(const SelectQuestion& question);
  Status RunPairwise(PackedRange& range, const Combine& combine, std::vector<Slice> owned, bool gathers);

  MeshGroup group_;
  TcpOptions options_;
  Scratch scratch_;
  Choice choice_{Algorithm::kAuto, "nothing has run yet"};
  std::array<std::atomic<uint64_t>, kAlgorithmCount> runs_{};
};

}  // namespace kolovod
