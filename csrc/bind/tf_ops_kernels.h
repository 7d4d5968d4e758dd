// What the ops of tf_ops.cc do when they are run.
#pragma once

#include <string>

#include "bind/tf_ops_api.h"

namespace kolovod::tensorflow {

// The ops' types, and which of the attributes of tf_ops.cc each has.
constexpr const char* kAllreduce = "KolovodAllreduce";
constexpr const char* kBroadcast = "KolovodBroadcast";
constexpr const char* kAllgather = "KolovodAllgather";
constexpr const char* kAlltoall = "KolovodAlltoall";
constexpr const char* kReducescatter = "KolovodReducescatter";
constexpr const char* kBarrier = "KolovodBarrier";
constexpr const char* kJoin = "KolovodJoin";
constexpr const char* kFact = "KolovodFact";

constexpr int kFirstTensor = 1;  // of the inputs of ops that have any; before it comes the anchor

// TensorFlow's code for one of the engine's, hence the class of exception that Python sees.
int ToTensorFlow(int code);

// Of facts: where this process is in the world.
void* CreateFact(TF_OpKernelConstruction* construction);
void ComputeFact(void* fact, TF_OpKernelContext* context);
void DeleteFact(void* fact);

// Of every op for XLA's devices: says that it cannot be compiled.
void RefuseToCompile(void*, TF_OpKernelContext* context);

// Registers the kernels of the op `type`.
void RegisterKernels(const char* type, TF_Status* status);

}  // namespace kolovod::tensorflow
