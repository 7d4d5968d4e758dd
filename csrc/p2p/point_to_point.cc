#include "p2p/point_to_point.h"

#include <algorithm>
#include <cstring>

#include "transport/waiter.h"

namespace kolovod {

PointToPoint::PointToPoint(Segment& segment, OperationsMutex& mutex, PointToPointOptions options)
    : segment_(segment),
      mutex_(mutex),
      options_(std::move(options)),
      rank_(options_.topology.rank),
      inbox_(segment, options_.topology.local_rank),
      peers_(segment, options_.topology.local_rank),
      outbox_(segment, inbox_, options_.topology, options_.mesh),
      unreceived_(static_cast<size_t>(options_.topology.size())),
      uncredited_(unreceived_.size()),
      exchanged_(unreceived_.size()) {
  if (options_.mesh != nullptr) options_.mesh->SetReceiver(this);
}

// --- what this rank submits ---

bool PointToPoint::Elsewhere(const Operation& op) const {
  const int peer = op.request.root;
  return peer == kAnySource ? options_.mesh != nullptr : !here(peer);
}

void PointToPoint::Submit(const OperationPtr& op) {
  op->transfer = ++next_id_;
  pending_[op->transfer] = op;
  if (Elsewhere(*op)) elsewhere_.fetch_add(1, std::memory_order_seq_cst);
  fresh_.push_back(op);
  has_fresh_.store(true, std::memory_order_seq_cst);
}

void PointToPoint::Erase(const Operation& op) {
  if (pending_.erase(op.transfer) != 0 && Elsewhere(op)) elsewhere_.fetch_sub(1, std::memory_order_seq_cst);
}

Status PointToPoint::Start(const OperationPtr& op) {
  if (op->request.verb == Verb::kRecv) return StartReceive(op);
  StartSend(op);
  return Status();
}

void PointToPoint::StartSend(const OperationPtr& op) {
  const int to = op->request.root;
  if (const Departures::Departure* const leaver = departures_.FindLeaver(to); leaver != nullptr) {
    return Finish(op, Lost(*op, *leaver));
  }
  const bool is_here = here(to);
  uint64_t& unreceived = unreceived_[static_cast<size_t>(to)];
  Envelope envelope;
  envelope.dtype = op->request.tensors.front().dtype;
  envelope.tag = op->request.splits.front();
  envelope.bytes = op->bytes;
  envelope.id = op->transfer;
  sends_[op->transfer] = op;
  const void* const data = op->inputs.front();
  Count(With(to).sent);
  const size_t most = is_here ? kEagerHereBytes : kEagerElsewhereBytes;
  if (op->bytes <= most && unreceived + op->bytes + kMessageBytes <= kMostUnreceivedBytes) {
    unreceived += op->bytes + kMessageBytes;
    op->meeting = Meeting::kMet;
    outbox_.Post(to, envelope, data, op->bytes, op->transfer);
    return;
  }
  op->meeting = Meeting::kAsks;
  envelope.kind = Envelope::Kind::kOffer;
  if (is_here && Readable(data, op->bytes)) envelope.value = reinterpret_cast<uint64_t>(data);
  outbox_.Post(to, envelope);
}

Status PointToPoint::StartReceive(const OperationPtr& op) {
  const int source = op->request.root;
  if (options_.mesh != nullptr) {
    for (int r = 0; r < options_.topology.size(); ++r) {
      if (!here(r) && (source == kAnySource || source == r)) options_.mesh->Reach(r);
    }
  }
  receives_[op->transfer] = op;
  std::optional<Arrival> arrival = matching_.Post(op->transfer, source, op->request.splits.front());
  op->meeting = arrival ? Meeting::kMet : Meeting::kAsks;
  if (!arrival) return Status();
  receives_.erase(op->transfer);
  if (!arrival->complete) {
    arriving_.at(arrival->envelope.source).taker = op;
    return Status();
  }
  return Accept(op, *arrival);
}

// --- what others send ---

Status PointToPoint::Malformed(const Envelope& envelope) const {
  return Status(Code::kInternal, Name(envelope.source) +
                                     " sent a message that does not fit the protocol: kind " +
                                     std::to_string(static_cast<int>(envelope.kind)) + ", " +
                                     std::to_string(envelope.bytes) + " bytes");
}

Status PointToPoint::Fits(const Operation& op, const Envelope& envelope) const {
  const DType dtype = op.request.tensors.front().dtype;
  if (envelope.bytes == op.bytes && envelope.dtype == dtype) return Status();
  const auto text = [](uint64_t bytes, DType of) {
    return std::to_string(bytes / SizeOf(of)) + " elements of " + NameOf(of);
  };
  return Status(Code::kMismatch, Name(envelope.source) + " sent " + text(envelope.bytes, envelope.dtype) +
                                     " with tag " + std::to_string(envelope.tag) + ", but " + Name(rank_) +
                                     " receives " + text(op.bytes, dtype) +
                                     ": give both ends tensors of one dtype and size");
}

Status PointToPoint::Accept(const OperationPtr& op, const Arrival& arrival) {
  const Envelope& envelope = arrival.envelope;
  op->rows = {{envelope.source}};
  if (envelope.kind == Envelope::Kind::kOffer) return AcceptOffer(op, envelope);
  Status fits = Fits(*op, envelope);
  if (fits.ok() && op->bytes > 0) std::memcpy(op->outputs.front(), arrival.data.get(), op->bytes);
  Credit(envelope.source, envelope.bytes);
  Finish(op, std::move(fits));
  return Status();
}

Status PointToPoint::AcceptOffer(const OperationPtr& op, const Envelope& offer) {
  Count(With(offer.source).answered);
  Envelope answer;
  answer.id = offer.id;
  Status fits = Fits(*op, offer);
  if (!fits.ok()) {
    answer.kind = Envelope::Kind::kRefused;
    outbox_.PostText(offer.source, answer, fits.message().substr(0, kMostTextBytes));
    Finish(op, std::move(fits));
    return Status();
  }
  if (offer.value != 0 && options_.reads_peers && here(offer.source)) {
    const int peer = options_.topology.local_of[static_cast<size_t>(offer.source)];
    const int failed = peers_.Read(peer, offer.value, op->outputs.front(), op->bytes);
    // What was read may be another process's, to which the number of a dead one has gone.
    if (options_.died && options_.died()) return segment_.RevokedStatus();
    if (failed == 0) {
      answer.kind = Envelope::Kind::kTaken;
      outbox_.Post(offer.source, answer);
      Finish(op, Status());
      return Status();
    }
  }
  receiving_[op->transfer] = {op};
  answer.kind = Envelope::Kind::kGrant;
  answer.value = op->transfer;
  outbox_.Post(offer.source, answer);
  return Status();
}

void PointToPoint::Credit(int source, uint64_t bytes) {
  uint64_t& uncredited = uncredited_[static_cast<size_t>(source)];
  uncredited += bytes + kMessageBytes;
  if (uncredited < kMostUnreceivedBytes / 4) return;
  Envelope envelope;
  envelope.kind = Envelope::Kind::kCredit;
  envelope.value = std::exchange(uncredited, 0);
  outbox_.Post(source, envelope);
}

Status PointToPoint::Take(const Envelope& envelope, const char* data, size_t bytes) {
  switch (envelope.kind) {
    case Envelope::Kind::kEager:
    case Envelope::Kind::kOffer:
      return TakeMessage(envelope, data, bytes);
    case Envelope::Kind::kData:
      return TakeData(envelope, data, bytes);
    case Envelope::Kind::kGrant: {
      const auto found = sends_.find(envelope.id);
      if (found == sends_.end() || found->second->request.root != envelope.source) return Malformed(envelope);
      const OperationPtr& op = found->second;
      op->meeting = Meeting::kMet;
      Count(With(envelope.source).answers);
      Envelope content;
      content.kind = Envelope::Kind::kData;
      content.bytes = op->bytes;
      content.id = envelope.value;
      outbox_.Post(envelope.source, content, op->inputs.front(), op->bytes, op->transfer);
      return Status();
    }
    case Envelope::Kind::kTaken:
    case Envelope::Kind::kRefused: {
      const auto found = sends_.find(envelope.id);
      if (found == sends_.end() || found->second->request.root != envelope.source) return Malformed(envelope);
      const bool taken = envelope.kind == Envelope::Kind::kTaken;
      found->second->meeting = Meeting::kMet;
      Count(With(envelope.source).answers);
      FinishSend(envelope.id, taken ? Status() : Status(Code::kMismatch, std::string(data, bytes)));
      return Status();
    }
    case Envelope::Kind::kCredit: {
      uint64_t& unreceived = unreceived_[static_cast<size_t>(envelope.source)];
      if (envelope.value > unreceived) return Malformed(envelope);
      unreceived -= envelope.value;
      return Status();
    }
  }
  return Malformed(envelope);
}

Status PointToPoint::TakeMessage(const Envelope& envelope, const char* data, size_t bytes) {
  const bool eager = envelope.kind == Envelope::Kind::kEager;
  if (bytes != (eager ? envelope.bytes : 0)) return Malformed(envelope);
  Arrival arrival{envelope, nullptr};
  const std::optional<uint64_t> taker = matching_.Arrive(envelope.source, envelope.tag);
  if (!taker) {
    if (bytes > 0) {
      arrival.data = std::make_unique_for_overwrite<char[]>(bytes);
      std::memcpy(arrival.data.get(), data, bytes);
    }
    matching_.Keep(std::move(arrival));
    Count(With(envelope.source).seen);
    return Status();
  }
  const OperationPtr op = receives_.extract(*taker).mapped();
  op->meeting = Meeting::kMet;
  Count(With(envelope.source).seen);
  if (!eager) return Accept(op, arrival);
  op->rows = {{envelope.source}};
  Status fits = Fits(*op, envelope);
  if (fits.ok() && bytes > 0) std::memcpy(op->outputs.front(), data, bytes);
  Credit(envelope.source, bytes);
  Finish(op, std::move(fits));
  return Status();
}

OperationPtr PointToPoint::FindReceive(uint64_t id, int source) const {
  const auto found = receiving_.find(id);
  const bool fits = found != receiving_.end() && found->second.op->rows[0][0] == source;
  return fits ? found->second.op : nullptr;
}

Status PointToPoint::TakeData(const Envelope& envelope, const char* data, size_t bytes) {
  const OperationPtr op = FindReceive(envelope.id, envelope.source);
  if (op == nullptr) return Malformed(envelope);
  Receiving& receiving = receiving_[envelope.id];
  if (envelope.value != receiving.received || bytes > op->bytes - receiving.received)
    return Malformed(envelope);
  if (bytes > 0) std::memcpy(static_cast<char*>(op->outputs.front()) + envelope.value, data, bytes);
  receiving.received += bytes;
  if (receiving.received < op->bytes) return Status();
  receiving_.erase(envelope.id);
  Finish(op, Status());
  return Status();
}

// From a stream: what has a place goes there at once.
Status PointToPoint::Begin(int peer, const Envelope& envelope, uint64_t bytes, std::vector<iovec>* places) {
  Envelope checked = envelope;
  checked.source = peer;
  const auto kind = static_cast<int>(envelope.kind);
  const auto dtype = static_cast<int>(envelope.dtype);
  if (envelope.source != peer || kind >= Envelope::kKindCount || dtype >= kDTypeCount)
    return Malformed(checked);
  Arriving arriving{envelope, bytes};
  switch (envelope.kind) {
    case Envelope::Kind::kEager: {
      if (bytes != envelope.bytes || bytes > kEagerElsewhereBytes) return Malformed(envelope);
      const std::optional<uint64_t> taker = matching_.Arrive(peer, envelope.tag);
      if (taker) {
        arriving.taker = receives_.extract(*taker).mapped();
        arriving.taker->meeting = Meeting::kMet;
      } else {
        matching_.Keep({envelope, nullptr, false});  // a receive may come before its data are here
      }
      Count(With(peer).seen);
      break;
    }
    case Envelope::Kind::kData:
      arriving.taker = FindReceive(envelope.id, peer);
      if (arriving.taker == nullptr || bytes != arriving.taker->bytes) return Malformed(envelope);
      break;
    case Envelope::Kind::kRefused:
      if (bytes > kMostTextBytes) return Malformed(envelope);
      break;
    default:
      if (bytes != 0) return Malformed(envelope);
  }
  arriving.placed = envelope.kind == Envelope::Kind::kData ||
                    (arriving.taker != nullptr && Fits(*arriving.taker, envelope).ok());
  if (bytes > 0 && !arriving.placed) arriving.data = std::make_unique_for_overwrite<char[]>(bytes);
  if (bytes > 0) {
    places->push_back({arriving.placed ? arriving.taker->outputs.front() : arriving.data.get(), bytes});
  }
  arriving_[peer] = std::move(arriving);
  return Status();
}

Status PointToPoint::End(int peer) {
  Arriving arriving = std::move(arriving_.extract(peer).mapped());
  const Envelope& envelope = arriving.envelope;
  if (envelope.kind == Envelope::Kind::kData) {
    receiving_.erase(envelope.id);
    Finish(arriving.taker, Status());
    return Status();
  }
  if (envelope.kind != Envelope::Kind::kEager) return Take(envelope, arriving.data.get(), arriving.bytes);
  if (arriving.taker == nullptr) {
    matching_.Complete(peer, envelope.tag, std::move(arriving.data));
    return Status();
  }
  if (arriving.placed) {
    arriving.taker->rows = {{peer}};
    Credit(peer, arriving.bytes);
    Finish(arriving.taker, Status());
    return Status();
  }
  return Accept(arriving.taker, Arrival{envelope, std::move(arriving.data)});
}

// --- moving ---

bool PointToPoint::Readable(const void* data, size_t bytes) const {
  if (!options_.reads_peers || bytes == 0) return false;
  const auto address = reinterpret_cast<uint64_t>(data);
  const int self = options_.topology.local_rank;
  char ends[2];
  return peers_.Read(self, address, ends, 1) == 0 && peers_.Read(self, address + bytes - 1, ends + 1, 1) == 0;
}

Status PointToPoint::ReadMail() {
  int read = 0;
  for (; read < kMailAtOnce; ++read) {
    const InboxSlot* const mail = inbox_.Front();
    if (mail == nullptr) break;
    const Envelope envelope = mail->envelope;
    const bool sound =
        envelope.source >= 0 && envelope.source < options_.topology.size() && mail->bytes <= kMailBytes;
    Status status = sound ? Take(envelope, mail->data, mail->bytes) : Malformed(Envelope{});
    inbox_.Pop();
    KV_RETURN_IF_ERROR(status);
  }
  if (read == 0 || !inbox_.TakeWanted()) return Status();
  for (int r = 0; r < options_.topology.local_size(); ++r) {
    if (r != options_.topology.local_rank) segment_.WakeReceiver(r);
  }
  return Status();
}

bool PointToPoint::HasWork() {
  return has_fresh_.load(std::memory_order_seq_cst) || !done_.empty() || inbox_.HasMail() ||
         outbox_.HasWork() || MustJudge() || listens_ != (options_.mesh != nullptr && WaitsElsewhere());
}

Status PointToPoint::Progress() {
  if (has_fresh_.load(std::memory_order_seq_cst)) {
    std::vector<OperationPtr> fresh;
    {
      OperationsLock lock(mutex_);
      fresh.swap(fresh_);
      has_fresh_.store(false, std::memory_order_seq_cst);
    }
    for (const OperationPtr& op : fresh) KV_RETURN_IF_ERROR(Start(op));
    judge_ |= !departures_.empty();
  }
  KV_RETURN_IF_ERROR(ReadMail());
  if (options_.mesh != nullptr) KV_RETURN_IF_ERROR(MoveElsewhere(*options_.mesh));
  outbox_.Flush();
  for (const uint64_t id : outbox_.TakeThrough()) FinishSend(id, Status());
  return MustJudge() && !inbox_.HasMail() ? JudgeDepartures() : Status();
}

// Connections are listened to as long as something may come over them, for whoever waits moves bytes then.
Status PointToPoint::MoveElsewhere(Mesh& mesh) {
  listens_ = WaitsElsewhere();
  mesh.Listen(listens_);
  if (!listens_) return Status();
  (void)mesh.Background();
  return mesh.broken() ? mesh.status() : Status();
}

void PointToPoint::Finish(const OperationPtr& op, Status status) {
  if (!status.ok()) op->status = std::move(status);
  done_.push_back(op);
}

void PointToPoint::FinishSend(uint64_t id, Status status) {
  const auto found = sends_.find(id);
  if (found == sends_.end()) return;  // it has failed
  const OperationPtr op = std::move(found->second);
  sends_.erase(found);
  Finish(op, std::move(status));
}

// --- ranks that take part no more ---

void PointToPoint::Left(int rank, const Status& status) {
  departures_.Left(rank, status, here(rank), NowNs());
  judge_ = true;
}

void PointToPoint::Closed(int peer, const Status& status) {
  departures_.Closed(peer, status, NowNs());
  judge_ = true;
}

bool PointToPoint::MustJudge() const { return judge_ || (judge_at_ns_ != 0 && NowNs() >= judge_at_ns_); }

Status PointToPoint::JudgeDepartures() {
  const int64_t now_ns = NowNs();
  judge_ = false;
  judge_at_ns_ = departures_.NextNs(now_ns);
  std::vector<OperationPtr> waiting;
  for (const auto& [id, op] : sends_) waiting.push_back(op);
  for (const auto& [id, op] : receives_) waiting.push_back(op);
  for (const auto& [id, receiving] : receiving_) waiting.push_back(receiving.op);
  for (const OperationPtr& op : waiting) {
    const Departures::Departure* const gone = FindCulprit(*op, now_ns);
    if (gone == nullptr) continue;
    if (!gone->left) return gone->status;  // its connection broke
    if (op->request.verb == Verb::kRecv && receives_.erase(op->transfer) != 0) {
      matching_.Withdraw(op->transfer, op->request.root, op->request.splits.front());
    }
    sends_.erase(op->transfer);
    receiving_.erase(op->transfer);
    Finish(op, Lost(*op, *gone));
  }
  return Status();
}

const Departures::Departure* PointToPoint::FindCulprit(const Operation& op, int64_t now_ns) const {
  const int peer = op.rows.empty() ? op.request.root : static_cast<int>(op.rows[0][0]);
  if (peer != kAnySource) return departures_.FindGone(peer, now_ns);
  // Any other rank could still send it.
  const Departures::Departure* last = nullptr;
  for (int r = 0; r < options_.topology.size(); ++r) {
    if (r == rank_) continue;
    last = departures_.FindGone(r, now_ns);
    if (last == nullptr) return nullptr;
  }
  return last;
}

Status PointToPoint::Lost(const Operation& op, const Departures::Departure& departure) {
  return Status(departure.status.code(), departure.status.message() + "; " + NameOf(op.request.verb) + " '" +
                                             op.request.name + "' will not happen");
}

void PointToPoint::Drop() {
  sends_.clear();
  receives_.clear();
  receiving_.clear();
  outbox_.Drop();
  arriving_.clear();
  done_.clear();
  OperationsLock lock(mutex_);
  fresh_.clear();
  has_fresh_.store(false, std::memory_order_seq_cst);
}

}  // namespace kolovod
