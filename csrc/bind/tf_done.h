// What TensorFlow gives an asynchronous kernel to call when it is done: a TF_AsyncOpKernelDoneCallback is a
// std::function<void()> of libstdc++, a variable on TensorFlow's stack that is gone when Compute returns. To
// keep it, it is moved from. That is the one place that leans on more than the C API
// (docs/design/graphs.md). The layout is written out here, since this module may be compiled with another
// standard library, whose std::function is larger (docs/design/launching.md).
#pragma once

#include <cstddef>
#include <cstring>

namespace kolovod::tensorflow {

class Done {
 public:
  // Takes what is at `function`, and leaves an empty one.
  static Done From(void* function) {
    Done taken;
    std::memcpy(static_cast<void*>(&taken), function, sizeof(taken));
    static_cast<Done*>(function)->Empty();
    return taken;
  }

  Done(Done&& other) noexcept {
    std::memcpy(static_cast<void*>(this), static_cast<const void*>(&other), sizeof(*this));
    other.Empty();
  }
  Done& operator=(Done&&) = delete;

  ~Done() {
    if (manager_ != nullptr) manager_(functor_, functor_, kDestroy);
  }

 private:
  // What libstdc++ calls _Manager_operation.
  enum Operation { kDestroy = 3 };

  Done() = default;

  void Empty() {
    manager_ = nullptr;
    invoker_ = nullptr;
  }

  // A function object, if it is small and may be moved by copying its bytes; else a pointer to one.
  alignas(void*) std::byte functor_[2 * sizeof(void*)] = {};
  bool (*manager_)(std::byte*, const std::byte*, Operation) = nullptr;
  void (*invoker_)(const std::byte*) = nullptr;
};

}  // namespace kolovod::tensorflow
