#include "base/text.h"

#include <algorithm>

namespace kolovod {
namespace {

// Bytes of the character that `text` begins with; 0: it is none (RFC 3629, section 4).
size_t CharacterBytes(std::string_view text) {
  const auto byte = [text](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned lead = byte(0);
  if (lead < 0x80) return 1;
  const size_t bytes = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4 || text.size() < bytes) return 0;
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
  }
  const unsigned second = byte(1);
  const bool overlong = (lead == 0xE0 && second < 0xA0) || (lead == 0xF0 && second < 0x90);
  const bool surrogate = lead == 0xED && second >= 0xA0;
  const bool beyond = lead == 0xF4 && second >= 0x90;
  return overlong || surrogate || beyond ? 0 : bytes;
}

}  // namespace

std::string ValidUtf8(std::string_view text, size_t limit) {
  constexpr std::string_view kReplacement = "\xEF\xBF\xBD";
  std::string out;
  out.reserve(std::min(text.size(), limit));
  while (!text.empty()) {
    const size_t bytes = CharacterBytes(text);
    const std::string_view piece = bytes == 0 ? kReplacement : text.substr(0, bytes);
    if (piece.size() > limit - out.size()) break;
    out += piece;
    text.remove_prefix(std::max<size_t>(bytes, 1));
  }
  return out;
}

}  // namespace kolovod
