#include "control/message.h"

#include <utility>

#include "control/bytes.h"

namespace kolovod {
namespace {

void PutInts(Writer& w, const std::vector<int64_t>& values) {
  w.Put(static_cast<uint32_t>(values.size()));
  for (int64_t v : values) w.Put(v);
}

// Rows are small numbers mostly, and there are many.
void PutSplits(Writer& w, const Splits* splits) {
  w.Put(static_cast<uint32_t>(splits == nullptr ? 0 : splits->size()));
  if (splits == nullptr) return;
  w.Put(static_cast<uint32_t>(splits->ranks().size()));
  for (const int rank : splits->ranks()) w.PutVarint(static_cast<uint64_t>(rank));
  w.PutVarint(static_cast<uint64_t>(splits->total()));
  for (const int64_t rows : splits->numbers()) w.PutVarint(static_cast<uint64_t>(rows));
}

bool GetSplits(Reader& r, std::shared_ptr<const Splits>* splits) {
  uint32_t size, count;
  if (!r.Get(&size) || size > INT32_MAX) return false;
  if (size == 0) return true;
  if (!r.GetCount(1, &count) || count == 0 || count > size || Splits::CountOf(size, count) > r.left()) {
    return false;
  }
  std::vector<int> ranks(count);
  for (int& rank : ranks) {
    int64_t value;
    if (!r.GetVarint(&value) || value >= size) return false;
    rank = static_cast<int>(value);
  }
  int64_t total;
  if (!r.GetVarint(&total)) return false;
  std::vector<int64_t> numbers(Splits::CountOf(size, count));
  for (int64_t& rows : numbers) {
    if (!r.GetVarint(&rows)) return false;
  }
  std::optional<Splits> read =
      Splits::Of(static_cast<int>(size), std::move(ranks), total, std::move(numbers));
  if (!read) return false;
  *splits = std::make_shared<const Splits>(*std::move(read));
  return true;
}

// No dimension is ever negative here. What has more bytes than an int64 can count cannot be anywhere, and
// would wrap round where bytes are multiplied; so would the other dimensions of what is empty.
bool IsCountable(const TensorMeta& tensor) {
  auto bytes = static_cast<int64_t>(SizeOf(tensor.dtype));
  for (int64_t dim : tensor.shape) {
    if (dim > 0 && __builtin_mul_overflow(bytes, dim, &bytes)) return false;
  }
  return true;
}

}  // namespace

std::vector<int64_t> OwnRows(const Request& request) {
  // The splits are empty unless the verb has some.
  if (TraitsOf(request.verb).rows_differ != RowsDiffer::kFirstDimension) return request.splits;
  std::vector<int64_t> rows;
  for (const TensorMeta& tensor : request.tensors)
    rows.push_back(tensor.shape.empty() ? 1 : tensor.shape.front());
  return rows;
}

void SetRows(Verb verb, const std::vector<std::vector<int64_t>>& by_rank,
             std::vector<std::vector<int64_t>>* rows, std::shared_ptr<const Splits>* splits) {
  const RowsDiffer differ = TraitsOf(verb).rows_differ;
  if (differ == RowsDiffer::kSplits) *splits = std::make_shared<const Splits>(Splits::OfAll(by_rank));
  if (differ != RowsDiffer::kFirstDimension) return;
  rows->assign(by_rank.front().size(), {});
  for (const std::vector<int64_t>& own : by_rank) {
    for (size_t t = 0; t < own.size(); ++t) (*rows)[t].push_back(own[t]);
  }
}

std::string EncodeRequest(const Request& request) {
  Writer w;
  w.PutString(request.name);
  w.Put(static_cast<uint8_t>(request.cacheable));
  w.Put(static_cast<uint8_t>(request.verb));
  w.Put(static_cast<uint8_t>(request.op));
  w.Put(request.prescale);
  w.Put(request.postscale);
  w.Put(request.root);
  PutInts(w, request.splits);
  w.Put(static_cast<uint32_t>(request.tensors.size()));
  for (const TensorMeta& tensor : request.tensors) {
    w.Put(static_cast<uint8_t>(tensor.dtype));
    w.Put(static_cast<uint8_t>(tensor.device));
    w.Put(static_cast<uint8_t>(tensor.codec));
    PutInts(w, tensor.shape);
  }
  w.PutString(request.called_from);
  PutInts(w, request.callers);
  return w.Take();
}

std::optional<Request> DecodeRequest(std::string_view bytes) {
  Reader r(bytes);
  Request request;
  uint8_t cacheable;
  uint32_t tensors;
  if (!r.GetString(&request.name) || !r.Get(&cacheable) || cacheable > 1 ||
      !r.GetEnum(kVerbCount, &request.verb) || !r.GetEnum(kOpCount, &request.op) ||
      !r.Get(&request.prescale) || !r.Get(&request.postscale) || !r.Get(&request.root) ||
      !r.GetInts(&request.splits) || !r.GetCount(7, &tensors)) {
    return std::nullopt;
  }
  request.cacheable = cacheable != 0;
  request.tensors.resize(tensors);
  for (TensorMeta& tensor : request.tensors) {
    if (!r.GetEnum(kDTypeCount, &tensor.dtype) || !r.GetEnum(kDeviceCount, &tensor.device) ||
        tensor.device != request.tensors.front().device || !r.GetEnum(kCodecCount, &tensor.codec) ||
        !r.GetInts(&tensor.shape) || tensor.shape.size() > kMaxDims || !IsCountable(tensor)) {
      return std::nullopt;
    }
  }
  if (!r.GetString(&request.called_from) || !r.GetInts(&request.callers) || !r.AtEnd()) return std::nullopt;
  return request;
}

std::string EncodeNote(const Note& note) {
  Writer w;
  w.Put(static_cast<uint8_t>(note.kind));
  w.Put(note.rank);
  w.Put(note.number);
  w.Put(note.end);
  w.PutString(note.body);
  return w.Take();
}

std::optional<Note> DecodeNote(std::string_view bytes) {
  Reader r(bytes);
  Note note;
  if (!r.GetEnum(Note::kKindCount, &note.kind) || !r.Get(&note.rank) || !r.Get(&note.number) ||
      !r.Get(&note.end) || !r.GetString(&note.body) || !r.AtEnd()) {
    return std::nullopt;
  }
  return note;
}

std::string EncodeResponse(const Response& response) {
  Writer w;
  w.Put(static_cast<uint8_t>(response.kind));
  w.PutString(response.name);
  w.Put(response.id);
  w.PutString(response.error);
  w.PutString(response.request);
  w.Put(static_cast<uint32_t>(response.rows.size()));
  for (const auto& rows : response.rows) PutInts(w, rows);
  PutSplits(w, response.splits.get());
  return w.Take();
}

std::optional<Response> DecodeResponse(std::string_view bytes) {
  Reader r(bytes);
  Response response;
  uint32_t tensors;
  if (!r.GetEnum(Response::kKindCount, &response.kind) || !r.GetString(&response.name) ||
      !r.Get(&response.id) || !r.GetString(&response.error) || !r.GetString(&response.request) ||
      !r.GetCount(4, &tensors)) {
    return std::nullopt;
  }
  response.rows.resize(tensors);
  for (auto& rows : response.rows) {
    if (!r.GetInts(&rows)) return std::nullopt;
  }
  if (!GetSplits(r, &response.splits)) return std::nullopt;
  if (!r.AtEnd()) return std::nullopt;
  return response;
}

}  // namespace kolovod
