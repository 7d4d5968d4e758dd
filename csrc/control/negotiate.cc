#include "control/negotiate.h"

#include <cstdio>

namespace kolovod {
namespace {

constexpr size_t kMaxSeen = 1 << 16;

std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(shape[i]);
  }
  if (shape.size() == 1) text += ",";
  return text + ")";
}

std::string Number(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.17g", value);
  return text;
}

std::string Conflict(const char* what, int a, const std::string& value_a, int b, const std::string& value_b) {
  return std::string(what) + " differs: rank " + std::to_string(a) + " has " + value_a + ", rank " +
         std::to_string(b) + " has " + value_b;
}

// Allgather and alltoall join along dimension 0, so that one may differ.
bool ShapesAgree(Verb verb, const std::vector<int64_t>& a, const std::vector<int64_t>& b) {
  if (verb != Verb::kAllgather && verb != Verb::kAlltoall) return a == b;
  if (a.size() != b.size()) return false;
  for (size_t d = 1; d < a.size(); ++d) {
    if (a[d] != b[d]) return false;
  }
  return true;
}

std::string TensorConflict(Verb verb, const Request& first, int rank, const Request& other) {
  for (size_t t = 0; t < first.tensors.size(); ++t) {
    const TensorMeta& a = first.tensors[t];
    const TensorMeta& b = other.tensors[t];
    const std::string where =
        first.tensors.size() > 1 ? " of tensor " + std::to_string(t) + " of the group" : "";
    if (a.dtype != b.dtype) {
      return Conflict(("dtype" + where).c_str(), 0, NameOf(a.dtype), rank, NameOf(b.dtype));
    }
    if (!ShapesAgree(verb, a.shape, b.shape)) {
      return Conflict(("shape" + where).c_str(), 0, ShapeText(a.shape), rank, ShapeText(b.shape));
    }
  }
  return "";
}

std::string FindConflict(const Request& first, int rank, const Request& other) {
  if (first.verb != other.verb) {
    return Conflict("kind of operation", 0, NameOf(first.verb), rank, NameOf(other.verb));
  }
  if (first.tensors.size() != other.tensors.size()) {
    return Conflict("number of tensors", 0, std::to_string(first.tensors.size()), rank,
                    std::to_string(other.tensors.size()));
  }
  if (std::string text = TensorConflict(first.verb, first, rank, other); !text.empty()) return text;
  if (first.op != other.op) {
    return Conflict("reduction op", 0, NameOf(first.op), rank, NameOf(other.op));
  }
  if (first.prescale != other.prescale) {
    return Conflict("prescale factor", 0, Number(first.prescale), rank, Number(other.prescale));
  }
  if (first.postscale != other.postscale) {
    return Conflict("postscale factor", 0, Number(first.postscale), rank, Number(other.postscale));
  }
  if (first.root != other.root) {
    return Conflict("root rank", 0, std::to_string(first.root), rank, std::to_string(other.root));
  }
  return "";
}

}  // namespace

std::string FindMismatch(const std::vector<std::optional<Request>>& by_rank) {
  for (size_t r = 1; r < by_rank.size(); ++r) {
    std::string text = FindConflict(*by_rank[0], static_cast<int>(r), *by_rank[r]);
    if (!text.empty()) return text;
  }
  return "";
}

Negotiator::Negotiator(int size, size_t cache_capacity) : size_(size), cache_capacity_(cache_capacity) {}

std::vector<Response> Negotiator::Offer(int rank, Request request) {
  std::vector<Response> responses;
  const std::string name = request.name;
  if (auto cached = cached_.find(name); cached != cached_.end()) {
    Response forget;
    forget.kind = Response::Kind::kForget;
    forget.name = name;
    forget.id = cached->second;
    responses.push_back(std::move(forget));
    retiring_[name] = cached->second;
    cached_.erase(cached);
  }
  Waiting& waiting = waiting_[name];
  waiting.by_rank.resize(static_cast<size_t>(size_));
  std::optional<Request>& slot = waiting.by_rank[static_cast<size_t>(rank)];
  if (!slot.has_value()) ++waiting.count;
  slot = std::move(request);
  if (waiting.count == size_) {
    responses.push_back(Decide(name, waiting));
    waiting_.erase(name);
  }
  return responses;
}

Response Negotiator::Decide(const std::string& name, const Waiting& waiting) {
  if (auto retiring = retiring_.find(name); retiring != retiring_.end()) {
    free_ids_.push_back(retiring->second);
    released_.push_back(retiring->second);
    retiring_.erase(retiring);
  }
  Response response;
  response.name = name;
  const Request& first = *waiting.by_rank[0];
  if (std::string mismatch = FindMismatch(waiting.by_rank); !mismatch.empty()) {
    response.kind = Response::Kind::kError;
    response.error = std::string(NameOf(first.verb)) + " '" + name + "': " + mismatch +
                     ". Every rank must submit the same operation under one name.";
    return response;
  }
  if (first.verb == Verb::kAllgather) {
    for (size_t t = 0; t < first.tensors.size(); ++t) {
      std::vector<int64_t>& rows = response.rows.emplace_back();
      for (const auto& request : waiting.by_rank) {
        const std::vector<int64_t>& shape = request->tensors[t].shape;
        rows.push_back(shape.empty() ? 1 : shape[0]);  // a scalar is refused before it gets here
      }
    }
  } else if (first.verb == Verb::kAlltoall) {
    std::vector<int64_t>& rows = response.rows.emplace_back();
    for (const auto& request : waiting.by_rank) {
      rows.insert(rows.end(), request->splits.begin(), request->splits.end());
    }
  }
  response.id = AssignId(name, waiting);
  return response;
}

int32_t Negotiator::AssignId(const std::string& name, const Waiting& waiting) {
  for (const auto& request : waiting.by_rank) {
    if (!request->cacheable) return kNoId;
  }
  if (free_ids_.empty() && static_cast<size_t>(next_id_) >= cache_capacity_) return kNoId;
  const uint64_t hash = std::hash<std::string>{}(name);
  if (!seen_.contains(hash)) {
    if (seen_.size() >= kMaxSeen) seen_.clear();
    seen_.insert(hash);
    return kNoId;
  }
  int32_t id = next_id_;
  if (free_ids_.empty()) {
    ++next_id_;
  } else {
    id = free_ids_.back();
    free_ids_.pop_back();
  }
  cached_[name] = id;
  return id;
}

}  // namespace kolovod
