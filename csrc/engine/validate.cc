#include "engine/validate.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace kolovod {

size_t ElementsOf(const TensorMeta& meta) {
  size_t count = 1;
  for (int64_t dim : meta.shape) count *= static_cast<size_t>(dim);
  return count;
}

namespace {

// Results of one tensor of a group would be the input of another, in an order that nobody promises.
Status ValidateApart(const std::string& what, const std::vector<SubmittedTensor>& tensors,
                     bool makes_outputs) {
  struct Span {
    const char *begin, *end;
    size_t index;
    bool written;
  };
  std::vector<Span> spans;
  for (size_t t = 0; t < tensors.size(); ++t) {
    const SubmittedTensor& tensor = tensors[t];
    const size_t bytes = ElementsOf(tensor.meta) * SizeOf(tensor.meta.dtype);
    const size_t out_bytes = makes_outputs ? tensor.out_bytes : bytes;
    const char* in = static_cast<const char*>(tensor.in);
    const char* out = static_cast<const char*>(tensor.out);
    const bool within = in >= out && in + bytes <= out + out_bytes;  // of an allgather
    if (out_bytes > 0) spans.push_back({out, out + out_bytes, t, true});
    if (bytes > 0 && !within) spans.push_back({in, in + bytes, t, false});
  }
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  const Span* last = nullptr;     // of those before, the one that reaches furthest
  const Span* written = nullptr;  // the same of those that are written
  for (const Span& span : spans) {
    const Span* other = span.written ? last : written;
    if (other != nullptr && other->end > span.begin) {
      return Status(Code::kInvalidArgument, what + "tensors " +
                                                std::to_string(std::min(other->index, span.index)) + " and " +
                                                std::to_string(std::max(other->index, span.index)) +
                                                " of the group share memory; give each tensor once");
    }
    if (last == nullptr || span.end > last->end) last = &span;
    if (span.written && (written == nullptr || span.end > written->end)) written = &span;
  }
  return Status();
}

Status ValidateAdasum(const std::string& what, const Request& request,
                      const std::vector<SubmittedTensor>& tensors, int size) {
  if (request.verb != Verb::kAllreduce) {
    return Status(Code::kInvalidArgument, what + "op Adasum is for allreduce only; use Average or Sum");
  }
  if ((size & (size - 1)) != 0) {
    return Status(Code::kInvalidArgument,
                  what + "op Adasum combines ranks in pairs of pairs: it needs 2, 4, 8, ... " +
                      "ranks, not " + std::to_string(size) + "; use Average");
  }
  for (const SubmittedTensor& tensor : tensors) {
    const DTypeTraits& dtype = TraitsOf(tensor.meta.dtype);
    if (!dtype.adasum) {
      return Status(Code::kInvalidArgument, what + "op Adasum needs a floating dtype, not " + dtype.name);
    }
  }
  return Status();
}

// The sum of an Average is kept in 64 bits, where int64 may not fit: a wrong mean would be silent.
Status ValidateMean(const std::string& what, const Request& request, const SubmittedTensor& tensor,
                    int size) {
  const bool is_risky = request.op == Op::kAverage && tensor.meta.dtype == DType::kInt64 &&
                        tensor.meta.device == Device::kHost && size > 1;
  if (!is_risky) return Status();
  const auto* values = static_cast<const int64_t*>(tensor.in);
  const int64_t most = INT64_MAX / size;
  const size_t count = ElementsOf(tensor.meta);
  for (size_t i = 0; i < count; ++i) {
    if (values[i] <= most && values[i] >= -most) continue;
    return Status(Code::kInvalidArgument, what + "the value " + std::to_string(values[i]) +
                                              " is too large for an Average of int64 over " +
                                              std::to_string(size) +
                                              " ranks, whose sum must fit 64 bits; convert to float64");
  }
  return Status();
}

bool MayBeCoded(const Request& request) {
  return request.verb == Verb::kAllreduce && (request.op == Op::kSum || request.op == Op::kAverage);
}

Status ValidateCodec(const std::string& what, const Request& request, Codec codec) {
  if (codec == Codec::kNone || MayBeCoded(request)) return Status();
  const std::string asked =
      request.verb == Verb::kAllreduce ? std::string("op ") + NameOf(request.op) : NameOf(request.verb);
  return Status(Code::kInvalidArgument, what + "compression " + NameOf(codec) +
                                            " is for allreduce by Sum or Average, not for " + asked +
                                            "; leave it out");
}

Status ValidateDevice(const std::string& what, const Request& request,
                      const std::vector<SubmittedTensor>& tensors) {
  for (const SubmittedTensor& tensor : tensors) {
    const SubmittedTensor& first = tensors.front();
    if (tensor.meta.device != first.meta.device || tensor.gpu != first.gpu) {
      return Status(Code::kInvalidArgument,
                    what +
                        "the tensors of a group are on several devices; give those of one GPU, or those "
                        "in host memory");
    }
    if (tensor.meta.device == Device::kHost) continue;
    if (request.op == Op::kAdasum) {
      return Status(Code::kInvalidArgument, what + "op Adasum works in host memory; give tensors there");
    }
    if (tensor.out_bytes != 0) {
      return Status(Code::kInvalidArgument,
                    what + "memory for a result was given on a GPU; leave out_bytes 0");
    }
  }
  return Status();
}

Status ValidateSplits(const std::string& what, const Request& request,
                      const std::vector<SubmittedTensor>& tensors, const std::vector<int>& ranks) {
  const auto size = static_cast<int>(ranks.size());
  if (request.splits.size() != static_cast<size_t>(size)) {
    return Status(Code::kInvalidArgument, what + std::to_string(request.splits.size()) + " splits for " +
                                              std::to_string(size) + " ranks; give one for each");
  }
  int64_t left = tensors.front().meta.shape.front();
  for (int r = 0; r < size; ++r) {
    const int64_t rows = request.splits[static_cast<size_t>(r)];
    if (rows < 0 || rows > left) {
      return Status(Code::kInvalidArgument,
                    what + "split " + std::to_string(rows) + " for rank " +
                        std::to_string(ranks[static_cast<size_t>(r)]) + ", but " + std::to_string(left) +
                        " of " + std::to_string(tensors.front().meta.shape.front()) +
                        " rows are left; splits are at least 0 and together at most the first dimension");
    }
    left -= rows;
  }
  return Status();
}

Status ValidateTransfer(const Request& request, const std::vector<SubmittedTensor>& tensors, int size) {
  const std::string what = std::string(NameOf(request.verb)) + ": ";
  const bool receives = request.verb == Verb::kRecv;
  if (request.root < (receives ? -1 : 0) || request.root >= size) {
    return Status(Code::kInvalidArgument, what + "rank " + std::to_string(request.root) + " is not in 0.." +
                                              std::to_string(size - 1) +
                                              (receives ? "; -1 stands for any" : ""));
  }
  if (tensors.size() == 1 && tensors.front().meta.device != Device::kHost) {
    return Status(Code::kInvalidArgument,
                  what + "messages between two ranks are of tensors in host memory; give tensor.cpu()");
  }
  if (tensors.size() != 1 || request.splits.size() != 1) {
    return Status(Code::kInvalidArgument, what + std::to_string(tensors.size()) + " tensors and " +
                                              std::to_string(request.splits.size()) +
                                              " tags; give one of each");
  }
  if (request.splits.front() < 0) {
    return Status(Code::kInvalidArgument,
                  what + "tag " + std::to_string(request.splits.front()) + " is negative; tags count from 0");
  }
  return Status();
}

}  // namespace

Status Validate(const Request& request, const std::vector<SubmittedTensor>& tensors,
                const std::vector<int>& ranks) {
  const auto size = static_cast<int>(ranks.size());
  const VerbTraits& verb = TraitsOf(request.verb);
  if (verb.is_transfer) return ValidateTransfer(request, tensors, size);
  const std::string what = std::string(NameOf(request.verb)) + " '" + request.name + "': ";
  if (request.root < 0 || request.root >= size) {
    return Status(Code::kInvalidArgument, what + "root rank " + std::to_string(request.root) +
                                              " is not in 0.." + std::to_string(size - 1));
  }
  if (request.op == Op::kAdasum && verb.reduces) {
    KV_RETURN_IF_ERROR(ValidateAdasum(what, request, tensors, size));
  }
  for (double factor : {request.prescale, request.postscale}) {
    if (!std::isfinite(factor)) {
      return Status(Code::kInvalidArgument, what + "a factor is " + std::to_string(factor) +
                                                "; prescale and postscale factors are finite numbers");
    }
  }
  KV_RETURN_IF_ERROR(ValidateDevice(what, request, tensors));
  if (tensors.size() > 1) KV_RETURN_IF_ERROR(ValidateApart(what, tensors, verb.makes_outputs));
  for (const SubmittedTensor& tensor : tensors) {
    const DTypeTraits& dtype = TraitsOf(tensor.meta.dtype);
    KV_RETURN_IF_ERROR(ValidateCodec(what, request, tensor.meta.codec));
    if (verb.reduces) KV_RETURN_IF_ERROR(ValidateMean(what, request, tensor, size));
    if (tensor.meta.shape.size() > kMaxDims) {
      return Status(Code::kInvalidArgument, what + std::to_string(tensor.meta.shape.size()) +
                                                " dimensions; at most " + std::to_string(kMaxDims));
    }
    if (verb.makes_outputs && tensor.meta.shape.empty()) {
      return Status(Code::kInvalidArgument,
                    what + "a scalar has no first dimension to join or split along; reshape it to (1,)");
    }
    if (verb.reduces && !dtype.scales &&
        (request.op == Op::kAverage || request.prescale != 1.0 || request.postscale != 1.0)) {
      return Status(Code::kInvalidArgument,
                    what + dtype.name + " cannot be averaged or scaled; use Sum (or), Min (and) or Max (or)");
    }
  }
  return verb.rows_differ == RowsDiffer::kSplits ? ValidateSplits(what, request, tensors, ranks) : Status();
}

bool IsSound(const Request& request, int size) {
  const VerbTraits& verb = TraitsOf(request.verb);
  if (verb.is_transfer || request.root < 0 || request.root >= size) return false;
  for (const TensorMeta& tensor : request.tensors) {
    if (verb.makes_outputs && tensor.shape.empty()) return false;
    if (tensor.codec != Codec::kNone && !MayBeCoded(request)) return false;
  }
  if (verb.rows_differ != RowsDiffer::kSplits) return request.splits.empty();
  if (request.tensors.size() != 1 || request.splits.size() != static_cast<size_t>(size)) return false;
  int64_t left = request.tensors.front().shape.front();
  for (int64_t rows : request.splits) {
    if (rows < 0 || rows > left) return false;
    left -= rows;
  }
  return true;
}

namespace {

// What `rows` of a tensor take, together; false: more than an int64 counts.
bool AreCountable(const std::vector<int64_t>& rows, const TensorMeta& tensor) {
  TensorMeta row = tensor;
  row.shape.front() = 1;
  const auto row_bytes = static_cast<int64_t>(ElementsOf(row) * SizeOf(row.dtype));
  int64_t total = 0;
  for (int64_t count : rows) {
    int64_t bytes;
    if (count < 0 || __builtin_mul_overflow(count, row_bytes, &bytes) ||
        __builtin_add_overflow(total, bytes, &total)) {
      return false;
    }
  }
  return true;
}

}  // namespace

bool RowsFit(const Request& request, const std::vector<std::vector<int64_t>>& rows, int rank, int size) {
  const auto n = static_cast<size_t>(size);
  const auto self = static_cast<size_t>(rank);
  if (request.verb == Verb::kJoin) {
    return rows.size() == 1 && rows[0].size() == 1 && rows[0][0] >= 0;
  }
  if (TraitsOf(request.verb).rows_differ == RowsDiffer::kFirstDimension) {
    if (rows.size() != request.tensors.size()) return false;
    for (size_t t = 0; t < rows.size(); ++t) {
      const TensorMeta& tensor = request.tensors[t];
      if (rows[t].size() != n || rows[t][self] != tensor.shape.front() || !AreCountable(rows[t], tensor)) {
        return false;
      }
    }
    return true;
  }
  return rows.empty();
}

bool SplitsFit(const Request& request, const Splits* splits, const Topology& topology) {
  if (TraitsOf(request.verb).rows_differ != RowsDiffer::kSplits) return splits == nullptr;
  if (splits == nullptr || splits->size() != topology.size() || splits->ranks() != topology.local_ranks ||
      !AreCountable(splits->numbers(), request.tensors.front())) {
    return false;
  }
  for (int to = 0; to < topology.size(); ++to) {
    if (splits->sent(topology.rank, to) != request.splits[static_cast<size_t>(to)]) return false;
  }
  return true;
}

}  // namespace kolovod
