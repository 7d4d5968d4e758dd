// What the fuzz targets share. Each target is one file, NAME_fuzz.cc, with libFuzzer's entry point; replay.cc
// runs the same entry point over the corpus without Clang, as a test. `make fuzz` runs them for long.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace kolovod::fuzz {

// Bytes that this thread has taken so far (allocations.cc).
size_t AllocatedBytes();

// Aborts, so that libFuzzer keeps the input.
inline void Require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %s\n", what);
  std::abort();
}

// Calls decode(bytes) and requires that it takes no more than `times` the bytes it is given, and a little.
template <class Decode>
auto Bounded(std::string_view bytes, size_t times, Decode decode) {
  const size_t before = AllocatedBytes();
  auto result = decode(bytes);
  Require(AllocatedBytes() - before <= times * bytes.size() + 4096, "memory is taken by the input's size");
  return result;
}

// Reads what steers a target from the front of its input; zeros when that has ended.
class Steering {
 public:
  Steering(const uint8_t* data, size_t size) : rest_(reinterpret_cast<const char*>(data), size) {}

  template <class T>
  T Take() {
    T value{};
    const size_t n = sizeof(T) < rest_.size() ? sizeof(T) : rest_.size();
    if (n > 0) std::memcpy(&value, rest_.data(), n);
    rest_.remove_prefix(n);
    return value;
  }
  std::string_view TakeBytes(size_t n) {
    const std::string_view bytes = rest_.substr(0, n);
    rest_.remove_prefix(bytes.size());
    return bytes;
  }
  std::string_view rest() const { return rest_; }
  bool empty() const { return rest_.empty(); }

 private:
  std::string_view rest_;
};

}  // namespace kolovod::fuzz
