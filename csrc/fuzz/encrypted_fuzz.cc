// An encrypted connection: whoever is in between may do to its records what he likes (transport/sealer.h).
#include <algorithm>
#include <vector>

#include "fuzz/fuzz.h"
#include "transport/sealer.h"

using namespace kolovod;

namespace {

constexpr size_t kMaxRecords = 8;
constexpr uint64_t kPerKey = 3;

// A machine without OpenSSL has nothing to open.
ConnectionKeys Keys(Cipher cipher) {
  fuzz::Require(Libcrypto::Get() != nullptr, "the machine has OpenSSL");
  ConnectionKeys keys;
  keys.cipher = cipher;
  keys.send.data()[0] = keys.receive.data()[0] = 7;
  return keys;
}

}  // namespace

// Begins with: the cipher, whether records are opened into a place of their exact size, and the number of
// records, in a byte; the plain bytes of each. Then what happens, as pairs of bytes: a record, and what
// becomes of it; the rest replaces what is sent.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Steering steering(data, size);
  const auto begin = steering.Take<uint8_t>();
  const ConnectionKeys keys = Keys((begin & 1) != 0 ? Cipher::kAes256Gcm : Cipher::kChaCha20Poly1305);
  const bool placed = (begin & 2) != 0;
  Sealer sealer(keys.cipher, keys.send, kPerKey);
  std::vector<std::string> plain(1 + (begin >> 2) % kMaxRecords), records;
  for (std::string& bytes : plain) {
    bytes.assign(1 + steering.Take<uint8_t>(), static_cast<char>('a' + records.size()));
    std::string& record = records.emplace_back();
    fuzz::Require(sealer.Append(bytes.data(), bytes.size(), &record).ok(), "it is sealed");
  }
  std::string sent;
  while (steering.rest().size() > 2 && sent.size() < 30'000) {
    std::string record = records[steering.Take<uint8_t>() % records.size()];
    const auto what = steering.Take<uint8_t>();
    if (what % 4 == 1) record.resize(what % record.size());
    if (what % 4 == 2) record[what % record.size()] ^= static_cast<char>(1 + what / 4 % 127);
    if (what % 4 == 3) record = steering.TakeBytes(what);
    sent += record;
  }
  SealedReader reader(keys, kPerKey);
  std::string_view left(sent);
  std::string seen;
  Status status;
  while (status.ok() && !left.empty()) {
    const std::span<char> room = reader.Room();
    fuzz::Require(!room.empty(), "there is room after all whole records were opened");
    const size_t n = std::min({left.size(), room.size(), size_t{1} + begin * 16});
    std::memcpy(room.data(), left.data(), n);
    left.remove_prefix(n);
    reader.Arrived(n);
    size_t whole = 0;
    while ((status = reader.Next(&whole)).ok() && whole > 0) {
      std::vector<char> own(whole);  // of exactly its size, so that AddressSanitizer sees a byte too many
      const iovec place{own.data(), own.size()};
      std::span<char> opened = own;
      status = placed ? reader.Open({&place, 1}) : reader.Open(&opened);
      if (!status.ok()) break;
      seen.append(opened.data(), opened.size());
    }
  }
  std::string wanted;
  for (const std::string& bytes : plain) wanted += bytes;
  fuzz::Require(wanted.compare(0, seen.size(), seen) == 0, "what opens is what was sealed, in its order");
  size_t same = 0;  // bytes that are as they were sent
  std::string all;
  for (const std::string& record : records) all += record;
  while (same < std::min(all.size(), sent.size()) && all[same] == sent[same]) ++same;
  fuzz::Require(seen.size() <= same, "nothing opens beyond the first change");
  return 0;
}
