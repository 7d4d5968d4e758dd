// The main of all C++ tests: doctest's, which stops at the first check that fails.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
// A crash is left to the system and the sanitizers: children abort on purpose, and a handler would run in
// them.
#define DOCTEST_CONFIG_NO_POSIX_SIGNALS
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <mutex>
#include <sstream>

#include "testing/check.h"

namespace {

const pid_t main_process = getpid();

// Prints and ends the process; of several threads that come here, the first.
[[noreturn]] void Fail(const char* file, int line, const std::string& what) {
  static std::mutex first;
  first.lock();
  std::ostringstream text;
  text << file << ":" << line << ": " << what << "\n";
  const int contexts = doctest::IReporter::get_num_active_contexts();
  for (int i = 0; i < contexts; ++i) {
    text << "  with: ";
    doctest::IReporter::get_active_contexts()[i]->stringify(&text);
    text << "\n";
  }
  std::fputs(text.str().c_str(), stderr);
  // A parent that does not look at how its child ended would go on.
  if (getpid() != main_process) kill(main_process, SIGTERM);
  std::_Exit(1);
}

// Sees every check in the thread that makes it.
struct Listener : doctest::IReporter {
  explicit Listener(const doctest::ContextOptions&) {}
  void log_assert(const doctest::AssertData& check) override {
    if (!check.m_failed || (check.m_at & doctest::assertType::is_warn)) return;
    Fail(check.m_file, check.m_line,
         std::string("CHECK(") + check.m_expr + ") failed: " + check.m_decomp.c_str());
  }
  void log_message(const doctest::MessageData& message) override {
    if (message.m_severity & doctest::assertType::is_warn) return;
    Fail(message.m_file, message.m_line, message.m_string.c_str());
  }
  void test_case_start(const doctest::TestCaseData& test) override {
    std::printf("%s\n", test.m_name);
    std::fflush(stdout);  // who hangs or crashes has been named
  }
  void test_run_end(const doctest::TestRunStats& run) override {
    if (run.numTestCasesPassingFilters == 0) Fail(__FILE__, __LINE__, "no test is left to run");
  }
  void test_case_end(const doctest::CurrentTestCaseStats&) override {}
  void test_case_exception(const doctest::TestCaseException&) override {}
  void test_case_reenter(const doctest::TestCaseData&) override {}
  void test_case_skipped(const doctest::TestCaseData&) override {}
  void test_run_start() override {}
  void report_query(const doctest::QueryData&) override {}
  void subcase_start(const doctest::SubcaseSignature&) override {}
  void subcase_end() override {}
};

}  // namespace

DOCTEST_REGISTER_LISTENER("stops_at_the_first_failure", 1, Listener);
