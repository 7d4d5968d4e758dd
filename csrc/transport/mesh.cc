#include "transport/mesh.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>
#include <utility>

#include "transport/cores.h"

namespace kolovod {

Mesh::Mesh(int self, std::vector<MeshPeer> peers, MeshOptions options)
    : self_(self), options_(std::move(options)), streams_(peers.size()), is_active_(peers.size(), 0) {
  for (MeshPeer& peer : peers) descriptions_.push_back(std::move(peer.description));
}

Status Mesh::Create(int self, std::vector<MeshPeer> peers, MeshOptions options, std::unique_ptr<Mesh>* out) {
  std::vector<MadeConnection> given;
  for (size_t p = 0; p < peers.size(); ++p)
    given.push_back({static_cast<int>(p), peers[p].fd, peers[p].keys});
  std::unique_ptr<Mesh> mesh(new Mesh(self, std::move(peers), std::move(options)));
  Status status;
  for (const MadeConnection& made : given) {
    if (made.peer == self || made.fd < 0) continue;
    Status connected = mesh->Connect(made);
    if (status.ok()) status = std::move(connected);
  }
  KV_RETURN_IF_ERROR(status);
  *out = std::move(mesh);
  return Status();
}

Stream& Mesh::Make(int peer) {
  const auto p = static_cast<size_t>(peer);
  made_.push_back(std::make_unique<Stream>(descriptions_[p], options_.epoch, peer, options_.host_lost_ms));
  made_.back()->BeginOperation(operation_);
  made_.back()->set_receiver(receiver_);
  made_.back()->Listen(listening_);
  streams_[p].store(made_.back().get(), std::memory_order_release);
  ++unconnected_;
  return *made_.back();
}

Status Mesh::Connect(const MadeConnection& made) {
  Stream* const found = Find(made.peer);
  Stream& to = found == nullptr ? Make(made.peer) : *found;
  if (to.connected()) {
    close(made.fd);
    return Status();
  }
  --unconnected_;
  connections_.fetch_add(1, std::memory_order_relaxed);
  return to.Connect(made.fd, made.keys.get());
}

Status Mesh::TakeNews() {
  for (const MadeConnection& made : options_.broker->Take()) {
    if (made.peer < 0 || made.peer >= size() || made.peer == self_) {
      close(made.fd);
      continue;
    }
    KV_RETURN_IF_ERROR(Connect(made));
  }
  return Status();
}

void Mesh::SetReceiver(Receiver* receiver) {
  receiver_ = receiver;
  for (const std::unique_ptr<Stream>& stream : made_) stream->set_receiver(receiver);
}

void Mesh::Listen(bool listening) {
  if (std::exchange(listening_, listening) == listening) return;
  for (const std::unique_ptr<Stream>& stream : made_) stream->Listen(listening);
}

void Mesh::BeginOperation(uint32_t number) {
  operation_ = number;
  for (const std::unique_ptr<Stream>& stream : made_) stream->BeginOperation(number);
}

void Mesh::Farewell(int64_t limit_ms) {
  const int64_t end_ns = NowNs() + limit_ms * 1'000'000;
  while (std::any_of(made_.begin(), made_.end(), [](const auto& stream) { return stream->Lingers(); }) &&
         NowNs() < end_ns) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void Mesh::Close() {
  for (const std::unique_ptr<Stream>& stream : made_) stream->Close();
  if (options_.broker != nullptr) options_.broker->Forget();
  if (broken_.ok()) broken_ = Status(Code::kShutDown, "the connections of this process are closed");
}

void Mesh::Activate(int peer) {
  const auto p = static_cast<size_t>(peer);
  if (is_active_[p] != 0) return;
  is_active_[p] = 1;
  active_.push_back(peer);
}

bool Mesh::Usable(int peer) {
  if (broken()) return false;
  return (peer >= 0 && peer < size() && Find(peer) != nullptr) || MakeUsable(peer);
}

bool Mesh::MakeUsable(int peer) {
  if (options_.broker == nullptr || peer < 0 || peer >= size() || peer == self_) {
    (void)Break(Status(Code::kInternal, "rank " + std::to_string(self_) + " has no connection to rank " +
                                            std::to_string(peer)));
    return false;
  }
  if (!Break(TakeNews()).ok()) return false;
  if (Find(peer) != nullptr) return true;  // the peer was first
  Make(peer);
  options_.broker->Want(peer);
  return true;
}

uint64_t Mesh::PostSend(int peer, std::span<const iovec> parts) {
  if (!Usable(peer)) return 0;
  Stream& to = stream(peer);
  const bool idle = !to.sending();
  const uint64_t position = to.Send(parts);
  if (!to.sending()) return position;
  Activate(peer);
  // Behind others it would wait for room anyway.
  bool moved = false;
  if (idle) (void)Break(to.Push(&moved));
  return position;
}

uint64_t Mesh::PostEnveloped(int peer, const Envelope& envelope, std::span<const iovec> parts) {
  if (!Usable(peer)) return 0;
  const uint64_t position = stream(peer).SendEnveloped(envelope, parts);
  Activate(peer);
  bool moved = false;
  (void)Break(stream(peer).Push(&moved));
  return position;
}

uint64_t Mesh::PostReceive(int peer, std::span<const iovec> parts) {
  if (!Usable(peer)) return 0;
  const uint64_t position = stream(peer).Receive(parts);
  if (stream(peer).receiving()) Activate(peer);
  return position;
}

Status Mesh::Break(Status status) {
  if (status.ok() || broken()) return status;
  broken_ = std::move(status);
  for (const std::unique_ptr<Stream>& stream : made_) stream->Drop();
  active_.clear();
  std::fill(is_active_.begin(), is_active_.end(), 0);
  return broken_;
}

void Mesh::BeginSpan() {
  in_span_ = true;
  span_bytes_ = 0;
  span_first_ns_ = span_last_ns_ = 0;
}

Mesh::Span Mesh::EndSpan() {
  in_span_ = false;
  return Span{span_bytes_, span_last_ns_ - span_first_ns_};
}

// What came first had waited for somebody to look: it begins the time, and does not count.
Status Mesh::Pull(Stream& peer, bool* moved) {
  const uint64_t before = peer.received();
  KV_RETURN_IF_ERROR(peer.Pull(moved));
  const auto came = static_cast<size_t>(peer.received() - before);
  if (!in_span_ || came == 0) return Status();
  span_last_ns_ = NowNs();
  if (span_first_ns_ == 0) {
    span_first_ns_ = span_last_ns_;
  } else {
    span_bytes_ += came;
  }
  return Status();
}

Status Mesh::Progress(bool* moved) {
  if ((unconnected_ > 0 || (listening_ && options_.broker != nullptr)) && options_.broker->HasNews()) {
    KV_RETURN_IF_ERROR(TakeNews());
  }
  for (size_t i = 0; i < active_.size();) {
    Stream& peer = stream(active_[i]);
    if (peer.sending()) KV_RETURN_IF_ERROR(peer.Push(moved));
    if (peer.receiving()) KV_RETURN_IF_ERROR(Pull(peer, moved));
    if (peer.sending() || peer.receiving()) {
      ++i;
    } else {
      is_active_[static_cast<size_t>(active_[i])] = 0;
      active_.erase(active_.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
  if (!listening_) return Status();
  for (size_t i = 0; i < made_.size(); ++i) {
    if (made_[i]->listening() && !made_[i]->receiving()) KV_RETURN_IF_ERROR(made_[i]->Pull(moved));
  }
  return Status();
}

Status Mesh::Check(int64_t now_ns) {
  if (now_ns < next_check_ns_) return Status();
  next_check_ns_ = now_ns + kCheckPeriodNs;
  if (options_.check) KV_RETURN_IF_ERROR(options_.check());
  const std::optional<std::string> failure = unconnected_ > 0 ? options_.broker->failure() : std::nullopt;
  return failure ? Status(Code::kRankLost, *failure) : Status();
}

Status Mesh::CheckHosts(int64_t now_ns) {
  if (now_ns < next_host_check_ns_) return Status();
  next_host_check_ns_ = now_ns + kHostCheckPeriodMs * 1'000'000;
  for (const int peer : active_) KV_RETURN_IF_ERROR(stream(peer).CheckHost(now_ns, kHostCheckPeriodMs));
  if (!listening_) return Status();
  for (const std::unique_ptr<Stream>& stream : made_) {  // messages that this end is done with
    const bool looked = stream->sending() || stream->receiving();
    if (!looked) KV_RETURN_IF_ERROR(stream->CheckHost(now_ns, kHostCheckPeriodMs));
  }
  return Status();
}

void Mesh::SpreadOverCores(int64_t now_ns) {
  if (now_ns < next_spread_ns_) return;
  std::vector<int> cores(streams_.size(), -1);
  bool any = false;
  for (const int peer : active_) {
    cores[static_cast<size_t>(peer)] = stream(peer).PeerCore();
    any |= cores[static_cast<size_t>(peer)] >= 0;
  }
  // Where all cores are busy with others, leaving leads to the end of another queue, and back: ever more
  // rarely.
  const bool left = any && LeaveSharedCore(self_, cores);
  spread_period_ns_ = left ? std::min(2 * spread_period_ns_, kMaxSpreadPeriodNs) : kSpreadPeriodNs;
  next_spread_ns_ = now_ns + spread_period_ns_;
}

Status Mesh::Rest(int64_t idle_since_ns, int64_t now_ns, int64_t spin_ns) {
  const int64_t idle_ns = now_ns - idle_since_ns;
  if (idle_ns < spin_ns) {
    CpuRelax();
    return Status();
  }
  if (spin_ns > 0) spin_gauge_.InVain();
  SpreadOverCores(now_ns);
  if (idle_ns < spin_ns + options_.budget.yield_ns) {
    spin_gauge_.Yield();
    return Status();
  }
  KV_RETURN_IF_ERROR(CheckHosts(now_ns));
  std::vector<pollfd> polled;
  polled.reserve(active_.size() + 1);
  if (unconnected_ > 0) polled.push_back({options_.broker->news_fd(), POLLIN, 0});
  for (const int peer : active_) {
    const Stream& of = stream(peer);
    const int events = (of.sending() ? POLLOUT : 0) | (of.receiving() ? POLLIN : 0);
    polled.push_back({of.fd(), static_cast<short>(events), 0});
  }
  // Errors and hang-ups wake it too; the next transfer says what they are.
  (void)poll(polled.data(), polled.size(), kPollMs);
  return Status();
}

template <class Done>
Status Mesh::Until(Done done) {
  if (broken()) return broken_;
  int64_t idle_since_ns = 0;
  int64_t spin_ns = 0;
  while (!done()) {
    bool moved = false;
    KV_RETURN_IF_ERROR(Break(Progress(&moved)));
    if (done()) break;
    const int64_t now_ns = NowNs();
    KV_RETURN_IF_ERROR(Break(Check(now_ns)));
    if (moved || idle_since_ns == 0) {
      idle_since_ns = now_ns;
      spin_ns = spin_gauge_.Allowed(options_.budget.spin_ns);
      if (moved) continue;
    }
    KV_RETURN_IF_ERROR(Break(Rest(idle_since_ns, now_ns, spin_ns)));
  }
  return Status();
}

Status Mesh::WaitSent(int peer, uint64_t position) {
  return Until([&] { return Sent(peer, position); });
}

Status Mesh::WaitReceived(int peer, uint64_t position) {
  return Until([&] { return Received(peer, position); });
}

Status Mesh::WaitAll() {
  return Until([&] { return active_.empty(); });
}

Status Mesh::Transfer(std::span<const SendPart> sends, std::span<const ReceivePart> receives) {
  for (const ReceivePart& part : receives) {
    const iovec place{part.data, part.bytes};
    PostReceive(part.peer, {&place, 1});
  }
  for (const SendPart& part : sends) {
    const iovec place{const_cast<void*>(part.data), part.bytes};
    PostSend(part.peer, {&place, 1});
  }
  return WaitAll();
}

bool Mesh::Background() {
  bool moved = false;
  if (!Break(Progress(&moved)).ok() || (active_.empty() && !listening_)) return false;
  return Break(CheckHosts(NowNs())).ok();
}

}  // namespace kolovod
