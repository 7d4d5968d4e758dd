// Where this process's main thread is in Python. Python's faulthandler has a handler on a real-time signal
// that writes the stack into a pipe: it runs at once, whoever holds the GIL (src/kolovod/core/stacks.py).
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/thread_annotations.h"

namespace kolovod {

// One for all engines of a process.
class StackSource {
 public:
  // `signum` has its handler by now, which writes into the pipe whose other end is `read_fd` (not blocking,
  // kept open by the caller).
  StackSource(int signum, int read_fd);

  // Returns the text (the stack, or why there is none) once it is there: the caller asks again until then.
  // Never blocks.
  std::optional<std::string> Capture(int64_t now_ns);

 private:
  using Handler = void (*)(int);
  std::string Begin(int64_t now_ns) REQUIRES(mutex_);
  bool Read() REQUIRES(mutex_);

  const int signum_;
  const int read_fd_;
  const Handler handler_;
  Mutex mutex_;
  int64_t begun_ns_ GUARDED_BY(mutex_) = 0;  // 0: no capture under way
  int64_t read_ns_ GUARDED_BY(mutex_) = 0;   // when the last part came
  std::string text_ GUARDED_BY(mutex_);
};

}  // namespace kolovod
