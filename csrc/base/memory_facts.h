// What ranks tell each other of tensors that should be equal, and of numbers that should be finite. At the
// speed of memory, since it is looked at while a model trains.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/types.h"

namespace kolovod {

// 64 bits that differ, but for one case in 2^64, where the bytes do. Not for bytes that somebody has chosen.
inline uint64_t HashMemory(const void* data, size_t bytes, uint64_t seed = 0) {
  constexpr uint64_t kFirst = 0x9e3779b97f4a7c15, kSecond = 0xbf58476d1ce4e5b9;
  constexpr size_t kLanes = 4;
  const auto mixed = [](uint64_t state, uint64_t word) {
    state = (state ^ word) * kFirst;
    return state ^ (state >> 29);
  };
  const auto* at = static_cast<const char*>(data);
  uint64_t lanes[kLanes] = {seed, seed ^ kFirst, seed ^ kSecond, seed + 1};
  size_t left = bytes;
  for (; left >= 8 * kLanes; left -= 8 * kLanes, at += 8 * kLanes) {
    uint64_t words[kLanes];
    std::memcpy(words, at, sizeof(words));
    for (size_t i = 0; i < kLanes; ++i) lanes[i] = mixed(lanes[i], words[i]);
  }
  uint64_t state = bytes;
  for (const uint64_t lane : lanes) state = mixed(state, lane) * kSecond;
  while (left > 0) {
    const size_t part = left < 8 ? left : 8;
    uint64_t word = 0;
    std::memcpy(&word, at, part);
    state = mixed(state, word);
    at += part;
    left -= part;
  }
  state = mixed(state, state >> 32) * kSecond;
  return state ^ (state >> 31);
}

namespace internal {

// Numbers whose exponent has all bits set are infinities or no numbers.
template <class Word>
bool HasExponent(const void* data, size_t count, Word exponent) {
  const auto* words = static_cast<const Word*>(data);
  constexpr size_t kAtOnce = 4096;  // between two looks at what was found
  constexpr Word kSign = Word{1} << (8 * sizeof(Word) - 1);
  const auto lowest = static_cast<Word>(exponent & (~exponent + 1));
  for (size_t begin = 0; begin < count; begin += kAtOnce) {
    const size_t end = count - begin < kAtOnce ? count : begin + kAtOnce;
    Word found = 0;  // with the exponent's lowest bit added, one with all bits set carries into the sign
    for (size_t i = begin; i < end; ++i) {
      found = static_cast<Word>(found | static_cast<Word>((words[i] & exponent) + lowest));
    }
    if ((found & kSign) != 0) return true;
  }
  return false;
}

}  // namespace internal

// Of numbers that are no floats: false.
inline bool HasNonFinite(const void* data, size_t count, DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return internal::HasExponent<uint16_t>(data, count, 0x7c00);
    case DType::kBFloat16:
      return internal::HasExponent<uint16_t>(data, count, 0x7f80);
    case DType::kFloat32:
      return internal::HasExponent<uint32_t>(data, count, 0x7f800000);
    case DType::kFloat64:
      return internal::HasExponent<uint64_t>(data, count, 0x7ff0000000000000);
    default:
      return false;
  }
}

}  // namespace kolovod
