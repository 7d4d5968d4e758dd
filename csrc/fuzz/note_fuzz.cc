// What goes up to rank 0 and down from it (docs/wire.md, Notes).
#include "control/message.h"
#include "fuzz/fuzz.h"

using namespace kolovod;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const auto note = fuzz::Bounded(bytes, 2, DecodeNote);
  if (!note) return 0;
  fuzz::Require(EncodeNote(*note) == bytes, "a note has one encoding");
  fuzz::Bounded(note->body, 16, DecodeRequest);
  fuzz::Bounded(note->body, 16, DecodeResponse);
  return 0;
}
