// What each rank of a world says of itself while it can go on only by what others submit: a text, whose words
// are the front end's (src/kolovod/core/standings.py). It lies in the segment of each host, where all its
// ranks read it; what other hosts' ranks say their leaders pass on.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "transport/segment.h"

namespace kolovod {

// Words, so that readers of another process meet no torn value; `version` is odd while one is being written.
class WaitNotices {
 public:
  explicit WaitNotices(Segment& segment) : segment_(segment) {}

  // Of `rank` (of the world): its own, or one of another host by the leader here; one thread at a time.
  // Empty: it can go on. False: longer than kNoticeBytes, and nothing was changed.
  bool Write(int rank, std::string_view text) {
    if (text.size() > kNoticeBytes) return false;
    WaitNotice& notice = segment_.notice(rank);
    const uint32_t version = notice.version.load(std::memory_order_relaxed);
    notice.version.store(version + 1, std::memory_order_seq_cst);
    for (size_t at = 0; at < text.size(); at += 8) {
      uint64_t word = 0;
      std::memcpy(&word, text.data() + at, std::min<size_t>(8, text.size() - at));
      notice.words[at / 8].store(word, std::memory_order_release);
    }
    notice.bytes.store(static_cast<uint32_t>(text.size()), std::memory_order_release);
    notice.version.store(version + 2, std::memory_order_seq_cst);
    return true;
  }

  // Empty as well while it is being written. `*version`: another one for each text.
  std::string Read(int rank, uint32_t* version) const {
    WaitNotice& notice = segment_.notice(rank);
    *version = notice.version.load(std::memory_order_seq_cst);
    if (*version % 2 != 0) return "";
    std::string text(std::min<size_t>(notice.bytes.load(std::memory_order_acquire), kNoticeBytes), '\0');
    for (size_t at = 0; at < text.size(); at += 8) {
      const uint64_t word = notice.words[at / 8].load(std::memory_order_acquire);
      std::memcpy(text.data() + at, &word, std::min<size_t>(8, text.size() - at));
    }
    return notice.version.load(std::memory_order_seq_cst) == *version ? text : "";
  }

 private:
  Segment& segment_;
};

}  // namespace kolovod
