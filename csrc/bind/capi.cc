#include "bind/capi.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/thread_annotations.h"

using kolovod::Code;
using kolovod::DType;
using kolovod::Engine;
using kolovod::Op;
using kolovod::Operation;
using kolovod::OperationPtr;
using kolovod::Request;
using kolovod::Status;
using kolovod::SubmittedTensor;
using kolovod::TensorCount;
using kolovod::Verb;

struct kolovod_engine {
  kolovod::Mutex mutex;
  std::shared_ptr<Engine> engine GUARDED_BY(mutex);  // null: detached
  kolovod_engine* next = nullptr;                    // of all that were ever made
};

struct kolovod_memory {
  kolovod::OutputMemory data;
};

namespace {

std::atomic<kolovod_engine*> all_handles{nullptr};
// What is current, by number. Entries are never removed.
struct Published {
  int process_set;
  std::atomic<kolovod_engine*> handle;
  Published* next;
};
std::atomic<Published*> all_published{nullptr};
thread_local std::string error_message;

static_assert(static_cast<int>(Code::kInternal) == KOLOVOD_INTERNAL);
static_assert(static_cast<int>(Code::kLate) == KOLOVOD_LATE);
static_assert(static_cast<int>(DType::kBFloat16) == KOLOVOD_BFLOAT16 &&
              kolovod::kDTypeCount == KOLOVOD_BFLOAT16 + 1);
static_assert(static_cast<int>(Op::kProduct) == KOLOVOD_PRODUCT && kolovod::kOpCount == KOLOVOD_PRODUCT + 1);
static_assert(static_cast<int>(kolovod::Codec::kInt4) == KOLOVOD_INT4_BLOCKS &&
              kolovod::kCodecCount == KOLOVOD_INT4_BLOCKS + 1);
static_assert(static_cast<int>(Verb::kRecv) == KOLOVOD_RECV && kolovod::kVerbCount == KOLOVOD_RECV + 1);

// The first version's structs: no caller has smaller ones.
constexpr size_t kRequestBytes1 = offsetof(kolovod_request, split_count) + sizeof(size_t);
constexpr size_t kRequestBytes2 = offsetof(kolovod_request, output_bytes) + sizeof(size_t*);
constexpr size_t kRequestBytes3 = offsetof(kolovod_request, called_from) + sizeof(char*);
constexpr size_t kTensorBytes1 = offsetof(kolovod_tensor, dtype) + sizeof(int32_t);

Published* FindPublished(int process_set) {
  Published* at = all_published.load();
  while (at != nullptr && at->process_set != process_set) at = at->next;
  return at;
}

int Report(const Status& status) {
  error_message = status.message();
  return static_cast<int>(status.code());
}

Status Invalid(std::string message) { return Status(Code::kInvalidArgument, std::move(message)); }

Status Find(kolovod_engine* handle, std::shared_ptr<Engine>* engine) {
  if (handle == nullptr) return Invalid("engine is NULL");
  kolovod::MutexLock lock(handle->mutex);
  *engine = handle->engine;
  return *engine != nullptr ? Status() : Status(Code::kShutDown, "the world that this handle was of is over");
}

Status ReadTensor(const kolovod_tensor& from, size_t index, bool makes_outputs, size_t output_bytes,
                  SubmittedTensor* to) {
  const std::string what = "tensor " + std::to_string(index) + ": ";
  if (from.dtype < 0 || from.dtype >= kolovod::kDTypeCount) {
    return Invalid(what + "dtype " + std::to_string(from.dtype) + " is unknown; see kolovod_dtype");
  }
  if (from.ndim < 0 || (from.ndim > 0 && from.shape == nullptr)) {
    return Invalid(what + "ndim is " + std::to_string(from.ndim) + (from.shape ? "" : " and shape is NULL"));
  }
  to->meta.dtype = static_cast<DType>(from.dtype);
  to->meta.shape.assign(from.shape, from.shape + from.ndim);
  bool empty = false;
  for (int64_t dim : to->meta.shape) {
    if (dim < 0) return Invalid(what + "dimension " + std::to_string(dim) + " is negative");
    empty = empty || dim == 0;
  }
  if (from.codec < 0 || from.codec >= kolovod::kCodecCount) {
    return Invalid(what + "codec " + std::to_string(from.codec) + " is unknown; see kolovod_codec");
  }
  to->meta.codec = static_cast<kolovod::Codec>(from.codec);
  to->in = from.input;
  to->out = makes_outputs && output_bytes == 0 ? nullptr : from.output;
  to->out_bytes = makes_outputs ? output_bytes : 0;
  if (to->out_bytes > 0 && to->out == nullptr)
    return Invalid(what + "output_bytes is given, but output is NULL");
  if (empty) return Status();
  if (to->in == nullptr) return Invalid(what + "input is NULL");
  if (to->out == nullptr && !makes_outputs) return Invalid(what + "output is NULL");
  return Status();
}

Status CheckTensorCount(Verb verb, size_t count) {
  const char* need = nullptr;
  switch (TraitsOf(verb).tensors) {
    case TensorCount::kNone:
      if (count != 0) need = "none";
      break;
    case TensorCount::kOne:
      if (count != 1) need = "exactly one";
      break;
    case TensorCount::kAny:
      if (count == 0) need = "at least one";
      break;
  }
  if (need == nullptr) return Status();
  return Invalid(std::string(NameOf(verb)) + " with " + std::to_string(count) + " tensors: needs " + need);
}

Status Read(const kolovod_request* from, Request* request, std::vector<SubmittedTensor>* tensors) {
  if (from == nullptr) return Invalid("request is NULL");
  if (from->struct_size < kRequestBytes1 || from->tensor_size < kTensorBytes1) {
    return Invalid("struct_size is " + std::to_string(from->struct_size) + " and tensor_size " +
                   std::to_string(from->tensor_size) + ": set them to the sizes of the structs");
  }
  if (from->verb < 0 || from->verb >= kolovod::kVerbCount) {
    return Invalid("verb " + std::to_string(from->verb) + " is unknown; see kolovod_verb");
  }
  if (from->op < 0 || from->op >= kolovod::kOpCount) {
    return Invalid("op " + std::to_string(from->op) + " is unknown; see kolovod_op");
  }
  request->verb = static_cast<Verb>(from->verb);
  request->op = static_cast<Op>(from->op);
  request->root = from->root;
  request->prescale = from->prescale;
  request->postscale = from->postscale;
  if (from->name != nullptr) request->name = from->name;
  if (from->struct_size >= kRequestBytes3 && from->called_from != nullptr) {
    request->called_from = from->called_from;
  }
  KV_RETURN_IF_ERROR(CheckTensorCount(request->verb, from->tensor_count));
  if (from->tensor_count > 0 && from->tensors == nullptr) return Invalid("tensors is NULL");
  if (from->split_count > 0 && from->splits == nullptr) return Invalid("splits is NULL");
  request->splits.assign(from->splits, from->splits + from->split_count);
  tensors->resize(from->tensor_count);
  const bool makes_outputs = TraitsOf(request->verb).makes_outputs;
  const size_t* output_bytes = from->struct_size >= kRequestBytes2 ? from->output_bytes : nullptr;
  const char* at = reinterpret_cast<const char*>(from->tensors);
  for (size_t t = 0; t < tensors->size(); ++t, at += from->tensor_size) {
    kolovod_tensor tensor{};
    std::memcpy(&tensor, at,
                std::min(from->tensor_size, sizeof(tensor)));  // an older caller has smaller ones
    if (request->verb == Verb::kSend) tensor.output = const_cast<void*>(tensor.input);
    if (request->verb == Verb::kRecv) tensor.input = tensor.output;
    const size_t bytes = output_bytes == nullptr ? 0 : output_bytes[t];
    KV_RETURN_IF_ERROR(ReadTensor(tensor, t, makes_outputs, bytes, &(*tensors)[t]));
  }
  return Status();
}

Status Submit(kolovod_engine* handle, const kolovod_request* from, kolovod_callback callback, void* user_data,
              uint64_t* operation) {
  std::shared_ptr<Engine> engine;
  KV_RETURN_IF_ERROR(Find(handle, &engine));
  if (callback == nullptr && operation == nullptr) return Invalid("callback and operation are both NULL");
  Request request;
  std::vector<SubmittedTensor> tensors;
  KV_RETURN_IF_ERROR(Read(from, &request, &tensors));
  Engine::Callback on_done;
  if (callback != nullptr) {
    on_done = [callback, user_data](const Operation& op) {
      callback(user_data, static_cast<int>(op.status.code()), op.status.message().c_str());
    };
  }
  return engine->Submit(std::move(request), std::move(tensors), /*blocking=*/false, operation,
                        std::move(on_done), int64_t{1000} * from->drive_us);
}

Status Release(kolovod_engine* handle, uint64_t operation) {
  std::shared_ptr<Engine> engine;
  KV_RETURN_IF_ERROR(Find(handle, &engine));
  bool done = false;
  KV_RETURN_IF_ERROR(engine->Release(operation, &done));
  return done ? Status() : Status(Code::kTimeout, "the operation is still pending: wait for it first");
}

Status Completed(kolovod_engine* handle, uint64_t operation, OperationPtr* op) {
  std::shared_ptr<Engine> engine;
  KV_RETURN_IF_ERROR(Find(handle, &engine));
  *op = engine->Find(operation);
  if (*op == nullptr || !(*op)->done.load(std::memory_order_acquire)) {
    return Invalid("operation " + std::to_string(operation) + " is unknown or still pending");
  }
  return (*op)->status;
}

// Whether output `index` is there to be taken.
Status HasOutput(const Operation& op, size_t index) {
  if (index >= op.buffers.size()) return Invalid("no output of this number was made");
  return op.buffers[index].data == nullptr ? Invalid("the output was taken before") : Status();
}

int Place(kolovod_engine* handle, int (*place)(const kolovod::Topology&)) {
  std::shared_ptr<Engine> engine;
  return Report(Find(handle, &engine)) == KOLOVOD_OK ? place(engine->topology()) : -1;
}

}  // namespace

namespace kolovod {

kolovod_engine* Attach(std::shared_ptr<Engine> engine) {
  auto* handle = new kolovod_engine;
  {
    kolovod::MutexLock lock(handle->mutex);
    handle->engine = std::move(engine);
  }
  handle->next = all_handles.load();
  while (!all_handles.compare_exchange_weak(handle->next, handle)) {
  }
  return handle;
}

void Detach(kolovod_engine* handle) {
  std::shared_ptr<Engine> last;  // destroyed without the lock
  kolovod::MutexLock lock(handle->mutex);
  last.swap(handle->engine);
}

void Publish(int process_set, kolovod_engine* handle) {
  if (Published* known = FindPublished(process_set); known != nullptr) return known->handle.store(handle);
  auto* added = new Published{process_set, {handle}, all_published.load()};
  while (!all_published.compare_exchange_weak(added->next, added)) {
  }
}

}  // namespace kolovod

extern "C" {

uint32_t kolovod_abi_version(void) { return KOLOVOD_ABI_VERSION; }

const char* kolovod_error_message(void) { return error_message.c_str(); }

kolovod_engine* kolovod_current(int32_t process_set) {
  const Published* known = FindPublished(process_set);
  kolovod_engine* handle = known == nullptr ? nullptr : known->handle.load();
  if (handle == nullptr) {
    error_message = process_set == 0 ? "there is no world in this process: call kolovod.init() first"
                                     : "process set " + std::to_string(process_set) +
                                           " is not part of this world, or this rank is not in it";
  }
  return handle;
}

int kolovod_rank(kolovod_engine* handle) {
  std::shared_ptr<Engine> engine;
  return Report(Find(handle, &engine)) == KOLOVOD_OK ? engine->rank() : -1;
}

int kolovod_size(kolovod_engine* handle) {
  std::shared_ptr<Engine> engine;
  return Report(Find(handle, &engine)) == KOLOVOD_OK ? engine->size() : -1;
}

int kolovod_local_rank(kolovod_engine* handle) {
  return Place(handle, [](const kolovod::Topology& topology) { return topology.local_rank; });
}

int kolovod_local_size(kolovod_engine* handle) {
  return Place(handle, [](const kolovod::Topology& topology) { return topology.local_size(); });
}

int kolovod_cross_rank(kolovod_engine* handle) {
  return Place(handle, [](const kolovod::Topology& topology) { return topology.cross_rank; });
}

int kolovod_cross_size(kolovod_engine* handle) {
  return Place(handle, [](const kolovod::Topology& topology) { return topology.cross_size; });
}

int kolovod_submit(kolovod_engine* handle, const kolovod_request* request, kolovod_callback callback,
                   void* user_data, uint64_t* operation) {
  return Report(Submit(handle, request, callback, user_data, operation));
}

int kolovod_wait(kolovod_engine* handle, uint64_t operation, double timeout_s) {
  std::shared_ptr<Engine> engine;
  Status status = Find(handle, &engine);
  if (status.ok() && std::isnan(timeout_s)) status = Invalid("timeout_s is not a number");
  return Report(status.ok() ? engine->Wait(operation, timeout_s, nullptr) : status);
}

int kolovod_poll(kolovod_engine* handle, uint64_t operation, int* done) {
  std::shared_ptr<Engine> engine;
  Status status = Find(handle, &engine);
  bool is_done = false;
  if (status.ok()) status = engine->Poll(operation, &is_done);
  *done = is_done ? 1 : 0;
  return Report(status);
}

int kolovod_release(kolovod_engine* handle, uint64_t operation) { return Report(Release(handle, operation)); }

int kolovod_output(kolovod_engine* handle, uint64_t operation, size_t index, const void** data,
                   size_t* bytes) {
  OperationPtr op;
  Status status = Completed(handle, operation, &op);
  if (status.ok()) status = HasOutput(*op, index);
  if (status.ok()) {
    *data = op->buffers[index].data.get();
    *bytes = op->buffers[index].bytes;
  }
  return Report(status);
}

int kolovod_take_output(kolovod_engine* handle, uint64_t operation, size_t index, kolovod_memory** memory,
                        void** data, size_t* bytes) {
  OperationPtr op;
  Status status = Completed(handle, operation, &op);
  if (status.ok()) status = HasOutput(*op, index);
  if (status.ok()) {
    *memory = new kolovod_memory{std::move(op->buffers[index].data)};
    *data = (*memory)->data.get();
    *bytes = op->buffers[index].bytes;
  }
  return Report(status);
}

void kolovod_free_memory(kolovod_memory* memory) { delete memory; }

int kolovod_rows(kolovod_engine* handle, uint64_t operation, size_t index, const int64_t** rows,
                 size_t* count) {
  OperationPtr op;
  Status status = Completed(handle, operation, &op);
  if (status.ok() && index >= op->rows.size()) status = Invalid("not an allgather, an alltoall or a recv");
  if (status.ok()) {
    *rows = op->rows[index].data();
    *count = op->rows[index].size();
  }
  return Report(status);
}

}  // extern "C"
