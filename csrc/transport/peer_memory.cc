#include "transport/peer_memory.h"

#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>

#include "transport/waiter.h"

namespace kolovod {
namespace {

constexpr uint32_t kReads = 1;
constexpr uint32_t kDoesNot = 2;

int ReadFrom(pid_t pid, uint64_t address, void* to, size_t bytes) {
  char* at = static_cast<char*>(to);
  while (bytes > 0) {
    const iovec local{at, bytes};
    const iovec remote{reinterpret_cast<void*>(address), bytes};
    const ssize_t n = process_vm_readv(pid, &local, 1, &remote, 1, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n < 0 ? errno : EFAULT;
    at += n;
    address += static_cast<uint64_t>(n);
    bytes -= static_cast<size_t>(n);
  }
  return 0;
}

}  // namespace

// In another pid namespace the number would be somebody else's: hence a token that no other process has
// there.
void PeerMemory::Announce() {
  RankBlock& self = segment_.rank(rank_);
  token_ = (static_cast<uint64_t>(NowNs()) << 8) ^ (static_cast<uint64_t>(getpid()) << 40) ^
           static_cast<uint64_t>(rank_);
  self.pid = getpid();
  self.token = token_;
  self.token_address = reinterpret_cast<uint64_t>(&token_);
}

void PeerMemory::Probe() {
  bool reads = segment_.layout().size > 1;
  for (int r = 0; r < segment_.layout().size && reads; ++r) {
    const RankBlock& peer = segment_.rank(r);
    uint64_t found = 0;
    reads = Read(r, peer.token_address, &found, sizeof(found)) == 0 && found == peer.token;
  }
  segment_.rank(rank_).reads_peers.store(reads ? kReads : kDoesNot, std::memory_order_seq_cst);
}

bool PeerMemory::AllHaveProbed() {
  bool all_read = true;
  for (int r = 0; r < segment_.layout().size; ++r) {
    const uint32_t said = segment_.rank(r).reads_peers.load(std::memory_order_seq_cst);
    if (said == 0) return false;
    all_read = all_read && said == kReads;
  }
  usable_ = all_read;
  return true;
}

void PeerMemory::Offer(const void* data, size_t bytes) {
  uint64_t address = reinterpret_cast<uint64_t>(data);
  char ends[2];
  const bool readable = bytes == 0 || (Read(rank_, address, ends, 1) == 0 &&
                                       Read(rank_, address + bytes - 1, ends + 1, 1) == 0);
  segment_.rank(rank_).offered.store(readable ? (address == 0 ? 1 : address) : 0, std::memory_order_release);
}

int PeerMemory::Read(int peer, uint64_t address, void* to, size_t bytes) const {
  return ReadFrom(segment_.rank(peer).pid, address, to, bytes);
}

}  // namespace kolovod
