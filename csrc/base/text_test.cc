#include "base/text.h"

#include "testing/check.h"

namespace kolovod {
namespace {

TEST_CASE("text that is utf8 stays as it is") {
  for (const char* text : {"", "plain", "kolo \xE2\x86\xBB", "\xC2\x80\xDF\xBF", "\xE0\xA0\x80\xED\x9F\xBF",
                           "\xEE\x80\x80\xEF\xBF\xBF", "\xF0\x90\x80\x80\xF4\x8F\xBF\xBF"}) {
    CHECK(ValidUtf8(text) == text);
  }
}

TEST_CASE("what is no utf8 is replaced") {
  // A lone continuation, overlong forms, a surrogate, beyond the last character, cut at the end.
  for (const char* text : {"\x80", "\xC0\xAF", "\xE0\x9F\xBF", "\xF0\x8F\xBF\xBF", "\xED\xA0\x80",
                           "\xF4\x90\x80\x80", "\xFF", "\xE2\x86"}) {
    std::string expected;
    for (size_t i = 0; i < std::string_view(text).size(); ++i) expected += "\xEF\xBF\xBD";
    CHECK(ValidUtf8(std::string("a") + text + "b") == "a" + expected + "b");
  }
}

TEST_CASE("a limit cuts between characters") {
  const std::string text = "a\xC3\xA9z";
  CHECK(ValidUtf8(text, 0).empty());
  CHECK(ValidUtf8(text, 1) == "a");
  CHECK(ValidUtf8(text, 2) == "a");
  CHECK(ValidUtf8(text, 3) == "a\xC3\xA9");
  CHECK(ValidUtf8(text, 4) == text);
  CHECK(ValidUtf8("\xFF", 2).empty());
}

}  // namespace
}  // namespace kolovod
