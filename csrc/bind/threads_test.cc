// Tasks run elsewhere, in order by one thread, at once by many.
#include "bind/threads.h"

#include <chrono>
#include <condition_variable>
#include <memory>
#include <set>
#include <vector>

#include "testing/check.h"

namespace kolovod {
namespace {

using std::chrono::seconds;

// Counts to a number that somebody waits for.
class Count {
 public:
  void Add() {
    std::lock_guard lock(mutex_);
    ++count_;
    changed_.notify_all();
  }
  bool Await(int count) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, seconds(30), [&] { return count_ >= count; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int count_ = 0;
};

TEST_CASE("one thread runs all in order and is not the caller") {
  auto* threads = new Threads(1, "kv-test");
  std::vector<int> order;  // written by that thread only
  std::set<std::thread::id> ids;
  Count done;
  for (int i = 0; i < 1000; ++i) {
    threads->Run([&, i] {
      order.push_back(i);
      ids.insert(std::this_thread::get_id());
      done.Add();
    });
    if (i % 100 == 0) CHECK(done.Await(i + 1));  // so that it sleeps now and then
  }
  CHECK(done.Await(1000));
  for (int i = 0; i < 1000; ++i) CHECK(order[static_cast<size_t>(i)] == i);
  CHECK(ids.size() == 1);
  CHECK(!ids.contains(std::this_thread::get_id()));
}

TEST_CASE("without a limit no task waits for another") {
  auto* threads = new Threads(SIZE_MAX, "kv-test");
  for (int round = 0; round < 20; ++round) {
    const auto here = std::make_shared<Count>(), done = std::make_shared<Count>();
    for (int i = 0; i < 5; ++i) {
      threads->Run([here, done] {
        here->Add();
        CHECK(here->Await(5));
        done->Add();
      });
    }
    CHECK(done->Await(5));
  }
}

}  // namespace
}  // namespace kolovod
