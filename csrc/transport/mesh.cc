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
    : self_(self), options_(std::move(options)), links_(peers.size()) {
  for (MeshPeer& peer : peers) descriptions_.push_back(std::move(peer.description));
}

Status Mesh::Create(int self, std::vector<MeshPeer> peers, MeshOptions options, std::unique_ptr<Mesh>* out) {
  std::vector<MadeConnection> given;
  for (size_t p = 0; p < peers.size(); ++p)
    given.push_back({static_cast<int>(p), peers[p].fd, peers[p].keys, 0});
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

uint64_t Mesh::Count(int peer, std::atomic<uint64_t> StreamCounters::* counter) const {
  uint64_t count = 0;
  for (int stripe = 0; stripe < kMostStripes; ++stripe) {
    Link* const found = Find(peer, stripe);
    if (found != nullptr) count += (found->stream.counters().*counter).load(std::memory_order_relaxed);
  }
  return count;
}

Mesh::Link& Mesh::Make(int peer, int stripe) {
  const auto p = static_cast<size_t>(peer);
  made_.push_back(std::make_unique<Link>(descriptions_[p], options_.epoch, peer, options_.host_lost_ms));
  Link& made = *made_.back();
  made.stream.BeginOperation(operation_);
  if (stripe == 0) {  // which alone has messages in envelopes
    made.stream.set_receiver(receiver_);
    made.stream.Listen(listening_);
  }
  if (links_[p].load(std::memory_order_relaxed) == nullptr) {
    met_.push_back(std::make_unique<Links>());
    links_[p].store(met_.back().get(), std::memory_order_release);
  }
  LinksTo(peer).stripes[static_cast<size_t>(stripe)].store(&made, std::memory_order_release);
  ++unconnected_;
  return made;
}

Status Mesh::Connect(const MadeConnection& made) {
  Link* const found = Find(made.peer, made.stripe);
  Link& to = found == nullptr ? Make(made.peer, made.stripe) : *found;
  if (to.stream.connected()) {
    close(made.fd);
    return Status();
  }
  --unconnected_;
  connections_.fetch_add(1, std::memory_order_relaxed);
  return to.stream.Connect(made.fd, made.keys.get());
}

Status Mesh::TakeNews() {
  for (const MadeConnection& made : options_.broker->Take()) {
    if (made.peer < 0 || made.peer >= size() || made.peer == self_ || made.stripe < 0 ||
        made.stripe >= kMostStripes) {
      close(made.fd);
      continue;
    }
    KV_RETURN_IF_ERROR(Connect(made));
  }
  return Status();
}

void Mesh::SetReceiver(Receiver* receiver) {
  receiver_ = receiver;
  for (const std::unique_ptr<Links>& links : met_) {
    if (Link* const first = links->stripes[0].load()) first->stream.set_receiver(receiver);
  }
}

void Mesh::Listen(bool listening) {
  if (std::exchange(listening_, listening) == listening) return;
  for (const std::unique_ptr<Links>& links : met_) {
    if (Link* const first = links->stripes[0].load()) first->stream.Listen(listening);
  }
}

void Mesh::BeginOperation(uint32_t number) {
  operation_ = number;
  for (const std::unique_ptr<Link>& link : made_) link->stream.BeginOperation(number);
  BeginTurns();
}

void Mesh::set_stripes(int stripes) {
  stripes_ = std::clamp(stripes, 1, kMostStripes);
  BeginTurns();
}

void Mesh::BeginTurns() {
  for (const std::unique_ptr<Links>& links : met_) links->sends.next = links->receives.next = 0;
}

void Mesh::Farewell(int64_t limit_ms) {
  const int64_t end_ns = NowNs() + limit_ms * 1'000'000;
  while (std::any_of(made_.begin(), made_.end(), [](const auto& link) { return link->stream.Lingers(); }) &&
         NowNs() < end_ns) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void Mesh::Close() {
  for (const std::unique_ptr<Link>& link : made_) link->stream.Close();
  if (options_.broker != nullptr) options_.broker->Forget();
  if (broken_.ok()) broken_ = Status(Code::kShutDown, "the connections of this process are closed");
}

void Mesh::Activate(Link& link) {
  if (std::exchange(link.active, true)) return;
  active_.push_back(&link);
}

Mesh::Link* Mesh::Usable(int peer, int stripe) {
  if (broken()) return nullptr;
  Link* const found = peer >= 0 && peer < size() ? Find(peer, stripe) : nullptr;
  return found != nullptr ? found : MakeUsable(peer, stripe);
}

Mesh::Link* Mesh::MakeUsable(int peer, int stripe) {
  if (options_.broker == nullptr || peer < 0 || peer >= size() || peer == self_) {
    (void)Break(Status(Code::kInternal, "rank " + std::to_string(self_) + " has no connection to rank " +
                                            std::to_string(peer)));
    return nullptr;
  }
  if (!Break(TakeNews()).ok()) return nullptr;
  if (Link* const found = Find(peer, stripe)) return found;  // the peer was first
  Link& made = Make(peer, stripe);
  options_.broker->Want(peer, stripe);
  return &made;
}

Mesh::Link* Mesh::TakeTurn(int peer, bool sending) {
  Turns& turns = TurnsOf(peer, sending);
  return Usable(peer, std::exchange(turns.next, (turns.next + 1) % stripes_));
}

void Mesh::Advance(Turns& turns, uint64_t (Stream::*reached)() const) {
  while (!turns.pending.empty() &&
         (turns.pending.front().first->*reached)() >= turns.pending.front().second) {
    turns.pending.pop_front();
    ++turns.through;
  }
}

bool Mesh::Sent(int peer, uint64_t position) const {
  if ((position & kByTurns) == 0) return position == 0 || stream(peer).sent() >= position;
  Turns& turns = LinksTo(peer).sends;
  Advance(turns, &Stream::sent);
  return turns.through >= (position & ~kByTurns);
}

bool Mesh::Received(int peer, uint64_t position) const {
  if ((position & kByTurns) == 0) return position == 0 || stream(peer).received() >= position;
  Turns& turns = LinksTo(peer).receives;
  Advance(turns, &Stream::received);
  return turns.through >= (position & ~kByTurns);
}

uint64_t Mesh::PostSend(int peer, std::span<const iovec> parts) {
  return Post(peer, /*sending=*/true, parts);
}

uint64_t Mesh::PostReceive(int peer, std::span<const iovec> parts) {
  return Post(peer, /*sending=*/false, parts);
}

uint64_t Mesh::Post(int peer, bool sending, std::span<const iovec> parts) {
  Link* const first = Usable(peer);
  if (first == nullptr) return 0;
  if (stripes_ == 1) return PostOver(*first, sending, parts);
  Turns& turns = TurnsOf(peer, sending);
  Advance(turns, sending ? &Stream::sent : &Stream::received);
  std::vector<iovec> piece;
  size_t room = kPieceBytes;
  const auto post = [&] {
    Link* const link = TakeTurn(peer, sending);
    if (link == nullptr) return false;
    turns.pending.emplace_back(&link->stream, PostOver(*link, sending, piece));
    ++turns.posted;
    piece.clear();
    room = kPieceBytes;
    return true;
  };
  for (iovec rest : parts) {
    while (rest.iov_len > 0) {
      const size_t bytes = std::min(rest.iov_len, room);
      piece.push_back({rest.iov_base, bytes});
      rest.iov_base = static_cast<char*>(rest.iov_base) + bytes;
      rest.iov_len -= bytes;
      room -= bytes;
      if (room == 0 && !post()) return 0;
    }
  }
  if (!piece.empty() && !post()) return 0;
  return kByTurns | turns.posted;
}

uint64_t Mesh::PostOver(Link& link, bool sending, std::span<const iovec> parts) {
  if (!sending) {
    const uint64_t position = link.stream.Receive(parts);
    if (link.stream.receiving()) Activate(link);
    return position;
  }
  const bool idle = !link.stream.sending();
  const uint64_t position = link.stream.Send(parts);
  if (!link.stream.sending()) return position;
  Activate(link);
  // Behind others it would wait for room anyway.
  bool moved = false;
  if (idle) (void)Break(link.stream.Push(&moved));
  return position;
}

uint64_t Mesh::PostEnveloped(int peer, const Envelope& envelope, std::span<const iovec> parts) {
  Link* const to = Usable(peer);
  if (to == nullptr) return 0;
  const uint64_t position = to->stream.SendEnveloped(envelope, parts);
  Activate(*to);
  bool moved = false;
  (void)Break(to->stream.Push(&moved));
  return position;
}

Status Mesh::Break(Status status) {
  if (status.ok() || broken()) return status;
  broken_ = std::move(status);
  for (const std::unique_ptr<Link>& link : made_) {
    link->stream.Drop();
    link->active = false;
  }
  active_.clear();
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
Status Mesh::Pull(Stream& stream, bool* moved) {
  const uint64_t before = stream.received();
  KV_RETURN_IF_ERROR(stream.Pull(moved));
  const auto came = static_cast<size_t>(stream.received() - before);
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
    Stream& stream = active_[i]->stream;
    if (stream.sending()) KV_RETURN_IF_ERROR(stream.Push(moved));
    if (stream.receiving()) KV_RETURN_IF_ERROR(Pull(stream, moved));
    if (stream.sending() || stream.receiving()) {
      ++i;
    } else {
      active_[i]->active = false;
      active_.erase(active_.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
  if (!listening_) return Status();
  for (size_t i = 0; i < made_.size(); ++i) {
    Stream& stream = made_[i]->stream;
    if (stream.listening() && !stream.receiving()) KV_RETURN_IF_ERROR(stream.Pull(moved));
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
  for (Link* const link : active_) KV_RETURN_IF_ERROR(link->stream.CheckHost(now_ns, kHostCheckPeriodMs));
  if (!listening_) return Status();
  for (const std::unique_ptr<Link>& link : made_) {  // messages that this end is done with
    Stream& stream = link->stream;
    const bool looked = stream.sending() || stream.receiving();
    if (!looked) KV_RETURN_IF_ERROR(stream.CheckHost(now_ns, kHostCheckPeriodMs));
  }
  return Status();
}

void Mesh::SpreadOverCores(int64_t now_ns) {
  if (now_ns < next_spread_ns_) return;
  std::vector<int> cores(links_.size(), -1);
  bool any = false;
  for (const Link* const link : active_) {
    int& core = cores[static_cast<size_t>(link->stream.number())];
    core = link->stream.PeerCore();
    any |= core >= 0;
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
  for (const Link* const link : active_) {
    const Stream& of = link->stream;
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
