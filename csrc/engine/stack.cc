#include "engine/stack.h"

#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>

namespace kolovod {
namespace {

constexpr int64_t kPatienceNs = 1'000'000'000;  // for the first part of the text, and for each other
constexpr int64_t kQuietNs = 20'000'000;        // after the last
constexpr size_t kMaxBytes = 1 << 16;

void (*HandlerOf(int signum))(int) {
  struct sigaction action = {};
  return sigaction(signum, nullptr, &action) == 0 ? action.sa_handler : SIG_DFL;
}

// What the kernel says of the main thread after `name`, which ends with a colon.
std::string MainThreadStatus(const std::string& name) {
  std::ifstream status("/proc/self/task/" + std::to_string(getpid()) + "/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(name)) return line.substr(line.find_first_not_of(" \t", name.size()));
  }
  return "unknown";
}

// The signal is blocked while its handler runs. faulthandler writes in many small parts, so a quiet moment
// alone does not tell that the text is whole: the main thread may have lost its core.
bool IsInHandler(int signum) {
  const std::string blocked = MainThreadStatus("SigBlk:");  // a bit for each signal, in hexadecimal digits
  return (std::strtoull(blocked.c_str(), nullptr, 16) >> (signum - 1) & 1) != 0;
}

}  // namespace

StackSource::StackSource(int signum, int read_fd)
    : signum_(signum), read_fd_(read_fd), handler_(HandlerOf(signum)) {}

std::optional<std::string> StackSource::Capture(int64_t now_ns) {
  MutexLock lock(mutex_);
  if (begun_ns_ == 0) {
    std::string trouble = Begin(now_ns);
    if (!trouble.empty()) return trouble;
    return std::nullopt;
  }
  if (Read()) {
    read_ns_ = now_ns;
    return std::nullopt;
  }
  const int64_t quiet_ns = now_ns - read_ns_;
  if (quiet_ns < (text_.empty() ? kPatienceNs : kQuietNs)) return std::nullopt;
  if (!text_.empty()) {
    if (quiet_ns < kPatienceNs && IsInHandler(signum_)) return std::nullopt;
    Read();  // what was written before the handler ended
    begun_ns_ = 0;
    return std::move(text_);
  }
  begun_ns_ = 0;
  return "no stack: the main thread does not take signal " + std::to_string(signum_) +
         " (native code that blocks signals, or a system call that cannot be interrupted); the system says " +
         MainThreadStatus("State:") + "\n";
}

// What went wrong, or empty.
std::string StackSource::Begin(int64_t now_ns) {
  // The default action of a real-time signal ends the process.
  if (handler_ == SIG_DFL || HandlerOf(signum_) != handler_) {
    return "no stack: this process has changed its handler of signal " + std::to_string(signum_) + "\n";
  }
  while (Read()) text_.clear();  // of a capture that was given up
  text_.clear();
  const pid_t pid = getpid();
  if (syscall(SYS_tgkill, pid, pid, signum_) != 0) return "no stack: the main thread has ended\n";
  begun_ns_ = read_ns_ = now_ns;
  return "";
}

// Appends what has come; false: nothing.
bool StackSource::Read() {
  char part[4096];
  bool any = false;
  ssize_t n;
  while ((n = read(read_fd_, part, sizeof(part))) > 0) {
    any = true;
    if (text_.size() < kMaxBytes) text_.append(part, static_cast<size_t>(n));
  }
  return any;
}

}  // namespace kolovod
