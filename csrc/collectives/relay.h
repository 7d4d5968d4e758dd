// Broadcast along a tree: every member receives from its parent and passes on to its children, block by
// block, so that all are busy at the same time.
#pragma once

#include <functional>
#include <vector>

#include "collectives/group.h"

namespace kolovod {

// One member's place in the tree. PURE.
struct Relay {
  int parent = -1;  // -1: the root
  std::vector<int> children;
};
// ceil(log2 N) steps; the root sends everything as often.
Relay BinomialRelay(int size, int root, int index);
// N-1 steps; nobody sends anything twice.
Relay ChainRelay(int size, int root, int index);

// On the root `data` is read, elsewhere written. `on_block(begin, bytes)` is called when a block is here and
// on its way to the children.
Status RunRelay(MeshGroup& group, const Relay& relay, char* data, size_t bytes, size_t block_bytes,
                const std::function<Status(size_t, size_t)>& on_block);

}  // namespace kolovod
