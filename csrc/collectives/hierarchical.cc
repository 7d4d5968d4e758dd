#include "collectives/hierarchical.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "collectives/coded.h"
#include "collectives/measure.h"
#include "collectives/pairwise.h"

namespace kolovod {
namespace {

std::vector<int> Everybody(size_t size) {
  std::vector<int> members(size);
  std::iota(members.begin(), members.end(), 0);
  return members;
}

// Up to this size one rank per host does the talking: a message costs more than its bytes.
constexpr size_t kOneLaneBytes = 16 << 10;
// Of a block that is reduced inside, exchanged, and gathered before the next.
constexpr size_t kPortionsOfBlock = 16;

}  // namespace

HierarchicalBackend::HierarchicalBackend(std::unique_ptr<Backend> local, Mesh& mesh,
                                         const std::vector<int>& host_of, const TcpOptions& options)
    : local_(std::move(local)),
      mesh_(mesh),
      hosts_(host_of),
      rank_(mesh.rank()),
      host_(hosts_.host[static_cast<size_t>(rank_)]),
      place_(hosts_.local[static_cast<size_t>(rank_)]),
      options_(options),
      flat_(mesh, Everybody(host_of.size()), mesh.rank(), options),
      watch_(options.cost) {
  if (static_cast<size_t>(place_) >= hosts_.fewest) return;
  std::vector<int> members;
  for (const std::vector<int>& there : hosts_.ranks) members.push_back(there[static_cast<size_t>(place_)]);
  lane_ = std::make_unique<TcpBackend>(mesh, std::move(members), host_, options);
}

HierarchicalBackend::~HierarchicalBackend() = default;

Status HierarchicalBackend::MeasureLinks() {
  if (hosts_.ranks.size() == 1) return Status();
  LinkCost cost = options_.cost;
  if (place_ == 0) {
    std::vector<int> leaders;
    for (const std::vector<int>& there : hosts_.ranks) leaders.push_back(there.front());
    MeshGroup group(mesh_, std::move(leaders), host_);
    KV_RETURN_IF_ERROR(MeasureLink(group, &cost));
  }
  // A choice that was made from what each had seen itself could differ.
  const std::string name = "link cost";
  double told[] = {cost.latency_us, cost.bytes_per_us};
  KV_RETURN_IF_ERROR(Broadcast(Piece{told, told, 2}, DType::kFloat64, 0, name));
  cost.latency_us = told[0];
  cost.bytes_per_us = told[1];
  cost.confirmed = false;
  set_cost(cost);
  Watch(cost);
  return Status();
}

void HierarchicalBackend::set_cost(const LinkCost& cost) {
  options_.cost = cost;
  flat_.set_cost(cost);
  if (lane_ != nullptr) lane_->set_cost(cost);
  mesh_.set_stripes(options_.stripes > 0 ? options_.stripes : StripesOf(cost));
}

bool HierarchicalBackend::GoesFlat(DType dtype, Op op) const {
  return hosts_.most == 1 || NeedsOnePlace(dtype, op);
}

// One block of an allreduce on its way through the three steps. Small tensors are gathered into scratch
// first, since what is inside the host wants one run of bytes; so is what is to be encoded and no whole
// number of codec blocks, with zeros behind it.
class HierarchicalBackend::Block {
 public:
  Block(HierarchicalBackend& owner, const FusedRange& range, const PackedRange& view, Slice slice,
        size_t lanes)
      : owner_(owner), range_(range), view_(view), slice_(slice), counts_(owner.local_size()) {
    const size_t item = SizeOf(range.dtype);
    const size_t unit = range.codec == Codec::kNone ? 1 : kCodecBlock * item;
    const size_t units = (slice.end - slice.begin) / unit;
    const auto place = static_cast<size_t>(owner.place_);
    for (size_t l = 0; l < lanes; ++l) {
      const auto parts = static_cast<int>(lanes), index = static_cast<int>(l);
      const Slice cut = unit == 1 ? SliceOf(units, parts, index) : BlocksOf(units, parts, index);
      const Slice share{cut.begin * unit, cut.end * unit};
      counts_[l] = (share.end - share.begin) / item;
      if (l == place) own_ = share;
    }
  }

  // Memory for a block of `bytes`, of which a lane has at most `lane_bytes`, and for its exchange among
  // `hosts` hosts.
  static size_t ScratchBytes(const FusedRange& range, size_t block_bytes, size_t lane_bytes, size_t hosts) {
    const size_t staging = RoundUp(block_bytes, kLine);
    if (range.codec == Codec::kNone)
      return staging + 2 * hosts * RoundUp((lane_bytes + hosts - 1) / hosts, kLine);
    const size_t blocks = lane_bytes / (kCodecBlock * SizeOf(range.dtype));
    const size_t widened = range.dtype == DType::kFloat32 ? 0 : blocks * kCodecBlockBytes;
    return staging + widened + CodedExchange::ScratchBytes(range.codec, blocks, static_cast<int>(hosts));
  }

  Status ReduceInside(char* scratch) {
    const char* in = nullptr;
    size_t parts = 0, bytes = 0;
    view_.ForEach(slice_, [&](const PackedRange::Part& part) {
      in = part.in;
      base_ = part.out;
      bytes += part.bytes;
      ++parts;
    });
    staged_ = parts > 1 || bytes < slice_.end - slice_.begin;
    if (staged_) {
      if (bytes < slice_.end - slice_.begin) std::memset(scratch, 0, slice_.end - slice_.begin);
      PackSlice(Combine{range_.dtype, range_.op, 1.0, 1.0, 1}, view_, slice_, scratch);
      in = base_ = scratch;
    }
    scratch_ = scratch + RoundUp(slice_.end - slice_.begin, kLine);
    const size_t elements = (slice_.end - slice_.begin) / SizeOf(range_.dtype);
    const Op op = range_.op == Op::kAverage ? Op::kSum : range_.op;  // divided between the hosts
    const FusedRange inside{range_.dtype, op, range_.prescale, 1.0, {Piece{in, base_ + own_.begin, elements}},
                            range_.name};
    KV_RETURN_IF_ERROR(owner_.local_->Reducescatter(inside, counts_));
    char* share = base_ + own_.begin;
    lane_range_.pieces = {Piece{share, share, (own_.end - own_.begin) / SizeOf(range_.dtype)}};
    lane_range_.dtype = range_.dtype;
    if (range_.codec != Codec::kNone) {
      MakeCoded();
      return Status();
    }
    lane_view_ = std::make_unique<PackedRange>(lane_range_);
    return Status();
  }

  // The exchange between the hosts at once, by whatever algorithm is best.
  Status Exchange() {
    if (range_.codec == Codec::kNone) {
      return InLane() ? owner_.lane_->Reduce(*lane_view_, Between()) : Status();
    }
    KV_RETURN_IF_ERROR(Contribute());
    KV_RETURN_IF_ERROR(Reduce());
    return Collect();
  }

  // The exchange in parts, so that blocks overlap.
  Status Contribute() {
    if (coded_ != nullptr) return coded_->Contribute();
    if (!InLane()) return Status();
    const auto hosts = static_cast<int>(owner_.hosts_.ranks.size());
    pairwise_ = std::make_unique<Pairwise>(owner_.lane_->group(), *lane_view_, Between(),
                                           Pairwise::EqualSlices(lane_view_->total(), hosts), true,
                                           lane_view_->total());
    pairwise_->Begin(scratch_);
    return pairwise_->Contribute(0);
  }
  Status Reduce() {
    if (coded_ != nullptr) return coded_->Reduce();
    return pairwise_ == nullptr ? Status() : pairwise_->Reduce(0);
  }
  Status Collect() {
    if (coded_ == nullptr) return pairwise_ == nullptr ? Status() : pairwise_->Collect();
    KV_RETURN_IF_ERROR(coded_->Collect());
    Narrow();
    return Status();
  }

  Status GatherInside() {
    std::vector<size_t> bytes;
    for (const size_t count : counts_) bytes.push_back(count * SizeOf(range_.dtype));
    KV_RETURN_IF_ERROR(owner_.local_->Allgather(base_ + own_.begin, base_, bytes));
    if (!staged_) return Status();
    view_.ForEach(slice_, [&](const PackedRange::Part& part) {
      std::memcpy(part.out, base_ + part.in_slice, part.bytes);
    });
    return Status();
  }

 private:
  bool InLane() const { return own_.end > own_.begin; }

  void MakeCoded() {
    if (!InLane()) return;
    const size_t elements = (own_.end - own_.begin) / SizeOf(range_.dtype);
    float* values = reinterpret_cast<float*>(base_ + own_.begin);
    if (range_.dtype != DType::kFloat32) {
      values = widened_ = reinterpret_cast<float*>(scratch_);
      scratch_ += elements * sizeof(float);
      Convert(base_ + own_.begin, widened_, /*to_partials=*/true);
    }
    coded_ = std::make_unique<CodedExchange>(owner_.lane_->group(), range_.codec, Between(), values,
                                             elements / kCodecBlock, scratch_);
  }
  void Narrow() {
    if (widened_ != nullptr) Convert(widened_, base_ + own_.begin, /*to_partials=*/false);
  }
  // Of this rank's share, between its dtype and float32.
  void Convert(const void* from, void* to, bool to_partials) {
    ::kolovod::Exchange x;
    x.reduce.dtype = range_.dtype;
    x.reduce.op = Op::kSum;
    x.reduce.sources = &from;
    x.reduce.source_count = 1;
    x.reduce.to_partials = to_partials;
    x.reduce.from_partials = !to_partials;
    x.reduce.out = to;
    x.reduce.count = (own_.end - own_.begin) / SizeOf(range_.dtype);
    ActiveKernels().exchange(x);
  }

  Combine Between() const {
    Combine between = Combine::Of(range_, static_cast<int>(owner_.hosts_.host.size()));
    between.prescale = 1.0;
    return between;
  }

  HierarchicalBackend& owner_;
  const FusedRange& range_;
  const PackedRange& view_;
  const Slice slice_;
  std::vector<size_t> counts_;  // by place: elements of its share
  Slice own_{0, 0};
  bool staged_ = false;
  char* base_ = nullptr;  // where the block lies, in the tensor or in scratch
  char* scratch_ = nullptr;
  FusedRange lane_range_{DType::kUInt8, Op::kSum, 1.0, 1.0, {}, nullptr};
  std::unique_ptr<PackedRange> lane_view_;
  std::unique_ptr<Pairwise> pairwise_;
  std::unique_ptr<CodedExchange> coded_;
  float* widened_ = nullptr;
};

// A block is to a lane what a portion is to a pairwise exchange: no more than keeps the links busy.
size_t HierarchicalBackend::OverlappingBytes() const {
  const auto hosts = static_cast<int>(hosts_.ranks.size());
  const size_t portion = PortionBytes(options_.cost, options_.portion_bytes);
  const size_t each = portion * LeadOf(options_.cost, portion, hosts - 1);
  return RoundUp(std::min(each * static_cast<size_t>(hosts), options_.portion_bytes), kLine);
}

// What an allreduce brings comes as fast as the links carry it, since all but its beginning is sent only
// when this rank has answered.
Status HierarchicalBackend::Allreduce(const FusedRange& range) {
  if (hosts_.ranks.size() == 1) return local_->Allreduce(range);
  mesh_.BeginSpan();
  KV_RETURN_IF_ERROR(AllreduceBetween(range));
  const Mesh::Span span = mesh_.EndSpan();
  watch_.Delivered(span.bytes, span.ns);
  return Status();
}

Status HierarchicalBackend::AllreduceBetween(const FusedRange& range) {
  const size_t hosts = hosts_.ranks.size();
  const bool coded = range.codec != Codec::kNone;
  if (!coded && GoesFlat(range.dtype, range.op)) return flat_.Allreduce(range);
  const size_t unit = coded ? kCodecBlock * SizeOf(range.dtype) : 1;
  const PackedRange view(range, unit);
  if (view.total() == 0) return Status();
  const size_t lanes = view.total() <= kOneLaneBytes ? 1 : hosts_.fewest;
  // Only pairwise can be done in parts that overlap. Others pay for every step of every block: larger ones.
  const bool overlaps =
      coded || options_.algorithm == Algorithm::kPairwise ||
      (options_.algorithm == Algorithm::kAuto && OrderOf(static_cast<int>(hosts)) == Order::kRanks);
  size_t lane_bytes =
      overlaps ? OverlappingBytes() : RoundUp(options_.portion_bytes, kLine) * kPortionsOfBlock;
  const size_t ahead = overlaps ? BlocksAhead(options_.cost, lane_bytes) : 1;
  if (coded) lane_bytes = RoundUp(lane_bytes * unit / EncodedBlockBytes(range.codec), unit);
  const size_t block_bytes = lanes * lane_bytes;
  const size_t blocks = (view.total() + block_bytes - 1) / block_bytes;
  const size_t most_in_flight = 2 * ahead + 1;
  const size_t slot_bytes =
      Block::ScratchBytes(range, std::min(block_bytes, view.total()), lane_bytes, hosts);
  KV_RETURN_IF_ERROR(scratch_.Reserve(std::min(most_in_flight, blocks) * slot_bytes));
  const auto block_at = [&](size_t i) {
    return Slice{i * block_bytes, std::min((i + 1) * block_bytes, view.total())};
  };
  if (!overlaps || blocks == 1) {
    for (size_t i = 0; i < blocks; ++i) {
      Block block(*this, range, view, block_at(i), lanes);
      KV_RETURN_IF_ERROR(block.ReduceInside(scratch_.data()));
      KV_RETURN_IF_ERROR(block.Exchange());
      KV_RETURN_IF_ERROR(block.GatherInside());
    }
    return Status();
  }
  if (lane_ != nullptr && !coded) lane_->Count(Algorithm::kPairwise);
  std::vector<std::unique_ptr<Block>> in_flight(std::min(most_in_flight, blocks));
  const size_t slots = in_flight.size();
  for (size_t step = 0; step < blocks + 2 * ahead; ++step) {
    if (step < blocks) {
      auto& block = in_flight[step % slots];
      block = std::make_unique<Block>(*this, range, view, block_at(step), lanes);
      KV_RETURN_IF_ERROR(block->ReduceInside(scratch_.data() + step % slots * slot_bytes));
      KV_RETURN_IF_ERROR(block->Contribute());
    }
    if (step >= ahead && step - ahead < blocks) {
      KV_RETURN_IF_ERROR(in_flight[(step - ahead) % slots]->Reduce());
    }
    if (step >= 2 * ahead) {
      Block& block = *in_flight[(step - 2 * ahead) % slots];
      KV_RETURN_IF_ERROR(block.Collect());
      KV_RETURN_IF_ERROR(block.GatherInside());
    }
  }
  return Status();
}

}  // namespace kolovod
