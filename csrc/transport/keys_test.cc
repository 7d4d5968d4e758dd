#include "transport/keys.h"

#include <array>
#include <string>
#include <vector>

#include "testing/check.h"

namespace kolovod {
namespace {

using testing::Contains;
using Bytes = std::vector<uint8_t>;

const Libcrypto& Library() {
  std::string why_not;
  const Libcrypto* const found = Libcrypto::Get(&why_not);
  CHECK_MESSAGE(found != nullptr, "these tests need OpenSSL: " << why_not);
  return *found;
}

Bytes FromHex(const std::string& text) {
  Bytes bytes;
  for (size_t i = 0; i < text.size(); i += 2) {
    bytes.push_back(static_cast<uint8_t>(std::stoi(text.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

Bytes Counting(int from, int to) {
  Bytes bytes;
  for (int i = from; i < to; ++i) bytes.push_back(static_cast<uint8_t>(i));
  return bytes;
}

Key KeyOf(const Bytes& bytes) {
  CHECK(bytes.size() == Key::kBytes);
  return Key(std::span<const uint8_t, Key::kBytes>(bytes.data(), Key::kBytes));
}

// RFC 5869, appendix A: SHA-256.
TEST_CASE("hkdf gives what its rfc says") {
  struct Case {
    Bytes secret, salt, info;
    const char *agreed, *out;
  };
  const Case cases[] = {
      {Bytes(22, 0x0b), Counting(0, 13), Counting(0xf0, 0xfa),
       "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5",
       "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"},
      {Counting(0, 0x50), Counting(0x60, 0xb0), Counting(0xb0, 0x100),
       "06a6b88c5853361a06104c9ceb35b45cef760014904671014a193f40c15fc244",
       "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c65e590e09"
       "da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87"},
  };
  for (const Case& test : cases) {
    Key agreed;
    CHECK_OK(HkdfExtract(Library(), test.salt, test.secret, &agreed));
    CHECK(agreed == KeyOf(FromHex(test.agreed)));
    const Bytes wanted = FromHex(test.out);
    Bytes out(wanted.size());
    const std::string info(test.info.begin(), test.info.end());
    CHECK_OK(HkdfExpand(Library(), agreed, info, out));
    CHECK(out == wanted);
  }
  Bytes too_much(255 * 32 + 1);
  CHECK(!HkdfExpand(Library(), Key(), "", too_much).ok());
}

// RFC 7748, 6.1: Bob's end.
TEST_CASE("x25519 gives what its rfc says") {
  std::unique_ptr<KeyExchange> bob;
  CHECK_OK(KeyExchange::Create(
      Library(), KeyOf(FromHex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")), &bob));
  CHECK(bob->public_key() ==
        KeyOf(FromHex("de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f")));
  Key shared;
  CHECK_OK(bob->Shared(KeyOf(FromHex("8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a")),
                       &shared));
  CHECK(shared == KeyOf(FromHex("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742")));
}

TEST_CASE("a public key that leaves no choice is refused") {
  std::unique_ptr<KeyExchange> mine;
  CHECK_OK(KeyExchange::Create(Library(), &mine));
  Key zero, shared;
  CHECK(!mine->Shared(zero, &shared).ok());
  std::unique_ptr<Agreement> agreement;
  CHECK(!mine->Agree(Key(), zero, Cipher::kAes256Gcm, true, &agreement).ok());
}

struct Ends {
  std::unique_ptr<Agreement> client, server;
};

Ends AgreeAnew(const Key& session) {
  std::unique_ptr<KeyExchange> a, b;
  CHECK_OK(KeyExchange::Create(Library(), &a));
  CHECK_OK(KeyExchange::Create(Library(), &b));
  Ends ends;
  CHECK_OK(a->Agree(session, b->public_key(), Cipher::kAes256Gcm, false, &ends.client));
  CHECK_OK(b->Agree(session, a->public_key(), Cipher::kAes256Gcm, true, &ends.server));
  return ends;
}

TEST_CASE("both ends have the same keys and every connection direction and purpose others") {
  Key session;
  session.data()[5] = 1;
  std::vector<Key> all;
  for (int connection = 0; connection < 3; ++connection) {  // of one session key, as if nonces were repeated
    const Ends ends = AgreeAnew(session);
    for (const char* purpose : {"messages", "records"}) {
      ConnectionKeys client, server;
      CHECK_OK(ends.client->Keys(purpose, &client));
      CHECK_OK(ends.server->Keys(purpose, &server));
      CHECK(client.send == server.receive);
      CHECK(client.receive == server.send);
      all.push_back(client.send);
      all.push_back(client.receive);
    }
  }
  for (size_t i = 0; i < all.size(); ++i) {
    for (size_t k = 0; k < i; ++k) CHECK(!(all[i] == all[k]));
  }
}

TEST_CASE("who does not know the session key has other keys") {
  std::unique_ptr<KeyExchange> a, b;
  CHECK_OK(KeyExchange::Create(Library(), &a));
  CHECK_OK(KeyExchange::Create(Library(), &b));
  Key session;
  std::unique_ptr<Agreement> one, other;
  CHECK_OK(a->Agree(session, b->public_key(), Cipher::kAes256Gcm, false, &one));
  session.data()[31] = 1;
  CHECK_OK(b->Agree(session, a->public_key(), Cipher::kAes256Gcm, true, &other));
  ConnectionKeys client, server;
  CHECK_OK(one->Keys("records", &client));
  CHECK_OK(other->Keys("records", &server));
  CHECK(!(client.send == server.receive));
}

TEST_CASE("a machine without the library says which names were tried") {
  Libcrypto library{};
  std::string why_not;
  const std::array names = {"libcrypto.so.no-such-version", "libc.so.6"};
  CHECK(!Libcrypto::Load(names, &library, &why_not));
  CHECK(why_not == Contains("libcrypto.so.no-such-version"));
  CHECK(why_not == Contains("libc.so.6 has no EVP_CIPHER_CTX_new"));
  CHECK(!Libcrypto::Load({}, &library, &why_not));
}

TEST_CASE("a cipher is offered") { CHECK(OfferedCiphers(Library()) != 0); }

}  // namespace
}  // namespace kolovod
