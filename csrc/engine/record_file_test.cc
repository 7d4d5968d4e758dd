#include "engine/record_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "testing/check.h"

namespace kolovod {
namespace {

using testing::Contains;

// A folder like /tmp, in which anybody may make folders.
struct Shared {
  Shared() {
    std::string pattern = "/tmp/kolovod-record-XXXXXX";
    CHECK(mkdtemp(pattern.data()) != nullptr);
    root = pattern;
    place = root + "/tmp";
    CHECK(mkdir(place.c_str(), 0700) == 0);
    CHECK(chmod(place.c_str(), 01777) == 0);
  }
  ~Shared() { std::filesystem::remove_all(root); }
  std::string root, place;
};

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

mode_t ModeOf(const std::string& path) {
  struct stat status;
  CHECK(lstat(path.c_str(), &status) == 0);
  return status.st_mode & 07777;
}

TEST_CASE("a file is new and for its user only") {
  const Shared shared;
  const std::string path = shared.place + "/kolovod-1/a.jsonl";
  const mode_t before = umask(0);
  CHECK_OK(WriteNewFile(path, "text"));
  umask(before);
  CHECK(ReadFile(path) == "text");
  CHECK(ModeOf(path) == 0600);
  CHECK(ModeOf(shared.place + "/kolovod-1") == 0700);
  CHECK(!WriteNewFile(path, "other").ok());
  CHECK(ReadFile(path) == "text");
  CHECK_OK(WriteNewFile(shared.place + "/kolovod-1/b.jsonl", ""));
}

// Its name can be worked out, and the world fails hours after its folder was looked at.
TEST_CASE("a folder that somebody else has put there is not written to") {
  const Shared shared;
  const std::string folder = shared.place + "/kolovod-1", elsewhere = shared.root + "/elsewhere";
  CHECK(mkdir(elsewhere.c_str(), 0700) == 0);
  CHECK(symlink(elsewhere.c_str(), folder.c_str()) == 0);
  CHECK(!WriteNewFile(folder + "/a.jsonl", "text").ok());
  CHECK(std::filesystem::is_empty(elsewhere));
  CHECK(unlink(folder.c_str()) == 0);

  CHECK(mkdir(folder.c_str(), 0700) == 0);
  CHECK(chmod(folder.c_str(), 0770) == 0);
  CHECK(WriteNewFile(folder + "/a.jsonl", "text").message() == Contains("only this user may write to"));
  CHECK(chmod(folder.c_str(), 0700) == 0);
  if (geteuid() == 0) {
    CHECK(chown(folder.c_str(), 65534, 65534) == 0);
    CHECK(WriteNewFile(folder + "/a.jsonl", "text").message() == Contains("only this user may write to"));
  }
  CHECK(std::filesystem::is_empty(folder));
}

TEST_CASE("a folder that the user names may be a link and a group's") {
  const Shared shared;
  const std::string folder = shared.root + "/folder", group = shared.root + "/group";
  CHECK(mkdir(group.c_str(), 0700) == 0);
  CHECK(chmod(group.c_str(), 0770) == 0);
  CHECK(symlink(group.c_str(), folder.c_str()) == 0);
  CHECK_OK(WriteNewFile(folder + "/a.jsonl", "text"));
  CHECK(ReadFile(group + "/a.jsonl") == "text");
}

}  // namespace
}  // namespace kolovod
