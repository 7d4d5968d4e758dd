// Writes the corpus: what a real world of two hosts exchanges, taken from its sockets and its shared memory.
//
// usage: capture FOLDER
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <source_location>
#include <thread>
#include <vector>

#include "control/message.h"
#include "engine/engine.h"
#include "transport/loopback.h"
#include "transport/stream.h"

namespace kolovod {
namespace {

// Not a test, but it stops like one.
void Require(bool holds, const std::string& otherwise = "does not hold",
             std::source_location at = std::source_location::current()) {
  if (holds) return;
  std::fprintf(stderr, "%s:%u: %s\n", at.file_name(), at.line(), otherwise.c_str());
  std::_Exit(1);
}
void Require(const Status& status, std::source_location at = std::source_location::current()) {
  Require(status.ok(), status.message(), at);
}

constexpr uint32_t kEpoch = 1;
constexpr size_t kMostOfAKind = 6;
constexpr size_t kLongest = 4000;  // bytes of an input

// One connection, with ourselves in its middle.
struct Tap {
  int ends[2];  // towards the engine, towards its peer
  std::string bytes[2];
  std::thread thread;

  explicit Tap(int* fd) {
    int pair[2];
    Require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
    ends[0] = pair[0];
    ends[1] = *fd;
    *fd = pair[1];
    thread = std::thread([this] { Pump(); });
  }

  void Pump() {
    bool open[2] = {true, true};
    while (open[0] || open[1]) {
      pollfd polled[2] = {{open[0] ? ends[0] : -1, POLLIN, 0}, {open[1] ? ends[1] : -1, POLLIN, 0}};
      poll(polled, 2, -1);
      for (int from = 0; from < 2; ++from) {
        if (polled[from].revents == 0) continue;
        char piece[65536];
        const ssize_t n = recv(ends[from], piece, sizeof(piece), MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
        if (n <= 0) {
          open[from] = false;
          shutdown(ends[1 - from], SHUT_WR);
          continue;
        }
        bytes[from].append(piece, static_cast<size_t>(n));
        for (ssize_t sent = 0; sent < n;) {
          const ssize_t step =
              send(ends[1 - from], piece + sent, static_cast<size_t>(n - sent), MSG_NOSIGNAL);
          if (step <= 0) break;
          sent += step;
        }
      }
    }
  }
};

class Corpus {
 public:
  explicit Corpus(std::filesystem::path folder) : folder_(std::move(folder)) {}

  // At most so many inputs of one kind; `kind` is also in the file's name.
  void Add(const std::string& target, const std::string& kind, std::string_view bytes) {
    if (bytes.size() > kLongest || !seen_[target].insert(std::string(bytes)).second) return;
    const size_t number = counts_[target + kind]++;
    if (number >= kMostOfAKind) return;
    std::filesystem::create_directories(folder_ / target);
    std::ofstream file(folder_ / target / (kind + "-" + std::to_string(number)), std::ios::binary);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    Require(file.good());
  }

 private:
  const std::filesystem::path folder_;
  std::map<std::string, std::set<std::string>> seen_;
  std::map<std::string, size_t> counts_;
};

template <class T>
void Append(std::string* to, T value) {
  to->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

const char* NameOf(Note::Kind kind) {
  static constexpr const char* kNames[Note::kKindCount] = {
      "request", "id", "response", "reset", "seal", "left", "revoked", "late", "late_seen", "waits"};
  return kNames[static_cast<int>(kind)];
}

// What went from one leader to another: frames, their notes, and what is in those.
void AddControl(Corpus* corpus, std::string_view stream, std::string* announced) {
  std::string run;
  for (std::string_view left = stream; left.size() >= 8;) {
    uint32_t length;
    std::memcpy(&length, left.data(), sizeof(length));
    Require(left.size() >= 8 + length);
    const std::string_view payload = left.substr(8, length);
    run += left.substr(0, 8 + length);
    if (run.size() > 300) {
      corpus->Add("control_link", "frames", run);
      corpus->Add("message_ring", "frames", run);
      run.clear();
    }
    left.remove_prefix(8 + length);
    if (length == 0) continue;  // a beat
    const auto note = DecodeNote(payload);
    Require(note.has_value());
    corpus->Add("note", NameOf(note->kind), payload);
    if (note->kind == Note::Kind::kRequest) {
      const auto request = DecodeRequest(note->body);
      Require(request.has_value());
      corpus->Add("request", NameOf(request->verb), note->body);
      for (uint8_t rank = 0; rank < 3 && note->rank == 2; ++rank) {  // as if all announced the same
        Append(announced, rank);
        Append(announced, static_cast<uint16_t>(note->body.size()));
        *announced += note->body;
      }
    } else if (note->kind == Note::Kind::kResponse) {
      const auto response = DecodeResponse(note->body);
      Require(response.has_value());
      const std::string with = response->splits != nullptr ? "_splits"
                               : response->rows.empty()    ? ""
                                                           : "_rows";
      corpus->Add("response", "kind" + std::to_string(static_cast<int>(response->kind)) + with, note->body);
    } else if (note->kind == Note::Kind::kOverdue) {
      corpus->Add("waits", "waits", note->body);
    }
  }
}

// The messages of one operation, with what their receiver expects in front (stream_fuzz.cc).
void AddData(Corpus* corpus, std::string_view stream) {
  std::string sizes;
  std::string bytes;
  uint32_t operation = 0;
  uint8_t count = 0;
  const auto flush = [&] {
    if (count == 0) return;
    std::string input;
    Append(&input, static_cast<uint8_t>(operation));
    Append(&input, count);
    corpus->Add("stream", "operation", input + sizes + bytes);
    sizes.clear();
    bytes.clear();
    count = 0;
  };
  while (stream.size() >= sizeof(MessageHeader)) {
    MessageHeader header;
    std::memcpy(&header, stream.data(), sizeof(header));
    Require(stream.size() >= sizeof(header) + header.bytes);
    if (count > 0 && header.sequence >> 16 != operation) flush();
    operation = header.sequence >> 16;
    if (operation < 4 && header.bytes < 1500 && count < 8) {
      Append(&sizes, static_cast<uint16_t>(header.bytes));
      bytes += stream.substr(0, sizeof(header) + header.bytes);
      ++count;
    }
    stream.remove_prefix(sizeof(header) + header.bytes);
  }
  flush();
}

struct Rank {
  int rank = 0;
  int size = 0;
  std::unique_ptr<Engine> engine;

  Status Do(Verb verb, const std::string& name, std::vector<std::vector<int64_t>> shapes,
            std::vector<int64_t> splits = {}, Op op = Op::kSum, DType dtype = DType::kFloat32) {
    Request request;
    request.name = name;
    request.verb = verb;
    if (name.empty()) request.called_from = "loss.py:3, from train.py:40";
    request.op = op;
    request.splits = std::move(splits);
    std::vector<SubmittedTensor> tensors;
    std::vector<std::vector<double>> memory;
    for (std::vector<int64_t>& shape : shapes) {
      size_t count = 1;
      for (int64_t dim : shape) count *= static_cast<size_t>(dim);
      memory.emplace_back(count, 1.0);
      SubmittedTensor tensor;
      tensor.meta = {dtype, std::move(shape)};
      tensor.in = memory.back().data();
      tensor.out = TraitsOf(verb).makes_outputs ? nullptr : memory.back().data();
      tensors.push_back(std::move(tensor));
    }
    uint64_t handle = 0;
    KV_RETURN_IF_ERROR(engine->Submit(std::move(request), std::move(tensors), true, &handle));
    const Status status = engine->Wait(handle, 20, nullptr);
    bool done = false;
    (void)engine->Release(handle, &done);
    return status;
  }
};

void Work(Rank& self) {
  const int64_t n = self.rank + 1;
  for (int again = 0; again < 4; ++again) {
    Require(self.Do(Verb::kAllreduce, "layer1.weight", {{4, 3}}));
    Require(
        self.Do(Verb::kAllreduce, "\xD1\x81\xD0\xBB\xD0\xBE\xD0\xB9.bias", {{5}, {2, 2}}, {}, Op::kAverage));
    Require(self.Do(Verb::kAllgather, "rows", {{n, 2}, {n}}));
  }
  Require(self.Do(Verb::kAllreduce, "layer1.weight", {{2, 2}}, {}, Op::kMax, DType::kFloat64));
  Require(!self.Do(Verb::kAllreduce, "differs", {{n}}).ok());
  Require(self.Do(Verb::kAlltoall, "exchange", {{4, 2}}, {1, 1, 2, 0}));
  Require(self.Do(Verb::kBroadcast, "state", {{7}}, {}, Op::kSum, DType::kInt64));
  Require(self.Do(Verb::kReducescatter, "part", {{6, 2}}));
  Require(self.Do(Verb::kBarrier, "barrier", {}));
  Require(self.engine->waits().Say("[{},[],\"barrier 'epoch' at train.py:12\"]"));
  Require(self.Do(Verb::kAllreduce, "", {{2}}));
  Require(self.engine->waits().Say(""));
  if (self.rank == 3)
    std::this_thread::sleep_for(std::chrono::milliseconds(1500));  // the others tell each other
  Require(self.Do(Verb::kAllreduce, "late", {{3}}));
  if (self.rank < 2) Require(self.Do(Verb::kAllreduce, "only some have data", {{3}}));
  const Status joined = self.Do(Verb::kJoin, "", {});
  Require(joined.ok() || joined.code() == Code::kInterrupted);  // rank 0 is done and aborts
}

// Four ranks on two hosts; `ends` says how rank 0 leaves.
void Run(Corpus* corpus, const std::function<void(Rank&)>& ends) {
  std::shared_ptr<LoopbackWorld> world;
  Config config;
  config.chunk_bytes = 4096;
  config.late_report_ms = 400;
  Require(LoopbackWorld::Create({0, 0, 1, 1}, config, &world));
  std::vector<std::vector<int>> control_links;
  for (int r = 0; r < world->size(); ++r) control_links.push_back(world->TakeControlLinks(r));
  Tap control(&control_links[0][1]);
  // The one that ranks 0 and 2 would ask for.
  int pair[2];
  Require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
  Tap data(&pair[0]);
  world->BrokerOf(0)->Connected({2, pair[0]});
  world->BrokerOf(2)->Connected({0, pair[1]});
  std::vector<std::thread> threads;
  for (int r = 0; r < world->size(); ++r) {
    threads.emplace_back([&, r] {
      EngineOptions options;
      options.rank = r;
      options.size = world->size();
      options.epoch = kEpoch;
      options.hosts = world->hosts;
      options.control_fds = control_links[static_cast<size_t>(r)];
      options.broker = world->BrokerOf(r);
      options.config = world->config;
      options.segment = world->SegmentOf(r);
      options.faults = world->faults;
      options.ranks = world->ranks;
      options.liveness = std::make_unique<LoopbackLiveness>(world->faults, world->ranks);
      Rank self{r, world->size(), nullptr};
      Require(Engine::Create(std::move(options), &self.engine));
      Work(self);
      if (r == 0) ends(self);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int r = 0; r < world->size(); ++r) world->BrokerOf(r)->Close();
  control.thread.join();
  data.thread.join();
  std::string announced;
  for (const std::string& bytes : control.bytes) AddControl(corpus, bytes, &announced);
  for (const std::string& bytes : data.bytes) AddData(corpus, bytes);
  corpus->Add("negotiate", "announced", announced.substr(0, kLongest));
  const auto* slots = reinterpret_cast<const char*>(world->SegmentOf(0)->records(0));
  std::string notes;
  Append(&notes, static_cast<uint8_t>(14));
  notes += "rank 3 is late";
  corpus->Add("records", "slots", notes + std::string(slots, 8 * sizeof(OperationSlot)));
}

}  // namespace
}  // namespace kolovod

int main(int argc, char** argv) {
  kolovod::Require(argc == 2, "usage: capture FOLDER");
  kolovod::Corpus corpus(argv[1]);
  kolovod::Run(&corpus, [](kolovod::Rank&) {});
  kolovod::Run(&corpus, [](kolovod::Rank& rank) { rank.engine->Abort("the loss is not a number"); });
  return 0;
}
