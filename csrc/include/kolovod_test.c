/* kolovod.h as a C program uses it. One call of kolovod_c_test for each rank, each in a thread of its own. */
#define _POSIX_C_SOURCE 200809L

#include "include/kolovod.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CHECK(condition)                                                                           \
  do {                                                                                             \
    if (!(condition)) {                                                                            \
      fprintf(stderr, "%s:%d: CHECK failed: %s; last error: %s\n", __FILE__, __LINE__, #condition, \
              kolovod_error_message());                                                            \
      _Exit(1);                                                                                    \
    }                                                                                              \
  } while (0)

int kolovod_c_test(kolovod_engine* engine);

/* What callbacks write and the test waits for. */
struct record {
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  int calls;
  int last_code;
  char message[400];
};

static void on_done(void* user_data, int code, const char* message) {
  struct record* record = user_data;
  pthread_mutex_lock(&record->mutex);
  ++record->calls;
  record->last_code = code;
  snprintf(record->message, sizeof(record->message), "%s", message);
  pthread_cond_broadcast(&record->changed);
  pthread_mutex_unlock(&record->mutex);
}

static void await(struct record* record, int calls) {
  struct timespec deadline;
  clock_gettime(CLOCK_REALTIME, &deadline);
  deadline.tv_sec += 30;
  pthread_mutex_lock(&record->mutex);
  while (record->calls < calls) {
    CHECK(pthread_cond_timedwait(&record->changed, &record->mutex, &deadline) == 0);
  }
  pthread_mutex_unlock(&record->mutex);
}

static kolovod_request make_request(kolovod_verb verb, const char* name, const kolovod_tensor* tensors,
                                    size_t count) {
  kolovod_request request;
  memset(&request, 0, sizeof(request));
  request.struct_size = sizeof(request);
  request.tensor_size = sizeof(kolovod_tensor);
  request.verb = verb;
  request.op = KOLOVOD_SUM;
  request.prescale = request.postscale = 1.0;
  request.name = name;
  request.tensors = tensors;
  request.tensor_count = count;
  return request;
}

static kolovod_tensor make_tensor(const float* input, float* output, const int64_t* length) {
  kolovod_tensor tensor;
  memset(&tensor, 0, sizeof(tensor)); /* also the codec: none */
  tensor.input = input;
  tensor.output = output;
  tensor.shape = length;
  tensor.ndim = 1;
  tensor.dtype = KOLOVOD_FLOAT32;
  return tensor;
}

enum { OPERATIONS = 16 };

/* Several on their way at once, nobody waiting for any. */
static void check_callbacks(kolovod_engine* engine, struct record* record) {
  const int64_t length = 1000;
  float* data = malloc(OPERATIONS * 1000 * sizeof(float));
  char name[20];
  int i, k;
  CHECK(data != NULL);
  for (i = 0; i < OPERATIONS; ++i) {
    kolovod_tensor tensor = make_tensor(data + 1000 * i, data + 1000 * i, &length);
    kolovod_request request = make_request(KOLOVOD_ALLREDUCE, name, &tensor, 1);
    snprintf(name, sizeof(name), "t%d", i);
    for (k = 0; k < 1000; ++k) data[1000 * i + k] = (float)(i + kolovod_rank(engine));
    CHECK(kolovod_submit(engine, &request, on_done, record, NULL) == KOLOVOD_OK);
  }
  await(record, OPERATIONS);
  for (i = 0; i < OPERATIONS; ++i) {
    const int size = kolovod_size(engine);
    for (k = 0; k < 1000; ++k) CHECK(data[1000 * i + k] == (float)(size * i + size * (size - 1) / 2));
  }
  CHECK(record->calls == OPERATIONS && record->last_code == KOLOVOD_OK);
  free(data);
}

static void check_handles(kolovod_engine* engine) {
  const int64_t length = 1 + kolovod_rank(engine);
  const float input[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  kolovod_tensor tensor = make_tensor(input, NULL, &length);
  kolovod_request request = make_request(KOLOVOD_ALLGATHER, "gathered", &tensor, 1);
  kolovod_request barrier = make_request(KOLOVOD_BARRIER, NULL, NULL, 0);
  const void* output = NULL;
  kolovod_memory* memory = NULL;
  void* data = NULL;
  const int64_t* rows = NULL;
  uint64_t operation = 0;
  size_t bytes = 0, count = 0, r;
  int done = 0;
  CHECK(kolovod_submit(engine, &request, NULL, NULL, &operation) == KOLOVOD_OK);
  CHECK(kolovod_wait(engine, operation, -1.0) == KOLOVOD_OK);
  CHECK(kolovod_poll(engine, operation, &done) == KOLOVOD_OK && done == 1);
  CHECK(kolovod_output(engine, operation, 0, &output, &bytes) == KOLOVOD_OK);
  CHECK(kolovod_rows(engine, operation, 0, &rows, &count) == KOLOVOD_OK);
  CHECK(count == (size_t)kolovod_size(engine));
  for (r = 0; r < count; ++r) CHECK(rows[r] == (int64_t)(r + 1));
  CHECK(bytes == count * (count + 1) / 2 * sizeof(float) && ((const float*)output)[0] == 1.0f);
  CHECK(kolovod_output(engine, operation, 1, &output, &bytes) == KOLOVOD_INVALID_ARGUMENT);
  CHECK(kolovod_take_output(engine, operation, 1, &memory, &data, &bytes) == KOLOVOD_INVALID_ARGUMENT);
  CHECK(kolovod_take_output(engine, operation, 0, &memory, &data, &bytes) == KOLOVOD_OK);
  CHECK(data == output && bytes == count * (count + 1) / 2 * sizeof(float) && (uintptr_t)data % 64 == 0);
  CHECK(kolovod_take_output(engine, operation, 0, &memory, &data, &bytes) == KOLOVOD_INVALID_ARGUMENT);
  CHECK(strstr(kolovod_error_message(), "taken before") != NULL);
  CHECK(kolovod_output(engine, operation, 0, &output, &bytes) == KOLOVOD_INVALID_ARGUMENT);
  CHECK(kolovod_release(engine, operation) == KOLOVOD_OK);
  for (r = 0; r < bytes / sizeof(float); ++r) ((float*)data)[r] += 1.0f; /* still there, and ours */
  CHECK(((float*)data)[0] == 2.0f);
  kolovod_free_memory(memory);
  CHECK(kolovod_wait(engine, operation, -1.0) == KOLOVOD_INVALID_ARGUMENT);
  CHECK(kolovod_submit(engine, &barrier, NULL, NULL, &operation) == KOLOVOD_OK);
  CHECK(kolovod_wait(engine, operation, 30.0) == KOLOVOD_OK);
  CHECK(kolovod_release(engine, operation) == KOLOVOD_OK);
}

/* Of ranks that share one host. */
static void check_places(kolovod_engine* engine) {
  CHECK(kolovod_local_rank(engine) == kolovod_rank(engine));
  CHECK(kolovod_local_size(engine) == kolovod_size(engine));
  CHECK(kolovod_cross_rank(engine) == 0 && kolovod_cross_size(engine) == 1);
  CHECK(kolovod_local_rank(NULL) == -1 && kolovod_cross_size(NULL) == -1);
}

static void check_refusals(kolovod_engine* engine, struct record* record) {
  const int64_t length = 4;
  const int64_t negative = -4;
  float data[4] = {0};
  const kolovod_tensor good = make_tensor(data, data, &length);
  kolovod_tensor tensor = good;
  kolovod_request request = make_request(KOLOVOD_ALLREDUCE, "refused", &tensor, 1);
  uint64_t operation = 0;
  const int calls = record->calls;
#define REFUSED(change, text)                                                                       \
  change;                                                                                           \
  CHECK(kolovod_submit(engine, &request, on_done, record, &operation) == KOLOVOD_INVALID_ARGUMENT); \
  CHECK(strstr(kolovod_error_message(), text) != NULL);                                             \
  tensor = good;                                                                                    \
  request = make_request(KOLOVOD_ALLREDUCE, "refused", &tensor, 1)
  REFUSED(request.struct_size = 8, "struct_size is 8");
  REFUSED(request.verb = 77, "verb 77");
  REFUSED(request.op = -1, "op -1");
  REFUSED(request.tensor_count = 0, "0 tensors");
  REFUSED(request.verb = KOLOVOD_BARRIER, "needs none");
  REFUSED(request.tensors = NULL, "tensors is NULL");
  REFUSED(tensor.dtype = 11, "dtype 11");
  REFUSED(tensor.ndim = -1, "ndim is -1");
  REFUSED(tensor.shape = &negative, "dimension -4");
  REFUSED(tensor.input = NULL, "input is NULL");
  REFUSED(tensor.output = NULL, "output is NULL");
#undef REFUSED
  CHECK(kolovod_submit(engine, &request, NULL, NULL, NULL) == KOLOVOD_INVALID_ARGUMENT);
  CHECK(kolovod_submit(NULL, &request, on_done, record, NULL) == KOLOVOD_INVALID_ARGUMENT);
  CHECK(record->calls == calls);
}

/* Fields that a later version adds are skipped by this one. */
static void check_larger_structs(kolovod_engine* engine) {
  struct {
    kolovod_tensor tensor;
    int64_t added[3];
  } tensors[2];
  struct {
    kolovod_request request;
    int64_t added[5];
  } larger;
  const int64_t length = 2;
  float a[2] = {1, 2}, b[2] = {3, 4};
  uint64_t operation = 0;
  memset(tensors, -1, sizeof(tensors));
  memset(&larger, -1, sizeof(larger));
  tensors[0].tensor = make_tensor(a, a, &length);
  tensors[1].tensor = make_tensor(b, b, &length);
  larger.request = make_request(KOLOVOD_ALLREDUCE, "larger", &tensors[0].tensor, 2);
  larger.request.struct_size = sizeof(larger);
  larger.request.tensor_size = sizeof(tensors[0]);
  CHECK(kolovod_submit(engine, &larger.request, NULL, NULL, &operation) == KOLOVOD_OK);
  CHECK(kolovod_wait(engine, operation, -1.0) == KOLOVOD_OK);
  CHECK(a[1] == 2.0f * (float)kolovod_size(engine) && b[1] == 4.0f * (float)kolovod_size(engine));
  CHECK(kolovod_release(engine, operation) == KOLOVOD_OK);
}

static void check_mismatch(kolovod_engine* engine, struct record* record) {
  const int64_t length = 1 + kolovod_rank(engine);
  float data[8] = {0};
  kolovod_tensor tensor = make_tensor(data, data, &length);
  kolovod_request request = make_request(KOLOVOD_ALLREDUCE, "mismatch", &tensor, 1);
  const int calls = record->calls;
  if (kolovod_size(engine) == 1) return;
  CHECK(kolovod_submit(engine, &request, on_done, record, NULL) == KOLOVOD_OK);
  await(record, calls + 1);
  CHECK(record->last_code == KOLOVOD_MISMATCH);
  CHECK(strstr(record->message, "rank 0 has (1,), rank 1 has (2,)") != NULL);
}

int kolovod_c_test(kolovod_engine* engine) {
  struct record record;
  memset(&record, 0, sizeof(record));
  pthread_mutex_init(&record.mutex, NULL);
  pthread_cond_init(&record.changed, NULL);
  CHECK(kolovod_abi_version() >= KOLOVOD_ABI_VERSION);
  check_places(engine);
  check_callbacks(engine, &record);
  check_handles(engine);
  check_refusals(engine, &record);
  check_larger_structs(engine);
  check_mismatch(engine, &record);
  check_handles(engine); /* also so that no rank leaves before the others are through */
  pthread_cond_destroy(&record.changed);
  pthread_mutex_destroy(&record.mutex);
  return 0;
}
