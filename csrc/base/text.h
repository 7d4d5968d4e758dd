// Text that came from elsewhere: cut to a limit, and made UTF-8, for the user must be able to read an error
// whatever a name in it looks like.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace kolovod {

// `text` as UTF-8 (RFC 3629) of at most `limit` bytes: what is none becomes U+FFFD, a byte at a time, and
// no character is cut in two.
std::string ValidUtf8(std::string_view text, size_t limit = SIZE_MAX);

}  // namespace kolovod
