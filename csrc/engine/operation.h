// One submitted request and its way to completion.
#pragma once

#include <atomic>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "control/message.h"

namespace kolovod {

struct FreeDeleter {
  void operator()(char* p) const { std::free(p); }
};

// Bytes that the engine allocated because only the negotiation knew how many (allgather).
struct OutputBuffer {
  std::unique_ptr<char, FreeDeleter> data;
  size_t bytes = 0;
};

struct Operation {
  Request request;                  // constant after submission
  std::vector<const void*> inputs;  // by tensor; constant after submission
  std::vector<void*> outputs;
  std::vector<size_t> counts;  // elements
  size_t bytes = 0;            // all tensors of this rank

  int32_t announced_id = kNoId;                  // guarded by the engine's mutex
  bool in_log = false;                           // guarded by the engine's mutex
  std::vector<std::vector<int64_t>> first_dims;  // allgather: set when the entry is read from the log
  std::vector<OutputBuffer> buffers;             // allgather: filled by the driver before `done`

  Status status;  // written before `done`
  std::atomic<bool> done{false};
};

using OperationPtr = std::shared_ptr<Operation>;

}  // namespace kolovod
