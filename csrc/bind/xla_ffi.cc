// Allreduce as an XLA custom call, over the C ABI of XLA's foreign function interface (FFI).
//
// The handler submits and returns a future, so that any number of operations are on their way while XLA goes
// on with what does not depend on them. What does depend on them XLA runs in the thread that completes the
// future; that must not be the engine's, so completions are handed to threads of their own.
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "bind/graph_clients.h"
#include "include/kolovod.h"

namespace kolovod {
namespace {

// The part of the ABI that is used here; it has been the same since its version 0.1 (jaxlib 0.4.38 to 0.10).
// Every struct begins with its size and a list of extensions.
namespace xla {

constexpr int kMajor = 0;
constexpr int kOldestMinor = 1;
constexpr int kNewestMinor = 3;

struct Extension {
  size_t struct_size;
  int type;
  Extension* next;
};
constexpr int kMetadataExtension = 1;

struct Version {
  size_t struct_size;
  Extension* extensions;
  int major;
  int minor;
};
struct Metadata {
  size_t struct_size;
  Version version;
  uint32_t traits;
};
struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

struct Error;
struct Future;
struct ErrorCreateArgs {
  size_t struct_size;
  Extension* extensions;
  const char* message;
  int code;
};
struct FutureCreateArgs {
  size_t struct_size;
  Extension* extensions;
  Future* future;
};
struct FutureSetAvailableArgs {
  size_t struct_size;
  Extension* extensions;
  Future* future;
};
struct FutureSetErrorArgs {
  size_t struct_size;
  Extension* extensions;
  Future* future;
  Error* error;  // XLA's from then on
};

using Unused = void*;
struct Api {  // its struct_size said less than there was until jaxlib 0.6
  size_t struct_size;
  Extension* extensions;
  Version version;
  void* internal;
  Error* (*error_create)(ErrorCreateArgs*);
  Unused error_message, error_destroy, handler_register, stream, type_register, context, state_set, state_get;
  Unused memory_allocate, memory_free, pool_schedule, pool_threads;
  Error* (*future_create)(FutureCreateArgs*);
  Error* (*future_set_available)(FutureSetAvailableArgs*);
  Error* (*future_set_error)(FutureSetErrorArgs*);
};

struct Buffer {
  size_t struct_size;
  Extension* extensions;
  int dtype;
  void* data;
  int64_t rank;
  int64_t* dims;
};
struct Operands {  // arguments, and results
  size_t struct_size;
  Extension* extensions;
  int64_t size;
  int* types;
  void** values;
};
constexpr int kBufferType = 1;

struct Text {
  const char* data;
  size_t length;
};
struct Scalar {
  int dtype;
  void* value;
};
struct Attributes {
  size_t struct_size;
  Extension* extensions;
  int64_t size;
  int* types;
  Text** names;
  void** values;
};
constexpr int kScalarType = 3;
constexpr int kTextType = 4;
constexpr int kInt64 = 5;
constexpr int kFloat64 = 12;

struct CallFrame {
  size_t struct_size;
  Extension* extensions;
  const Api* api;
  void* context;
  int stage;
  Operands arguments;
  Operands results;
  Attributes attributes;
  Future* future;  // set by an asynchronous handler
};
constexpr int kExecute = 3;

}  // namespace xla

// XLA's code, hence the beginning of the message that Python sees.
int ToXla(int code) {
  switch (code) {
    case KOLOVOD_INVALID_ARGUMENT:
      return 3;
    case KOLOVOD_DUPLICATE_NAME:
      return 6;  // ALREADY_EXISTS
    case KOLOVOD_MISMATCH:
      return 9;  // FAILED_PRECONDITION
    case KOLOVOD_RANK_LOST:
    case KOLOVOD_RANK_LEFT:
    case KOLOVOD_SHUT_DOWN:
    case KOLOVOD_INTERRUPTED:
    case KOLOVOD_LATE:
      return 10;  // ABORTED
    default:
      return 13;  // INTERNAL
  }
}

// -1: none.
int ToDType(int xla_type) {
  switch (xla_type) {
    case 1:
      return KOLOVOD_BOOL;
    case 2:
      return KOLOVOD_INT8;
    case 3:
      return KOLOVOD_INT16;
    case 4:
      return KOLOVOD_INT32;
    case 5:
      return KOLOVOD_INT64;
    case 6:
      return KOLOVOD_UINT8;
    case 7:
      return KOLOVOD_UINT16;
    case 10:
      return KOLOVOD_FLOAT16;
    case 11:
      return KOLOVOD_FLOAT32;
    case 12:
      return KOLOVOD_FLOAT64;
    case 16:
      return KOLOVOD_BFLOAT16;
    default:
      return -1;
  }
}

// Runs tasks at once, each in a thread that runs nothing else meanwhile, and keeps idle threads for the next.
// Never destroyed: its threads have no end before the process's.
class Threads {
 public:
  void Run(std::function<void()> task) {
    std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    if (tasks_.size() > idle_) {
      std::thread([this] { Work(); }).detach();
    } else {
      changed_.notify_one();
    }
  }

 private:
  void Work() {
    std::unique_lock lock(mutex_);
    while (true) {
      ++idle_;
      changed_.wait(lock, [&] { return !tasks_.empty(); });
      --idle_;
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;  // guarded by mutex_
  size_t idle_ = 0;                          // guarded by mutex_
};

Threads& CompletionThreads() {
  static auto* threads = new Threads;
  return *threads;
}

struct Call {
  const xla::Api* api;
  xla::Future* future;
};

xla::Error* MakeError(const xla::Api* api, int code, const std::string& message) {
  xla::ErrorCreateArgs args{sizeof(args), nullptr, message.c_str(), ToXla(code)};
  return api->error_create(&args);
}

void Complete(const Call& call, int code, const std::string& message) {
  if (code == KOLOVOD_OK) {
    xla::FutureSetAvailableArgs args{sizeof(args), nullptr, call.future};
    call.api->future_set_available(&args);
  } else {
    xla::FutureSetErrorArgs args{sizeof(args), nullptr, call.future, MakeError(call.api, code, message)};
    call.api->future_set_error(&args);
  }
}

void OnDone(void* user_data, int code, const char* message) {
  const std::unique_ptr<Call> call(static_cast<Call*>(user_data));
  CompletionThreads().Run([call = *call, code, text = std::string(message)] { Complete(call, code, text); });
}

struct Arguments {
  std::string name;
  int64_t op = -1;
  int64_t process_set = 0;
  double prescale = 1.0;
  double postscale = 1.0;
};

// False if there is an attribute that does not belong here.
bool ReadAttributes(const xla::Attributes& attributes, Arguments* out) {
  for (int64_t i = 0; i < attributes.size; ++i) {
    const std::string_view name(attributes.names[i]->data, attributes.names[i]->length);
    const void* value = attributes.values[i];
    if (name == "name" && attributes.types[i] == xla::kTextType) {
      const auto& text = *static_cast<const xla::Text*>(value);
      out->name.assign(text.data, text.length);
      continue;
    }
    if (attributes.types[i] != xla::kScalarType) return false;
    const auto& scalar = *static_cast<const xla::Scalar*>(value);
    if (name == "op" && scalar.dtype == xla::kInt64) {
      std::memcpy(&out->op, scalar.value, sizeof(out->op));
    } else if (name == "process_set" && scalar.dtype == xla::kInt64) {
      std::memcpy(&out->process_set, scalar.value, sizeof(out->process_set));
    } else if (name == "prescale" && scalar.dtype == xla::kFloat64) {
      std::memcpy(&out->prescale, scalar.value, sizeof(double));
    } else if (name == "postscale" && scalar.dtype == xla::kFloat64) {
      std::memcpy(&out->postscale, scalar.value, sizeof(double));
    } else {
      return false;
    }
  }
  return true;
}

// What is wrong with the operands, or "".
std::string ReadTensors(const xla::CallFrame& frame, std::vector<kolovod_tensor>* tensors) {
  if (frame.arguments.size != frame.results.size) return "needs as many results as arguments";
  for (int64_t i = 0; i < frame.arguments.size; ++i) {
    if (frame.arguments.types[i] != xla::kBufferType || frame.results.types[i] != xla::kBufferType) {
      return "operand " + std::to_string(i) + " is not an array";
    }
    const auto& input = *static_cast<const xla::Buffer*>(frame.arguments.values[i]);
    const auto& output = *static_cast<const xla::Buffer*>(frame.results.values[i]);
    const int dtype = ToDType(input.dtype);
    if (dtype < 0) {
      return "XLA's dtype number " + std::to_string(input.dtype) + " of array " + std::to_string(i) +
             " cannot be reduced";
    }
    tensors->push_back({input.data, output.data, input.dims, static_cast<int32_t>(input.rank), dtype});
  }
  return "";
}

// XLA wants its own version to the digit, and may ask before it has told which that is.
std::atomic<int> minor_version{xla::kNewestMinor};

xla::Error* Answer(xla::MetadataExtension* question) {
  xla::Metadata& metadata = *question->metadata;
  metadata.version = {sizeof(xla::Version), nullptr, xla::kMajor, minor_version.load()};
  metadata.traits = 0;
  return nullptr;
}

xla::Error* Allreduce(xla::CallFrame* frame) {
  const xla::Api* api = frame->api;
  for (xla::Extension* e = frame->extensions; e != nullptr; e = e->next) {
    if (e->type == xla::kMetadataExtension) return Answer(reinterpret_cast<xla::MetadataExtension*>(e));
  }
  if (frame->stage != xla::kExecute) return nullptr;
  Arguments arguments;
  std::vector<kolovod_tensor> tensors;
  if (!ReadAttributes(frame->attributes, &arguments)) {
    return MakeError(api, KOLOVOD_INVALID_ARGUMENT, "kolovod_allreduce: an attribute is unknown");
  }
  if (const std::string wrong = ReadTensors(*frame, &tensors); !wrong.empty()) {
    return MakeError(api, KOLOVOD_INVALID_ARGUMENT, "allreduce '" + arguments.name + "': " + wrong);
  }
  xla::FutureCreateArgs created{sizeof(created), nullptr, nullptr};
  if (xla::Error* error = api->future_create(&created); error != nullptr) return error;
  frame->future = created.future;
  kolovod_request request{};
  request.struct_size = sizeof(request);
  request.tensor_size = sizeof(kolovod_tensor);
  request.verb = KOLOVOD_ALLREDUCE;
  request.op = static_cast<int32_t>(arguments.op);
  request.prescale = arguments.prescale;
  request.postscale = arguments.postscale;
  request.name = arguments.name.c_str();
  request.tensors = tensors.data();
  request.tensor_count = tensors.size();
  auto call = std::make_unique<Call>(Call{api, created.future});
  kolovod_engine* engine = kolovod_current(static_cast<int32_t>(arguments.process_set));
  const int code = engine == nullptr ? static_cast<int>(KOLOVOD_SHUT_DOWN)
                                     : kolovod_submit(engine, &request, OnDone, call.get(), nullptr);
  if (code == KOLOVOD_OK) {
    (void)call.release();  // the callback's, which may have run already
  } else {
    Complete(*call, code, kolovod_error_message());
  }
  return nullptr;
}

}  // namespace

void* XlaAllreduceHandler(int major, int minor) {
  if (major != xla::kMajor || minor < xla::kOldestMinor || minor > xla::kNewestMinor) return nullptr;
  minor_version.store(minor);
  return reinterpret_cast<void*>(&Allreduce);
}

}  // namespace kolovod
