#pragma once

// Encryption between hosts as the handshake in Python needs it (src/kolovod/net/encryption.py).

#include <nanobind/stl/unique_ptr.h>

#include "bind/py_engine.h"
#include "transport/sealer.h"

namespace kolovod {

inline const Libcrypto& RequireLibcrypto() {
  std::string why_not;
  const Libcrypto* const library = Libcrypto::Get(&why_not);
  if (library == nullptr) throw EngineError{static_cast<int>(Code::kInvalidArgument), why_not};
  return *library;
}

inline Key ToKey(const nb::bytes& bytes) {
  if (bytes.size() != Key::kBytes) throw nb::value_error("a key has 32 bytes");
  return Key(
      std::span<const uint8_t, Key::kBytes>(reinterpret_cast<const uint8_t*>(bytes.c_str()), Key::kBytes));
}

inline std::unique_ptr<KeyExchange> NewKeyExchange() {
  std::unique_ptr<KeyExchange> made;
  ThrowIfError(KeyExchange::Create(RequireLibcrypto(), &made));
  return made;
}

inline std::unique_ptr<Agreement> Agree(const KeyExchange& mine, const nb::bytes& session,
                                        const nb::bytes& others_public_key, int cipher, bool is_server) {
  const auto chosen = static_cast<Cipher>(cipher);
  if (chosen != Cipher::kAes256Gcm && chosen != Cipher::kChaCha20Poly1305) {
    throw nb::value_error("there is no such cipher");
  }
  std::unique_ptr<Agreement> made;
  ThrowIfError(mine.Agree(ToKey(session), ToKey(others_public_key), chosen, is_server, &made));
  return made;
}

inline std::shared_ptr<ConnectionKeys> KeysFor(const Agreement& agreement, const std::string& purpose) {
  auto keys = std::make_shared<ConnectionKeys>();
  ThrowIfError(agreement.Keys(purpose, keys.get()));
  return keys;
}

// Both directions of a connection whose messages Python sends: each is one record.
class MessageSealer {
 public:
  explicit MessageSealer(const ConnectionKeys& keys)
      : sealer_(keys.cipher, keys.send), opener_(keys.cipher, keys.receive) {}

  nb::bytes Seal(const nb::bytes& body) {
    std::string record(body.size() + kRecordExtraBytes, '\0');
    const iovec part{const_cast<char*>(body.c_str()), body.size()};
    ThrowIfError(sealer_.Seal({&part, 1}, body.size(), record.data()));
    return nb::bytes(record.data(), record.size());
  }
  // None: it is not what the peer has sealed here.
  nb::object Open(const nb::bytes& record) {
    if (record.size() < kRecordExtraBytes) throw nb::value_error("a record has 20 bytes at least");
    std::string body(record.size() - kRecordExtraBytes, '\0');
    const iovec place{body.data(), body.size()};
    const Status status = opener_.Open(record.c_str(), body.size(), {&place, 1});
    if (!status.ok()) return nb::none();
    return nb::bytes(body.data(), body.size());
  }

 private:
  Sealer sealer_;
  Opener opener_;
};

inline void BindSealing(nb::module_& m) {
  using namespace nanobind::literals;
  nb::class_<ConnectionKeys>(m, "RecordKeys");
  nb::class_<Agreement>(m, "Agreement").def("keys", &KeysFor, "purpose"_a);
  nb::class_<KeyExchange>(m, "KeyExchange")
      .def(nb::new_(&NewKeyExchange))
      .def_prop_ro("public",
                   [](const KeyExchange& mine) {
                     return nb::bytes(reinterpret_cast<const char*>(mine.public_key().data()), Key::kBytes);
                   })
      .def("agree", &Agree, "session"_a, "others_public"_a, "cipher"_a, "is_server"_a);
  nb::class_<MessageSealer>(m, "MessageSealer")
      .def(nb::init<const ConnectionKeys&>(), "keys"_a)
      .def("seal", &MessageSealer::Seal, "body"_a)
      .def("open", &MessageSealer::Open, "record"_a);
  m.def("libcrypto", [] { return std::string(RequireLibcrypto().version_text(0)); });
  m.def("offered_ciphers", [] { return static_cast<int>(OfferedCiphers(RequireLibcrypto())); });
}

}  // namespace kolovod
