// doctest, as all C++ tests include it. A check that fails, in whatever thread or child process, ends the
// test's process (testing/main.cc): other ranks would wait in vain for the one that failed.
#pragma once

// One call per check instead of an object and a try block: the tests compile faster.
#define DOCTEST_CONFIG_SUPER_FAST_ASSERTS
#define DOCTEST_CONFIG_USE_STD_HEADERS
#include <doctest/doctest.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "base/status.h"
#include "base/types.h"

// Prints the message of a Status that is an error.
#define CHECK_OK(...) CHECK(__VA_ARGS__ == ::kolovod::Code::kOk)

namespace kolovod {

// How failing checks print our values. doctest finds these by their name, in the namespace of the type.
inline doctest::String toString(DType dtype) { return NameOf(dtype); }
inline doctest::String toString(Op op) { return NameOf(op); }
inline doctest::String toString(Verb verb) { return NameOf(verb); }
inline doctest::String toString(Code code) {
  static constexpr const char* kNames[] = {"kOk",          "kInvalidArgument", "kDuplicateName", "kMismatch",
                                           "kRankLost",    "kRankLeft",        "kShutDown",      "kTimeout",
                                           "kInterrupted", "kInternal",        "kLate"};
  return kNames[static_cast<int>(code)];
}
inline doctest::String toString(const Status& status) {
  return toString(status.code()) + " \"" + status.message().c_str() + "\"";
}

// CHECK(status == Code::kTimeout) prints the message of another outcome.
inline bool operator==(const Status& status, Code code) { return status.code() == code; }

namespace testing {

// CHECK(text == Contains("part")) prints the text, if it does not.
struct Contains {
  explicit Contains(std::string_view given) : part(given) {}
  std::string part;
};
inline bool operator==(std::string_view text, const Contains& wanted) {
  return text.find(wanted.part) != std::string_view::npos;
}
inline doctest::String toString(const Contains& wanted) {
  return doctest::String("\"... ") + wanted.part.c_str() + " ...\"";
}

struct StartsWith {
  explicit StartsWith(std::string_view given) : part(given) {}
  std::string part;
};
inline bool operator==(std::string_view text, const StartsWith& wanted) {
  return text.starts_with(wanted.part);
}
inline doctest::String toString(const StartsWith& wanted) {
  return doctest::String("\"") + wanted.part.c_str() + " ...\"";
}

template <class T>
concept PrintsItself = requires(std::ostream& stream, const T& value) { stream << value; };

template <class T>
concept Elements = requires(const T& elements) { elements.begin() == elements.end(); } && !PrintsItself<T>;

template <class T>
doctest::String Print(const T& value) {
  if constexpr (std::is_floating_point_v<T>) {
    char digits[64] = {};  // as many as tell it from its neighbours
    std::to_chars(digits, digits + sizeof(digits) - 1, value);
    return digits;
  } else {
    using doctest::toString;
    return toString(value);
  }
}

}  // namespace testing
}  // namespace kolovod

namespace doctest {

// Vectors and maps: their first elements, and how many there are.
template <kolovod::testing::Elements T>
struct StringMaker<T> {
  static String convert(const T& elements) {
    String text = "{";
    size_t count = 0;
    for (const auto& element : elements) {
      if (count++ < 16) text += (count > 1 ? ", " : "") + kolovod::testing::Print(element);
    }
    return count > 16 ? text + ", ... " + toString(count) + " elements}" : text + "}";
  }
};

template <class A, class B>
struct StringMaker<std::pair<A, B>> {
  static String convert(const std::pair<A, B>& pair) {
    return "(" + kolovod::testing::Print(pair.first) + ", " + kolovod::testing::Print(pair.second) + ")";
  }
};

template <class T>
struct StringMaker<std::optional<T>> {
  static String convert(const std::optional<T>& value) {
    return value.has_value() ? kolovod::testing::Print(*value) : String("nothing");
  }
};

}  // namespace doctest

namespace kolovod::testing {

// For vectors too long to print: CHECK(FirstDifference(out, wanted) == "") says where they differ first.
template <class A, class B>
std::string FirstDifference(const A& a, const B& b) {
  if (a.size() != b.size()) return std::to_string(a.size()) + " elements, not " + std::to_string(b.size());
  const auto [left, right] = std::mismatch(a.begin(), a.end(), b.begin());
  if (left == a.end()) return "";
  return "[" + std::to_string(left - a.begin()) + "] is " + Print(*left).c_str() + ", not " +
         Print(*right).c_str();
}

}  // namespace kolovod::testing
