// The smallest test harness that names what failed: TEST registers, CHECK aborts the test's process.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace kolovod::testing {

struct Test {
  const char* name;
  void (*body)();
};

inline std::vector<Test>& Tests() {
  static std::vector<Test> tests;
  return tests;
}

struct Registration {
  Registration(const char* name, void (*body)()) { Tests().push_back({name, body}); }
};

[[noreturn]] inline void Fail(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "%s:%d: CHECK failed: %s\n", file, line, what.c_str());
  std::_Exit(1);
}

}  // namespace kolovod::testing

#define TEST(name)                                                                       \
  static void Test_##name();                                                             \
  static const ::kolovod::testing::Registration registration_##name(#name, Test_##name); \
  static void Test_##name()

#define CHECK(condition)                                                        \
  do {                                                                          \
    if (!(condition)) ::kolovod::testing::Fail(__FILE__, __LINE__, #condition); \
  } while (0)

#define CHECK_OK(expression)                                                                   \
  do {                                                                                         \
    if (const ::kolovod::Status check_status = (expression); !check_status.ok())               \
      ::kolovod::testing::Fail(__FILE__, __LINE__, #expression ": " + check_status.message()); \
  } while (0)

// Arguments: parts of the names of tests that are left out.
#define TEST_MAIN()                                                        \
  int main(int count, char** left_out) {                                   \
    for (const auto& test : ::kolovod::testing::Tests()) {                 \
      const std::string test_name = test.name;                             \
      bool runs = true;                                                    \
      for (int i = 1; i < count; ++i) {                                    \
        runs = runs && test_name.find(left_out[i]) == std::string::npos;   \
      }                                                                    \
      if (!runs) continue;                                                 \
      std::printf("%s\n", test.name);                                      \
      std::fflush(stdout);                                                 \
      test.body();                                                         \
    }                                                                      \
    std::printf("%zu tests passed\n", ::kolovod::testing::Tests().size()); \
    return ::kolovod::testing::Tests().empty() ? 1 : 0;                    \
  }
