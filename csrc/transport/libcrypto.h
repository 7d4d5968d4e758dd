// The functions of OpenSSL's libcrypto that encryption between hosts needs (docs/design/network.md), found at
// run time in the library that the machine has: no header, no link, and security updates are the system's.
// They are declared by hand; their signatures are the same from 1.1.1 to 3.x (the library's own pages
// EVP_EncryptInit(3), EVP_PKEY_new(3), EVP_PKEY_derive(3) and HMAC(3)).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace kolovod {

struct Libcrypto {
  // OpenSSL's own, known by address only.
  struct CipherContext;
  struct CipherType;
  struct DigestType;
  struct PrivateOrPublicKey;
  struct KeyContext;
  struct Engine;

  // What ciphers are asked (EVP_CTRL_AEAD_*), and the number of X25519 (EVP_PKEY_X25519).
  static constexpr int kGetTag = 0x10, kSetTag = 0x11;
  static constexpr int kX25519 = 1034;

  CipherContext* (*new_context)();
  void (*free_context)(CipherContext*);
  const CipherType* (*aes_256_gcm)();
  const CipherType* (*chacha20_poly1305)();  // null: the library was built without it
  int (*begin_sealing)(CipherContext*, const CipherType*, Engine*, const uint8_t* key, const uint8_t* nonce);
  int (*seal)(CipherContext*, uint8_t* out, int* written, const uint8_t* in, int bytes);
  int (*end_sealing)(CipherContext*, uint8_t* out, int* written);
  int (*begin_opening)(CipherContext*, const CipherType*, Engine*, const uint8_t* key, const uint8_t* nonce);
  int (*open)(CipherContext*, uint8_t* out, int* written, const uint8_t* in, int bytes);
  int (*end_opening)(CipherContext*, uint8_t* out, int* written);
  int (*control)(CipherContext*, int what, int argument, void* data);

  const DigestType* (*sha256)();
  uint8_t* (*hmac)(const DigestType*, const void* key, int key_bytes, const uint8_t* data, size_t bytes,
                   uint8_t* out, unsigned* out_bytes);

  PrivateOrPublicKey* (*private_key)(int type, Engine*, const uint8_t* key, size_t bytes);
  PrivateOrPublicKey* (*public_key)(int type, Engine*, const uint8_t* key, size_t bytes);
  int (*public_bytes)(const PrivateOrPublicKey*, uint8_t* out, size_t* bytes);
  void (*free_key)(PrivateOrPublicKey*);
  KeyContext* (*new_key_context)(PrivateOrPublicKey*, Engine*);
  void (*free_key_context)(KeyContext*);
  int (*begin_deriving)(KeyContext*);
  int (*set_peer)(KeyContext*, PrivateOrPublicKey*);
  int (*derive)(KeyContext*, uint8_t* out, size_t* bytes);

  const char* (*version_text)(int what);

  // The machine's, loaded once, for the life of the process; null if there is none, and `why_not` (which may
  // be null) says so. Any thread.
  static const Libcrypto* Get(std::string* why_not = nullptr);
  // The first of the libraries of these names that has all it takes.
  static bool Load(std::span<const char* const> names, Libcrypto* out, std::string* why_not);
};

}  // namespace kolovod
