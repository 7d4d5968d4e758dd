// Encrypted connections with somebody in between: streams of the data plane, and the leaders' control links.
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "testing/check.h"
#include "testing/mesh_world.h"
#include "transport/control_link.h"
#include "transport/stream.h"

namespace kolovod {
namespace {

using testing::Contains;
using testing::StartsWith;
using Clock = std::chrono::steady_clock;
using testing::KeyPair;
using testing::MakeKeys;

constexpr size_t kLarge = 300'001;  // several records

// Passes on what comes from one end, record by record, through `change`, in pieces; remembers it. The other
// way nothing passes.
class Middle {
 public:
  using Change = std::function<std::vector<std::string>(size_t number, std::string record)>;

  explicit Middle(Change change, size_t piece = SIZE_MAX) : change_(std::move(change)), piece_(piece) {
    int near[2], far[2];
    testing::Connect(testing::Wire::kSocketPair, near);
    testing::Connect(testing::Wire::kSocketPair, far);
    from = near[0];
    to = far[0];
    thread_ = std::thread([this, source = near[1], sink = far[1]] { Pump(source, sink); });
  }
  ~Middle() {
    if (thread_.joinable()) thread_.join();
  }
  // All that came, once both ends have closed `from` and `to`.
  const std::string& Finish() {
    thread_.join();
    return seen_;
  }

  int from, to;

 private:
  void Pump(int source, int sink) {
    std::string held;
    char bytes[10'000];
    for (size_t number = 0;;) {
      const ssize_t n = recv(source, bytes, sizeof(bytes), 0);
      if (n <= 0) break;
      held.append(bytes, static_cast<size_t>(n));
      seen_.append(bytes, static_cast<size_t>(n));
      uint32_t length = 0;
      while (held.size() >= sizeof(length)) {
        std::memcpy(&length, held.data(), sizeof(length));
        if (held.size() < length + kRecordExtraBytes) break;
        const std::string record = held.substr(0, length + kRecordExtraBytes);
        held.erase(0, record.size());
        for (const std::string& changed : change_(number++, record)) Write(sink, changed);
      }
    }
    close(source);
    close(sink);
  }
  void Write(int sink, const std::string& bytes) {
    for (size_t at = 0; at < bytes.size();) {
      const ssize_t n = send(sink, bytes.data() + at, std::min(piece_, bytes.size() - at), MSG_NOSIGNAL);
      if (n <= 0) return;  // the receiver has given up
      at += static_cast<size_t>(n);
    }
  }

  const Change change_;
  const size_t piece_;
  std::string seen_;
  std::thread thread_;
};

std::vector<std::string> Pass(size_t, std::string record) { return {std::move(record)}; }

std::string Pattern(size_t bytes, int seed) {
  std::string data(bytes, '\0');
  for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<char>(i * 7 + i / 253 + static_cast<size_t>(seed));
  return data;
}

struct Sent {
  Status status;
  std::string seen;                  // in between
  std::vector<std::string> arrived;  // whole messages
};

// Sends messages of these sizes from one stream to another, with somebody in between.
Sent SendThrough(const Middle::Change& change, const std::vector<size_t>& sizes, Cipher cipher,
                 size_t piece = SIZE_MAX, bool posted_late = false) {
  Sent result;
  Middle middle(change, piece);
  const KeyPair keys = MakeKeys(cipher);
  std::vector<std::string> in, out;
  for (size_t i = 0; i < sizes.size(); ++i) {
    in.push_back(Pattern(sizes[i], static_cast<int>(i)));
    out.emplace_back(sizes[i], '\0');
  }
  Stream receiver("rank 1 on test", 3);
  CHECK_OK(receiver.Connect(middle.to, keys.ends[1].get()));
  std::vector<uint64_t> ends;
  size_t posted = 0;
  const auto post = [&] {
    const size_t half = out[posted].size() / 2;
    const iovec parts[] = {{out[posted].data(), half},
                           {out[posted].data() + half, out[posted].size() - half}};
    ends.push_back(receiver.Receive(parts));
    ++posted;
  };
  while (!posted_late && posted < out.size()) post();
  {
    Stream sender("rank 0 on test", 3);
    CHECK_OK(sender.Connect(middle.from, keys.ends[0].get()));
    for (std::string& message : in) {
      const iovec part{message.data(), message.size()};
      sender.Send({&part, 1});
    }
    const auto deadline = Clock::now() + std::chrono::seconds(30);
    while (result.status.ok() && (sender.sending() || receiver.receiving() || posted < out.size())) {
      bool moved = false;
      if (!receiver.receiving() && posted < out.size()) post();
      const Status pushed = sender.Push(&moved);
      if (!pushed.ok()) sender.Drop();  // the receiver has given up, as it will say
      result.status = receiver.Pull(&moved);
      if (!sender.sending()) sender.Close();  // what does not come now never does
      if (!moved) std::this_thread::yield();
      CHECK(Clock::now() < deadline);
    }
  }
  for (size_t i = 0; i < ends.size() && receiver.received() >= ends[i]; ++i) {
    CHECK(out[i] == in[i]);
    result.arrived.push_back(out[i]);
  }
  receiver.Close();
  result.seen = middle.Finish();
  return result;
}

TEST_CASE("messages arrive in pieces of any size") {
  for (const Cipher cipher : {Cipher::kAes256Gcm, Cipher::kChaCha20Poly1305}) {
    for (const bool late : {false, true}) {
      const std::vector<size_t> small = {1, 4, 17, 1, 300, 2};
      CHECK(SendThrough(Pass, small, cipher, 1, late).arrived.size() == small.size());
      // Around the size of a record, with and without the header.
      const std::vector<size_t> sizes = {kRecordPlainBytes - 17,
                                         kRecordPlainBytes - 16,
                                         kRecordPlainBytes,
                                         kRecordPlainBytes + 1,
                                         kLarge,
                                         5};
      for (const size_t piece : {size_t{999}, SIZE_MAX}) {
        CHECK(SendThrough(Pass, sizes, cipher, piece, late).arrived.size() == sizes.size());
      }
    }
  }
}

TEST_CASE("nothing of it is seen in between") {
  const std::string pattern = Pattern(kLarge, 0);
  const Sent sent = SendThrough(Pass, {kLarge}, Cipher::kAes256Gcm);
  CHECK(sent.seen.size() > kLarge);
  for (size_t at = 0; at + 16 <= kLarge; at += 997) {
    CHECK(sent.seen != Contains(pattern.substr(at, 16)));
  }
}

TEST_CASE("whoever changes what passes ends it with an error that names the peer") {
  std::string kept;
  const Middle::Change changes[] = {
      [](size_t number, std::string record) {  // a bit of the payload
        if (number == 2) record[100] = static_cast<char>(record[100] ^ 4);
        return std::vector{record};
      },
      [](size_t number, std::string record) {  // of the tag
        if (number == 2) record.back() = static_cast<char>(record.back() ^ 1);
        return std::vector{record};
      },
      [](size_t number, std::string record) {
        return number == 2 ? std::vector<std::string>() : std::vector{record};
      },
      [](size_t number, std::string record) {
        return number == 2 ? std::vector{record, record} : std::vector{record};
      },
      [&kept](size_t number, std::string record) {  // 3 before 2
        if (number == 2) return kept = record, std::vector<std::string>();
        return number == 3 ? std::vector{record, kept} : std::vector{record};
      },
      [](size_t number, std::string record) {  // shorter, and says so
        if (number == 2)
          record = Pattern(4, 0).replace(0, 4, std::string("\x10\0\0\0", 4)) + record.substr(4, 32);
        return std::vector{record};
      },
  };
  for (const Middle::Change& change : changes) {
    const Sent sent = SendThrough(change, {10, kLarge, 20}, Cipher::kAes256Gcm);
    CHECK(sent.status == Code::kRankLost);
    CHECK(sent.status.message() == StartsWith("rank 1 on test: a record from there"));
    CHECK(sent.arrived.size() <= 1);
  }
}

TEST_CASE("what is cut off is an error wherever") {
  for (const size_t kept : {size_t{0}, size_t{1}, size_t{3}}) {
    const auto cut = [kept](size_t number, std::string record) {
      return number < kept ? std::vector{record} : std::vector<std::string>();
    };
    const Sent sent = SendThrough(cut, {10, kLarge}, Cipher::kAes256Gcm);
    CHECK(sent.status == Code::kRankLost);
    CHECK(sent.status.message() == StartsWith("rank 1 on test"));
  }
}

TEST_CASE("one end without keys gets an error and no numbers") {
  for (const bool sender_seals : {false, true}) {
    int ends[2];
    testing::Connect(testing::Wire::kSocketPair, ends);
    const KeyPair keys = MakeKeys(Cipher::kAes256Gcm);
    Stream sender("rank 0", 1), receiver("rank 1", 1);
    CHECK_OK(sender.Connect(ends[0], sender_seals ? keys.ends[0].get() : nullptr));
    CHECK_OK(receiver.Connect(ends[1], sender_seals ? nullptr : keys.ends[1].get()));
    std::string in = Pattern(100, 0), out(100, '\0');
    const iovec from{in.data(), in.size()}, to{out.data(), out.size()};
    sender.Send({&from, 1});
    receiver.Receive({&to, 1});
    bool moved = false;
    CHECK_OK(sender.Push(&moved));
    sender.Close();
    Status status;
    for (int tries = 0; tries < 10 && status.ok(); ++tries) status = receiver.Pull(&moved);
    CHECK(!status.ok());
    CHECK(out == std::string(100, '\0'));
  }
}

struct Heard {
  std::vector<std::string> frames;
  std::string lost;
};

// Frames from one leader to another, with somebody in between.
Heard SendFrames(const Middle::Change& change, const std::vector<std::string>& frames) {
  Middle middle(change);
  const KeyPair keys = MakeKeys(Cipher::kChaCha20Poly1305);
  Heard heard;
  std::atomic<bool> lost{false};
  ControlLink receiver({ControlLinkPeer{1, middle.to, keys.ends[1]}}, 5);
  ControlLink::Events events;
  events.read = [](const ControlLink::Frame&) { return false; };
  events.arrived = [] {};
  events.lost = [&](int, const std::string& reason) {
    heard.lost = reason;
    lost.store(true);
  };
  receiver.Start(std::move(events));
  {
    ControlLink sender({ControlLinkPeer{0, middle.from, keys.ends[0]}}, 5);
    sender.Start({[](const ControlLink::Frame&) { return false; }, [] {}, [](int, const std::string&) {}});
    for (const std::string& frame : frames) sender.Send(0, frame);
    sender.Stop(10'000);
  }
  const auto deadline = Clock::now() + std::chrono::seconds(30);
  while (!lost.load()) CHECK(Clock::now() < deadline);
  receiver.Stop(0);
  for (const ControlLink::Frame& frame : receiver.Take()) heard.frames.push_back(frame.payload);
  return heard;
}

TEST_CASE("frames between leaders arrive and changed ones end the connection") {
  const std::vector<std::string> frames = {"a", Pattern(200'000, 1), "", Pattern(70'000, 2), "b"};
  std::vector<std::string> said = frames;
  said.erase(said.begin() + 2);  // a beat
  const Heard all = SendFrames(Pass, frames);
  CHECK(all.frames == said);
  CHECK(all.lost == "its connection was closed");
  for (const size_t at : {size_t{0}, size_t{2}, size_t{6}}) {
    const Heard some = SendFrames(
        [at](size_t number, std::string record) {
          if (number == at) record[6] = static_cast<char>(record[6] ^ 1);
          return std::vector{record};
        },
        frames);
    CHECK(some.frames.size() < said.size());
    CHECK(std::equal(some.frames.begin(), some.frames.end(), said.begin()));
    CHECK(some.lost == Contains("changed on its way"));
  }
}

}  // namespace
}  // namespace kolovod
