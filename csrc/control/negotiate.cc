#include "control/negotiate.h"

#include <algorithm>
#include <cstdio>

#include "control/line_history.h"

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

bool ShapesAgree(Verb verb, const std::vector<int64_t>& a, const std::vector<int64_t>& b) {
  if (TraitsOf(verb).rows_differ == RowsDiffer::kNo) return a == b;
  if (a.size() != b.size()) return false;
  for (size_t d = 1; d < a.size(); ++d) {
    if (a[d] != b[d]) return false;
  }
  return true;
}

// Two requests under one name, and who sent them.
struct Pair {
  const Request& first;
  const Request& other;
  int first_rank;
  int other_rank;

  std::string Says(const std::string& what, const std::string& a, const std::string& b) const {
    return what + " differs: rank " + std::to_string(first_rank) + " has " + a + ", rank " +
           std::to_string(other_rank) + " has " + b;
  }
};

std::string TensorConflict(const Pair& pair) {
  const auto& [first, other, first_rank, other_rank] = pair;
  for (size_t t = 0; t < first.tensors.size(); ++t) {
    const TensorMeta& a = first.tensors[t];
    const TensorMeta& b = other.tensors[t];
    const std::string where =
        first.tensors.size() > 1 ? " of tensor " + std::to_string(t) + " of the group" : "";
    if (a.dtype != b.dtype) return pair.Says("dtype" + where, NameOf(a.dtype), NameOf(b.dtype));
    if (a.codec != b.codec) return pair.Says("compression" + where, NameOf(a.codec), NameOf(b.codec));
    if (a.device != b.device) return pair.Says("device" + where, NameOf(a.device), NameOf(b.device));
    if (!ShapesAgree(first.verb, a.shape, b.shape)) {
      return pair.Says("shape" + where, ShapeText(a.shape), ShapeText(b.shape));
    }
  }
  return "";
}

// Whether two ranks are at different places of the script. Where only the outer lines differ, they are if
// both ranks have come from both of them: `if rank == 0: train(verbose=True) else: train()` is no fault, also
// where rank 0 does so in some steps only. A line from which no other rank has come yet is told apart by what
// follows.
bool AreElsewhere(const Request& first, const Request& other) {
  const std::string& a = first.called_from;
  const std::string& b = other.called_from;
  if (a.empty() || b.empty() || a == b) return false;
  const auto has_called = [](const Request& request, const std::string& lines) {
    return std::find(request.callers.begin(), request.callers.end(), HashLines(lines)) !=
           request.callers.end();
  };
  return InnermostLine(a) != InnermostLine(b) || (has_called(first, b) && has_called(other, a));
}

std::string FindConflict(const Pair& pair) {
  const auto& [first, other, first_rank, other_rank] = pair;
  if (first.verb != other.verb) {
    return pair.Says("kind of operation", NameOf(first.verb), NameOf(other.verb));
  }
  if (first.tensors.size() != other.tensors.size()) {
    return pair.Says("number of tensors", std::to_string(first.tensors.size()),
                     std::to_string(other.tensors.size()));
  }
  if (std::string text = TensorConflict(pair); !text.empty()) return text;
  if (first.op != other.op) return pair.Says("reduction op", NameOf(first.op), NameOf(other.op));
  if (first.prescale != other.prescale) {
    return pair.Says("prescale factor", Number(first.prescale), Number(other.prescale));
  }
  if (first.postscale != other.postscale) {
    return pair.Says("postscale factor", Number(first.postscale), Number(other.postscale));
  }
  if (first.root != other.root) {
    return pair.Says("root rank", std::to_string(first.root), std::to_string(other.root));
  }
  if (AreElsewhere(first, other)) return "the calling line differs";
  return "";
}

// How the user finds operations that have no name of his.
std::string CallingLines(const Pair& pair) {
  const auto at = [](const Request& request, int rank) {
    const std::string& lines = request.called_from;
    return "rank " + std::to_string(rank) + " calls " + NameOf(request.verb) +
           (lines.empty() ? "" : " at " + lines);
  };
  if (pair.first.called_from.empty() && pair.other.called_from.empty()) return "";
  return ": " + at(pair.first, pair.first_rank) + "; " + at(pair.other, pair.other_rank);
}

// The first of the requests that are there.
size_t FirstOf(const std::vector<std::optional<Request>>& by_rank) {
  size_t r = 0;
  while (!by_rank[r].has_value()) ++r;
  return r;
}

}  // namespace

std::string FindMismatch(const std::vector<std::optional<Request>>& by_rank, const std::vector<int>& ranks) {
  const size_t first = FirstOf(by_rank);
  for (size_t r = first + 1; r < by_rank.size(); ++r) {
    if (!by_rank[r].has_value()) continue;
    const Pair pair{*by_rank[first], *by_rank[r], ranks[first], ranks[r]};
    const std::string text = FindConflict(pair);
    if (!text.empty()) return text + CallingLines(pair);
  }
  return "";
}

Negotiator::Negotiator(std::vector<int> ranks, size_t cache_capacity)
    : ranks_(std::move(ranks)), cache_capacity_(cache_capacity), joined_(ranks_.size()) {}

std::vector<Response> Negotiator::Offer(int rank, Request request) {
  if (request.verb == Verb::kJoin) return Join(rank, request.name);
  std::vector<Response> responses;
  const std::string name = request.name;
  if (auto cached = cached_.find(name); cached != cached_.end()) {
    Response forget;
    forget.kind = Response::Kind::kForget;
    forget.name = name;
    forget.id = cached->second;
    responses.push_back(std::move(forget));
    Retire(name, cached->second);
    cached_.erase(cached);
  }
  Waiting& waiting = waiting_[name];
  waiting.by_rank.resize(ranks_.size());
  std::optional<Request>& slot = waiting.by_rank[static_cast<size_t>(rank)];
  if (!slot.has_value()) ++waiting.count;
  slot = std::move(request);
  if (static_cast<size_t>(waiting.count + joined_count_) == ranks_.size()) {
    responses.push_back(Decide(name, waiting));
    waiting_.erase(name);
  }
  return responses;
}

bool Negotiator::Lacks(const std::string& name, int rank) const {
  const auto waiting = waiting_.find(name);
  return waiting != waiting_.end() && !waiting->second.by_rank[static_cast<size_t>(rank)].has_value();
}

std::string Negotiator::FindFault(int rank, const Request& request) const {
  const auto r = static_cast<size_t>(rank);
  if (!joined_[r]) return "";
  return "rank " + std::to_string(ranks_[r]) + " has joined, and then announces " + NameOf(request.verb) +
         " '" + request.name + "' before all have joined";
}

// A rank joins with nothing pending, so it is missing in all that waits.
std::vector<Response> Negotiator::Join(int rank, const std::string& name) {
  std::vector<Response> responses;
  joined_[static_cast<size_t>(rank)] = true;
  if (static_cast<size_t>(++joined_count_) == ranks_.size()) {
    joined_.assign(ranks_.size(), false);
    joined_count_ = 0;
    Response all;
    all.name = name;
    all.rows = {{rank}};
    responses.push_back(std::move(all));
    return responses;
  }
  Response forget;
  forget.kind = Response::Kind::kForgetAll;
  responses.push_back(std::move(forget));
  for (const auto& [cached, id] : cached_) Retire(cached, id);
  cached_.clear();
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    const bool complete = static_cast<size_t>(it->second.count + joined_count_) == ranks_.size();
    if (complete) responses.push_back(Decide(it->first, it->second));
    it = complete ? waiting_.erase(it) : std::next(it);
  }
  return responses;
}

// Why the operation cannot be executed, or empty.
std::string Negotiator::FindReason(const Waiting& waiting) const {
  const Request& first = *waiting.by_rank[FirstOf(waiting.by_rank)];
  if (std::string text = FindMismatch(waiting.by_rank, ranks_); !text.empty()) {
    if (first.called_from.empty())
      return text + ". Every rank must submit the same operation under one name.";
    return text +
           ". Operations without a name are matched by their order: see whether a rank makes one more or one "
           "less before. If other lines are meant, give both the same name, or set KOLOVOD_CALL_LINES=0.";
  }
  if (joined_count_ == 0 || TraitsOf(first.verb).allows_joined) return "";
  std::string who;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    if (joined_[r]) who += (who.empty() ? "" : ", ") + std::to_string(ranks_[r]);
  }
  return "rank " + who + " has joined, and of those that have no data left only an allreduce can do without.";
}

Response Negotiator::Decide(const std::string& name, const Waiting& waiting) {
  if (auto retiring = retiring_.find(name); retiring != retiring_.end()) {
    free_ids_.push_back(retiring->second);
    released_.push_back(retiring->second);
    retiring_.erase(retiring);
  }
  Response response;
  response.name = name;
  const Request& first = *waiting.by_rank[FirstOf(waiting.by_rank)];
  if (std::string reason = FindReason(waiting); !reason.empty()) {
    response.kind = Response::Kind::kError;
    response.error = std::string(NameOf(first.verb)) + " '" + name + "': " + reason;
    return response;
  }
  if (joined_count_ > 0) {
    response.request = EncodeRequest(first);
    return response;
  }
  std::vector<std::vector<int64_t>> by_rank;
  for (const auto& request : waiting.by_rank) by_rank.push_back(OwnRows(*request));
  SetRows(first.verb, by_rank, &response.rows, &response.splits);
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
