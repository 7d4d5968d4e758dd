#include "engine/wait_board.h"

namespace kolovod {

bool WaitBoard::Say(std::string_view text) {
  MutexLock lock(mutex_);
  if (!notices_.Write(topology_.rank, text)) return false;
  if (topology_.hosts() > 1) segment_.WakeIdle(0);
  return true;
}

std::vector<WaitBoard::Said> WaitBoard::Read() const {
  std::vector<Said> said;
  for (int rank = 0; rank < topology_.size(); ++rank) {
    uint32_t version;
    std::string text = notices_.Read(rank, &version);
    if (!text.empty()) said.push_back({rank, version, std::move(text)});
  }
  return said;
}

void WaitBoard::Relay() {
  if (topology_.hosts() == 1 || !topology_.leads()) return;
  for (int r = 0; r < topology_.local_size(); ++r) {
    const int rank = topology_.local_ranks[static_cast<size_t>(r)];
    uint32_t& relayed = relayed_[static_cast<size_t>(r)];
    uint32_t version;
    std::string text = notices_.Read(rank, &version);
    if (version == relayed || version % 2 != 0) continue;
    relayed = version;
    tell_leaders_(Note{Note::Kind::kWaits, rank, version, 0, std::move(text)});
  }
}

void WaitBoard::Hear(const Note& note) {
  if (note.rank < 0 || note.rank >= topology_.size() || topology_.on_this_host(note.rank)) return;
  MutexLock lock(mutex_);
  (void)notices_.Write(note.rank, note.body);
}

}  // namespace kolovod
