// What a stream does besides if its connection is encrypted: messages are cut into records on their way out,
// and put together from them on their way in (sealer.h).
#include <algorithm>

#include "transport/stream.h"

namespace kolovod {

Status Stream::Refuse(const Status& status) const {
  return status.ok() ? Status() : Status(status.code(), peer_ + ": " + status.message());
}

// Seals straight from where the tensors are. Their memory stays taken until the record has left, as if it
// went out itself.
Status Stream::SealNext() {
  iovec parts[kMaxParts];
  size_t bytes = 0;
  const size_t count = Gather(parts, kRecordPlainBytes, &bytes);
  KV_RETURN_IF_ERROR(Refuse(sealed_->sealer.Seal({parts, count}, bytes, sealed_->record.get())));
  Taken(bytes);
  sealed_->plain = bytes;
  sealed_->begin = 0;
  sealed_->end = bytes + kRecordExtraBytes;
  return Status();
}

Status Stream::PushSealed(bool* moved) {
  for (int records = 0; records < kRecordsPerPush && sending(); ++records) {
    if (sealed_->begin == sealed_->end) KV_RETURN_IF_ERROR(SealNext());
    iovec part{sealed_->record.get() + sealed_->begin, sealed_->end - sealed_->begin};
    size_t bytes = 0;
    KV_RETURN_IF_ERROR(Spared(Write({&part, 1}, &bytes), /*reading=*/false));
    if (sealed_->begin == sealed_->end) return Status();
    *moved |= bytes > 0;
    sealed_->begin += bytes;
    if (sealed_->begin < sealed_->end) return Status();
    sent_ += sealed_->plain;
  }
  return Status();
}

// What has arrived, as far as it is expected. A record that is all payload of the front message is opened
// into its place: whoever posted that place reads it only once it counts as received, after the tag was
// right.
Status Stream::OpenArrived(bool* moved) {
  for (;;) {
    KV_RETURN_IF_ERROR(TakeFromInbox(moved));
    if (!reads()) return Status();
    if (IsAhead()) return Status();
    if (inbox_begin_ != inbox_end_) {
      return Status(Code::kMismatch, peer_ + " sent a record that ends within a header");
    }
    size_t bytes = 0;
    KV_RETURN_IF_ERROR(Refuse(sealed_->reader.Next(&bytes)));
    if (bytes == 0) return Status();
    if (!in_payload_ || bytes > Front().left) {
      std::span<char> plain;
      KV_RETURN_IF_ERROR(Refuse(sealed_->reader.Open(&plain)));
      inbox_ = plain.data();
      inbox_begin_ = 0;
      inbox_end_ = plain.size();
      continue;
    }
    Incoming& front = Front();
    KV_RETURN_IF_ERROR(Refuse(sealed_->reader.Open(std::span(front.parts).subspan(front.next))));
    Advance(front.parts, &front.next, bytes);
    if (!enveloped_) received_ += bytes;
    front.left -= bytes;
    *moved = true;
    if (front.left == 0) KV_RETURN_IF_ERROR(Finished());
  }
}

Status Stream::PullSealed(bool* moved) {
  KV_RETURN_IF_ERROR(OpenArrived(moved));
  if (!reads() || !connected()) return Status();
  const std::span<char> room = sealed_->reader.Room();
  iovec part{room.data(), room.size()};
  size_t bytes = 0;
  KV_RETURN_IF_ERROR(Spared(Read({&part, 1}, &bytes), /*reading=*/true));
  sealed_->reader.Arrived(bytes);
  return OpenArrived(moved);
}

}  // namespace kolovod
