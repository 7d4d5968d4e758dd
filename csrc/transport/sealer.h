// Bytes between hosts, cut into records that nobody else can read or change (docs/wire.md):
//
//   record := length: uint32     // of the plain bytes; authenticated
//             sealed: byte[length]
//             tag: byte[16]
//   nonce  := 0: uint32, number of the record: uint64     // not sent
//
// The number counts from 0 for each key of a connection, so a record that is changed, left out, repeated,
// moved or sent back does not open. Each direction has its own key.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/status.h"
#include "transport/keys.h"

namespace kolovod {

inline constexpr size_t kRecordPlainBytes = 64 << 10;  // at most; stays in a core's second-level cache
inline constexpr size_t kRecordHeadBytes = sizeof(uint32_t);
inline constexpr size_t kTagBytes = 16;
inline constexpr size_t kRecordExtraBytes = kRecordHeadBytes + kTagBytes;
inline constexpr size_t kRecordBytes = kRecordPlainBytes + kRecordExtraBytes;
// 256 GiB: what one key of AES-GCM may seal with a margin of 2^-57 (RFC 8446 5.5).
inline constexpr uint64_t kRecordsPerKey = uint64_t{1} << 22;

// One direction's cipher, key and count. Not thread-safe; `Sealer` and `Opener` are what is used.
class RecordCipher {
 public:
  RecordCipher(const RecordCipher&) = delete;
  RecordCipher& operator=(const RecordCipher&) = delete;

 protected:
  RecordCipher(Cipher cipher, const Key& key, bool seals, uint64_t records_per_key);
  ~RecordCipher();

  // Sets the next record's nonce, and the key when it is that one's turn.
  Status Begin(uint32_t length);
  bool Update(const uint8_t* in, size_t bytes, uint8_t* out);

  const Libcrypto* const library_;
  Libcrypto::CipherContext* const context_;
  const Cipher cipher_;
  const bool seals_;
  const uint64_t records_per_key_;
  Key key_;
  uint64_t count_ = 0;  // records begun
};

class Sealer : private RecordCipher {
 public:
  Sealer(Cipher cipher, const Key& key, uint64_t records_per_key = kRecordsPerKey)
      : RecordCipher(cipher, key, /*seals=*/true, records_per_key) {}

  // Writes one record of all bytes of `parts`, whose sum is `bytes`, to `out`: bytes + kRecordExtraBytes.
  Status Seal(std::span<const iovec> parts, size_t bytes, char* out);
  // Appends `bytes` of `data` as records to `out`.
  Status Append(const char* data, size_t bytes, std::string* out);
};

class Opener : private RecordCipher {
 public:
  Opener(Cipher cipher, const Key& key, uint64_t records_per_key = kRecordsPerKey)
      : RecordCipher(cipher, key, /*seals=*/false, records_per_key) {}

  // Opens a whole record of `bytes` plain bytes into `places`, which hold as many or more; they may be the
  // sealed bytes themselves. Not OK: it is not the one that the peer has sealed here, and what is in `places`
  // means nothing.
  Status Open(const char* record, size_t bytes, std::span<const iovec> places);
};

// Gathers what arrives into records, and opens them.
class SealedReader {
 public:
  // `most_bytes`: plain bytes of a record.
  explicit SealedReader(const ConnectionKeys& keys, uint64_t records_per_key = kRecordsPerKey);

  // Where the next bytes from the socket go, never empty after every whole record has been opened; then how
  // many have come.
  std::span<char> Room();
  void Arrived(size_t bytes) { end_ += bytes; }

  // Plain bytes of the next record; 0: it is not whole yet. An error: there is no such record.
  Status Next(size_t* bytes) const;
  // The next one, which is whole: to `places` that hold it.
  Status Open(std::span<const iovec> places);
  // The same to its own place: the bytes stay there until `Room` is called.
  Status Open(std::span<char>* plain);

 private:
  static constexpr size_t kAheadBytes = 4 << 10;  // small records come several at a time
  static constexpr size_t kBufferBytes = kRecordBytes + kAheadBytes;

  uint32_t Length() const;

  Opener opener_;
  const std::unique_ptr<char[]> buffer_;
  size_t begin_ = 0, end_ = 0;
};

}  // namespace kolovod
