// How values become bytes and back (docs/wire.md): little-endian, every read checked against the end.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace kolovod {

class Writer {
 public:
  template <class T>
  void Put(T value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  void PutString(std::string_view text) {
    Put(static_cast<uint32_t>(text.size()));
    bytes_.append(text);
  }
  // Seven bits in each byte, the lowest first; the highest bit says that another follows.
  void PutVarint(uint64_t value) {
    for (; value >= 0x80; value >>= 7) bytes_.push_back(static_cast<char>(value | 0x80));
    bytes_.push_back(static_cast<char>(value));
  }
  std::string Take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}

  template <class T>
  bool Get(T* value) {
    if (bytes_.size() < sizeof(T)) return false;
    std::memcpy(value, bytes_.data(), sizeof(T));
    bytes_.remove_prefix(sizeof(T));
    return true;
  }
  bool GetString(std::string* text) {
    uint32_t n;
    if (!Get(&n) || n > bytes_.size()) return false;
    text->assign(bytes_.substr(0, n));
    bytes_.remove_prefix(n);
    return true;
  }
  // At most 63 bits, in the only encoding that it has.
  bool GetVarint(int64_t* value) {
    uint64_t bits = 0;
    for (unsigned shift = 0; shift < 63; shift += 7) {
      uint8_t byte;
      if (!Get(&byte)) return false;
      bits |= static_cast<uint64_t>(byte & 0x7f) << shift;
      if (byte >= 0x80) continue;
      *value = static_cast<int64_t>(bits);
      return byte != 0 || shift == 0;
    }
    return false;
  }
  size_t left() const { return bytes_.size(); }
  // A count of items of at least item_bytes each: refused when they could not be there.
  bool GetCount(size_t item_bytes, uint32_t* count) {
    return Get(count) && *count <= bytes_.size() / item_bytes;
  }
  template <class Enum>
  bool GetEnum(int limit, Enum* value) {
    uint8_t raw;
    if (!Get(&raw) || raw >= limit) return false;
    *value = static_cast<Enum>(raw);
    return true;
  }
  bool GetInts(std::vector<int64_t>* values) {
    uint32_t n;
    if (!GetCount(sizeof(int64_t), &n)) return false;
    values->resize(n);
    for (int64_t& v : *values) {
      if (!Get(&v) || v < 0) return false;
    }
    return true;
  }
  bool AtEnd() const { return bytes_.empty(); }

 private:
  std::string_view bytes_;
};

}  // namespace kolovod
