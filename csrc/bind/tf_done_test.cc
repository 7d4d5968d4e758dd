#include "bind/tf_done.h"

#include <doctest/doctest.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <utility>

namespace kolovod::tensorflow {
namespace {

int destroyed = 0;

// As libstdc++ has it, whatever the library here.
struct Given {
  alignas(void*) std::byte functor[2 * sizeof(void*)] = {};
  bool (*manager)(std::byte*, const std::byte*, int) = [](std::byte*, const std::byte*, int operation) {
    destroyed += operation == 3;
    return false;
  };
  void (*invoker)(const std::byte*) = [](const std::byte*) {};
};

TEST_CASE("a callback is moved byte by byte, and destroyed once") {
  static_assert(sizeof(Done) == sizeof(Given));
  static_assert(alignof(Done) == alignof(Given));
  destroyed = 0;
  {
    Given given;
    Done taken = Done::From(&given);
    CHECK_FALSE(static_cast<bool>(given.manager));
    CHECK_FALSE(static_cast<bool>(given.invoker));
    const Done last = std::move(taken);
    CHECK(destroyed == 0);
  }
  CHECK(destroyed == 1);
}

#ifdef __GLIBCXX__  // std::function is the one that TensorFlow has

using Function = std::function<void()>;

void Call(Done* done) { (*reinterpret_cast<Function*>(done))(); }

TEST_CASE("a callback is called after its variable is gone, and destroyed once") {
  static_assert(sizeof(Done) == sizeof(Function));
  static_assert(alignof(Done) == alignof(Function));
  const auto alive = std::make_shared<int>(0);
  for (const bool is_large : {false, true}) {
    CAPTURE(is_large);
    int called = 0;
    {
      Function given;
      if (is_large) {
        given = [alive, &called, more = std::make_pair(1L, 2L)] { called += static_cast<int>(more.first); };
      } else {
        given = [&called] { ++called; };
      }
      const long before = alive.use_count();
      Done taken = Done::From(&given);
      CHECK(given == nullptr);
      CHECK(alive.use_count() == before);
      auto call = std::make_unique<Done>(std::move(taken));
      Done now = std::move(*call);
      call.reset();
      Call(&now);
      CHECK(called == 1);
    }
    CHECK(alive.use_count() == 1);
  }
}

TEST_CASE("an empty one is destroyed, too") {
  Function none;
  const Done taken = Done::From(&none);
  CHECK(none == nullptr);
}

#endif

}  // namespace
}  // namespace kolovod::tensorflow
