// Which lines of the user's script call an operation without a name (src/kolovod/core/call_lines.py).
#pragma once

#include <Python.h>

#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>

#include "bind/gil.h"

namespace kolovod {

// A reference to an object of Python, let go at the end.
class Owned {
 public:
  explicit Owned(PyObject* object) : object_(object) {}
  Owned(Owned&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Owned() { Py_XDECREF(object_); }
  PyObject* get() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_;
};

// The script's lines from the innermost frame outwards. With the GIL. To walk the frames of one call takes
// 50 ns each, where Python's own loop took 250: a small allreduce is 4 us.
class CallLines {
 public:
  // Never destroyed: the interpreter may be gone by then.
  static CallLines& Instance() {
    static auto* const instance = new CallLines;
    return *instance;
  }

  // `kind_of`: is called with the name of a file, and returns what its frames are, as a number. Null: there
  // are no lines to tell.
  void Use(PyObject* kind_of) {
    Py_XINCREF(kind_of);
    kind_of_ = Owned(kind_of);
    is_stale_ = true;
  }

  // "loss.py:12, from train.py:40": at most kMostLines; empty if no frame is of the script.
  const std::string& Here() {
    static const std::string nowhere;
    if (!kind_of_) return nowhere;
    // To ask `kind_of` lets other threads run, which may be here, too: what a walk has found stays meanwhile.
    if (walks_ == 0 && (is_stale_ || codes_.size() >= kMostCodes || chains_.size() >= kMostChains)) Forget();
    ++walks_;
    const std::string* const lines = Walk();
    --walks_;
    PyErr_Clear();  // a frame that cannot be read is no reason to refuse the operation
    return lines == nullptr ? nowhere : *lines;
  }

 private:
  static constexpr size_t kMostLines = 4;
  static constexpr size_t kMostFrames = 200;
  static constexpr size_t kMostCodes = 4096;
  static constexpr size_t kMostChains = 65'536;
  static constexpr size_t kMostCharacters = 80;  // of a file's name

  // src/kolovod/core/call_lines.py has the numbers, too.
  enum class Kind : long { kLibrary, kScript, kBorder };

  struct Code {
    Owned code{nullptr};  // so that no other can be where it is
    Kind kind = Kind::kLibrary;
    bool is_outermost = false;  // a module's
    std::string file;           // without its folders, which may differ between hosts
  };

  // Null: there is nothing to tell.
  const std::string* Walk() {
    const Code* codes[kMostLines];
    size_t found = 0;
    uint64_t chain = 0;
    PyObject* const innermost = reinterpret_cast<PyObject*>(PyEval_GetFrame());
    Py_XINCREF(innermost);
    Owned frame(innermost);
    Owned frames[kMostLines] = {Owned(nullptr), Owned(nullptr), Owned(nullptr), Owned(nullptr)};
    for (size_t n = 0; n < kMostFrames && frame && frame.get() != Py_None; ++n) {
      const Code* const code = Find(frame.get());
      if (code == nullptr) return nullptr;
      if (code->kind == Kind::kBorder) break;
      Owned back(PyObject_GetAttr(frame.get(), back_.get()));
      if (code->kind == Kind::kScript) {
        const Owned instruction(PyObject_GetAttr(frame.get(), instruction_.get()));
        if (!instruction) return nullptr;
        chain = (chain ^ reinterpret_cast<uintptr_t>(code)) * 0x9e3779b97f4a7c15ULL;
        chain =
            (chain ^ (chain >> 29) ^ PyLong_AsUnsignedLongMask(instruction.get())) * 0xbf58476d1ce4e5b9ULL;
        codes[found] = code;
        frames[found] = std::move(frame);
        if (++found == kMostLines || code->is_outermost) break;
      }
      frame = std::move(back);
    }
    if (found == 0) return nullptr;
    if (const auto known = chains_.find(chain); known != chains_.end()) return &known->second;
    std::string text;
    for (size_t i = 0; i < found; ++i) {
      const int line = PyFrame_GetLineNumber(reinterpret_cast<PyFrameObject*>(frames[i].get()));
      text += (i == 0 ? "" : ", from ") + codes[i]->file + ":" + std::to_string(line);
    }
    return &(chains_[chain] = std::move(text));
  }

  const Code* Find(PyObject* frame) {
    Owned code(reinterpret_cast<PyObject*>(PyFrame_GetCode(reinterpret_cast<PyFrameObject*>(frame))));
    const auto known = codes_.find(code.get());
    if (known != codes_.end()) return &known->second;
    const Owned path(PyObject_GetAttrString(code.get(), "co_filename"));
    const Owned name(PyObject_GetAttrString(code.get(), "co_name"));
    if (!path || !name) return nullptr;
    const Owned answer(
        CallingPython([&] { return PyObject_CallFunctionObjArgs(kind_of_.get(), path.get(), nullptr); }));
    const Owned file(PyUnicode_AsEncodedString(path.get(), "utf-8", "replace"));
    if (!answer || !file) return nullptr;
    Code facts;
    facts.code = std::move(code);
    facts.kind = static_cast<Kind>(PyLong_AsLong(answer.get()));
    facts.is_outermost = PyUnicode_CompareWithASCIIString(name.get(), "<module>") == 0;
    facts.file = PyBytes_AsString(file.get());
    facts.file.erase(0, facts.file.find_last_of('/') + 1);
    if (facts.file.size() > kMostCharacters) facts.file.erase(0, facts.file.size() - kMostCharacters);
    PyObject* const key = facts.code.get();
    return &codes_.emplace(key, std::move(facts)).first->second;
  }

  void Forget() {
    chains_.clear();
    codes_.clear();
    is_stale_ = false;
  }

  Owned kind_of_{nullptr};
  bool is_stale_ = false;  // what is known is of another `kind_of`
  int walks_ = 0;          // under way
  const Owned back_{PyUnicode_InternFromString("f_back")};
  const Owned instruction_{PyUnicode_InternFromString("f_lasti")};
  std::unordered_map<PyObject*, Code> codes_;
  std::unordered_map<uint64_t, std::string> chains_;  // by the codes and instructions in them
};

}  // namespace kolovod
