// The part of the C ABI of XLA's foreign function interface (FFI) that xla_ffi.cc uses, declared here because
// a module that is built against one version of XLA's own header runs with that version only
// (docs/design/graphs.md).
#pragma once

#include <cstddef>
#include <cstdint>

namespace kolovod {

// It has been the same since its version 0.1 (jaxlib 0.4.38 to 0.12).
// Every struct begins with its size and a list of extensions.
namespace xla {

constexpr int kMajor = 0;
constexpr int kOldestMinor = 1;
constexpr int kNewestMinor = 5;

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

}  // namespace kolovod
