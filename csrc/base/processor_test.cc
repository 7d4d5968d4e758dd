#include "base/processor.h"

#include <doctest/doctest.h>

#include <fstream>
#include <set>
#include <sstream>
#include <string>

// What the kernel says of the first processor.
static std::set<std::string> Flags() {
  std::ifstream file("/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line)) {
    if (line.rfind("flags", 0) != 0 && line.rfind("Features", 0) != 0) continue;
    std::istringstream words(line.substr(line.find(':') + 1));
    std::set<std::string> found;
    for (std::string word; words >> word;) found.insert(word);
    return found;
  }
  return {};
}

TEST_CASE("the processor's instructions are those of which the kernel knows") {
  const std::set<std::string> flags = Flags();
  REQUIRE(!flags.empty());
  CHECK(kolovod::HasAvx2AndF16c() == (flags.count("avx2") == 1 && flags.count("f16c") == 1));
  const char* products = flags.count("pmull") == 1 ? "pmull" : "pclmulqdq";
  CHECK(kolovod::HasAesInstructions() == (flags.count("aes") == 1 && flags.count(products) == 1));
}
