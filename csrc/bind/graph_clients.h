// Engines of computation that call us from inside their graphs. Both files below know the C interface
// (include/kolovod.h) and their host's C ABI, and neither the engine nor Python.
#pragma once

#include <string>

namespace kolovod {

// Registers our ops with the TensorFlow that is loaded in this process; once, further calls
// do nothing. Returns what went wrong, or "".
std::string RegisterTensorFlowOps();

// The handler of all verbs for the version of XLA's FFI that the process has, on the platform "cpu"; null for
// a version whose structs nobody has compared with those here.
void* XlaCollectiveHandler(int major, int minor);

}  // namespace kolovod
