// The ops for TensorFlow graphs: their inputs, outputs, attributes and shapes.
//
// Those that carry data are stateless, since stateful ops are run one after the other. Then the optimizer
// must not take them for plain functions: the attribute `unique_name` keeps it from merging two that look
// alike, and the input `anchor`, which is not looked at and never a constant, from running one of constants
// ahead of time. Barrier and join are stateful: nothing depends on them, and they are run in their place.
#include <dlfcn.h>

#include <string>
#include <vector>

#include "base/thread_annotations.h"
#include "bind/graph_clients.h"
#include "bind/tf_ops_kernels.h"

namespace kolovod {
namespace tensorflow {
namespace {

class Shape {
 public:
  Shape() : handle_(tf.NewShapeHandle()) {}
  explicit Shape(TF_ShapeHandle* handle) : handle_(handle) {}
  ~Shape() { tf.DeleteShapeHandle(handle_); }
  Shape(const Shape&) = delete;
  Shape& operator=(const Shape&) = delete;
  TF_ShapeHandle* get() const { return handle_; }

 private:
  TF_ShapeHandle* handle_;
};

constexpr auto kUnknown = static_cast<size_t>(-1);

bool Ok(const TF_Status* status) { return tf.GetCode(status) == 0; }

void SameShapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  const int64_t count = tf.ShapeInferenceContextNumInputs(context) - kFirstTensor;
  const Shape shape;
  for (int i = 0; i < count && Ok(status); ++i) {
    tf.ShapeInferenceContextGetInput(context, kFirstTensor + i, shape.get(), status);
    if (Ok(status)) tf.ShapeInferenceContextSetOutput(context, i, shape.get(), status);
  }
}

// Output i is like tensor i, but with any number of rows: that depends on the other ranks, or on how many
// there are, which a world that is formed later may have otherwise.
void SetOtherRows(TF_ShapeInferenceContext* context, int i, TF_Status* status) {
  const Shape shape, checked, row, result;
  const Shape rows(tf.ShapeInferenceContextVectorFromSize(context, kUnknown));
  tf.ShapeInferenceContextGetInput(context, kFirstTensor + i, shape.get(), status);
  if (Ok(status)) tf.ShapeInferenceContextWithRankAtLeast(context, shape.get(), 1, checked.get(), status);
  if (Ok(status)) {
    tf.ShapeInferenceContextSubshape(context, checked.get(), 1, INT64_MAX, row.get(), status);
  }
  if (Ok(status)) {
    tf.ShapeInferenceContextConcatenateShapes(context, rows.get(), row.get(), result.get(), status);
  }
  if (Ok(status)) tf.ShapeInferenceContextSetOutput(context, i, result.get(), status);
}

void SetVector(TF_ShapeInferenceContext* context, int output, size_t size, TF_Status* status) {
  if (!Ok(status)) return;
  const Shape shape(tf.ShapeInferenceContextVectorFromSize(context, size));
  tf.ShapeInferenceContextSetOutput(context, output, shape.get(), status);
}

void ReducescatterShapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  const int64_t count = tf.ShapeInferenceContextNumInputs(context) - kFirstTensor;
  for (int i = 0; i < count && Ok(status); ++i) SetOtherRows(context, i, status);
}

void AllgatherShapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  ReducescatterShapes(context, status);
  const int64_t count = tf.ShapeInferenceContextNumInputs(context) - kFirstTensor;
  SetVector(context, static_cast<int>(count), static_cast<size_t>(count), status);
}

void AlltoallShapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  SetOtherRows(context, 0, status);
  const Shape splits, checked;
  if (Ok(status)) {
    tf.ShapeInferenceContextGetInput(context, kFirstTensor + 1, splits.get(), status);
  }
  if (Ok(status)) tf.ShapeInferenceContextWithRank(context, splits.get(), 1, checked.get(), status);
  SetVector(context, 1, kUnknown, status);
}

void NoShapes(TF_ShapeInferenceContext*, TF_Status*) {}

void ScalarShape(TF_ShapeInferenceContext* context, TF_Status* status) {
  const Shape shape(tf.ShapeInferenceContextScalar(context));
  tf.ShapeInferenceContextSetOutput(context, 0, shape.get(), status);
}

#define KV_TYPES "{uint8, int8, uint16, int16, int32, int64, half, float, double, bool, bfloat16}"
constexpr const char* kTypes = "T: list(" KV_TYPES ") >= 1";
constexpr const char* kType = "T: " KV_TYPES;

struct Definition {
  const char* type;
  std::vector<const char*> inputs;
  std::vector<const char*> outputs;
  std::vector<const char*> attributes;  // besides process_set, and those of all but facts
  void (*infer_shapes)(TF_ShapeInferenceContext*, TF_Status*);
  bool is_stateful = false;
};

std::vector<Definition> Definitions() {
  const std::vector<const char*> reduction = {kTypes, "op: int", "prescale_bits: int",
                                              "postscale_bits: int"};  // of float64
  std::vector<const char*> allreduce = reduction;
  allreduce.push_back("codecs: string");  // by tensor, as digits; empty: none
  const std::vector<const char*> tensors = {"anchor: uint8", "tensors: T"};
  return {
      {kAllreduce, tensors, {"results: T"}, allreduce, SameShapes},
      {kBroadcast, tensors, {"results: T"}, {kTypes, "root: int"}, SameShapes},
      // starts: of each result, the first row that is this rank's
      {kAllgather, tensors, {"results: T", "starts: int64"}, {kTypes}, AllgatherShapes},
      // splits: none for equal parts; received: rows from each rank
      {kAlltoall,
       {"anchor: uint8", "tensor: T", "splits: int64"},
       {"result: T", "received: int64"},
       {kType},
       AlltoallShapes},
      {kReducescatter, tensors, {"results: T"}, reduction, ReducescatterShapes},
      {kBarrier, {"anchor: uint8"}, {}, {}, NoShapes, true},
      {kJoin, {"anchor: uint8"}, {"last: int32"}, {}, ScalarShape, true},
      {kFact, {"anchor: uint8"}, {"value: int32"}, {"fact: string"}, ScalarShape},
  };
}

void RegisterOp(const Definition& definition, TF_Status* status) {
  TF_OpDefinitionBuilder* op = tf.NewOpDefinitionBuilder(definition.type);
  for (const char* input : definition.inputs) tf.OpDefinitionBuilderAddInput(op, input);
  for (const char* output : definition.outputs) tf.OpDefinitionBuilderAddOutput(op, output);
  for (const char* attribute : definition.attributes) tf.OpDefinitionBuilderAddAttr(op, attribute);
  tf.OpDefinitionBuilderAddAttr(op, "process_set: int");
  tf.OpDefinitionBuilderAddAttr(op, "tensor_name: string");  // empty: the node's
  tf.OpDefinitionBuilderAddAttr(op, "unique_name: string");
  tf.OpDefinitionBuilderAddAttr(op, "called_from: string = ''");  // models saved before have none
  tf.OpDefinitionBuilderSetShapeInferenceFunction(op, definition.infer_shapes);
  // Only then: TensorFlow takes the call for a yes, whatever it is given.
  if (definition.is_stateful) tf.OpDefinitionBuilderSetIsStateful(op, true);
  tf.RegisterOpDefinition(op, status);
  if (Ok(status)) RegisterKernels(definition.type, status);
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
           " was not found in this process: import tensorflow (2.15 or "
           "later, for CPU or GPU) first";
  }
  const StatusPtr status = NewStatus();
  for (const Definition& definition : Definitions()) {
    RegisterOp(definition, status.get());
    if (!Ok(status.get())) {
      return "TensorFlow refused the op " + std::string(definition.type) + ": " + tf.Message(status.get());
    }
  }
  return "";
}

}  // namespace
}  // namespace tensorflow

std::string RegisterTensorFlowOps() {
  static Mutex mutex;
  static bool registered = false;
  MutexLock lock(mutex);
  if (registered) return "";
  const std::string error = tensorflow::Register();
  registered = error.empty();
  return error;
}

}  // namespace kolovod
