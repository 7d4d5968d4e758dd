// The verbs as an XLA custom call, over the C ABI of XLA's foreign function interface (FFI).
//
// The handler submits and returns a future, so that any number of operations are on their way while XLA goes
// on with what does not depend on them. What does depend on them XLA runs in the thread that completes the
// future; that must not be the engine's, so completions are handed to threads of their own.
//
// Two hand-overs for each operation cost several times what a small one takes, and XLA comes to the
// operations of a short program one by one. So a small one that finds the engine idle is first tried in XLA's
// own thread (see Patience).
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bind/graph_clients.h"
#include "bind/patience.h"
#include "bind/threads.h"
#include "bind/xla_ffi_abi.h"
#include "include/kolovod.h"

namespace kolovod {
namespace {

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

// Each task runs in a thread that runs nothing else meanwhile.
Threads& CompletionThreads() {
  static auto* threads = new Threads(SIZE_MAX, "kv-xla-done");
  return *threads;
}

size_t BytesOf(const xla::Buffer& buffer) {
  size_t bytes = 0;
  switch (ToDType(buffer.dtype)) {
    case KOLOVOD_UINT8:
    case KOLOVOD_INT8:
    case KOLOVOD_BOOL:
      bytes = 1;
      break;
    case KOLOVOD_UINT16:
    case KOLOVOD_INT16:
    case KOLOVOD_FLOAT16:
    case KOLOVOD_BFLOAT16:
      bytes = 2;
      break;
    case KOLOVOD_INT32:
    case KOLOVOD_FLOAT32:
      bytes = 4;
      break;
    default:
      bytes = 8;
  }
  for (int64_t d = 0; d < buffer.rank; ++d) bytes *= static_cast<size_t>(buffer.dims[d]);
  return bytes;
}

struct Span {
  void* data;
  size_t bytes;
};

std::atomic<TellUnlike> tell_unlike{nullptr};

struct Call {
  const xla::Api* api;
  xla::Future* future;
  int verb;
  std::vector<Span> zeroed;          // outputs that nobody wants here, though all ranks have the same program
  std::unique_ptr<Unlike> compared;  // of an operation that compares
  // Whoever of the handler and the callback comes second completes it.
  std::atomic<Stage> stage{Stage::kSubmitting};
  int code = KOLOVOD_OK;  // and the message: written before kDone
  std::string message{};
};

Patience patience;

xla::Error* MakeError(const xla::Api* api, int code, const std::string& message) {
  xla::ErrorCreateArgs args{sizeof(args), nullptr, message.c_str(), ToXla(code)};
  return api->error_create(&args);
}

// Whether all ranks that are there say the same.
bool IsAlike(const Unlike& said) {
  const int32_t* first = nullptr;
  for (size_t row = 0; row < said.table.size(); row += said.columns) {
    const int32_t* const facts = &said.table[row];
    if (facts[0] == 0) continue;
    if (first != nullptr && std::memcmp(first, facts, said.columns * sizeof(int32_t)) != 0) return false;
    first = facts;
  }
  return true;
}

void Complete(const Call& call, int code, std::string message) {
  const TellUnlike tell = tell_unlike.load();
  if (code == KOLOVOD_OK && call.compared != nullptr && tell != nullptr && !IsAlike(*call.compared)) {
    message = tell(*call.compared);
    if (!message.empty()) code = KOLOVOD_MISMATCH;
  }
  if (code == KOLOVOD_OK) {
    for (const Span& span : call.zeroed) std::memset(span.data, 0, span.bytes);
    xla::FutureSetAvailableArgs args{sizeof(args), nullptr, call.future};
    call.api->future_set_available(&args);
    return;
  }
  if (code == KOLOVOD_INVALID_ARGUMENT && call.verb == KOLOVOD_ALLGATHER) {
    message += "; inside jax.jit shapes are fixed, so all ranks need the same: gather others outside of it";
  }
  xla::FutureSetErrorArgs args{sizeof(args), nullptr, call.future, MakeError(call.api, code, message)};
  call.api->future_set_error(&args);
}

void OnDone(void* user_data, int code, const char* message) {
  auto* call = static_cast<Call*>(user_data);
  call->code = code;
  call->message = message;
  if (call->stage.exchange(Stage::kDone) == Stage::kSubmitting) return;
  CompletionThreads().Run([call] {
    const std::unique_ptr<Call> owned(call);
    Complete(*owned, owned->code, owned->message);
  });
}

struct Arguments {
  std::string name;
  std::string called_from;  // the script's line, of an operation without a name
  std::string codecs;       // by array, as digits; shorter: none for the rest
  std::string about;        // of what is compared
  int64_t verb = -1;
  int64_t op = -1;
  int64_t root = 0;
  int64_t process_set = 0;
  int64_t zeroed = 0;
  int64_t together = 0;  // no operation: the arrays stay where they are (XLA was told that it is one memory)
  int64_t compared = 0;  // the array is what this rank says, and it stays where it is
  int64_t rank = -1;     // the place that the program was compiled for; -1: it does not depend on it
  int64_t size = -1;
  double prescale = 1.0;
  double postscale = 1.0;
};

// False if there is an attribute that does not belong here.
bool ReadAttributes(const xla::Attributes& attributes, Arguments* out) {
  struct Whole {
    std::string_view name;
    int64_t* to;
  };
  const Whole wholes[] = {{"verb", &out->verb},
                          {"op", &out->op},
                          {"root", &out->root},
                          {"zeroed", &out->zeroed},
                          {"together", &out->together},
                          {"compared", &out->compared},
                          {"rank", &out->rank},
                          {"size", &out->size},
                          {"process_set", &out->process_set}};
  for (int64_t i = 0; i < attributes.size; ++i) {
    const std::string_view name(attributes.names[i]->data, attributes.names[i]->length);
    const void* value = attributes.values[i];
    if (attributes.types[i] == xla::kTextType) {
      const auto& text = *static_cast<const xla::Text*>(value);
      std::string* const to = name == "name"          ? &out->name
                              : name == "called_from" ? &out->called_from
                              : name == "codecs"      ? &out->codecs
                              : name == "about"       ? &out->about
                                                      : nullptr;
      if (to == nullptr) return false;
      to->assign(text.data, text.length);
      continue;
    }
    if (attributes.types[i] != xla::kScalarType) return false;
    const auto& scalar = *static_cast<const xla::Scalar*>(value);
    bool known = false;
    for (const Whole& whole : wholes) {
      if (name != whole.name || scalar.dtype != xla::kInt64) continue;
      std::memcpy(whole.to, scalar.value, sizeof(int64_t));
      known = true;
    }
    if (scalar.dtype == xla::kFloat64 && (name == "prescale" || name == "postscale")) {
      std::memcpy(name == "prescale" ? &out->prescale : &out->postscale, scalar.value, sizeof(double));
      known = true;
    }
    if (!known) return false;
  }
  return true;
}

// What is wrong with the operands, or "".
std::string ReadTensors(const xla::CallFrame& frame, int64_t verb, std::vector<kolovod_tensor>* tensors,
                        std::vector<size_t>* output_bytes) {
  if (frame.arguments.size != frame.results.size) return "needs as many results as arguments";
  for (int64_t i = 0; i < frame.arguments.size; ++i) {
    if (frame.arguments.types[i] != xla::kBufferType || frame.results.types[i] != xla::kBufferType) {
      return "operand " + std::to_string(i) + " is not an array";
    }
    const auto& input = *static_cast<const xla::Buffer*>(frame.arguments.values[i]);
    const auto& output = *static_cast<const xla::Buffer*>(frame.results.values[i]);
    if (verb == KOLOVOD_BARRIER) {  // passes them on; XLA has been told that they are the same memory
      if (input.data != output.data) return "array " + std::to_string(i) + " is not the one it came from";
      continue;
    }
    const int dtype = ToDType(input.dtype);
    if (dtype < 0) {
      return "XLA's dtype number " + std::to_string(input.dtype) + " of array " + std::to_string(i) +
             " is none that Kolovod knows";
    }
    tensors->push_back(
        {input.data, output.data, input.dims, static_cast<int32_t>(input.rank), dtype, KOLOVOD_NO_CODEC});
    output_bytes->push_back(BytesOf(output));
  }
  return "";
}

// A row for each rank, so far of this one only, in place of the array. Returns what is wrong, or "".
std::string ReadFacts(const Arguments& arguments, int rank, int size, std::vector<kolovod_tensor>* tensors,
                      std::vector<size_t>* output_bytes, std::unique_ptr<Unlike>* compared,
                      std::vector<int64_t>* shape) {
  if (tensors->size() != 1 || (*tensors)[0].ndim != 1 || (*tensors)[0].dtype != KOLOVOD_INT32) {
    return "needs one vector of int32";
  }
  kolovod_tensor& tensor = (*tensors)[0];
  const int64_t count = tensor.shape[0];
  if (tensor.input != tensor.output) std::memcpy(tensor.output, tensor.input, count * sizeof(int32_t));
  auto said = std::make_unique<Unlike>();
  said->about = arguments.about;
  said->columns = static_cast<int>(count) + 1;
  said->rank = rank;
  said->table.resize(static_cast<size_t>(size) * said->columns);
  int32_t* const row = &said->table[static_cast<size_t>(rank) * said->columns];
  row[0] = 1;
  std::memcpy(row + 1, tensor.input, count * sizeof(int32_t));
  // The last says which gradient is not finite: other numbers on each rank, so that it is seen where all are.
  if (row[count] != 0) row[count] = row[count] * size + rank;
  *shape = {size, said->columns};
  tensor = {said->table.data(), said->table.data(), shape->data(), 2, KOLOVOD_INT32, KOLOVOD_NO_CODEC};
  (*output_bytes)[0] = said->table.size() * sizeof(int32_t);
  *compared = std::move(said);
  return "";
}

// What is wrong with the place that the program was compiled for, or "".
std::string CheckPlace(const Arguments& arguments, kolovod_engine* engine) {
  const int rank = kolovod_rank(engine);
  const int size = kolovod_size(engine);
  if (arguments.size < 0 || size < 0) return "";  // a world that is over is refused by name in a moment
  if (arguments.rank == rank && arguments.size == size) return "";
  return "was compiled for rank " + std::to_string(arguments.rank) + " of " + std::to_string(arguments.size) +
         ", but this is rank " + std::to_string(rank) + " of " + std::to_string(size) +
         " now: compile it anew after kolovod.init(); jax.clear_caches() has jax.jit do so";
}

// XLA wants its own version to the digit, and may ask before it has told which that is.
std::atomic<int> minor_version{xla::kNewestMinor};

xla::Error* Answer(xla::MetadataExtension* question) {
  xla::Metadata& metadata = *question->metadata;
  metadata.version = {sizeof(xla::Version), nullptr, xla::kMajor, minor_version.load()};
  metadata.traits = 0;
  return nullptr;
}

// Submits what the call asks for. `is_tried`: this thread may have worked on it.
int Submit(const xla::CallFrame& frame, const Arguments& arguments, Call* call, bool* is_tried,
           std::string* error) {
  std::vector<kolovod_tensor> tensors;
  std::vector<size_t> output_bytes;
  const auto refuse = [&](const std::string& wrong) {
    *error = "'" + arguments.name + "': " + wrong;
    return KOLOVOD_INVALID_ARGUMENT;
  };
  const std::string wrong = ReadTensors(frame, arguments.verb, &tensors, &output_bytes);
  if (!wrong.empty()) return refuse(wrong);
  kolovod_engine* engine = kolovod_current(static_cast<int32_t>(arguments.process_set));
  if (engine == nullptr) {
    *error = kolovod_error_message();
    return KOLOVOD_SHUT_DOWN;
  }
  if (const std::string other = CheckPlace(arguments, engine); !other.empty()) return refuse(other);
  std::vector<int64_t> shape;
  const int rank = kolovod_rank(engine), size = kolovod_size(engine);
  if (arguments.compared != 0 && size > 0) {  // a world that is over is refused by name in a moment
    const std::string other =
        ReadFacts(arguments, rank, size, &tensors, &output_bytes, &call->compared, &shape);
    if (!other.empty()) return refuse(other);
  }
  for (size_t t = 0; t < std::min(arguments.codecs.size(), tensors.size()); ++t) {
    tensors[t].codec = arguments.codecs[t] - '0';
  }
  for (size_t t = 0; arguments.zeroed != 0 && t < tensors.size(); ++t) {
    call->zeroed.push_back({tensors[t].output, output_bytes[t]});
  }
  std::vector<int64_t> splits;
  if (arguments.verb == KOLOVOD_ALLTOALL && !tensors.empty() && tensors[0].ndim > 0) {
    splits.assign(static_cast<size_t>(arguments.size), tensors[0].shape[0] / arguments.size);
  }
  kolovod_request request{};
  request.struct_size = sizeof(request);
  request.tensor_size = sizeof(kolovod_tensor);
  request.verb = static_cast<int32_t>(arguments.verb);
  request.op = static_cast<int32_t>(arguments.op);
  request.root = static_cast<int32_t>(arguments.root);
  request.prescale = arguments.prescale;
  request.postscale = arguments.postscale;
  request.name = arguments.name.c_str();
  request.called_from = arguments.called_from.c_str();
  request.tensors = tensors.data();
  request.tensor_count = tensors.size();
  request.splits = splits.data();
  request.split_count = splits.size();
  request.output_bytes = output_bytes.data();
  size_t bytes = 0;
  for (const size_t each : output_bytes) bytes += each;
  request.drive_us = patience.DriveUs(bytes);
  *is_tried = request.drive_us > 0;
  const int code = kolovod_submit(engine, &request, OnDone, call, nullptr);
  if (code != KOLOVOD_OK) *error = kolovod_error_message();
  return code;
}

xla::Error* Collective(xla::CallFrame* frame) {
  const xla::Api* api = frame->api;
  for (xla::Extension* e = frame->extensions; e != nullptr; e = e->next) {
    if (e->type == xla::kMetadataExtension) return Answer(reinterpret_cast<xla::MetadataExtension*>(e));
  }
  if (frame->stage != xla::kExecute) return nullptr;
  Arguments arguments;
  if (!ReadAttributes(frame->attributes, &arguments)) {
    return MakeError(api, KOLOVOD_INVALID_ARGUMENT, "kolovod: an attribute of the custom call is unknown");
  }
  if (arguments.together != 0) return nullptr;
  xla::FutureCreateArgs created{sizeof(created), nullptr, nullptr};
  if (xla::Error* error = api->future_create(&created); error != nullptr) return error;
  frame->future = created.future;
  auto* call = new Call{api, created.future, static_cast<int>(arguments.verb), {}, nullptr};
  std::unique_ptr<Call> owned(call);
  std::string error;
  bool is_tried = false;
  const int code = Submit(*frame, arguments, call, &is_tried, &error);
  if (code != KOLOVOD_OK) {
    Complete(*call, code, std::move(error));
    return nullptr;
  }
  const bool done = call->stage.exchange(Stage::kReturned) == Stage::kDone;
  if (is_tried) patience.Note(done);
  if (done) {
    Complete(*call, call->code, std::move(call->message));
  } else {
    (void)owned.release();  // the callback's, which may have run already
  }
  return nullptr;
}

}  // namespace

void OnUnlikeInPrograms(TellUnlike tell) { tell_unlike.store(tell); }

void* XlaCollectiveHandler(int major, int minor) {
  if (major != xla::kMajor || minor < xla::kOldestMinor || minor > xla::kNewestMinor) return nullptr;
  minor_version.store(minor);
  return reinterpret_cast<void*>(&Collective);
}

}  // namespace kolovod
