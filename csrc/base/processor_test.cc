#include "base/processor.h"

#include <doctest/doctest.h>

#include <fstream>
#include <set>
#include <sstream>
#include <string>

#if defined(__x86_64__)
constexpr const char* kLine = "flags";
constexpr const char* kProducts = "pclmulqdq";
#else
constexpr const char* kLine = "Features";
constexpr const char* kProducts = "pmull";
#endif

// What the kernel says of the first processor; nothing where it tells of another kind of them, under an
// emulator.
static std::set<std::string> Flags() {
  std::ifstream file("/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line)) {
    if (line.rfind(kLine, 0) != 0) continue;
    std::istringstream words(line.substr(line.find(':') + 1));
    std::set<std::string> found;
    for (std::string word; words >> word;) found.insert(word);
    return found;
  }
  return {};
}

TEST_CASE("the processor's instructions are those of which the kernel knows") {
  const std::set<std::string> flags = Flags();
  if (flags.empty()) {
    MESSAGE("/proc/cpuinfo has no line of ", kLine, ": not compared");
    return;
  }
  CHECK(kolovod::HasAvx2AndF16c() == (flags.count("avx2") == 1 && flags.count("f16c") == 1));
  bool has_avx512 = true;
  for (const char* name : {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vbmi2"}) {
    has_avx512 = has_avx512 && flags.count(name) == 1;
  }
  CHECK(kolovod::HasAvx512() == has_avx512);
  CHECK(kolovod::HasAesInstructions() == (flags.count("aes") == 1 && flags.count(kProducts) == 1));
}
