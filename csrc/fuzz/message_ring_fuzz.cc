// Frames in a control ring (docs/wire.md, Frames), as another process might have written them.
#include <algorithm>
#include <vector>

#include "control/message_ring.h"
#include "fuzz/fuzz.h"

using namespace kolovod;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr uint32_t kEpoch = 1;
  constexpr size_t kCapacity = 64;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  std::vector<char> ring(kCapacity);
  std::atomic<uint64_t> head{0}, tail{0};
  MessageRingReader reader(ring.data(), kCapacity, &head, &tail, kEpoch);
  std::string seen;
  size_t at = 0;
  while (true) {
    // The writer moves what fits, up to what the input's own bytes say.
    const uint64_t begin = head.load();
    const size_t room = kCapacity - static_cast<size_t>(begin - tail.load());
    const size_t n = std::min({room, bytes.size() - at, static_cast<size_t>(1 + size % 61)});
    for (size_t i = 0; i < n; ++i) ring[static_cast<size_t>(begin + i) % kCapacity] = bytes[at + i];
    at += n;
    head.store(begin + n);
    std::optional<std::string> frame;
    bool freed = false;
    const size_t before = fuzz::AllocatedBytes();
    const Status status = reader.Next(&frame, &freed);
    fuzz::Require(fuzz::AllocatedBytes() - before <= 8 * at + 4096, "a length takes no memory by itself");
    if (!status.ok()) return 0;
    if (frame) {
      const auto length = static_cast<uint32_t>(frame->size());
      seen.append(reinterpret_cast<const char*>(&length), sizeof(length));
      seen.append(reinterpret_cast<const char*>(&kEpoch), sizeof(kEpoch));
      seen += *frame;
    } else if (!reader.HasData() && at == bytes.size()) {
      break;
    }
  }
  fuzz::Require(bytes.substr(0, seen.size()) == seen, "frames are the bytes that were written");
  return 0;
}
