#include "collectives/relay.h"

#include <algorithm>

namespace kolovod {

Relay BinomialRelay(int size, int root, int index) {
  const int place = (index - root + size) % size;  // the root is 0
  Relay relay;
  int bit = 1;
  while (bit < size && (place & bit) == 0) bit *= 2;
  if (place != 0) relay.parent = (place - bit + root) % size;
  // The child with most below it first.
  for (bit /= 2; bit > 0; bit /= 2) {
    if (place + bit < size) relay.children.push_back((place + bit + root) % size);
  }
  return relay;
}

Relay ChainRelay(int size, int root, int index) {
  const int place = (index - root + size) % size;
  Relay relay;
  if (place > 0) relay.parent = (index - 1 + size) % size;
  if (place + 1 < size) relay.children.push_back((index + 1) % size);
  return relay;
}

Status RunRelay(MeshGroup& group, const Relay& relay, char* data, size_t bytes, size_t block_bytes,
                const std::function<Status(size_t, size_t)>& on_block) {
  std::vector<uint64_t> positions;
  const auto length = [&](size_t begin) { return std::min(block_bytes, bytes - begin); };
  if (relay.parent >= 0) {
    for (size_t begin = 0; begin < bytes; begin += block_bytes) {
      positions.push_back(group.Receive(relay.parent, data + begin, length(begin)));
    }
  }
  for (size_t begin = 0; begin < bytes; begin += block_bytes) {
    if (relay.parent >= 0) {
      KV_RETURN_IF_ERROR(group.WaitReceived(relay.parent, positions[begin / block_bytes]));
    }
    for (const int child : relay.children) group.Send(child, data + begin, length(begin));
    if (on_block) KV_RETURN_IF_ERROR(on_block(begin, length(begin)));
  }
  return group.mesh().WaitAll();
}

}  // namespace kolovod
