#include "transport/sealer.h"

#include <algorithm>
#include <cstring>

namespace kolovod {
namespace {

constexpr size_t kNonceBytes = 12;

Status Refused() {
  return Status(Code::kInternal, "libcrypto has no memory, or not the cipher that was agreed on");
}

uint8_t* Bytes(void* place) { return static_cast<uint8_t*>(place); }

}  // namespace

RecordCipher::RecordCipher(Cipher cipher, const Key& key, bool seals, uint64_t records_per_key)
    : library_(Libcrypto::Get()),
      context_(library_ == nullptr ? nullptr : library_->new_context()),
      cipher_(cipher),
      seals_(seals),
      records_per_key_(records_per_key),
      key_(key) {}

RecordCipher::~RecordCipher() {
  if (context_ != nullptr) library_->free_context(context_);
}

Status RecordCipher::Begin(uint32_t length) {
  if (context_ == nullptr) return Refused();
  const auto init = seals_ ? library_->begin_sealing : library_->begin_opening;
  if (count_ % records_per_key_ == 0) {
    if (count_ > 0) {
      Key next;
      KV_RETURN_IF_ERROR(HkdfExpand(*library_, key_, "kolovod next", {next.data(), Key::kBytes}));
      key_ = next;
    }
    const auto type = cipher_ == Cipher::kAes256Gcm ? library_->aes_256_gcm : library_->chacha20_poly1305;
    if (type == nullptr || init(context_, type(), nullptr, key_.data(), nullptr) != 1) return Refused();
  }
  uint8_t nonce[kNonceBytes] = {};
  std::memcpy(nonce + sizeof(uint32_t), &count_, sizeof(count_));
  ++count_;
  int written = 0;
  const auto* head = reinterpret_cast<const uint8_t*>(&length);
  const auto update = seals_ ? library_->seal : library_->open;
  const bool begun = init(context_, nullptr, nullptr, nullptr, nonce) == 1 &&
                     update(context_, nullptr, &written, head, sizeof(length)) == 1;
  return begun ? Status() : Refused();
}

bool RecordCipher::Update(const uint8_t* in, size_t bytes, uint8_t* out) {
  int written = 0;
  const auto update = seals_ ? library_->seal : library_->open;
  return update(context_, out, &written, in, static_cast<int>(bytes)) == 1 &&
         written == static_cast<int>(bytes);
}

Status Sealer::Seal(std::span<const iovec> parts, size_t bytes, char* out) {
  const auto length = static_cast<uint32_t>(bytes);
  KV_RETURN_IF_ERROR(Begin(length));
  std::memcpy(out, &length, sizeof(length));
  uint8_t* at = Bytes(out + kRecordHeadBytes);
  for (const iovec& part : parts) {
    if (part.iov_len == 0) continue;
    if (!Update(Bytes(part.iov_base), part.iov_len, at)) return Refused();
    at += part.iov_len;
  }
  int written = 0;
  if (library_->end_sealing(context_, at, &written) != 1 ||
      library_->control(context_, Libcrypto::kGetTag, kTagBytes, at) != 1) {
    return Refused();
  }
  return Status();
}

Status Sealer::Append(const char* data, size_t bytes, std::string* out) {
  while (bytes > 0) {
    const size_t step = std::min(bytes, kRecordPlainBytes);
    const size_t at = out->size();
    out->resize(at + step + kRecordExtraBytes);
    const iovec part{const_cast<char*>(data), step};
    KV_RETURN_IF_ERROR(Seal({&part, 1}, step, out->data() + at));
    data += step;
    bytes -= step;
  }
  return Status();
}

Status Opener::Open(const char* record, size_t bytes, std::span<const iovec> places) {
  KV_RETURN_IF_ERROR(Begin(static_cast<uint32_t>(bytes)));
  const auto* at = reinterpret_cast<const uint8_t*>(record + kRecordHeadBytes);
  size_t left = bytes;
  for (const iovec& place : places) {
    const size_t step = std::min(left, place.iov_len);
    if (step == 0) continue;
    if (!Update(at, step, Bytes(place.iov_base))) return Refused();
    at += step;
    left -= step;
  }
  if (left > 0) return Status(Code::kInternal, "a record is larger than its place");
  uint8_t tag[kTagBytes], rest[kTagBytes];
  std::memcpy(tag, at, kTagBytes);
  int written = 0;
  if (library_->control(context_, Libcrypto::kSetTag, kTagBytes, tag) != 1 ||
      library_->end_opening(context_, rest, &written) != 1) {
    return Status(Code::kRankLost,
                  "a record from there was changed on its way, or left out, repeated or moved: somebody or "
                  "something between the hosts alters what passes");
  }
  return Status();
}

SealedReader::SealedReader(const ConnectionKeys& keys, uint64_t records_per_key)
    : opener_(keys.cipher, keys.receive, records_per_key), buffer_(new char[kBufferBytes]) {}

uint32_t SealedReader::Length() const {
  uint32_t length;
  std::memcpy(&length, buffer_.get() + begin_, sizeof(length));
  return length;
}

std::span<char> SealedReader::Room() {
  if (begin_ == end_) {
    begin_ = end_ = 0;
  } else if (begin_ > 0) {
    std::memmove(buffer_.get(), buffer_.get() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }
  return {buffer_.get() + end_, kBufferBytes - end_};
}

Status SealedReader::Next(size_t* bytes) const {
  *bytes = 0;
  const size_t held = end_ - begin_;
  if (held < kRecordHeadBytes) return Status();
  const uint32_t length = Length();
  if (length == 0 || length > kRecordPlainBytes) {
    return Status(Code::kRankLost, "a record from there says that it has " + std::to_string(length) +
                                       " bytes: somebody or something between the hosts alters what passes");
  }
  if (held >= length + kRecordExtraBytes) *bytes = length;
  return Status();
}

Status SealedReader::Open(std::span<const iovec> places) {
  const char* const record = buffer_.get() + begin_;
  const uint32_t length = Length();
  begin_ += length + kRecordExtraBytes;
  return opener_.Open(record, length, places);
}

Status SealedReader::Open(std::span<char>* plain) {
  *plain = {buffer_.get() + begin_ + kRecordHeadBytes, Length()};
  const iovec place{plain->data(), plain->size()};
  return Open({&place, 1});
}

}  // namespace kolovod
