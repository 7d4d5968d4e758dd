#include "transport/keys.h"

#include <sys/random.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "base/processor.h"

namespace kolovod {
namespace {

Status Failed(const char* what) {
  return Status(Code::kInternal, std::string("libcrypto refuses ") + what + ": is it restricted (FIPS)?");
}

Status Hmac(const Libcrypto& library, std::span<const uint8_t> key, std::span<const uint8_t> data, Key* out) {
  unsigned bytes = 0;
  if (library.hmac(library.sha256(), key.data(), static_cast<int>(key.size()), data.data(), data.size(),
                   out->data(), &bytes) == nullptr ||
      bytes != Key::kBytes) {
    return Failed("HMAC-SHA256");
  }
  return Status();
}

}  // namespace

Key::Key(std::span<const uint8_t, kBytes> bytes) { std::copy(bytes.begin(), bytes.end(), bytes_.begin()); }

Key::~Key() { explicit_bzero(bytes_.data(), bytes_.size()); }

uint8_t OfferedCiphers(const Libcrypto& library) {
  uint8_t offered = 0;
  if (HasAesInstructions()) offered |= static_cast<uint8_t>(Cipher::kAes256Gcm);
  if (library.chacha20_poly1305 != nullptr) offered |= static_cast<uint8_t>(Cipher::kChaCha20Poly1305);
  return offered;
}

Status HkdfExtract(const Libcrypto& library, std::span<const uint8_t> salt, std::span<const uint8_t> secret,
                   Key* out) {
  return Hmac(library, salt, secret, out);
}

Status HkdfExpand(const Libcrypto& library, const Key& agreed, std::string_view info,
                  std::span<uint8_t> out) {
  if (out.size() > 255 * Key::kBytes) return Status(Code::kInternal, "HKDF: too much is asked for");
  Key block;
  std::vector<uint8_t> data;  // the block before, info, the block's number
  for (uint8_t number = 1; !out.empty(); ++number) {
    if (number > 1) data.assign(block.data(), block.data() + Key::kBytes);
    data.insert(data.end(), info.begin(), info.end());
    data.push_back(number);
    KV_RETURN_IF_ERROR(Hmac(library, agreed.bytes(), data, &block));
    const size_t bytes = std::min(out.size(), Key::kBytes);
    std::memcpy(out.data(), block.data(), bytes);
    out = out.subspan(bytes);
  }
  explicit_bzero(data.data(), data.size());
  return Status();
}

Status Agreement::Keys(std::string_view purpose, ConnectionKeys* out) const {
  const std::string info = "kolovod " + std::string(purpose);
  Key of_client, of_server;
  KV_RETURN_IF_ERROR(HkdfExpand(library_, agreed_, info + " client", {of_client.data(), Key::kBytes}));
  KV_RETURN_IF_ERROR(HkdfExpand(library_, agreed_, info + " server", {of_server.data(), Key::kBytes}));
  *out = is_server_ ? ConnectionKeys{cipher_, of_server, of_client}
                    : ConnectionKeys{cipher_, of_client, of_server};
  return Status();
}

Status KeyExchange::Create(const Libcrypto& library, std::unique_ptr<KeyExchange>* out) {
  Key fresh;
  if (getentropy(fresh.data(), Key::kBytes) != 0) {
    return Status(Code::kInternal, std::string("no random bytes are to be had: ") + std::strerror(errno));
  }
  return Create(library, fresh, out);
}

Status KeyExchange::Create(const Libcrypto& library, const Key& private_key,
                           std::unique_ptr<KeyExchange>* out) {
  Libcrypto::PrivateOrPublicKey* const key =
      library.private_key(Libcrypto::kX25519, nullptr, private_key.data(), Key::kBytes);
  if (key == nullptr) return Failed("X25519");
  std::unique_ptr<KeyExchange> made(new KeyExchange(library, key));
  size_t bytes = Key::kBytes;
  if (library.public_bytes(key, made->public_.data(), &bytes) != 1 || bytes != Key::kBytes) {
    return Failed("X25519");
  }
  *out = std::move(made);
  return Status();
}

KeyExchange::~KeyExchange() { library_.free_key(key_); }

Status KeyExchange::Shared(const Key& others_public_key, Key* out) const {
  Libcrypto::PrivateOrPublicKey* const other =
      library_.public_key(Libcrypto::kX25519, nullptr, others_public_key.data(), Key::kBytes);
  if (other == nullptr) return Failed("X25519");
  Libcrypto::KeyContext* const context = library_.new_key_context(key_, nullptr);
  size_t bytes = Key::kBytes;
  // It refuses a result of zeros, as RFC 7748 6.1 has it.
  const bool done = context != nullptr && library_.begin_deriving(context) == 1 &&
                    library_.set_peer(context, other) == 1 &&
                    library_.derive(context, out->data(), &bytes) == 1 && bytes == Key::kBytes;
  if (context != nullptr) library_.free_key_context(context);
  library_.free_key(other);
  return done ? Status() : Failed("the other end's public key");
}

Status KeyExchange::Agree(const Key& session, const Key& others_public_key, Cipher cipher, bool is_server,
                          std::unique_ptr<Agreement>* out) const {
  Key shared, agreed;
  KV_RETURN_IF_ERROR(Shared(others_public_key, &shared));
  KV_RETURN_IF_ERROR(HkdfExtract(library_, session.bytes(), shared.bytes(), &agreed));
  *out = std::make_unique<Agreement>(library_, cipher, agreed, is_server);
  return Status();
}

}  // namespace kolovod
