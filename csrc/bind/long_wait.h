// Waits of Python's threads for operations: signals meanwhile, and who is told that one lasts.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <utility>

#include "bind/gil.h"

namespace kolovod {

namespace nb = nanobind;

inline constexpr double kLastingS = 60;  // a wait with such a limit counts as one without

// A thread's wait for an operation: it looks for signals every 100 ms, and once it is long it tells a hook of
// Python each time, hook(engine, handle, true), and hook(engine, handle, false) before the thread does
// anything else: when the wait ends, or when a signal handler waits in the middle of it. A handler's own
// waits are not told: when they end depends on who gets the signal. With the GIL, but for Look.
class LongWait {
 public:
  // `engine`: as Python sees it. Null: no hook.
  static void SetHook(PyObject* hook) {
    Py_XINCREF(hook);
    Py_XDECREF(std::exchange(hook_, hook));
  }

  // `handle`: may be known later, but before Look. `lasts`: the thread does nothing else for a minute at
  // least.
  LongWait(nb::handle engine, const uint64_t* handle, bool lasts)
      : engine_(engine), handle_(handle), lasts_(lasts), outer_(std::exchange(innermost_, this)) {
    if (outer_ != nullptr) outer_->Withdraw();
  }
  ~LongWait() { innermost_ = outer_; }
  LongWait(const LongWait&) = delete;
  LongWait& operator=(const LongWait&) = delete;

  // True: give up, an exception is set.
  bool Look() {
    GilHeld gil;
    if (PyErr_CheckSignals() != 0) return true;
    if (++looks_ < kLooks || hook_ == nullptr || outer_ != nullptr || !lasts_) return false;
    told_ = true;
    return !Call(true);
  }
  // After the wait.
  void End() { Withdraw(); }

 private:
  static constexpr int kLooks = 2;

  // What is raised meanwhile is kept.
  void Withdraw() {
    if (!std::exchange(told_, false) || hook_ == nullptr) return;
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (!Call(false)) PyErr_WriteUnraisable(hook_);
    PyErr_Restore(type, value, trace);
  }
  bool Call(bool waits) const {
    PyObject* const answer = CallingPython([&] {
      return PyObject_CallFunction(hook_, "OKO", engine_.ptr(), static_cast<unsigned long long>(*handle_),
                                   waits ? Py_True : Py_False);
    });
    Py_XDECREF(answer);
    return answer != nullptr;
  }

  static inline PyObject* hook_ = nullptr;
  static inline thread_local LongWait* innermost_ = nullptr;
  const nb::handle engine_;
  const uint64_t* const handle_;
  const bool lasts_;
  LongWait* const outer_;
  int looks_ = 0;
  bool told_ = false;
};

}  // namespace kolovod
