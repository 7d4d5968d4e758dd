// Engines of computation that call us from inside their graphs. Both files below know the C interface
// (include/kolovod.h) and their host's C ABI, and neither the engine nor Python.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kolovod {

// Registers our ops with the TensorFlow that is loaded in this process; once, further calls
// do nothing. Returns what went wrong, or "".
std::string RegisterTensorFlowOps();

// The handler of all verbs for the version of XLA's FFI that the process has, on the platform "cpu"; null for
// a version whose structs nobody has compared with those here.
void* XlaCollectiveHandler(int major, int minor);

// What ranks say who should have the same, and have not: a row of `columns` numbers for each rank, the first
// of which is 0 where a rank has joined.
struct Unlike {
  std::string about;
  std::vector<int32_t> table;
  int columns = 0;
  int rank = 0;
};

// Who is told, on any thread. Returns the error that the program is to have, or "".
using TellUnlike = std::string (*)(const Unlike& unlike);
void OnUnlikeInPrograms(TellUnlike tell);

}  // namespace kolovod
