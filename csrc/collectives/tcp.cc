#include "collectives/tcp.h"

#include <cstring>
#include <utility>

#include "collectives/balanced.h"
#include "collectives/direct.h"
#include "collectives/pairwise.h"
#include "collectives/relay.h"
#include "collectives/ring.h"

namespace kolovod {

TcpBackend::TcpBackend(Mesh& mesh, std::vector<int> members, int index, const TcpOptions& options)
    : group_(mesh, std::move(members), index), options_(options) {}

Algorithm TcpBackend::Choose(const SelectQuestion& question) {
  choice_ = Select(question, options_.algorithm, options_.cost);
  Count(choice_.algorithm);
  return choice_.algorithm;
}

Status TcpBackend::RunPairwise(PackedRange& range, const Combine& combine, std::vector<Slice> owned,
                               bool gathers) {
  const size_t portion = PortionBytes(options_.cost, options_.portion_bytes);
  const size_t lead = LeadOf(options_.cost, portion, group_.size() - 1);
  Pairwise pairwise(group_, range, combine, std::move(owned), gathers, portion, lead);
  KV_RETURN_IF_ERROR(scratch_.Reserve(pairwise.ScratchBytes()));
  return pairwise.Run(scratch_.data());
}

Status TcpBackend::Allreduce(const FusedRange& range) {
  if (group_.size() == 1) {
    ReduceAlone(range);
    return Status();
  }
  PackedRange view(range);
  return Reduce(view, Combine::Of(range, group_.size()));
}

Status TcpBackend::Reduce(PackedRange& range, const Combine& combine) {
  if (range.total() == 0) return Status();
  switch (Choose(
      {Verb::kAllreduce, range.total(), group_.size(), combine.dtype, combine.op, options_.portion_bytes})) {
    case Algorithm::kDirect:
      return DirectAllreduce(group_, range, combine, options_.portion_bytes, scratch_);
    case Algorithm::kTree:
      return TreeAllreduce(group_, range, combine, scratch_);
    case Algorithm::kRing:
      return RingAllreduce(group_, range, combine, options_.portion_bytes, scratch_);
    case Algorithm::kDoubling:
      return DoublingAllreduce(group_, range, combine, scratch_);
    case Algorithm::kHalving:
      return HalvingAllreduce(group_, range, combine, PortionBytes(options_.cost, options_.portion_bytes),
                              scratch_);
    default:
      return RunPairwise(range, combine, Pairwise::EqualSlices(range.total(), group_.size()),
                         /*gathers=*/true);
  }
}

Status TcpBackend::Reducescatter(const FusedRange& range, const std::vector<size_t>& counts) {
  if (group_.size() == 1) {
    ReduceAlone(range);
    return Status();
  }
  // One piece per rank's part: only the own one has an output.
  const size_t item = SizeOf(range.dtype);
  FusedRange parts{range.dtype, range.op, range.prescale, range.postscale, {}, range.name};
  std::vector<Slice> owned;
  const char* in = static_cast<const char*>(range.pieces.front().in);
  size_t begin = 0;
  for (size_t r = 0; r < counts.size(); ++r) {
    const bool own = r == static_cast<size_t>(group_.index());
    parts.pieces.push_back(Piece{in + begin, own ? range.pieces.front().out : nullptr, counts[r]});
    owned.push_back(Slice{begin, begin + counts[r] * item});
    begin += counts[r] * item;
  }
  PackedRange view(parts);
  if (view.total() == 0) return Status();
  Choose({Verb::kReducescatter, view.total(), group_.size(), range.dtype, range.op});
  return RunPairwise(view, Combine::Of(range, group_.size()), std::move(owned), /*gathers=*/false);
}

Status TcpBackend::Broadcast(const Piece& piece, DType dtype, int root, const std::string&) {
  const size_t bytes = piece.count * SizeOf(dtype);
  const bool is_root = group_.index() == root;
  if (is_root && piece.in != piece.out && bytes > 0) std::memcpy(piece.out, piece.in, bytes);
  if (group_.size() == 1 || bytes == 0) return Status();
  const bool tree = Choose({Verb::kBroadcast, bytes, group_.size(), dtype}) == Algorithm::kTree;
  const Relay relay = tree ? BinomialRelay(group_.size(), root, group_.index())
                           : ChainRelay(group_.size(), root, group_.index());
  return RunRelay(group_, relay, static_cast<char*>(piece.out), bytes, options_.portion_bytes, nullptr);
}

Status TcpBackend::Allgather(const void* in, char* out, const std::vector<size_t>& bytes) {
  std::vector<Slice> slices;
  size_t total = 0;
  for (const size_t part : bytes) {
    slices.push_back(Slice{total, total + part});
    total += part;
  }
  const auto self = static_cast<size_t>(group_.index());
  if (bytes[self] > 0 && in != out + slices[self].begin)
    std::memcpy(out + slices[self].begin, in, bytes[self]);
  if (group_.size() == 1 || total == 0) return Status();
  if (Choose({Verb::kAllgather, total, group_.size()}) == Algorithm::kRing) {
    FusedRange range{DType::kUInt8, Op::kSum, 1.0, 1.0, {Piece{out, out, total}}, nullptr};
    PackedRange view(range);
    return RingAllgather(group_, view, slices, options_.portion_bytes);
  }
  for (int distance = 1; distance < group_.size(); ++distance) {
    const int from = group_.Before(distance);
    const auto f = static_cast<size_t>(from);
    group_.Receive(from, out + slices[f].begin, bytes[f]);
  }
  for (int distance = 1; distance < group_.size(); ++distance) {
    group_.Send(group_.Behind(distance), out + slices[self].begin, bytes[self]);
  }
  return group_.mesh().WaitAll();
}

Status TcpBackend::Alltoall(const char* in, char* out, const Splits& rows, size_t row_bytes) {
  const auto size = static_cast<size_t>(group_.size());
  const auto self = static_cast<size_t>(group_.index());
  std::vector<size_t> sent(size), received(size), in_at(size), out_at(size);
  size_t to_all = 0, from_all = 0;
  for (size_t r = 0; r < size; ++r) {
    const int peer = static_cast<int>(r);
    sent[r] = static_cast<size_t>(rows.sent(group_.index(), peer)) * row_bytes;
    received[r] = static_cast<size_t>(rows.received(peer, group_.index())) * row_bytes;
    in_at[r] = to_all;
    out_at[r] = from_all;
    to_all += sent[r];
    from_all += received[r];
  }
  if (sent[self] > 0) std::memcpy(out + out_at[self], in + in_at[self], sent[self]);
  const size_t total = rows.TotalBytes(row_bytes);
  if (size == 1 || total == 0) return Status();
  Choose({Verb::kAlltoall, total, group_.size()});
  for (int distance = 1; distance < group_.size(); ++distance) {
    const int from = group_.Before(distance);
    const auto f = static_cast<size_t>(from);
    group_.Receive(from, out + out_at[f], received[f]);
  }
  for (int distance = 1; distance < group_.size(); ++distance) {
    const int to = group_.Behind(distance);
    const auto t = static_cast<size_t>(to);
    group_.Send(to, in + in_at[t], sent[t]);
  }
  return group_.mesh().WaitAll();
}

}  // namespace kolovod
