// The keys of an encrypted connection: agreed on in the handshake (src/kolovod/net/channel.py), one for each
// direction and purpose.
//
//   shared   := X25519(own private key, the other's public key)         RFC 7748; fresh for each connection
//   agreed   := HKDF-Extract(salt = session key of the handshake, shared)            RFC 5869, SHA-256
//   key      := HKDF-Expand(agreed, "kolovod " purpose " " sender), sender "client" or "server"
//   next key := HKDF-Expand(key, "kolovod next")                         after kRecordsPerKey records
//
// The session key is an HMAC under the job's secret, so nobody without that is the other end; the private
// keys are forgotten when a connection is made, so who learns the secret later cannot read what was recorded.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "base/status.h"
#include "transport/libcrypto.h"

namespace kolovod {

// As the handshake says them: each end offers some, ORed; the lowest that both have is taken.
enum class Cipher : uint8_t { kAes256Gcm = 1, kChaCha20Poly1305 = 2 };

// Is forgotten, not only freed.
class Key {
 public:
  static constexpr size_t kBytes = 32;

  Key() = default;
  explicit Key(std::span<const uint8_t, kBytes> bytes);
  Key(const Key&) = default;
  Key& operator=(const Key&) = default;
  ~Key();

  uint8_t* data() { return bytes_.data(); }
  const uint8_t* data() const { return bytes_.data(); }
  std::span<const uint8_t, kBytes> bytes() const { return bytes_; }
  bool operator==(const Key&) const = default;

 private:
  std::array<uint8_t, kBytes> bytes_{};
};

// What one connection is sealed and opened with: own direction, and the peer's.
struct ConnectionKeys {
  Cipher cipher = Cipher::kAes256Gcm;
  Key send;
  Key receive;
};

// Ciphers that this host offers: AES-256-GCM if its processor has instructions for it, which without them is
// slow and tells the key by its timing; ChaCha20-Poly1305 if the library has it.
uint8_t OfferedCiphers(const Libcrypto& library);

Status HkdfExtract(const Libcrypto& library, std::span<const uint8_t> salt, std::span<const uint8_t> secret,
                   Key* out);
// At most 255 * 32 bytes.
Status HkdfExpand(const Libcrypto& library, const Key& agreed, std::string_view info, std::span<uint8_t> out);

// What both ends of a connection know once they have agreed.
class Agreement {
 public:
  Agreement(const Libcrypto& library, Cipher cipher, const Key& agreed, bool is_server)
      : library_(library), cipher_(cipher), agreed_(agreed), is_server_(is_server) {}

  // For one use: "messages" of the handshake's connection, "records" of the engine's.
  Status Keys(std::string_view purpose, ConnectionKeys* out) const;
  Cipher cipher() const { return cipher_; }

 private:
  const Libcrypto& library_;
  const Cipher cipher_;
  const Key agreed_;
  const bool is_server_;
};

// One end's part in agreeing on a key, for one connection.
class KeyExchange {
 public:
  // With a fresh private key.
  static Status Create(const Libcrypto& library, std::unique_ptr<KeyExchange>* out);
  static Status Create(const Libcrypto& library, const Key& private_key, std::unique_ptr<KeyExchange>* out);
  ~KeyExchange();
  KeyExchange(const KeyExchange&) = delete;
  KeyExchange& operator=(const KeyExchange&) = delete;

  const Key& public_key() const { return public_; }
  // An error for a public key that makes no secret (one of low order).
  Status Shared(const Key& others_public_key, Key* out) const;
  Status Agree(const Key& session, const Key& others_public_key, Cipher cipher, bool is_server,
               std::unique_ptr<Agreement>* out) const;

 private:
  KeyExchange(const Libcrypto& library, Libcrypto::PrivateOrPublicKey* key) : library_(library), key_(key) {}

  const Libcrypto& library_;
  Libcrypto::PrivateOrPublicKey* const key_;
  Key public_;
};

}  // namespace kolovod
