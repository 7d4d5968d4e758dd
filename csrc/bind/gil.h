// The interpreter's lock, for threads that may outlive the interpreter.
#pragma once

#include <Python.h>
#include <unistd.h>

namespace kolovod {

// Gives up the interpreter's lock while it lives. A daemon thread that wants it back when the interpreter has
// ended stops here for good, as from Python 3.14 on: before, Python ends it by an exception that is no
// exception, which a destructor must not let through, and the process died of std::terminate (SIGABRT).
class GilReleased {
 public:
  GilReleased() {
    ++count_;
    state_ = PyEval_SaveThread();
  }
  ~GilReleased() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      while (true) pause();
    }
    --count_;
  }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

  // How many there are. With the lock.
  static int Count() { return count_; }
  // In a forked child, which has none of its parent's other threads.
  static void Forget() { count_ = 0; }

 private:
  static inline int count_ = 0;  // changed with the lock only
  PyThreadState* state_;
};

// What `call` returns. Where that runs code of Python, which lets go of the interpreter's lock now and then,
// the same holds when it wants the lock back.
template <typename Call>
auto CallingPython(const Call& call) {
  try {
    return call();
  } catch (...) {
    while (true) pause();
  }
}

// Has the interpreter's lock while it lives, on a thread that gave it up; the same holds for its end.
class GilHeld {
 public:
  GilHeld() {
    try {
      state_ = PyGILState_Ensure();
    } catch (...) {
      while (true) pause();
    }
  }
  ~GilHeld() { PyGILState_Release(state_); }
  GilHeld(const GilHeld&) = delete;
  GilHeld& operator=(const GilHeld&) = delete;

 private:
  PyGILState_STATE state_;
};

}  // namespace kolovod
