// Whether a request can ever work, before anything is sent. PURE.
#pragma once

#include <vector>

#include "base/status.h"
#include "base/topology.h"
#include "engine/operation.h"

namespace kolovod {

size_t ElementsOf(const TensorMeta& meta);

// `ranks`: of those that take part, their numbers in the world. The error names the value received and the
// way out.
Status Validate(const Request& request, const std::vector<SubmittedTensor>& tensors,
                const std::vector<int>& ranks);

// Validates a request that came from rank `rank` of `size`: whether what follows from it stays within its
// buffers. A sound one may still be refused for what the others submit.
bool IsSound(const Request& request, int size);

// Whether `rows` are what rank 0 must answer to `request` of rank `rank` (Response::rows), and the bytes that
// follow from them can be counted.
bool RowsFit(const Request& request, const std::vector<std::vector<int64_t>>& rows, int rank, int size);

// Whether `splits` are what rank 0 must answer (Response::splits): all that concerns the ranks of this host.
bool SplitsFit(const Request& request, const Splits* splits, const Topology& topology);

}  // namespace kolovod
