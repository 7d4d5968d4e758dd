// The verbs among hosts besides allreduce: every byte crosses once, to the rank that deals with it there.
#include <algorithm>
#include <cstring>

#include "collectives/hierarchical.h"
#include "collectives/relay.h"

namespace kolovod {

Status HierarchicalBackend::Broadcast(const Piece& piece, DType dtype, int root, const std::string& name) {
  if (hosts_.ranks.size() == 1) return local_->Broadcast(piece, dtype, root, name);
  if (hosts_.most == 1) return flat_.Broadcast(piece, dtype, root, name);
  const size_t total = piece.count * SizeOf(dtype);
  if (rank_ == root && piece.in != piece.out && total > 0) std::memcpy(piece.out, piece.in, total);
  if (total == 0) return Status();
  // One rank of each host takes part between the hosts, and is the root inside.
  std::vector<int> heads;
  for (size_t h = 0; h < hosts_.ranks.size(); ++h) heads.push_back(hosts_.Agent(static_cast<int>(h), root));
  const int root_host = hosts_.host[static_cast<size_t>(root)];
  heads[static_cast<size_t>(root_host)] = root;
  const int head = heads[static_cast<size_t>(host_)];
  const int head_place = hosts_.local[static_cast<size_t>(head)];
  char* out = static_cast<char*>(piece.out);
  const auto inside = [&](size_t begin, size_t bytes) {
    if (local_size() == 1) return Status();
    return local_->Broadcast(Piece{out + begin, out + begin, bytes}, DType::kUInt8, head_place, name);
  };
  const size_t block = options_.portion_bytes;
  if (rank_ != head) {
    for (size_t begin = 0; begin < total; begin += block) {
      KV_RETURN_IF_ERROR(inside(begin, std::min(block, total - begin)));
    }
    return Status();
  }
  const auto hosts = static_cast<int>(heads.size());
  const Choice choice = Select({Verb::kBroadcast, total, hosts, dtype}, options_.algorithm, options_.cost);
  const Relay relay = choice.algorithm == Algorithm::kTree ? BinomialRelay(hosts, root_host, host_)
                                                           : ChainRelay(hosts, root_host, host_);
  MeshGroup group(mesh_, heads, host_);
  return RunRelay(group, relay, out, total, block, inside);
}

Status HierarchicalBackend::Allgather(const void* in, char* out, const std::vector<size_t>& bytes) {
  if (hosts_.ranks.size() == 1) return local_->Allgather(in, out, bytes);
  if (hosts_.most == 1) return flat_.Allgather(in, out, bytes);
  std::vector<size_t> at(bytes.size());
  for (size_t r = 1; r < bytes.size(); ++r) at[r] = at[r - 1] + bytes[r - 1];
  std::vector<std::vector<std::pair<int, uint64_t>>> awaited(hosts_.ranks.size());  // by host: rank, position
  const auto hosts = static_cast<int>(hosts_.ranks.size());
  for (int r = 0; r < static_cast<int>(bytes.size()); ++r) {
    const auto from = static_cast<size_t>(r);
    if (hosts_.host[from] == host_ || hosts_.Agent(host_, r) != rank_) continue;
    const iovec part{out + at[from], bytes[from]};
    awaited[static_cast<size_t>(hosts_.host[from])].emplace_back(r, mesh_.PostReceive(r, {&part, 1}));
  }
  const size_t own = bytes[static_cast<size_t>(rank_)];
  const iovec part{const_cast<void*>(in), own};
  for (int distance = 1; distance < hosts; ++distance) {
    mesh_.PostSend(hosts_.Agent((host_ + distance) % hosts, rank_), {&part, 1});
  }
  // Inside, the own host's parts first: the others are on their way meanwhile.
  for (int distance = 0; distance < hosts; ++distance) {
    const int of = (host_ + hosts - distance) % hosts;
    for (const auto& [peer, position] : awaited[static_cast<size_t>(of)]) {
      KV_RETURN_IF_ERROR(mesh_.WaitReceived(peer, position));
    }
    for (const Hosts::Run& run : hosts_.RunsOf(of, local_size())) {
      std::vector<size_t> parts(local_size(), 0);
      const char* mine = out;
      for (int k = 0; k < run.length; ++k) {
        const auto r = static_cast<size_t>(run.first_rank + k);
        parts[static_cast<size_t>(run.first_agent + k)] = bytes[r];
        if (run.first_agent + k == place_) mine = of == host_ ? static_cast<const char*>(in) : out + at[r];
      }
      KV_RETURN_IF_ERROR(local_->Allgather(mine, out + at[static_cast<size_t>(run.first_rank)], parts));
    }
  }
  return mesh_.WaitAll();
}

Status HierarchicalBackend::Alltoall(const char* in, char* out, const Splits& rows, size_t row_bytes) {
  if (hosts_.ranks.size() == 1) return local_->Alltoall(in, out, rows, row_bytes);
  if (hosts_.most == 1) return flat_.Alltoall(in, out, rows, row_bytes);
  const int size = static_cast<int>(hosts_.host.size());
  const auto sent = [&](int to) { return static_cast<size_t>(rows.sent(rank_, to)) * row_bytes; };
  const auto received = [&](int from) { return static_cast<size_t>(rows.received(from, rank_)) * row_bytes; };
  std::vector<size_t> in_at(hosts_.host.size()), out_at(hosts_.host.size());
  for (size_t r = 1; r < hosts_.host.size(); ++r) {
    in_at[r] = in_at[r - 1] + sent(static_cast<int>(r) - 1);
    out_at[r] = out_at[r - 1] + received(static_cast<int>(r) - 1);
  }
  for (int distance = 1; distance < size; ++distance) {
    const int from = (rank_ + size - distance) % size;
    const auto r = static_cast<size_t>(from);
    if (hosts_.host[r] == host_) continue;
    const iovec part{out + out_at[r], received(from)};
    mesh_.PostReceive(from, {&part, 1});
  }
  for (int distance = 1; distance < size; ++distance) {
    const int to = (rank_ + distance) % size;
    const auto r = static_cast<size_t>(to);
    if (hosts_.host[r] == host_) continue;
    const iovec part{const_cast<char*>(in) + in_at[r], sent(to)};
    mesh_.PostSend(to, {&part, 1});
  }
  KV_RETURN_IF_ERROR(AlltoallInside(in, out, rows, row_bytes, in_at, out_at));
  return mesh_.WaitAll();
}

Status HierarchicalBackend::AlltoallInside(const char* in, char* out, const Splits& rows, size_t row_bytes,
                                           const std::vector<size_t>& in_at,
                                           const std::vector<size_t>& out_at) {
  const std::vector<int>& here = hosts_.ranks[static_cast<size_t>(host_)];
  const Splits inside = rows.Within(here);
  const auto first = static_cast<size_t>(here.front());
  if (here.back() - here.front() + 1 == static_cast<int>(here.size())) {  // no rank of another host between
    return local_->Alltoall(in + in_at[first], out + out_at[first], inside, row_bytes);
  }
  size_t to_all = 0, from_all = 0;
  for (const int r : here) {
    to_all += static_cast<size_t>(rows.sent(rank_, r)) * row_bytes;
    from_all += static_cast<size_t>(rows.received(r, rank_)) * row_bytes;
  }
  KV_RETURN_IF_ERROR(scratch_.Reserve(to_all + from_all));
  char* const packed = scratch_.data();
  char* const unpacked = packed + to_all;
  size_t at = 0;
  for (const int to : here) {
    const size_t n = static_cast<size_t>(rows.sent(rank_, to)) * row_bytes;
    if (n > 0) std::memcpy(packed + at, in + in_at[static_cast<size_t>(to)], n);
    at += n;
  }
  KV_RETURN_IF_ERROR(local_->Alltoall(packed, unpacked, inside, row_bytes));
  at = 0;
  for (const int from : here) {
    const size_t n = static_cast<size_t>(rows.received(from, rank_)) * row_bytes;
    if (n > 0) std::memcpy(out + out_at[static_cast<size_t>(from)], unpacked + at, n);
    at += n;
  }
  return Status();
}

Status HierarchicalBackend::ReduceRun(const FusedRange& range, const Hosts::Run& run,
                                      const std::vector<size_t>& counts, size_t begin, char* out) {
  std::vector<size_t> parts(local_size(), 0);
  size_t elements = 0;
  for (int k = 0; k < run.length; ++k) {
    const size_t count = counts[static_cast<size_t>(run.first_rank + k)];
    parts[static_cast<size_t>(run.first_agent + k)] = count;
    elements += count;
  }
  const Op op = range.op == Op::kAverage ? Op::kSum : range.op;  // divided between the hosts
  const char* in = static_cast<const char*>(range.pieces.front().in) + begin * SizeOf(range.dtype);
  const FusedRange inside{range.dtype, op, range.prescale, 1.0, {Piece{in, out, elements}}, range.name};
  return local_->Reducescatter(inside, parts);
}

// Each host adds up all parts; what is another host's goes to the rank that keeps it, which adds the hosts.
Status HierarchicalBackend::Reducescatter(const FusedRange& range, const std::vector<size_t>& counts) {
  const size_t hosts = hosts_.ranks.size();
  if (hosts == 1) return local_->Reducescatter(range, counts);
  if (GoesFlat(range.dtype, range.op)) return flat_.Reducescatter(range, counts);
  const size_t item = SizeOf(range.dtype);
  const size_t own = counts[static_cast<size_t>(rank_)];
  std::vector<size_t> begins(counts.size());
  size_t partial_bytes = own * item * hosts;
  for (size_t r = 0; r < counts.size(); ++r) {
    if (r > 0) begins[r] = begins[r - 1] + counts[r - 1];
    if (hosts_.Agent(host_, static_cast<int>(r)) == rank_) partial_bytes += counts[r] * item;
  }
  // First the hosts' sums of this rank's part, then the sums that go to others.
  KV_RETURN_IF_ERROR(scratch_.Reserve(partial_bytes));
  std::vector<const char*> sources(hosts);
  for (size_t h = 0; h < hosts; ++h) {
    char* place = scratch_.data() + h * own * item;
    sources[h] = place;
    const iovec part{place, own * item};
    if (static_cast<int>(h) != host_) mesh_.PostReceive(hosts_.Agent(static_cast<int>(h), rank_), {&part, 1});
  }
  char* outgoing = scratch_.data() + hosts * own * item;
  for (size_t distance = 0; distance < hosts; ++distance) {
    const int of = static_cast<int>((static_cast<size_t>(host_) + distance) % hosts);
    for (const Hosts::Run& run : hosts_.RunsOf(of, local_size())) {
      const int mine = place_ - run.first_agent;  // of the run, if this rank deals with one of it
      const bool agent = mine >= 0 && mine < run.length;
      const int r = agent ? run.first_rank + mine : -1;
      char* sum = r == rank_ ? scratch_.data() + static_cast<size_t>(host_) * own * item : outgoing;
      KV_RETURN_IF_ERROR(ReduceRun(range, run, counts, begins[static_cast<size_t>(run.first_rank)], sum));
      if (!agent || r == rank_) continue;
      const iovec part{sum, counts[static_cast<size_t>(r)] * item};
      mesh_.PostSend(r, {&part, 1});
      outgoing += part.iov_len;
    }
  }
  KV_RETURN_IF_ERROR(mesh_.WaitAll());
  if (own == 0) return Status();
  FusedRange result{range.dtype, range.op, 1.0, range.postscale, {}, range.name};
  result.pieces = {Piece{sources[0], range.pieces.front().out, own}};
  const PackedRange view(result);
  ReduceSlice(Combine::Of(result, static_cast<int>(counts.size())), view, Slice{0, view.total()}, sources);
  return Status();
}

}  // namespace kolovod
