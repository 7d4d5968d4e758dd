// What the machine itself gives, measured by the same protocol as the collectives (worker.py): forked
// processes, private memory, new data before each iteration, a barrier, max(end) - min(start) on
// CLOCK_MONOTONIC. The bench compiles this file with the system's c++; see machine.py.
//
//   pingpong                                      how long one cache line takes from one core to another
//   memcpy  --np N --bytes S [--iterations I --ops K]   every process copies its buffer at the same time
//   inplace --np N --bytes S [--iterations I --ops K]   every process reads and writes its buffer once:
//                                                 no in-place allreduce can do with less
//
// One line of JSON goes to stdout. The exit code is 1 when a check of the results failed.

#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <vector>

namespace {

constexpr int kMaxRanks = 64;
constexpr int kMaxIterations = 10'000;
constexpr unsigned kDeadlineSeconds = 120;  // a lost process must not leave the others spinning

struct alignas(128) Line {
  std::atomic<int64_t> value{0};
};

struct Shared {
  Line arrived[kMaxRanks];
  Line ping, pong;
  std::atomic<int64_t> wrong{0};
  int64_t start_ns[kMaxRanks][kMaxIterations];
  int64_t end_ns[kMaxRanks][kMaxIterations];
};

struct Options {
  std::string what;
  int np = 2;
  int64_t bytes = 1 << 20;
  int iterations = 5;
  int ops = 1;  // operations back to back, each on buffers of its own; the time is that of one
};

int64_t NowNs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

void Relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

std::vector<int> AllowedCores() {
  cpu_set_t set;
  std::vector<int> cores;
  if (sched_getaffinity(0, sizeof set, &set) == 0) {
    for (int core = 0; core < CPU_SETSIZE; ++core) {
      if (CPU_ISSET(core, &set)) cores.push_back(core);
    }
  }
  return cores;
}

void Pin(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  sched_setaffinity(0, sizeof set, &set);
}

[[noreturn]] void Fail(const char* message) {
  std::fprintf(stderr, "pingpong: %s\n", message);
  std::exit(2);
}

void* Map(size_t bytes, int sharing) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, sharing | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) Fail("cannot map memory");
  return memory;
}

// NumPy asks for huge pages from 4 MiB on; the bound must be that of the same memory.
float* PrivateBuffer(int64_t bytes) {
  void* memory = Map(static_cast<size_t>(bytes), MAP_PRIVATE);
#if defined(MADV_HUGEPAGE)
  if (bytes >= (4 << 20)) madvise(memory, static_cast<size_t>(bytes), MADV_HUGEPAGE);
#endif
  return static_cast<float*>(memory);
}

class Barrier {
 public:
  Barrier(Shared& shared, int rank, int np, bool yield)
      : shared_(shared), rank_(rank), np_(np), yield_(yield) {}

  void Wait() {
    ++count_;
    shared_.arrived[rank_].value.store(count_, std::memory_order_release);
    for (int rank = 0; rank < np_; ++rank) {
      while (shared_.arrived[rank].value.load(std::memory_order_acquire) < count_) {
        if (yield_) {
          sched_yield();
        } else {
          Relax();
        }
      }
    }
  }

 private:
  Shared& shared_;
  const int rank_, np_;
  const bool yield_;
  int64_t count_ = 0;
};

// Forks `np` processes, each pinned to a core (round robin), runs body(rank) in them and waits for all.
template <class Body>
bool RunRanks(int np, Body body) {
  const std::vector<int> cores = AllowedCores();
  if (cores.empty()) Fail("no core is allowed");
  const pid_t parent = getpid();
  std::vector<pid_t> children;
  for (int rank = 0; rank < np; ++rank) {
    const pid_t child = fork();
    if (child < 0) Fail("fork failed");
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) _exit(3);
      alarm(kDeadlineSeconds);
      Pin(cores[static_cast<size_t>(rank) % cores.size()]);
      body(rank);
      _exit(0);
    }
    children.push_back(child);
  }
  bool clean = true;
  for (pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    clean = clean && WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }
  return clean;
}

int PingPong(Shared& shared) {
  constexpr int kBatches = 41, kTrips = 500;
  if (AllowedCores().size() < 2) {
    std::printf("{\"one_way_ns\": null}\n");
    return 0;
  }
  const bool clean = RunRanks(2, [&](int rank) {
    std::atomic<int64_t>& mine = rank == 0 ? shared.ping.value : shared.pong.value;
    std::atomic<int64_t>& other = rank == 0 ? shared.pong.value : shared.ping.value;
    int64_t trip = 0;
    for (int batch = 0; batch < kBatches; ++batch) {
      shared.start_ns[rank][batch] = NowNs();
      for (int i = 0; i < kTrips; ++i) {
        ++trip;
        if (rank == 0) mine.store(trip, std::memory_order_release);
        while (other.load(std::memory_order_acquire) < trip) {
          // No pause here: on some cores it alone takes as long as the line.
        }
        if (rank == 1) mine.store(trip, std::memory_order_release);
      }
      shared.end_ns[rank][batch] = NowNs();
    }
  });
  if (!clean) Fail("a process of the ping-pong died");
  std::vector<double> one_way_ns;
  for (int batch = 1; batch < kBatches; ++batch) {
    one_way_ns.push_back(static_cast<double>(shared.end_ns[0][batch] - shared.start_ns[0][batch]) / kTrips /
                         2);
  }
  // The lower quartile: batches that another process interrupted say nothing about the cores.
  std::sort(one_way_ns.begin(), one_way_ns.end());
  std::printf("{\"one_way_ns\": %.1f}\n", one_way_ns[one_way_ns.size() / 4]);
  return 0;
}

float Element(int64_t index, int rank, int iteration) {
  return static_cast<float>((index * 7 + rank * 3 + iteration) & 15);
}

struct Buffers {
  float* target;
  float* source;  // memcpy only
};

// Returns how many of the looked-at elements are wrong; every 61st is looked at, and the last.
int64_t CountWrong(const Options& options, const Buffers& buffers, int rank, int iteration) {
  const int64_t count = options.bytes / static_cast<int64_t>(sizeof(float));
  const float added = options.what == "inplace" ? 1.0f : 0.0f;
  int64_t wrong = 0;
  for (int64_t i = 0; i < count; i += 61) wrong += buffers.target[i] != Element(i, rank, iteration) + added;
  wrong += buffers.target[count - 1] != Element(count - 1, rank, iteration) + added;
  return wrong;
}

void Operate(const Options& options, const Buffers& buffers) {
  if (options.what == "memcpy") {
    std::memcpy(buffers.target, buffers.source, static_cast<size_t>(options.bytes));
    return;
  }
  const int64_t count = options.bytes / static_cast<int64_t>(sizeof(float));
  float* data = buffers.target;
  for (int64_t i = 0; i < count; ++i) data[i] += 1.0f;
}

void MeasureRank(const Options& options, Shared& shared, int rank, bool yield) {
  Barrier barrier(shared, rank, options.np, yield);
  const int64_t count = options.bytes / static_cast<int64_t>(sizeof(float));
  const bool copies = options.what == "memcpy";
  std::vector<Buffers> all(static_cast<size_t>(options.ops));
  for (Buffers& buffers : all) {
    buffers.target = PrivateBuffer(options.bytes);
    buffers.source = copies ? PrivateBuffer(options.bytes) : nullptr;
    std::memset(buffers.target, 0, static_cast<size_t>(options.bytes));
  }
  for (int iteration = 0; iteration < options.iterations; ++iteration) {
    for (Buffers& buffers : all) {
      float* data = copies ? buffers.source : buffers.target;
      for (int64_t i = 0; i < count; ++i) data[i] = Element(i, rank, iteration);
    }
    barrier.Wait();
    shared.start_ns[rank][iteration] = NowNs();
    for (const Buffers& buffers : all) Operate(options, buffers);
    shared.end_ns[rank][iteration] = NowNs();
    barrier.Wait();
    for (const Buffers& buffers : all) shared.wrong += CountWrong(options, buffers, rank, iteration);
  }
}

int Measure(const Options& options, Shared& shared) {
  const bool yield = static_cast<size_t>(options.np) > AllowedCores().size();
  if (!RunRanks(options.np, [&](int rank) { MeasureRank(options, shared, rank, yield); })) {
    Fail("a process died or took too long");
  }
  std::printf("{\"wrong\": %lld, \"us\": [", static_cast<long long>(shared.wrong.load()));
  for (int i = 0; i < options.iterations; ++i) {
    int64_t start_ns = shared.start_ns[0][i], end_ns = shared.end_ns[0][i];
    for (int rank = 1; rank < options.np; ++rank) {
      start_ns = std::min(start_ns, shared.start_ns[rank][i]);
      end_ns = std::max(end_ns, shared.end_ns[rank][i]);
    }
    std::printf("%s%.4f", i ? ", " : "", static_cast<double>(end_ns - start_ns) / 1e3 / options.ops);
  }
  std::printf("]}\n");
  return shared.wrong.load() == 0 ? 0 : 1;
}

Options Parse(int argc, char** argv) {
  Options options;
  if (argc < 2 || argc % 2 != 0) Fail("usage: pingpong | memcpy | inplace [--np N] [--bytes S] ...");
  options.what = argv[1];
  for (int i = 2; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    const long long value = std::atoll(argv[i + 1]);
    if (name == "--np" && value >= 1 && value <= kMaxRanks) {
      options.np = static_cast<int>(value);
    } else if (name == "--bytes" && value >= 4) {
      options.bytes = value / 4 * 4;
    } else if (name == "--iterations" && value >= 1 && value <= kMaxIterations) {
      options.iterations = static_cast<int>(value);
    } else if (name == "--ops" && value >= 1) {
      options.ops = static_cast<int>(value);
    } else {
      Fail(("bad option: " + name + " " + argv[i + 1]).c_str());
    }
  }
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = Parse(argc, argv);
  Shared& shared = *new (Map(sizeof(Shared), MAP_SHARED)) Shared;
  if (options.what == "pingpong") return PingPong(shared);
  if (options.what == "memcpy" || options.what == "inplace") return Measure(options, shared);
  Fail(("unknown measurement: " + options.what).c_str());
}
