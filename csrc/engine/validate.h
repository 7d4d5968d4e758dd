// Whether a request can ever work, before anything is sent. PURE.
#pragma once

#include <vector>

#include "base/status.h"
#include "engine/operation.h"

namespace kolovod {

size_t ElementsOf(const TensorMeta& meta);

// `ranks`: of those that take part, their numbers in the world. The error names the value received and the
// way out.
Status Validate(const Request& request, const std::vector<SubmittedTensor>& tensors,
                const std::vector<int>& ranks);

}  // namespace kolovod
