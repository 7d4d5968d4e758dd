// The kernels are asynchronous: each submits, returns, and the engine's callback completes the node, so that
// any number may be on their way. Completing a node means work for TensorFlow (it looks for the nodes that
// are ready now and wakes its threads), so the engine's thread, which drives transfers, leaves it to another.
// A small call by itself is first tried in TensorFlow's thread (bind/patience.h), which then completes it.
//
// A result whose size is known only when the ranks have agreed stays in the memory that the engine has put
// it into: TensorFlow is given that memory.
#include "bind/tf_ops_kernels.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bind/patience.h"
#include "bind/tf_done.h"
#include "bind/threads.h"
#include "include/kolovod.h"

namespace kolovod::tensorflow {
namespace {

// -1: none.
int ToDType(int tensorflow_type) {
  switch (tensorflow_type) {
    case 1:
      return KOLOVOD_FLOAT32;
    case 2:
      return KOLOVOD_FLOAT64;
    case kInt32:
      return KOLOVOD_INT32;
    case 4:
      return KOLOVOD_UINT8;
    case 5:
      return KOLOVOD_INT16;
    case 6:
      return KOLOVOD_INT8;
    case kInt64:
      return KOLOVOD_INT64;
    case 10:
      return KOLOVOD_BOOL;
    case 14:
      return KOLOVOD_BFLOAT16;
    case 17:
      return KOLOVOD_UINT16;
    case 19:
      return KOLOVOD_FLOAT16;
    default:
      return -1;
  }
}

// A loop runs up to 10 of its iterations at once, unless it is given another number of parallel_iterations.
constexpr int64_t kIterationsAtOnce = 16;

struct Kernel {
  kolovod_verb verb = KOLOVOD_ALLREDUCE;
  std::string name;
  std::string called_from;  // the script's line, of an operation without a name
  std::string codecs;       // by tensor, as digits; shorter: none for the rest
  bool is_named_by_place = false;
  bool is_in_inner_loop = false;  // its frame is one of several of the same place
  int op = KOLOVOD_SUM;
  double prescale = 1.0;
  double postscale = 1.0;
  int32_t root = 0;
  int32_t process_set = 0;

  bool makes_outputs() const {
    return verb == KOLOVOD_ALLGATHER || verb == KOLOVOD_ALLTOALL || verb == KOLOVOD_REDUCESCATTER;
  }
  bool reduces() const { return verb == KOLOVOD_ALLREDUCE || verb == KOLOVOD_REDUCESCATTER; }
};

// Of a node, by what TensorFlow calls it when it puts a loop's body in the loop's place.
int LoopsAround(const std::string& node) {
  constexpr std::string_view kBody = "/body/_";
  int loops = 0;
  for (size_t at = node.find(kBody); at != std::string::npos; at = node.find(kBody, at + 1)) ++loops;
  return loops;
}

template <kolovod_verb verb>
void* CreateKernel(TF_OpKernelConstruction* construction) {
  auto kernel = std::make_unique<Kernel>();
  kernel->verb = verb;
  Attributes attributes(construction);
  kernel->process_set = static_cast<int32_t>(attributes.Int("process_set"));
  kernel->name = attributes.Text("tensor_name");
  kernel->called_from = attributes.Text("called_from");
  if (verb == KOLOVOD_BROADCAST) kernel->root = static_cast<int32_t>(attributes.Int("root"));
  if (kernel->reduces()) {
    kernel->op = static_cast<int>(attributes.Int("op"));
    kernel->prescale = attributes.Double("prescale_bits");
    kernel->postscale = attributes.Double("postscale_bits");
  }
  if (verb == KOLOVOD_ALLREDUCE) kernel->codecs = attributes.Text("codecs");
  if (!attributes.Complete()) return nullptr;
  if (kernel->name.empty()) {
    // The place in the graph: unlike a name made while tracing it does not depend on how often each rank has
    // traced, and a function that is called twice is there twice once it is inlined.
    const TF_StringView node = tf.OpKernelConstruction_GetName(construction);
    kernel->name = "tf." + std::string(node.data, node.len);
    kernel->is_named_by_place = true;
    kernel->is_in_inner_loop = LoopsAround(kernel->name) > 1;
  }
  return kernel.release();
}

void DeleteKernel(void* kernel) { delete static_cast<Kernel*>(kernel); }

// One execution of an op, from Compute to the engine's callback.
struct Call {
  const Kernel* kernel;
  TF_OpKernelContext* context;
  Done done;
  kolovod_engine* engine = nullptr;
  uint64_t operation = 0;              // of which something is asked once it is done
  std::vector<TensorPtr> inputs = {};  // of those that were not forwarded
  std::vector<TensorPtr> outputs = {};
  std::vector<int> types = {};  // TensorFlow's
  std::vector<std::vector<int64_t>> shapes = {};
  std::vector<kolovod_tensor> tensors = {};
  std::vector<int64_t> splits = {};
  size_t bytes = 0;
  std::atomic<Stage> stage{Stage::kSubmitting};
  int code = KOLOVOD_OK;  // and the message: written before kDone
  std::string message = {};
};

TensorPtr GetInput(const Call& call, int number, const StatusPtr& status) {
  TF_Tensor* input = nullptr;
  tf.GetInput(call.context, number, &input, status.get());
  return TensorPtr(Ok(status) ? input : nullptr);
}

std::vector<int64_t> ShapeOf(const TF_Tensor* tensor) {
  std::vector<int64_t> shape;
  for (int d = 0; d < tf.NumDims(tensor); ++d) shape.push_back(tf.Dim(tensor, d));
  return shape;
}

// Describes tensor i. Its output is in the input's memory if nothing else needs that; a verb that makes its
// outputs has none yet.
void Prepare(Call* call, int i, const StatusPtr& status) {
  const int number = kFirstTensor + i;
  TensorPtr input = GetInput(*call, number, status);
  if (!Ok(status)) return;
  const int type = tf.TensorType(input.get());
  std::vector<int64_t> shape = ShapeOf(input.get());
  const auto ndim = static_cast<int>(shape.size());
  void* target = nullptr;
  if (!call->kernel->makes_outputs()) {
    input.reset();  // a second reference to the memory would keep it from being forwarded
    int forwarded = -1;
    TensorPtr output(tf.ForwardInputOrAllocateOutput(call->context, &number, 1, i, shape.data(), ndim,
                                                     &forwarded, status.get()));
    if (!Ok(status)) return;
    if (forwarded != number) input = GetInput(*call, number, status);
    if (!Ok(status)) return;
    target = tf.TensorData(output.get());
    call->outputs.push_back(std::move(output));
  }
  const TF_Tensor* given = input == nullptr ? call->outputs.back().get() : input.get();
  const void* source = tf.TensorData(given);
  call->bytes += tf.TensorByteSize(given);
  call->types.push_back(type);
  call->shapes.push_back(std::move(shape));
  const auto place = static_cast<size_t>(i);
  const std::string& codecs = call->kernel->codecs;
  const int codec = place < codecs.size() ? codecs[place] - '0' : KOLOVOD_NO_CODEC;
  call->tensors.push_back({source, target, call->shapes.back().data(), ndim, ToDType(type), codec});
  if (input != nullptr) call->inputs.push_back(std::move(input));
}

// Of an alltoall. No splits mean equal parts.
void PrepareSplits(Call* call, const StatusPtr& status) {
  const TensorPtr splits = GetInput(*call, kFirstTensor + 1, status);
  if (!Ok(status)) return;
  const std::vector<int64_t> shape = ShapeOf(splits.get());
  const std::vector<int64_t>& rows = call->shapes.front();
  const int size = kolovod_size(call->engine);
  if (shape.size() == 1 && shape[0] > 0) {
    const auto* values = static_cast<const int64_t*>(tf.TensorData(splits.get()));
    call->splits.assign(values, values + shape[0]);
  } else if (shape.size() != 1) {
    const std::string text = "splits have " + std::to_string(shape.size()) + " dimensions";
    tf.SetStatus(status.get(), kInvalidArgument, ("alltoall: " + text + "; give one number a rank").c_str());
  } else if (size > 0 && !rows.empty() && rows[0] % size != 0) {
    const std::string text = std::to_string(rows[0]) + " rows cannot be split evenly over " +
                             std::to_string(size) + " ranks; give splits";
    tf.SetStatus(status.get(), kInvalidArgument, ("alltoall: " + text).c_str());
  } else if (size > 0) {
    call->splits.assign(static_cast<size_t>(size), rows.empty() ? 0 : rows[0] / size);
  }
}

bool Sets(int code, const StatusPtr& status) {
  if (code != KOLOVOD_OK) tf.SetStatus(status.get(), ToTensorFlow(code), kolovod_error_message());
  return code == KOLOVOD_OK;
}

void SetNumbers(const Call& call, int index, const std::vector<int64_t>& numbers, const StatusPtr& status) {
  const auto count = static_cast<int64_t>(numbers.size());
  const size_t bytes = numbers.size() * sizeof(int64_t);
  const TensorPtr output(tf.AllocateOutput(call.context, index, kInt64, &count, 1, bytes, status.get()));
  if (Ok(status)) std::memcpy(tf.TensorData(output.get()), numbers.data(), bytes);
}

void FreeMemory(void*, size_t, void* memory) { kolovod_free_memory(static_cast<kolovod_memory*>(memory)); }

// Output i is what the engine has made of tensor i, with so many rows.
void SetMade(const Call& call, size_t i, int64_t rows, const StatusPtr& status) {
  kolovod_memory* memory = nullptr;
  void* data = nullptr;
  size_t bytes = 0;
  if (!Sets(kolovod_take_output(call.engine, call.operation, i, &memory, &data, &bytes), status)) return;
  std::vector<int64_t> shape = call.shapes[i];
  shape[0] = rows;
  const TensorPtr output(tf.NewTensor(call.types[i], shape.data(), static_cast<int>(shape.size()), data,
                                      bytes, FreeMemory, memory));
  if (output == nullptr) return tf.SetStatus(status.get(), kInternal, "a result does not fit its shape");
  tf.SetOutput(call.context, static_cast<int>(i), output.get(), status.get());
}

void SetOutputs(const Call& call, const StatusPtr& status) {
  const auto rank = static_cast<size_t>(std::max(kolovod_rank(call.engine), 0));
  const auto size = static_cast<size_t>(std::max(kolovod_size(call.engine), 1));
  std::vector<int64_t> starts;  // where this rank's rows are
  for (size_t i = 0; i < call.tensors.size() && Ok(status); ++i) {
    if (call.kernel->verb == KOLOVOD_REDUCESCATTER) {
      const auto rows = static_cast<size_t>(call.shapes[i][0]);
      SetMade(call, i, static_cast<int64_t>(rows / size + (rank < rows % size)), status);
      continue;
    }
    const int64_t* rows = nullptr;
    size_t count = 0;
    if (!Sets(kolovod_rows(call.engine, call.operation, i, &rows, &count), status)) return;
    starts.push_back(std::accumulate(rows, rows + std::min(rank, count), int64_t{0}));
    SetMade(call, i, std::accumulate(rows, rows + count, int64_t{0}), status);
    if (Ok(status) && call.kernel->verb == KOLOVOD_ALLTOALL) {
      SetNumbers(call, 1, std::vector<int64_t>(rows, rows + count), status);
    }
  }
  if (Ok(status) && call.kernel->verb == KOLOVOD_ALLGATHER) {
    SetNumbers(call, static_cast<int>(starts.size()), starts, status);
  }
}

// The rank that came last.
void SetLast(const Call& call, const StatusPtr& status) {
  const int64_t* rows = nullptr;
  size_t count = 0;
  if (!Sets(kolovod_rows(call.engine, call.operation, 0, &rows, &count), status)) return;
  const TensorPtr output(
      tf.AllocateOutput(call.context, 0, kInt32, nullptr, 0, sizeof(int32_t), status.get()));
  if (Ok(status)) *static_cast<int32_t*>(tf.TensorData(output.get())) = static_cast<int32_t>(rows[0]);
}

// Completes the node with call->code and call->message.
void Finish(Call* call) {
  const StatusPtr status = NewStatus();
  if (call->code != KOLOVOD_OK) {
    tf.SetStatus(status.get(), ToTensorFlow(call->code), call->message.c_str());
  } else if (call->kernel->makes_outputs()) {
    SetOutputs(*call, status);
  } else if (call->kernel->verb == KOLOVOD_JOIN) {
    SetLast(*call, status);
  }
  if (call->operation != 0) kolovod_release(call->engine, call->operation);
  if (!Ok(status)) tf.OpKernelContext_Failure(call->context, status.get());
  Done done = std::move(call->done);
  delete call;  // before the node is done: its tensors belong to the step
  tf.RunAsyncOpKernelDoneCallback(reinterpret_cast<TF_AsyncOpKernelDoneCallback*>(&done));
}

// In a loop the same place is there once for each iteration, several of which may be on their way. The
// numbers start anew, so that names come again and the ranks need not tell each other what they mean.
// Of a loop within a loop the frame's id, too: TensorFlow makes it of the loops' names and the outer
// iterations, so that it is the same on all ranks, and two outer iterations never meet.
std::string NameOf(const Kernel& kernel, TF_OpKernelContext* context) {
  if (!kernel.is_named_by_place) return kernel.name;
  const int64_t iteration = tf.GetIterId(context) % kIterationsAtOnce;
  std::string name = kernel.name;
  if (iteration != 0) name.append("#").append(std::to_string(iteration));
  if (kernel.is_in_inner_loop) name.append("@").append(std::to_string(tf.GetFrameId(context)));
  return name;
}

void Refuse(Call* call, int code, const char* message) {
  call->code = code;
  call->message = message;
  Finish(call);
}

// One thread: TensorFlow only schedules what is ready, and its own threads run that.
Threads& CompletionThread() {
  static auto* threads = new Threads(1, "kv-completions");
  return *threads;
}

// A call that comes this long after the one before is not of a burst.
constexpr int64_t kApartNs = 20'000;
std::atomic<int64_t> last_call_ns{0};
Patience patience;

// The first of a burst may be tried, too; then the others have gathered meanwhile.
int32_t DriveUs(size_t bytes) {
  const int64_t now = std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  const bool is_apart = now - last_call_ns.exchange(now, std::memory_order_relaxed) > kApartNs;
  return is_apart ? patience.DriveUs(bytes) : 0;
}

void OnDone(void* user_data, int code, const char* message) {
  auto* call = static_cast<Call*>(user_data);
  call->code = code;
  call->message = message;
  if (call->stage.exchange(Stage::kDone) == Stage::kSubmitting) return;  // Compute completes it
  CompletionThread().Run([call] { Finish(call); });
}

void Compute(void* kernel_pointer, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
  const Kernel& kernel = *static_cast<Kernel*>(kernel_pointer);
  auto* call = new Call{.kernel = &kernel,
                        .context = context,
                        .done = Done::From(done),
                        .engine = kolovod_current(kernel.process_set)};
  if (call->engine == nullptr) return Refuse(call, KOLOVOD_SHUT_DOWN, kolovod_error_message());
  const StatusPtr status = NewStatus();
  const bool splits = kernel.verb == KOLOVOD_ALLTOALL;
  const int count = tf.NumInputs(context) - kFirstTensor - (splits ? 1 : 0);
  for (int i = 0; i < count && Ok(status); ++i) Prepare(call, i, status);
  if (splits && Ok(status)) PrepareSplits(call, status);
  if (!Ok(status)) {
    tf.OpKernelContext_Failure(context, status.get());
    // What Refuse does, but with TensorFlow's own error.
    Done now = std::move(call->done);
    delete call;
    return tf.RunAsyncOpKernelDoneCallback(reinterpret_cast<TF_AsyncOpKernelDoneCallback*>(&now));
  }
  kolovod_request request{};
  request.struct_size = sizeof(request);
  request.tensor_size = sizeof(kolovod_tensor);
  request.verb = kernel.verb;
  request.op = kernel.op;
  request.root = kernel.root;
  request.prescale = kernel.prescale;
  request.postscale = kernel.postscale;
  const std::string name = NameOf(kernel, context);
  if (kernel.verb != KOLOVOD_JOIN) request.name = name.c_str();
  request.called_from = kernel.called_from.c_str();
  request.tensors = call->tensors.data();
  request.tensor_count = call->tensors.size();
  request.splits = call->splits.data();
  request.split_count = call->splits.size();
  const bool asks_later = kernel.makes_outputs() || kernel.verb == KOLOVOD_JOIN;
  uint64_t* operation = asks_later ? &call->operation : nullptr;
  const int32_t drive_us = DriveUs(call->bytes);
  request.drive_us = drive_us;
  const int code = kolovod_submit(call->engine, &request, OnDone, call, operation);
  if (code != KOLOVOD_OK) return Refuse(call, code, kolovod_error_message());
  const bool is_done = call->stage.exchange(Stage::kReturned) == Stage::kDone;
  if (drive_us > 0) patience.Note(is_done);
  if (is_done) Finish(call);  // else the callback has it done, which may have happened already
}

void Register(const char* type, TF_KernelBuilder* builder, TF_Status* status) {
  if (tf.GetCode(status) == 0) tf.RegisterKernelBuilder(type, builder, status);
}

using Create = void* (*)(TF_OpKernelConstruction*);

Create CreatorOf(const std::string& type) {
  if (type == kAllreduce) return CreateKernel<KOLOVOD_ALLREDUCE>;
  if (type == kBroadcast) return CreateKernel<KOLOVOD_BROADCAST>;
  if (type == kAllgather) return CreateKernel<KOLOVOD_ALLGATHER>;
  if (type == kAlltoall) return CreateKernel<KOLOVOD_ALLTOALL>;
  if (type == kReducescatter) return CreateKernel<KOLOVOD_REDUCESCATTER>;
  if (type == kBarrier) return CreateKernel<KOLOVOD_BARRIER>;
  return CreateKernel<KOLOVOD_JOIN>;
}

}  // namespace

void RegisterKernels(const char* type, TF_Status* status) {
  if (std::string(type) == kFact) {
    Register(type, tf.NewKernelBuilder(type, "CPU", CreateFact, ComputeFact, DeleteFact), status);
  } else {
    Register(type, tf.NewAsyncKernelBuilder(type, "CPU", CreatorOf(type), Compute, DeleteKernel), status);
  }
  for (const char* device : {"XLA_CPU_JIT", "XLA_GPU_JIT"}) {
    Register(type, tf.NewKernelBuilder(type, device, nullptr, RefuseToCompile, nullptr), status);
  }
}

}  // namespace kolovod::tensorflow
