// Memory of PyTorch that stays where it is while an operation uses it (kolovod/torch/held.py says why). With
// the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <unordered_map>
#include <utility>

namespace kolovod {

namespace nb = nanobind;

// A reference to a storage that the script cannot have resized as long as this lives.
class HeldStorage {
 public:
  // `at`: the address of PyTorch's storage; `mark`: how many bytes behind it the mark is that it may be
  // resized; negative: not known.
  HeldStorage(nb::object storage, uintptr_t at, int mark)
      : storage_(std::move(storage)), at_(at), mark_(mark) {
    Users& users = All()[at_];
    if (users.count++ > 0 || mark_ < 0 || Mark() != 1) return;
    users.is_marked = true;  // by us: others have theirs for reasons of their own
    Mark() = 0;
  }
  HeldStorage(const HeldStorage&) = delete;
  HeldStorage& operator=(const HeldStorage&) = delete;
  ~HeldStorage() {
    const auto users = All().find(at_);
    if (--users->second.count > 0) return;
    if (users->second.is_marked) Mark() = 1;
    All().erase(users);
  }

  static bool IsInUse(uintptr_t at) { return All().count(at) > 0; }

 private:
  struct Users {
    size_t count = 0;
    bool is_marked = false;
  };
  // By the address of the storage. Never destroyed: operations end while the process does.
  static std::unordered_map<uintptr_t, Users>& All() {
    static auto* const all = new std::unordered_map<uintptr_t, Users>;
    return *all;
  }
  uint8_t& Mark() const { return *reinterpret_cast<uint8_t*>(at_ + static_cast<uintptr_t>(mark_)); }

  const nb::object storage_;
  const uintptr_t at_;
  const int mark_;
};

}  // namespace kolovod
