// The ranks of one collective and the connections among them. Members count from 0 in the order of the list;
// the order of addition follows it.
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "transport/mesh.h"

namespace kolovod {

class MeshGroup {
 public:
  // `members`: ranks of the mesh, each once; `index`: where this rank stands among them.
  MeshGroup(Mesh& mesh, std::vector<int> members, int index)
      : mesh_(mesh), members_(std::move(members)), index_(index) {}

  int size() const { return static_cast<int>(members_.size()); }
  int index() const { return index_; }
  int rank_of(int member) const { return members_[static_cast<size_t>(member)]; }
  // The member `distance` places behind this one, around.
  int Behind(int distance) const { return (index_ + distance) % size(); }
  int Before(int distance) const { return (index_ + size() - distance) % size(); }

  Mesh& mesh() { return mesh_; }
  uint64_t Send(int to, std::span<const iovec> parts) { return mesh_.PostSend(rank_of(to), parts); }
  uint64_t Send(int to, const void* data, size_t bytes) {
    const iovec part{const_cast<void*>(data), bytes};
    return Send(to, {&part, 1});
  }
  uint64_t Receive(int from, std::span<const iovec> parts) { return mesh_.PostReceive(rank_of(from), parts); }
  uint64_t Receive(int from, void* data, size_t bytes) {
    const iovec part{data, bytes};
    return Receive(from, {&part, 1});
  }
  Status WaitSent(int to, uint64_t position) { return mesh_.WaitSent(rank_of(to), position); }
  Status WaitReceived(int from, uint64_t position) { return mesh_.WaitReceived(rank_of(from), position); }

 private:
  Mesh& mesh_;
  const std::vector<int> members_;
  const int index_;
};

}  // namespace kolovod
