// The C interface: include/kolovod_test.c on loopback ranks, and what happens to handles when worlds end.
#include "bind/capi.h"

#include <atomic>
#include <vector>

#include "testing/world.h"

extern "C" int kolovod_c_test(kolovod_engine* engine);

namespace kolovod {
namespace {

using testing::Contains;
using testing::Rank;
using testing::RunRanks;

// The test's ranks own their engines; a handle does not have to.
std::shared_ptr<Engine> Borrow(Rank& rank) {
  return {&rank.engine(), [](Engine*) {}};
}

TEST_CASE("a c program on every world") {
  for (int size : {1, 2, 3}) {
    RunRanks(size, [](Rank& rank) {
      kolovod_engine* handle = Attach(Borrow(rank));
      CHECK(kolovod_rank(handle) == rank.rank());
      CHECK(kolovod_c_test(handle) == 0);
      Detach(handle);
    });
  }
}

TEST_CASE("places on hosts of unequal size") {
  const std::vector<int> hosts = {0, 1, 0, 0, 1};
  const int wanted[5][4] = {{0, 3, 0, 2}, {0, 2, 1, 2}, {1, 3, 0, 2}, {2, 3, 0, 1}, {1, 2, 1, 2}};
  testing::RunHosts(hosts, [&](Rank& rank) {
    kolovod_engine* handle = Attach(Borrow(rank));
    const int* places = wanted[rank.rank()];
    CHECK(kolovod_local_rank(handle) == places[0]);
    CHECK(kolovod_local_size(handle) == places[1]);
    CHECK(kolovod_cross_rank(handle) == places[2]);
    CHECK(kolovod_cross_size(handle) == places[3]);
    Detach(handle);
  });
}

kolovod_request MakeRequest(const kolovod_tensor& tensor) {
  kolovod_request request{};
  request.struct_size = sizeof(request);
  request.tensor_size = sizeof(tensor);
  request.op = KOLOVOD_SUM;
  request.prescale = request.postscale = 1.0;
  request.name = "t";
  request.tensors = &tensor;
  request.tensor_count = 1;
  return request;
}

TEST_CASE("a handle outlives its world") {
  RunRanks(1, [](Rank& rank) {
    kolovod_engine* handle = Attach(Borrow(rank));
    float value = 1.0f;
    kolovod_tensor tensor{&value, &value, nullptr, 0, KOLOVOD_FLOAT32, KOLOVOD_NO_CODEC};
    const kolovod_request request = MakeRequest(tensor);
    std::atomic<int> calls{0};
    const auto count = [](void* calls_pointer, int, const char*) {
      static_cast<std::atomic<int>*>(calls_pointer)->fetch_add(1);
    };
    CHECK(kolovod_submit(handle, &request, count, &calls, nullptr) == KOLOVOD_OK);
    while (calls.load() == 0) std::this_thread::yield();
    rank.engine().Shutdown();
    CHECK(kolovod_submit(handle, &request, count, &calls, nullptr) == KOLOVOD_SHUT_DOWN);
    Detach(handle);
    uint64_t operation = 0;
    int done = 1;
    const void* data = nullptr;
    size_t bytes = 0;
    CHECK(kolovod_submit(handle, &request, count, &calls, nullptr) == KOLOVOD_SHUT_DOWN);
    CHECK(kolovod_wait(handle, operation, 0) == KOLOVOD_SHUT_DOWN);
    CHECK(kolovod_poll(handle, operation, &done) == KOLOVOD_SHUT_DOWN);
    CHECK(done == 0);
    CHECK(kolovod_release(handle, operation) == KOLOVOD_SHUT_DOWN);
    CHECK(kolovod_output(handle, operation, 0, &data, &bytes) == KOLOVOD_SHUT_DOWN);
    CHECK(kolovod_rank(handle) == -1);
    CHECK(kolovod_size(handle) == -1);
    CHECK(kolovod_local_rank(handle) == -1);
    CHECK(kolovod_cross_size(handle) == -1);
    CHECK(calls.load() == 1);
  });
}

TEST_CASE("what is current is what was published") {
  RunRanks(1, [](Rank& rank) {
    CHECK(kolovod_current(0) == nullptr);
    CHECK(kolovod_error_message() == Contains("kolovod.init()"));
    kolovod_engine* world = Attach(Borrow(rank));
    kolovod_engine* set = Attach(Borrow(rank));
    Publish(0, world);
    Publish(7, set);
    CHECK(kolovod_current(0) == world);
    CHECK(kolovod_current(7) == set);
    CHECK(kolovod_current(1) == nullptr);
    CHECK(kolovod_error_message() == Contains("process set 1 "));
    Publish(7, nullptr);
    Publish(0, set);
    CHECK(kolovod_current(0) == set);
    CHECK(kolovod_current(7) == nullptr);
    Publish(0, nullptr);
    Detach(world);
    Detach(set);
  });
}

TEST_CASE("outputs in memory of the caller") {
  RunRanks(3, [](Rank& rank) {
    kolovod_engine* handle = Attach(Borrow(rank));
    const float value = 1.0f + static_cast<float>(rank.rank());
    const int64_t one = 1;
    float gathered[4] = {};
    const kolovod_tensor tensor{&value, gathered, &one, 1, KOLOVOD_FLOAT32, KOLOVOD_NO_CODEC};
    kolovod_request request = MakeRequest(tensor);
    request.verb = KOLOVOD_ALLGATHER;
    size_t bytes = 3 * sizeof(float);
    request.output_bytes = &bytes;
    uint64_t operation = 0;
    CHECK(kolovod_submit(handle, &request, nullptr, nullptr, &operation) == KOLOVOD_OK);
    CHECK(kolovod_wait(handle, operation, -1) == KOLOVOD_OK);
    CHECK(kolovod_release(handle, operation) == KOLOVOD_OK);
    CHECK(gathered[0] == 1.0f);
    CHECK(gathered[1] == 2.0f);
    CHECK(gathered[2] == 3.0f);
    CHECK(gathered[3] == 0.0f);
    // What does not fit is an error here and a result elsewhere, and nothing is written.
    if (rank.rank() == 1) bytes = sizeof(gathered);
    gathered[0] = -1.0f;
    CHECK(kolovod_submit(handle, &request, nullptr, nullptr, &operation) == KOLOVOD_OK);
    const int code = kolovod_wait(handle, operation, -1);
    CHECK(code == (rank.rank() == 1 ? KOLOVOD_INVALID_ARGUMENT : KOLOVOD_OK));
    CHECK(gathered[0] == (rank.rank() == 1 ? -1.0f : 1.0f));
    CHECK(kolovod_release(handle, operation) == KOLOVOD_OK);
    // A caller that was compiled before there was this field.
    request.struct_size = offsetof(kolovod_request, output_bytes);
    CHECK(kolovod_submit(handle, &request, nullptr, nullptr, &operation) == KOLOVOD_OK);
    CHECK(kolovod_wait(handle, operation, -1) == KOLOVOD_OK);
    const void* data = nullptr;
    CHECK(kolovod_output(handle, operation, 0, &data, &bytes) == KOLOVOD_OK);
    CHECK(bytes == 3 * sizeof(float));
    CHECK(data != gathered);
    CHECK(static_cast<const float*>(data)[2] == 3.0f);
    CHECK(kolovod_release(handle, operation) == KOLOVOD_OK);
    request.struct_size = sizeof(request);
    kolovod_tensor nowhere = tensor;
    nowhere.output = nullptr;
    request.tensors = &nowhere;
    CHECK(kolovod_submit(handle, &request, nullptr, nullptr, &operation) == KOLOVOD_INVALID_ARGUMENT);
    Detach(handle);
  });
}

TEST_CASE("operations that ranks ask for at different lines are refused") {
  RunRanks(2, [](Rank& rank) {
    kolovod_engine* handle = Attach(Borrow(rank));
    float value = 1.0f;
    kolovod_tensor tensor{&value, &value, nullptr, 0, KOLOVOD_FLOAT32, KOLOVOD_NO_CODEC};
    kolovod_request request = MakeRequest(tensor);
    uint64_t operation = 0;
    const auto run = [&] {
      CHECK(kolovod_submit(handle, &request, nullptr, nullptr, &operation) == KOLOVOD_OK);
      const int code = kolovod_wait(handle, operation, -1);
      if (code != KOLOVOD_OK) CHECK(kolovod_error_message() == Contains("at train.py:3"));
      CHECK(kolovod_release(handle, operation) == KOLOVOD_OK);
      return code;
    };
    request.called_from = rank.rank() == 0 ? "train.py:3" : "train.py:4";
    CHECK(run() == KOLOVOD_MISMATCH);
    request.called_from = "train.py:3";
    CHECK(run() == KOLOVOD_OK);
    if (rank.rank() == 1) request.called_from = "";  // from any
    CHECK(run() == KOLOVOD_OK);
    // A caller that was compiled before there was this field.
    request.called_from = rank.rank() == 0 ? "train.py:3" : "train.py:4";
    request.struct_size = offsetof(kolovod_request, called_from);
    CHECK(run() == KOLOVOD_OK);
    Detach(handle);
  });
}

TEST_CASE("a wait has its limit") {
  RunRanks(2, [](Rank& rank) {
    kolovod_engine* handle = Attach(Borrow(rank));
    float value = 1.0f;
    kolovod_tensor tensor{&value, &value, nullptr, 0, KOLOVOD_FLOAT32, KOLOVOD_NO_CODEC};
    kolovod_request request = MakeRequest(tensor);
    uint64_t operation = 0;
    if (rank.rank() == 0) {
      CHECK(kolovod_submit(handle, &request, nullptr, nullptr, &operation) == KOLOVOD_OK);
      CHECK(kolovod_wait(handle, operation, 0.05) == KOLOVOD_TIMEOUT);
      CHECK(kolovod_error_message() == Contains("'t'"));
      CHECK(kolovod_release(handle, operation) == KOLOVOD_TIMEOUT);
      CHECK(kolovod_submit(handle, &request, nullptr, nullptr, &operation) == KOLOVOD_DUPLICATE_NAME);
    }
    std::vector<float> meet(1);
    CHECK_OK(rank.Allreduce("meet", meet));
    if (rank.rank() == 1) {
      CHECK(kolovod_submit(handle, &request, nullptr, nullptr, &operation) == KOLOVOD_OK);
    }
    CHECK(kolovod_wait(handle, operation, -1) == KOLOVOD_OK);
    CHECK(value == 2.0f);
    CHECK(kolovod_wait(handle, operation, 0.0 / 0.0) == KOLOVOD_INVALID_ARGUMENT);
    Detach(handle);
  });
}

}  // namespace
}  // namespace kolovod
