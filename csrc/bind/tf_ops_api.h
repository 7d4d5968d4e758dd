// The part of TensorFlow's stable C API that is used here, looked up in the library that is already loaded:
// no header and no library of TensorFlow is needed to build this, and one build serves many versions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>

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

namespace kolovod::tensorflow {

// Every function of TensorFlow that is called: name after TF_, result, parameters.
#define KV_TENSORFLOW_FUNCTIONS(F)                                                                           \
  F(NewStatus, TF_Status*, ())                                                                               \
  F(DeleteStatus, void, (TF_Status*))                                                                        \
  F(SetStatus, void, (TF_Status*, int, const char*))                                                         \
  F(GetCode, int, (const TF_Status*))                                                                        \
  F(Message, const char*, (const TF_Status*))                                                                \
  F(NewOpDefinitionBuilder, TF_OpDefinitionBuilder*, (const char*))                                          \
  F(OpDefinitionBuilderAddAttr, void, (TF_OpDefinitionBuilder*, const char*))                                \
  F(OpDefinitionBuilderAddInput, void, (TF_OpDefinitionBuilder*, const char*))                               \
  F(OpDefinitionBuilderAddOutput, void, (TF_OpDefinitionBuilder*, const char*))                              \
  F(OpDefinitionBuilderSetShapeInferenceFunction, void,                                                      \
    (TF_OpDefinitionBuilder*, void (*)(TF_ShapeInferenceContext*, TF_Status*)))                              \
  F(RegisterOpDefinition, void, (TF_OpDefinitionBuilder*, TF_Status*))                                       \
  F(ShapeInferenceContextNumInputs, int64_t, (TF_ShapeInferenceContext*))                                    \
  F(ShapeInferenceContextGetInput, void, (TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*))      \
  F(ShapeInferenceContextSetOutput, void, (TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*))     \
  F(NewShapeHandle, TF_ShapeHandle*, ())                                                                     \
  F(DeleteShapeHandle, void, (TF_ShapeHandle*))                                                              \
  F(NewAsyncKernelBuilder, TF_KernelBuilder*,                                                                \
    (const char*, const char*, void* (*)(TF_OpKernelConstruction*),                                          \
     void (*)(void*, TF_OpKernelContext*, TF_AsyncOpKernelDoneCallback*), void (*)(void*)))                  \
  F(RegisterKernelBuilder, void, (const char*, TF_KernelBuilder*, TF_Status*))                               \
  F(OpKernelConstruction_GetAttrSize, void,                                                                  \
    (TF_OpKernelConstruction*, const char*, int32_t*, int32_t*, TF_Status*))                                 \
  F(OpKernelConstruction_GetAttrString, void,                                                                \
    (TF_OpKernelConstruction*, const char*, char*, size_t, TF_Status*))                                      \
  F(OpKernelConstruction_GetAttrInt64, void, (TF_OpKernelConstruction*, const char*, int64_t*, TF_Status*))  \
  F(OpKernelConstruction_GetName, TF_StringView, (TF_OpKernelConstruction*))                                 \
  F(OpKernelConstruction_Failure, void, (TF_OpKernelConstruction*, TF_Status*))                              \
  F(OpKernelContext_Failure, void, (TF_OpKernelContext*, TF_Status*))                                        \
  F(RunAsyncOpKernelDoneCallback, void, (TF_AsyncOpKernelDoneCallback*))                                     \
  F(GetFrameId, int64_t, (TF_OpKernelContext*))                                                              \
  F(GetIterId, int64_t, (TF_OpKernelContext*))                                                               \
  F(NumInputs, int, (TF_OpKernelContext*))                                                                   \
  F(GetInput, void, (TF_OpKernelContext*, int, TF_Tensor**, TF_Status*))                                     \
  F(ForwardInputOrAllocateOutput, TF_Tensor*,                                                                \
    (TF_OpKernelContext*, const int*, int, int, const int64_t*, int, int*, TF_Status*))                      \
  F(DeleteTensor, void, (TF_Tensor*))                                                                        \
  F(TensorType, int, (const TF_Tensor*))                                                                     \
  F(NumDims, int, (const TF_Tensor*))                                                                        \
  F(Dim, int64_t, (const TF_Tensor*, int))                                                                   \
  F(TensorData, void*, (const TF_Tensor*))                                                                   \
  F(TensorByteSize, size_t, (const TF_Tensor*))                                                              \
  F(NewTensor, TF_Tensor*, (int, const int64_t*, int, void*, size_t, void (*)(void*, size_t, void*), void*)) \
  F(SetOutput, void, (TF_OpKernelContext*, int, const TF_Tensor*, TF_Status*))                               \
  F(AllocateOutput, TF_Tensor*, (TF_OpKernelContext*, int, int, const int64_t*, int, size_t, TF_Status*))    \
  F(NewKernelBuilder, TF_KernelBuilder*,                                                                     \
    (const char*, const char*, void* (*)(TF_OpKernelConstruction*), void (*)(void*, TF_OpKernelContext*),    \
     void (*)(void*)))                                                                                       \
  F(OpDefinitionBuilderSetIsStateful, void, (TF_OpDefinitionBuilder*, bool))                                 \
  F(ShapeInferenceContextScalar, TF_ShapeHandle*, (TF_ShapeInferenceContext*))                               \
  F(ShapeInferenceContextVectorFromSize, TF_ShapeHandle*, (TF_ShapeInferenceContext*, size_t))               \
  F(ShapeInferenceContextWithRank, void,                                                                     \
    (TF_ShapeInferenceContext*, TF_ShapeHandle*, int64_t, TF_ShapeHandle*, TF_Status*))                      \
  F(ShapeInferenceContextWithRankAtLeast, void,                                                              \
    (TF_ShapeInferenceContext*, TF_ShapeHandle*, int64_t, TF_ShapeHandle*, TF_Status*))                      \
  F(ShapeInferenceContextSubshape, void,                                                                     \
    (TF_ShapeInferenceContext*, TF_ShapeHandle*, int64_t, int64_t, TF_ShapeHandle*, TF_Status*))             \
  F(ShapeInferenceContextConcatenateShapes, void,                                                            \
    (TF_ShapeInferenceContext*, TF_ShapeHandle*, TF_ShapeHandle*, TF_ShapeHandle*, TF_Status*))

struct TensorFlow {
#define KV_MEMBER(name, result, parameters) result(*name) parameters = nullptr;
  KV_TENSORFLOW_FUNCTIONS(KV_MEMBER)
#undef KV_MEMBER
};

inline TensorFlow tf;  // filled once, before the first op can exist

constexpr int kInvalidArgument = 3;  // codes
constexpr int kInternal = 13;
constexpr int kInt32 = 3;  // types
constexpr int kInt64 = 9;

struct DeleteStatus {
  void operator()(TF_Status* status) const { tf.DeleteStatus(status); }
};
struct DeleteTensor {
  void operator()(TF_Tensor* tensor) const { tf.DeleteTensor(tensor); }
};
using StatusPtr = std::unique_ptr<TF_Status, DeleteStatus>;
using TensorPtr = std::unique_ptr<TF_Tensor, DeleteTensor>;

inline StatusPtr NewStatus() { return StatusPtr(tf.NewStatus()); }
inline bool Ok(const StatusPtr& status) { return tf.GetCode(status.get()) == 0; }

// Reads attributes; after the first that fails the rest are left alone.
class Attributes {
 public:
  explicit Attributes(TF_OpKernelConstruction* construction) : construction_(construction) {}

  int64_t Int(const char* name) {
    int64_t value = 0;
    if (Ok(status_)) tf.OpKernelConstruction_GetAttrInt64(construction_, name, &value, status_.get());
    return value;
  }
  // An attribute of TensorFlow's own type float would have 32 bits, and not equal that of an eager call.
  double Double(const char* name) {
    const int64_t bits = Int(name);
    double value = 0;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
  std::string Text(const char* name) {
    int32_t list_size = 0;
    int32_t bytes = 0;
    if (Ok(status_)) {
      tf.OpKernelConstruction_GetAttrSize(construction_, name, &list_size, &bytes, status_.get());
    }
    if (!Ok(status_) || bytes <= 0) return "";
    std::string text(static_cast<size_t>(bytes), '\0');
    tf.OpKernelConstruction_GetAttrString(construction_, name, text.data(), text.size(), status_.get());
    return text;
  }
  // Whether all were there. Else the kernel cannot be made, and TensorFlow knows.
  bool Complete() {
    if (!Ok(status_)) tf.OpKernelConstruction_Failure(construction_, status_.get());
    return Ok(status_);
  }

 private:
  TF_OpKernelConstruction* construction_;
  const StatusPtr status_ = NewStatus();
};

}  // namespace kolovod::tensorflow
