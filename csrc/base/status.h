// The outcome of an operation. The core never throws across its own layers: everything that can fail
// returns a Status, and the binding turns it into one Python exception.
#pragma once

#include <string>
#include <utility>

namespace kolovod {

enum class Code : int {
  kOk = 0,
  kInvalidArgument = 1,
  kDuplicateName = 2,
  kMismatch = 3,
  kRankLost = 4,
  kRankLeft = 5,
  kShutDown = 6,
  kTimeout = 7,
  kInterrupted = 8,
  kInternal = 9,
  kLate = 10,
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

}  // namespace kolovod

#define KV_RETURN_IF_ERROR(expression)                                 \
  do {                                                                 \
    if (::kolovod::Status kv_status = (expression); !kv_status.ok()) { \
      return kv_status;                                                \
    }                                                                  \
  } while (0)
