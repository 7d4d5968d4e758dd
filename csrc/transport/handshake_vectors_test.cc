// The handshake's test vectors (docs/security.md), as the engine computes them: what is agreed on, the keys,
// and records. tests/net/test_handshake_vectors.py compares this table with that page's, and with what
// follows from the page.
#include <array>
#include <map>
#include <string>
#include <vector>

#include "testing/check.h"
#include "transport/sealer.h"

namespace kolovod {
namespace {

const std::map<std::string, std::string> kVectors = {
    {"client private key", "404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f"},
    {"server private key", "606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f"},
    {"offer", "0379a631eede1bf9c98f12032cdeadd0e7a079398fc786b88cc846ec89af85a51a"},
    {"answer", "02675dd574ed7789310b3d2e7681f3790b466c773b1521fecf36577958371ea52f"},
    {"encrypted session key", "09cecb197b9c9ee5dd757bc1b14952ece18adb74804b50ba9654495b7d80df34"},
    {"shared", "d6fb939511b2381bc8599b4b8edc5968829450dfd7a87aebe78a703cd04cd54e"},
    {"agreed", "d57d7ea7919e4b1b47c5cfa659c31be7afd9b7f072a8bab47af59dedd72724ef"},
    {"messages key client", "b1d628bfbd99b8e592f8880dd067c7b21c7502679d5ed72fd0110241a41475bb"},
    {"messages key server", "dff6adf5e1c60025fbe27621bd935853ddaf68ba53fd4e182d3d5eb6bc901179"},
    {"records key client", "7719549afc0b6e0f4d4af4dd073d2a478d08aaa367c96bd156235cdd91d4895b"},
    {"records key server", "fbd61234b9e7c13a86d53f005894deedc2695f62420eac4d605f3c4c2237bec8"},
    {"messages key client next", "c95293f2052d6087fe42e3fc60acb4b74129c3986883f3a58d0995d3286b3504"},
    {"record client 0", "07000000bd4cb62120088ba9b60f53f3d7c6907249d62222082f52"},
    {"record client 1", "07000000dcee1a23673ff2874cfed793fb497afb4c18aeef39a8fe"},
};

std::string ToHex(std::span<const uint8_t> bytes) {
  std::string text;
  for (const uint8_t byte : bytes) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

Key KeyAt(const std::string& name, size_t from = 0) {
  const std::string& text = kVectors.at(name);
  Key key;
  for (size_t i = 0; i < Key::kBytes; ++i) {
    key.data()[i] = static_cast<uint8_t>(std::stoi(text.substr(2 * (from + i), 2), nullptr, 16));
  }
  return key;
}

const Libcrypto& Library() {
  std::string why_not;
  const Libcrypto* const found = Libcrypto::Get(&why_not);
  CHECK_MESSAGE(found != nullptr, "these tests need OpenSSL: " << why_not);
  return *found;
}

// What an end with this private key makes of the other end's offer or answer.
std::unique_ptr<Agreement> AgreementOf(const std::string& own, const std::string& other, bool is_server) {
  std::unique_ptr<KeyExchange> exchange;
  CHECK_OK(KeyExchange::Create(Library(), KeyAt(own), &exchange));
  const Key others_key = KeyAt(other, 1);
  Key shared, agreed;
  CHECK_OK(exchange->Shared(others_key, &shared));
  CHECK(ToHex(shared.bytes()) == kVectors.at("shared"));
  const Key session = KeyAt("encrypted session key");
  CHECK_OK(HkdfExtract(Library(), session.bytes(), shared.bytes(), &agreed));
  CHECK(ToHex(agreed.bytes()) == kVectors.at("agreed"));
  std::unique_ptr<Agreement> agreement;
  CHECK_OK(exchange->Agree(session, others_key, Cipher::kChaCha20Poly1305, is_server, &agreement));
  return agreement;
}

TEST_CASE("both ends offer and agree on what the page says") {
  for (const std::string end : {"client", "server"}) {
    const bool is_server = end == "server";
    std::unique_ptr<KeyExchange> exchange;
    CHECK_OK(KeyExchange::Create(Library(), KeyAt(end + " private key"), &exchange));
    CHECK(exchange->public_key() == KeyAt(is_server ? "answer" : "offer", 1));
    const auto agreement = AgreementOf(end + " private key", is_server ? "offer" : "answer", is_server);
    for (const std::string purpose : {"messages", "records"}) {
      ConnectionKeys keys;
      CHECK_OK(agreement->Keys(purpose, &keys));
      CHECK(ToHex(keys.send.bytes()) == kVectors.at(purpose + " key " + end));
      CHECK(ToHex(keys.receive.bytes()) ==
            kVectors.at(purpose + " key " + (is_server ? "client" : "server")));
    }
  }
}

TEST_CASE("records and the next key are what the page says") {
  const Key key = KeyAt("messages key client");
  Key next;
  CHECK_OK(HkdfExpand(Library(), key, "kolovod next", {next.data(), Key::kBytes}));
  CHECK(ToHex(next.bytes()) == kVectors.at("messages key client next"));
  if (Library().chacha20_poly1305 == nullptr) return;
  Sealer sealer(Cipher::kChaCha20Poly1305, key);
  std::string body = "{\"a\":1}";
  for (const char* const name : {"record client 0", "record client 1"}) {
    std::vector<char> record(body.size() + kRecordExtraBytes);
    const iovec part{body.data(), body.size()};
    CHECK_OK(sealer.Seal({&part, 1}, body.size(), record.data()));
    CHECK(ToHex({reinterpret_cast<const uint8_t*>(record.data()), record.size()}) == kVectors.at(name));
  }
}

}  // namespace
}  // namespace kolovod
