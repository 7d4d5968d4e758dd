#include "engine/record_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string_view>

#include "base/text.h"

namespace kolovod {
namespace {

std::string Quoted(std::string_view text) {
  std::string out = "\"";
  for (char c : ValidUtf8(text)) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) {
      char escape[8];
      std::snprintf(escape, sizeof(escape), "\\u%04x", static_cast<unsigned>(static_cast<unsigned char>(c)));
      out += escape;
    } else {
      out += c;
    }
  }
  return out + '"';
}

std::string Time(const RecordFileHeader& header, int64_t monotonic_ns) {
  if (monotonic_ns == 0) return "null";
  // Another process may have written anything there.
  int64_t ns;
  if (__builtin_add_overflow(monotonic_ns, header.wall_ns - header.now_ns, &ns) || ns < 0) return "null";
  const int64_t us = ns / 1000;
  char text[40];
  std::snprintf(text, sizeof(text), "%lld.%06lld", static_cast<long long>(us / 1'000'000),
                static_cast<long long>(us % 1'000'000));
  return text;
}

std::string Line(const RecordFileHeader& header, const OperationRecord& record) {
  std::string line = "{\"number\": " + std::to_string(record.number);
  line += ", \"name\": " + Quoted(record.name);
  line += std::string(", \"verb\": \"") + NameOf(record.verb) + "\"";
  line += ", \"dtype\": " + (record.tensors > 0 ? "\"" + std::string(NameOf(record.dtype)) + "\"" : "null");
  line += std::string(", \"device\": \"") + NameOf(record.device) + "\"";
  line += ", \"tensors\": " + std::to_string(record.tensors);
  line += ", \"bytes\": " + std::to_string(record.bytes);
  line += ", \"bucket\": " + (record.bucket > 0 ? std::to_string(record.bucket) : "null");
  line += std::string(", \"state\": \"") + NameOf(record.state) + "\"";
  line += ", \"submitted_at_s\": " + Time(header, record.submitted_ns);
  line += ", \"started_at_s\": " + Time(header, record.started_ns);
  line += ", \"ended_at_s\": " + Time(header, record.ended_ns);
  return line + "}\n";
}

Status Trouble(const std::string& what, const std::string& path) {
  return Status(Code::kInternal, "cannot " + what + " " + path + ": " + std::strerror(errno));
}

// The caller closes `out`. Where anybody may make folders, as in /tmp, it must be one that only this user may
// write to: the world fails hours after its folder was looked at.
Status OpenFolder(const std::string& folder, int* out) {
  const size_t slash = folder.rfind('/');
  const std::string parent = slash == 0 ? "/" : folder.substr(0, slash);
  const int above = open(parent.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC);
  if (above < 0) return Trouble("make the folder", folder);
  struct stat status;
  const bool is_shared = fstat(above, &status) != 0 || (status.st_mode & S_IWOTH) != 0;
  const char* const name = folder.c_str() + slash + 1;
  const bool is_there = mkdirat(above, name, 0700) == 0 || errno == EEXIST;
  const int fd =
      is_there ? openat(above, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | (is_shared ? O_NOFOLLOW : 0)) : -1;
  const int error = errno;
  close(above);
  errno = error;
  if (fd < 0) return Trouble("make the folder", folder);
  const mode_t others_write = S_IWGRP | S_IWOTH;
  if (is_shared &&
      (fstat(fd, &status) != 0 || status.st_uid != geteuid() || (status.st_mode & others_write) != 0)) {
    close(fd);
    return Status(Code::kInternal, folder + " is not a folder that only this user may write to");
  }
  *out = fd;
  return Status();
}

}  // namespace

std::string RecordFileText(const RecordFileHeader& header, const std::vector<OperationRecord>& records,
                           size_t limit) {
  std::string text = "{\"rank\": " + std::to_string(header.rank);
  text += ", \"size\": " + std::to_string(header.size);
  text += ", \"epoch\": " + std::to_string(header.epoch);
  text += ", \"who\": " + Quoted(header.who);
  text += ", \"reason\": " + Quoted(header.reason);
  text += ", \"written_at_s\": " + Time(header, header.now_ns) + "}\n";
  for (size_t i = 0; i < records.size(); ++i) {
    if (i + limit >= records.size() || records[i].pending()) text += Line(header, records[i]);
  }
  return text;
}

Status WriteNewFile(const std::string& path, const std::string& text) {
  const size_t slash = path.rfind('/');
  int folder = -1;
  KV_RETURN_IF_ERROR(OpenFolder(path.substr(0, slash), &folder));
  // Never through a link or into a file that somebody else has put there.
  const int fd =
      openat(folder, path.c_str() + slash + 1, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  const int error = errno;
  close(folder);
  errno = error;
  if (fd < 0) return Trouble("write", path);
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t n = write(fd, text.data() + done, text.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      Status status = Trouble("write", path);
      close(fd);
      return status;
    }
    done += static_cast<size_t>(n);
  }
  if (close(fd) != 0) return Trouble("write", path);
  return Status();
}

}  // namespace kolovod
