// Ops for TensorFlow graphs, over TensorFlow's stable C API, which is looked up in the library that is
// already loaded: no header and no library of TensorFlow is needed to build this, and one build serves many
// versions.
//
// KolovodAllreduce is stateless, since stateful ops are run one after the other. Then the optimizer must not
// take it for a plain function: the attribute `unique_name` keeps it from merging two that look alike, and
// the input `anchor`, which is not looked at and never a constant, from running one of constants ahead of
// time. Its kernel is asynchronous: it submits, returns, and the engine's callback completes the node, so
// that any number may be on their way.
#include <dlfcn.h>

#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "bind/graph_clients.h"
#include "include/kolovod.h"

// TensorFlow's C API, as far as it is needed here.
extern "C" {
struct TF_Status;
struct TF_Tensor;
struct TF_OpDefinitionBuilder;
struct TF_ShapeInferenceContext;
struct TF_ShapeHandle;
struct TF_KernelBuilder;
struct TF_OpKernelConstruction;
struct TF_OpKernelContext;
struct TF_AsyncOpKernelDoneCallback;
struct TF_StringView {
  const char* data;
  size_t len;
};
}

namespace kolovod {
namespace {

// Every function of TensorFlow that is called: name after TF_, result, parameters.
#define KV_TENSORFLOW_FUNCTIONS(F)                                                                          \
  F(NewStatus, TF_Status*, ())                                                                              \
  F(DeleteStatus, void, (TF_Status*))                                                                       \
  F(SetStatus, void, (TF_Status*, int, const char*))                                                        \
  F(GetCode, int, (const TF_Status*))                                                                       \
  F(Message, const char*, (const TF_Status*))                                                               \
  F(NewOpDefinitionBuilder, TF_OpDefinitionBuilder*, (const char*))                                         \
  F(OpDefinitionBuilderAddAttr, void, (TF_OpDefinitionBuilder*, const char*))                               \
  F(OpDefinitionBuilderAddInput, void, (TF_OpDefinitionBuilder*, const char*))                              \
  F(OpDefinitionBuilderAddOutput, void, (TF_OpDefinitionBuilder*, const char*))                             \
  F(OpDefinitionBuilderSetShapeInferenceFunction, void,                                                     \
    (TF_OpDefinitionBuilder*, void (*)(TF_ShapeInferenceContext*, TF_Status*)))                             \
  F(RegisterOpDefinition, void, (TF_OpDefinitionBuilder*, TF_Status*))                                      \
  F(ShapeInferenceContextNumInputs, int64_t, (TF_ShapeInferenceContext*))                                   \
  F(ShapeInferenceContextGetInput, void, (TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*))     \
  F(ShapeInferenceContextSetOutput, void, (TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*))    \
  F(NewShapeHandle, TF_ShapeHandle*, ())                                                                    \
  F(DeleteShapeHandle, void, (TF_ShapeHandle*))                                                             \
  F(NewAsyncKernelBuilder, TF_KernelBuilder*,                                                               \
    (const char*, const char*, void* (*)(TF_OpKernelConstruction*),                                         \
     void (*)(void*, TF_OpKernelContext*, TF_AsyncOpKernelDoneCallback*), void (*)(void*)))                 \
  F(RegisterKernelBuilder, void, (const char*, TF_KernelBuilder*, TF_Status*))                              \
  F(OpKernelConstruction_GetAttrSize, void,                                                                 \
    (TF_OpKernelConstruction*, const char*, int32_t*, int32_t*, TF_Status*))                                \
  F(OpKernelConstruction_GetAttrString, void,                                                               \
    (TF_OpKernelConstruction*, const char*, char*, size_t, TF_Status*))                                     \
  F(OpKernelConstruction_GetAttrInt64, void, (TF_OpKernelConstruction*, const char*, int64_t*, TF_Status*)) \
  F(OpKernelConstruction_GetName, TF_StringView, (TF_OpKernelConstruction*))                                \
  F(OpKernelConstruction_Failure, void, (TF_OpKernelConstruction*, TF_Status*))                             \
  F(OpKernelContext_Failure, void, (TF_OpKernelContext*, TF_Status*))                                       \
  F(RunAsyncOpKernelDoneCallback, void, (TF_AsyncOpKernelDoneCallback*))                                    \
  F(NumInputs, int, (TF_OpKernelContext*))                                                                  \
  F(GetInput, void, (TF_OpKernelContext*, int, TF_Tensor**, TF_Status*))                                    \
  F(ForwardInputOrAllocateOutput, TF_Tensor*,                                                               \
    (TF_OpKernelContext*, const int*, int, int, const int64_t*, int, int*, TF_Status*))                     \
  F(DeleteTensor, void, (TF_Tensor*))                                                                       \
  F(TensorType, int, (const TF_Tensor*))                                                                    \
  F(NumDims, int, (const TF_Tensor*))                                                                       \
  F(Dim, int64_t, (const TF_Tensor*, int))                                                                  \
  F(TensorData, void*, (const TF_Tensor*))

struct TensorFlow {
#define KV_MEMBER(name, result, parameters) result(*name) parameters = nullptr;
  KV_TENSORFLOW_FUNCTIONS(KV_MEMBER)
#undef KV_MEMBER
};

TensorFlow tf;  // filled once, before the first op can exist

constexpr int kTfInvalidArgument = 3;
constexpr int kTfInternal = 13;
constexpr const char* kAllreduce = "KolovodAllreduce";
constexpr int kFirstTensor = 1;  // of the inputs; before it comes the anchor

struct DeleteStatus {
  void operator()(TF_Status* status) const { tf.DeleteStatus(status); }
};
struct DeleteTensor {
  void operator()(TF_Tensor* tensor) const { tf.DeleteTensor(tensor); }
};
using StatusPtr = std::unique_ptr<TF_Status, DeleteStatus>;
using TensorPtr = std::unique_ptr<TF_Tensor, DeleteTensor>;

StatusPtr NewStatus() { return StatusPtr(tf.NewStatus()); }
bool Ok(const StatusPtr& status) { return tf.GetCode(status.get()) == 0; }

// TensorFlow's code, hence the class of exception that Python sees.
int ToTensorFlow(int code) {
  switch (code) {
    case KOLOVOD_OK:
      return 0;
    case KOLOVOD_INVALID_ARGUMENT:
      return kTfInvalidArgument;
    case KOLOVOD_DUPLICATE_NAME:
      return 6;  // ALREADY_EXISTS
    case KOLOVOD_MISMATCH:
      return 9;  // FAILED_PRECONDITION
    case KOLOVOD_RANK_LOST:
    case KOLOVOD_RANK_LEFT:
    case KOLOVOD_SHUT_DOWN:
    case KOLOVOD_INTERRUPTED:
    case KOLOVOD_LATE:
      return 10;  // ABORTED; TensorFlow takes UNAVAILABLE for a matter of its own network
    default:
      return kTfInternal;
  }
}

// -1: none.
int ToDType(int tensorflow_type) {
  switch (tensorflow_type) {
    case 1:
      return KOLOVOD_FLOAT32;
    case 2:
      return KOLOVOD_FLOAT64;
    case 3:
      return KOLOVOD_INT32;
    case 4:
      return KOLOVOD_UINT8;
    case 5:
      return KOLOVOD_INT16;
    case 6:
      return KOLOVOD_INT8;
    case 9:
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

struct Kernel {
  std::string name;
  int op = KOLOVOD_AVERAGE;
  double prescale = 1.0;
  double postscale = 1.0;
  int32_t process_set = 0;
};

// What a TF_AsyncOpKernelDoneCallback is: a variable on TensorFlow's stack, gone when Compute returns. To
// keep it, it is moved from. That is the one place that leans on more than the C API, namely on TensorFlow's
// type for it and on libstdc++'s layout of that (docs/decisions/0010).
using Done = std::function<void()>;

// One execution of the op, from Compute to the engine's callback.
struct Call {
  TF_OpKernelContext* context;
  Done done;
  std::vector<TensorPtr> inputs;  // of those that were not forwarded
  std::vector<TensorPtr> outputs;
  std::vector<std::vector<int64_t>> shapes;
  std::vector<kolovod_tensor> tensors;
};

std::string ReadString(TF_OpKernelConstruction* construction, const char* attribute,
                       const StatusPtr& status) {
  int32_t list_size = 0;
  int32_t bytes = 0;
  tf.OpKernelConstruction_GetAttrSize(construction, attribute, &list_size, &bytes, status.get());
  if (!Ok(status) || bytes <= 0) return "";
  std::string text(static_cast<size_t>(bytes), '\0');
  tf.OpKernelConstruction_GetAttrString(construction, attribute, text.data(), text.size(), status.get());
  return text;
}

// An attribute of TensorFlow's own type float would have 32 bits, and not equal that of an eager call.
double ReadDouble(TF_OpKernelConstruction* construction, const char* attribute, const StatusPtr& status) {
  int64_t bits = 0;
  double value = 0;
  tf.OpKernelConstruction_GetAttrInt64(construction, attribute, &bits, status.get());
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

void* CreateKernel(TF_OpKernelConstruction* construction) {
  auto kernel = std::make_unique<Kernel>();
  const StatusPtr status = NewStatus();
  int64_t op = 0;
  int64_t process_set = 0;
  kernel->name = ReadString(construction, "tensor_name", status);
  if (Ok(status)) tf.OpKernelConstruction_GetAttrInt64(construction, "op", &op, status.get());
  if (Ok(status)) {
    tf.OpKernelConstruction_GetAttrInt64(construction, "process_set", &process_set, status.get());
  }
  if (Ok(status)) kernel->prescale = ReadDouble(construction, "prescale_bits", status);
  if (Ok(status)) kernel->postscale = ReadDouble(construction, "postscale_bits", status);
  if (!Ok(status)) {
    tf.OpKernelConstruction_Failure(construction, status.get());
    return nullptr;
  }
  kernel->op = static_cast<int>(op);
  kernel->process_set = static_cast<int32_t>(process_set);
  if (kernel->name.empty()) {
    // The place in the graph: unlike a name made while tracing it does not depend on how often each rank has
    // traced, and a function that is called twice is there twice once it is inlined.
    const TF_StringView node = tf.OpKernelConstruction_GetName(construction);
    kernel->name = "tf." + std::string(node.data, node.len);
  }
  return kernel.release();
}

void DeleteKernel(void* kernel) { delete static_cast<Kernel*>(kernel); }

void Finish(Call* call, int code, const char* message) {
  if (code != KOLOVOD_OK) {
    const StatusPtr status = NewStatus();
    tf.SetStatus(status.get(), ToTensorFlow(code), message);
    tf.OpKernelContext_Failure(call->context, status.get());
  }
  Done done = std::move(call->done);
  delete call;  // before the node is done: its tensors belong to the step
  tf.RunAsyncOpKernelDoneCallback(reinterpret_cast<TF_AsyncOpKernelDoneCallback*>(&done));
}

void OnDone(void* call, int code, const char* message) { Finish(static_cast<Call*>(call), code, message); }

// Describes tensor i and makes output i: in the input's memory if nothing else needs that.
void Prepare(Call* call, int i, const StatusPtr& status) {
  const int number = kFirstTensor + i;
  const auto get_input = [&] {
    TF_Tensor* input = nullptr;
    tf.GetInput(call->context, number, &input, status.get());
    return TensorPtr(Ok(status) ? input : nullptr);
  };
  TensorPtr input = get_input();
  if (!Ok(status)) return;
  const int dtype = ToDType(tf.TensorType(input.get()));
  if (dtype < 0) {
    const std::string text = "TensorFlow's dtype number " + std::to_string(tf.TensorType(input.get()));
    return tf.SetStatus(status.get(), kTfInvalidArgument, (text + " cannot be reduced").c_str());
  }
  std::vector<int64_t> shape;
  for (int d = 0; d < tf.NumDims(input.get()); ++d) shape.push_back(tf.Dim(input.get(), d));
  const auto ndim = static_cast<int>(shape.size());
  input.reset();  // a second reference to the memory would keep it from being forwarded
  int forwarded = -1;
  TensorPtr output(tf.ForwardInputOrAllocateOutput(call->context, &number, 1, i, shape.data(), ndim,
                                                   &forwarded, status.get()));
  if (!Ok(status)) return;
  if (forwarded != number) input = get_input();
  if (!Ok(status)) return;
  void* target = tf.TensorData(output.get());
  const void* source = input == nullptr ? target : tf.TensorData(input.get());
  call->shapes.push_back(std::move(shape));
  call->tensors.push_back({source, target, call->shapes.back().data(), ndim, dtype});
  if (input != nullptr) call->inputs.push_back(std::move(input));
  call->outputs.push_back(std::move(output));
}

void Compute(void* kernel_pointer, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
  const Kernel& kernel = *static_cast<Kernel*>(kernel_pointer);
  auto* call = new Call{context, std::move(*reinterpret_cast<Done*>(done)), {}, {}, {}, {}};
  const StatusPtr status = NewStatus();
  const int count = tf.NumInputs(context) - kFirstTensor;
  for (int i = 0; i < count && Ok(status); ++i) Prepare(call, i, status);
  if (!Ok(status)) {
    tf.OpKernelContext_Failure(context, status.get());
    return Finish(call, KOLOVOD_OK, "");
  }
  kolovod_request request{};
  request.struct_size = sizeof(request);
  request.tensor_size = sizeof(kolovod_tensor);
  request.verb = KOLOVOD_ALLREDUCE;
  request.op = kernel.op;
  request.prescale = kernel.prescale;
  request.postscale = kernel.postscale;
  request.name = kernel.name.c_str();
  request.tensors = call->tensors.data();
  request.tensor_count = call->tensors.size();
  kolovod_engine* engine = kolovod_current(kernel.process_set);
  if (engine == nullptr) return Finish(call, KOLOVOD_SHUT_DOWN, kolovod_error_message());
  const int code = kolovod_submit(engine, &request, OnDone, call, nullptr);
  // From here on the call may be gone, unless it was refused.
  if (code != KOLOVOD_OK) Finish(call, code, kolovod_error_message());
}

void InferShapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  const int64_t count = tf.ShapeInferenceContextNumInputs(context) - kFirstTensor;
  TF_ShapeHandle* shape = tf.NewShapeHandle();
  for (int i = 0; i < count && tf.GetCode(status) == 0; ++i) {
    tf.ShapeInferenceContextGetInput(context, kFirstTensor + i, shape, status);
    if (tf.GetCode(status) == 0) tf.ShapeInferenceContextSetOutput(context, i, shape, status);
  }
  tf.DeleteShapeHandle(shape);
}

// The first function of TensorFlow that is missing, or "".
std::string LookUp() {
  // Python loads TensorFlow with RTLD_LOCAL, so its symbols are found by the library's name.
  void* library = dlopen("libtensorflow_framework.so.2", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) library = RTLD_DEFAULT;
#define KV_LOOK_UP(name, result, parameters)                                  \
  tf.name = reinterpret_cast<decltype(tf.name)>(dlsym(library, "TF_" #name)); \
  if (tf.name == nullptr) return "TF_" #name;
  KV_TENSORFLOW_FUNCTIONS(KV_LOOK_UP)
#undef KV_LOOK_UP
  return "";
}

std::string Register() {
  const std::string missing = LookUp();
  if (!missing.empty()) {
    return "TensorFlow's C function " + missing +
           " was not found in this process: import tensorflow (2.18 or "
           "later, for CPU or GPU) first";
  }
  const StatusPtr status = NewStatus();
  TF_OpDefinitionBuilder* op = tf.NewOpDefinitionBuilder(kAllreduce);
  tf.OpDefinitionBuilderAddInput(op, "anchor: uint8");
  tf.OpDefinitionBuilderAddInput(op, "tensors: T");
  tf.OpDefinitionBuilderAddOutput(op, "results: T");
  tf.OpDefinitionBuilderAddAttr(
      op, "T: list({uint8, int8, uint16, int16, int32, int64, half, float, double, bool, bfloat16}) >= 1");
  tf.OpDefinitionBuilderAddAttr(op, "op: int");
  tf.OpDefinitionBuilderAddAttr(op, "prescale_bits: int");   // of a float64
  tf.OpDefinitionBuilderAddAttr(op, "postscale_bits: int");  // of a float64
  tf.OpDefinitionBuilderAddAttr(op, "process_set: int");
  tf.OpDefinitionBuilderAddAttr(op, "tensor_name: string");  // empty: the node's
  tf.OpDefinitionBuilderAddAttr(op, "unique_name: string");
  tf.OpDefinitionBuilderSetShapeInferenceFunction(op, InferShapes);
  tf.RegisterOpDefinition(op, status.get());
  if (Ok(status)) {
    TF_KernelBuilder* builder =
        tf.NewAsyncKernelBuilder(kAllreduce, "CPU", CreateKernel, Compute, DeleteKernel);
    tf.RegisterKernelBuilder(kAllreduce, builder, status.get());
  }
  return Ok(status) ? "" : std::string("TensorFlow refused the op: ") + tf.Message(status.get());
}

}  // namespace

std::string RegisterTensorFlowOps() {
  static std::mutex mutex;
  static bool registered = false;
  std::lock_guard lock(mutex);
  if (registered) return "";
  const std::string error = Register();
  registered = error.empty();
  return error;
}

}  // namespace kolovod
