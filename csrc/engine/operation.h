// One submitted request and its way to completion.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "collectives/select.h"
#include "control/message.h"
#include "engine/output_memory.h"
#include "transport/operation_record.h"

namespace kolovod {

struct SubmittedTensor {
  TensorMeta meta;
  const void* in = nullptr;
  void* out = nullptr;
  // Of an allgather, alltoall or reducescatter: how large the memory at out is, which must be what the result
  // takes. 0: the engine allocates the output. It is apart from in, or in is this rank's part of it
  // (allgather).
  size_t out_bytes = 0;
  int gpu = -1;  // which of this process's GPUs the addresses belong to, where meta.device is kGpu
};

// Bytes that the engine allocated: allgather, alltoall and reducescatter make outputs of other sizes. On a
// device who carries the operation makes them, and the address of this stands for each.
struct OutputBuffer {
  OutputMemory data;  // null if the caller's memory was taken instead, or on a device
  size_t bytes = 0;
};

// How far a send or a recv is: the other end has to do something that it may never do, or not any more.
enum class Meeting : uint8_t { kFresh, kAsks, kMet };

struct Operation {
  Request request;                  // constant after submission
  std::vector<const void*> inputs;  // by tensor; constant after submission
  std::vector<void*> outputs;
  std::vector<size_t> out_bytes;  // as in SubmittedTensor
  std::vector<size_t> counts;     // elements
  size_t bytes = 0;               // all tensors of this rank
  int gpu = -1;                   // as in SubmittedTensor, of all tensors

  uint64_t transfer = 0;  // of send and recv: its number here; request.root is the peer, or -1 for any
  std::atomic<Meeting> meeting{Meeting::kFresh};  // of those
  uint64_t tag = 0;              // in EagerSlots, of what may go that way; guarded by the engine's mutex
  uint64_t claimed = 0;          // the tag for which this rank has claimed a slot there; the same
  bool was_eager = false;        // it was carried out by that
  int32_t announced_id = kNoId;  // guarded by the engine's mutex
  bool in_log = false;           // guarded by the engine's mutex
  // As in Response, set when the entry is read from the log. Once an alltoall is done: the rows received, by
  // rank; once a recv is done: who has sent it.
  std::vector<std::vector<int64_t>> rows;
  std::shared_ptr<const Splits> splits;
  std::vector<OutputBuffer> buffers;  // filled by the driver before `done`, unless outputs were given

  std::optional<LinkCost> links;  // what is in the log to say this, and nothing else

  uint32_t record = kNoRecord;  // where its rank notes it; guarded by the engine's mutex

  Status status;  // written before `done`
  std::atomic<bool> done{false};
  // Called once after `done`, without the engine's mutex, by whichever thread completes the operation. It
  // returns soon, since that thread drives; it may submit, and may not wait.
  std::function<void(const Operation&)> on_done;
};

using OperationPtr = std::shared_ptr<Operation>;

}  // namespace kolovod
