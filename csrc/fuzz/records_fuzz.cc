// The notes of another process in shared memory, read and written to a file (docs/late-ranks.md).
#include <algorithm>
#include <memory>

#include "base/text.h"
#include "engine/record_file.h"
#include "fuzz/fuzz.h"
#include "transport/operation_record.h"

using namespace kolovod;

namespace {

// A line is an object in JSON: strings are closed, braces match, no byte is a control character.
void RequireLine(std::string_view line) {
  bool in_string = false;
  int depth = 0;
  for (size_t i = 0; i < line.size(); ++i) {
    const char c = line[i];
    fuzz::Require(static_cast<unsigned char>(c) >= 0x20, "no control character");
    if (in_string) {
      if (c == '\\') ++i;
      in_string = c != '"';
    } else {
      in_string = c == '"';
      fuzz::Require(c != '-', "no number is negative");
      depth += c == '{' ? 1 : c == '}' ? -1 : 0;
      fuzz::Require(depth == 1 || i + 1 == line.size(), "one object a line");
    }
  }
  fuzz::Require(!in_string && depth == 0, "the object ends");
}

}  // namespace

// Begins with: bytes of the reason, the reason; the rest is memory.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const auto slots = std::make_unique<OperationSlot[]>(kRecordSlots);
  fuzz::Steering steering(data, size);
  RecordFileHeader header;
  header.reason = steering.TakeBytes(steering.Take<uint8_t>());
  header.who = "rank 0";
  header.now_ns = 1'000'000'000'000;
  header.wall_ns = 1'790'000'000'000'000'000;
  const std::string_view memory = steering.rest().substr(0, 16 * sizeof(OperationSlot));
  std::memset(static_cast<void*>(slots.get()), 0, 16 * sizeof(OperationSlot));
  if (!memory.empty()) std::memcpy(static_cast<void*>(slots.get()), memory.data(), memory.size());
  (void)OldestPendingNs(slots.get());
  std::string text = RecordFileText(header, ReadRecords(slots.get()), 8);
  fuzz::Require(ValidUtf8(text) == text, "the file is UTF-8");
  while (!text.empty()) {
    const size_t end = text.find('\n');
    fuzz::Require(end != std::string::npos, "the last line ends");
    RequireLine(std::string_view(text).substr(0, end));
    text.erase(0, end + 1);
  }
  return 0;
}
