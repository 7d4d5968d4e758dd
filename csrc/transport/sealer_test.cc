#include "transport/sealer.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "testing/check.h"
#include "testing/mesh_world.h"

namespace kolovod {
namespace {

using testing::Contains;
using testing::FirstDifference;

constexpr Cipher kCiphers[] = {Cipher::kAes256Gcm, Cipher::kChaCha20Poly1305};

std::string FromHex(const std::string& text) {
  std::string bytes;
  for (size_t i = 0; i < text.size(); i += 2) {
    bytes.push_back(static_cast<char>(std::stoi(text.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

uint8_t* Raw(std::string& bytes) { return reinterpret_cast<uint8_t*>(bytes.data()); }

// The library's cipher by itself, without records: the sealed bytes, then the tag.
std::string Reference(Cipher cipher, std::string key, std::string nonce, std::string head,
                      std::string plain) {
  const Libcrypto& library = *Libcrypto::Get();
  Libcrypto::CipherContext* const context = library.new_context();
  const auto* type = cipher == Cipher::kAes256Gcm ? library.aes_256_gcm() : library.chacha20_poly1305();
  std::string out(plain.size() + kTagBytes, '\0');
  int written = 0;
  CHECK(library.begin_sealing(context, type, nullptr, Raw(key), Raw(nonce)) == 1);
  CHECK(library.seal(context, nullptr, &written, Raw(head), static_cast<int>(head.size())) == 1);
  CHECK(library.seal(context, Raw(out), &written, Raw(plain), static_cast<int>(plain.size())) == 1);
  CHECK(library.end_sealing(context, Raw(out) + plain.size(), &written) == 1);
  CHECK(library.control(context, Libcrypto::kGetTag, kTagBytes, Raw(out) + plain.size()) == 1);
  library.free_context(context);
  return out;
}

// McGrew and Viega, The Galois/Counter Mode of Operation, test case 16.
TEST_CASE("aes 256 gcm gives what its authors say") {
  CHECK(
      Reference(Cipher::kAes256Gcm,
                FromHex("feffe9928665731c6d6a8f9467308308feffe9928665731c6d6a8f9467308308"),
                FromHex("cafebabefacedbaddecaf888"), FromHex("feedfacedeadbeeffeedfacedeadbeefabaddad2"),
                FromHex("d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a721c3c0c9595680953"
                        "2fcf0e2449a6b525b16aedf5aa0de657ba637b39")) ==
      FromHex("522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa8cb08e48590dbb3da7b08b10568288"
              "38c5f61e6393ba7a0abcc9f66276fc6ece0f4e1768cddf8853bb2d551b"));
}

// RFC 8439, 2.8.2.
TEST_CASE("chacha20 poly1305 gives what its rfc says") {
  CHECK(
      Reference(Cipher::kChaCha20Poly1305,
                FromHex("808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9f"),
                FromHex("070000004041424344454647"), FromHex("50515253c0c1c2c3c4c5c6c7"),
                "Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the future, "
                "sunscreen would be it.") ==
      FromHex(
          "d31a8d34648e60db7b86afbc53ef7ec2a4aded51296e08fea9e2b5a736ee62d63dbea45e8ca9671282fafb69da92728b"
          "1a71de0a9e060b2905d6a5b67ecd3b3692ddbd7f2d778b8c9803aee328091b58fab324e4fad675945585808b4831d7bc"
          "3ff4def08e4b7a9de576d26586cec64b61161ae10b594f09e26a7e902ecbd0600691"));
}

std::string Pattern(size_t bytes) {
  std::string data(bytes, '\0');
  for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<char>(i * 31 + i / 251);
  return data;
}

std::string Number(uint64_t value, size_t bytes) {
  return std::string(reinterpret_cast<const char*>(&value), bytes);
}

std::string Seal(Sealer& sealer, const std::string& plain) {
  std::string record;
  CHECK_OK(sealer.Append(plain.data(), plain.size(), &record));
  return record;
}

// What a reader makes of `bytes` that come in pieces of `step`: the plain bytes, until something is wrong.
std::string Read(SealedReader& reader, std::string_view bytes, size_t step, Status* status) {
  std::string plain;
  while (status->ok() && !bytes.empty()) {
    const std::span<char> room = reader.Room();
    CHECK(!room.empty());
    const size_t n = std::min({step, room.size(), bytes.size()});
    std::memcpy(room.data(), bytes.data(), n);
    bytes.remove_prefix(n);
    reader.Arrived(n);
    size_t whole = 0;
    while ((*status = reader.Next(&whole)).ok() && whole > 0) {
      std::span<char> opened;
      *status = reader.Open(&opened);
      if (!status->ok()) break;
      CHECK(opened.size() == whole);
      plain.append(opened.data(), opened.size());
    }
  }
  return plain;
}

TEST_CASE("a record is what the page about the wire says") {
  for (const Cipher cipher : kCiphers) {
    const testing::KeyPair keys = testing::MakeKeys(cipher);
    const ConnectionKeys& mine = *keys.ends[0];
    const std::string key(reinterpret_cast<const char*>(mine.send.data()), Key::kBytes);
    Sealer sealer(cipher, mine.send);
    for (uint64_t number = 0; number < 5; ++number) {
      const std::string plain = Pattern(10 + number), head = Number(plain.size(), 4);
      const std::string nonce = std::string(4, '\0') + Number(number, 8);
      CHECK(Seal(sealer, plain) == head + Reference(cipher, key, nonce, head, plain));
    }
  }
}

TEST_CASE("bytes arrive whatever the pieces and the sizes") {
  for (const Cipher cipher : kCiphers) {
    const testing::KeyPair keys = testing::MakeKeys(cipher);
    const size_t sizes[] = {
        1, 15, 16, 17, 4000, kRecordPlainBytes - 1, kRecordPlainBytes, kRecordPlainBytes + 1, 200'000};
    for (const size_t step : {size_t{1}, size_t{7}, size_t{1000}, size_t{65'536}, size_t{1 << 20}}) {
      Sealer sealer(cipher, keys.ends[0]->send);
      SealedReader reader(*keys.ends[1]);
      std::string sent, records;
      for (const size_t size : sizes) {
        sent += Pattern(size);
        records += Seal(sealer, Pattern(size));
      }
      Status status;
      CHECK(Read(reader, records, step, &status) == sent);
      CHECK_OK(status);
    }
  }
}

TEST_CASE("no changed bit opens") {
  for (const Cipher cipher : kCiphers) {
    const testing::KeyPair keys = testing::MakeKeys(cipher);
    Sealer sealer(cipher, keys.ends[0]->send);
    std::string record = Seal(sealer, Pattern(33));
    record += Seal(sealer, Pattern(2));
    for (size_t bit = 0; bit < 8 * record.size(); ++bit) {
      std::string changed = record;
      changed[bit / 8] = static_cast<char>(changed[bit / 8] ^ (1 << bit % 8));
      SealedReader reader(*keys.ends[1]);
      Status status;
      const std::string plain = Read(reader, changed, changed.size(), &status);
      const bool in_the_first = bit / 8 < 33 + kRecordExtraBytes;
      CHECK(plain == (in_the_first ? "" : Pattern(33)));
      // A larger length says that more is to come: that never does, and the end of the connection is an
      // error.
      CHECK((!status.ok() || bit / 8 % (33 + kRecordExtraBytes) < kRecordHeadBytes));
    }
  }
}

TEST_CASE("what is left out repeated moved cut or sent back does not open") {
  const testing::KeyPair keys = testing::MakeKeys(Cipher::kAes256Gcm);
  Sealer sealer(Cipher::kAes256Gcm, keys.ends[0]->send);
  const std::string a = Seal(sealer, "the first"), b = Seal(sealer, "another"), c = Seal(sealer, "the last");
  Sealer of_the_other(Cipher::kAes256Gcm, keys.ends[1]->send);
  const std::string back = Seal(of_the_other, "the first");
  struct Case {
    std::string bytes, plain;
  };
  const Case cases[] = {
      {a + c, "the first"}, {b + a, ""},
      {a + a, "the first"}, {a + b + b, "the firstanother"},
      {back, ""},           {a.substr(0, a.size() - 1) + b, ""},
  };
  for (const Case& test : cases) {
    SealedReader reader(*keys.ends[1]);
    Status status;
    CHECK(Read(reader, test.bytes, test.bytes.size(), &status) == test.plain);
    CHECK(status == Code::kRankLost);
    CHECK(status.message() == Contains("changed on its way"));
  }
}

TEST_CASE("a record that cannot be is refused before it is waited for") {
  const testing::KeyPair keys = testing::MakeKeys(Cipher::kAes256Gcm);
  for (const uint64_t length : {uint64_t{0}, uint64_t{kRecordPlainBytes + 1}, uint64_t{0xffffffff}}) {
    SealedReader reader(*keys.ends[1]);
    Status status;
    CHECK(Read(reader, Number(length, 4), 4, &status).empty());
    CHECK(status == Code::kRankLost);
  }
}

// The same plain bytes under one key and nonce would be the same record.
TEST_CASE("nonces never come again and keys follow each other") {
  for (const Cipher cipher : kCiphers) {
    const testing::KeyPair keys = testing::MakeKeys(cipher);
    constexpr uint64_t kPerKey = 8;
    Sealer sealer(cipher, keys.ends[0]->send, kPerKey), without(cipher, keys.ends[0]->send);
    SealedReader reader(*keys.ends[1], kPerKey), stays(*keys.ends[1]);
    std::set<std::string> seen;
    std::string records, plain;
    for (int i = 0; i < 1000; ++i) {
      const std::string record = Seal(sealer, "the same");
      CHECK(seen.insert(record).second);
      // The key changes with the eighth record, and then is another one than without.
      CHECK((Seal(without, "the same") == record) == (i < static_cast<int>(kPerKey)));
      records += record;
      plain += "the same";
    }
    Status status;
    CHECK(Read(reader, records, 100'000, &status) == plain);
    CHECK_OK(status);
    CHECK(Read(stays, records, 100'000, &status) == plain.substr(0, 8 * kPerKey));
    CHECK(!status.ok());
  }
}

TEST_CASE("parts are sealed and opened where they are") {
  const testing::KeyPair keys = testing::MakeKeys(Cipher::kAes256Gcm);
  Sealer sealer(Cipher::kAes256Gcm, keys.ends[0]->send);
  std::string in = Pattern(100), out(100, '\0'), record(100 + kRecordExtraBytes, '\0');
  const iovec parts[] = {{in.data(), 3}, {nullptr, 0}, {in.data() + 3, 60}, {in.data() + 63, 37}};
  CHECK_OK(sealer.Seal(parts, 100, record.data()));
  Opener opener(Cipher::kAes256Gcm, keys.ends[1]->receive);
  const iovec places[] = {{out.data(), 50}, {out.data() + 50, 1}, {out.data() + 51, 49}};
  CHECK_OK(opener.Open(record.data(), 100, places));
  CHECK(FirstDifference(out, in) == "");
}

TEST_CASE("a place that is too small is never exceeded") {
  const testing::KeyPair keys = testing::MakeKeys(Cipher::kAes256Gcm);
  Sealer sealer(Cipher::kAes256Gcm, keys.ends[0]->send);
  const std::string record = Seal(sealer, Pattern(100));
  std::vector<char> out(99);  // exactly, so that AddressSanitizer sees a byte too many
  Opener opener(Cipher::kAes256Gcm, keys.ends[1]->receive);
  const iovec place{out.data(), out.size()};
  CHECK(opener.Open(record.data(), 100, {&place, 1}) == Code::kInternal);
}

}  // namespace
}  // namespace kolovod
