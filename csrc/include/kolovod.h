/* The engine for callers that are not Python: ops inside a TensorFlow graph, XLA custom calls, plain C.
 *
 * The functions are exported by the extension module `kolovod._native`, beside which this file is installed
 * as include/kolovod.h: open the module that Python has loaded (its `__file__`) and look them up. The world
 * is formed by Python (`kolovod.init()`), and kolovod_current(0) finds it. A request says what every rank
 * submits alike; ranks' requests belong together by name, or, unnamed, by order of submission.
 *
 * Threads: every function may be called by any thread, without Python's global lock.
 *
 * Errors: functions that can fail return a kolovod_code. The text is kolovod_error_message(), until the same
 * thread calls the next function of this interface.
 *
 * Stability: a program that was compiled with this header runs with any module whose kolovod_abi_version()
 * is at least the KOLOVOD_ABI_VERSION it saw. Functions, codes, numbers and fields are only ever added,
 * fields at the end of a struct, which carries its size for that reason. Zero in an added field means what
 * was before.
 */
#ifndef KOLOVOD_H_
#define KOLOVOD_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define KOLOVOD_API __attribute__((visibility("default")))
#else
#define KOLOVOD_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* 2: places on hosts, kolovod_take_output, output_bytes; 3: drive_us; 4: codec */
#define KOLOVOD_ABI_VERSION 4

/* The outcome of an operation. */
typedef enum kolovod_code {
  KOLOVOD_OK = 0,
  KOLOVOD_INVALID_ARGUMENT = 1, /* can never work; nothing was sent */
  KOLOVOD_DUPLICATE_NAME = 2,   /* the name is still pending on this rank */
  KOLOVOD_MISMATCH = 3,         /* the ranks disagree; the world stays usable */
  KOLOVOD_RANK_LOST = 4,        /* a rank's process ended without leaving; the world is over */
  KOLOVOD_RANK_LEFT = 5,        /* a rank left before this operation */
  KOLOVOD_SHUT_DOWN = 6,        /* this rank left, or is a fork of one, or was never in a world */
  KOLOVOD_TIMEOUT = 7,          /* still pending; may be waited for again */
  KOLOVOD_INTERRUPTED = 8,      /* a rank gave up; the world is over */
  KOLOVOD_INTERNAL = 9,
  KOLOVOD_LATE = 10 /* a rank was late for longer than the user allows; the world is over */
} kolovod_code;

typedef enum kolovod_dtype {
  KOLOVOD_UINT8 = 0,
  KOLOVOD_INT8 = 1,
  KOLOVOD_UINT16 = 2,
  KOLOVOD_INT16 = 3,
  KOLOVOD_INT32 = 4,
  KOLOVOD_INT64 = 5,
  KOLOVOD_FLOAT16 = 6,
  KOLOVOD_FLOAT32 = 7,
  KOLOVOD_FLOAT64 = 8,
  KOLOVOD_BOOL = 9, /* one byte, 0 or 1 */
  KOLOVOD_BFLOAT16 = 10
} kolovod_dtype;

typedef enum kolovod_op {
  KOLOVOD_AVERAGE = 0,
  KOLOVOD_SUM = 1,
  KOLOVOD_ADASUM = 2,
  KOLOVOD_MIN = 3,
  KOLOVOD_MAX = 4,
  KOLOVOD_PRODUCT = 5
} kolovod_op;

/* Blocks of 256 floats with a scale (csrc/collectives/codec.h): 8 bits an element, or 4. */
typedef enum kolovod_codec {
  KOLOVOD_NO_CODEC = 0,
  KOLOVOD_INT8_BLOCKS = 1,
  KOLOVOD_INT4_BLOCKS = 2
} kolovod_codec;

typedef enum kolovod_verb {
  KOLOVOD_ALLREDUCE = 0,
  KOLOVOD_BROADCAST = 1,
  KOLOVOD_ALLGATHER = 2,
  KOLOVOD_BARRIER = 3, /* no tensors */
  KOLOVOD_ALLTOALL = 4,
  KOLOVOD_REDUCESCATTER = 5,
  KOLOVOD_JOIN = 6, /* no tensors, no name; kolovod_rows has the rank that came last */
  /* One tensor from one rank to another, matched by rank, tag and order; no name. `root` is the other rank
   * (of KOLOVOD_RECV -1 for any), `splits` one number, the tag. kolovod_rows has the rank that sent it. */
  KOLOVOD_SEND = 7, /* output is not looked at */
  KOLOVOD_RECV = 8  /* input is not looked at */
} kolovod_verb;

/* One rank of one world or process set. The pointer stays valid until the process ends; once the world is
 * over, every call with it fails with KOLOVOD_SHUT_DOWN. */
typedef struct kolovod_engine kolovod_engine;

/* Dense row-major host memory, owned by the caller and left alone by it until completion. Start from all
 * zeroes. */
typedef struct kolovod_tensor {
  const void* input;
  void* output;         /* as large as input; may equal it. Not looked at by a verb that makes its own. */
  const int64_t* shape; /* elements, `ndim` of them; not needed after kolovod_submit */
  int32_t ndim;
  int32_t dtype; /* kolovod_dtype */
  int32_t codec; /* kolovod_codec: of floats between hosts, in an allreduce by sum or average */
} kolovod_tensor;

/* Start from all zeroes, then set the two sizes and what the verb needs. */
typedef struct kolovod_request {
  size_t struct_size; /* sizeof(kolovod_request) */
  size_t tensor_size; /* sizeof(kolovod_tensor) */
  int32_t verb;       /* kolovod_verb */
  int32_t op;         /* kolovod_op; reductions only */
  int32_t root;       /* rank; broadcast only */
  int32_t drive_us;   /* with a callback: for how long kolovod_submit may wait for the others itself, if it
                         finds the engine idle; 0: not at all */
  double prescale;    /* reductions: result = postscale * op(prescale * input); write 1.0 for no factor */
  double postscale;
  const char* name;              /* UTF-8; NULL or "": unnamed */
  const kolovod_tensor* tensors; /* several make a group: ready when every rank has submitted it */
  size_t tensor_count;
  const int64_t* splits; /* alltoall only: rows for each rank */
  size_t split_count;
  const size_t*
      output_bytes; /* allgather, alltoall, reducescatter: for each tensor how large its output is, which
                       must be what the result takes. NULL, or 0 for a tensor: the engine makes it. */
  const char* called_from; /* UTF-8: the line of the script that asks for this, as in "train.py:12", where all
                              ranks must ask from the same one. NULL or "": any will do. */
} kolovod_request;

/* Called exactly once for each operation that kolovod_submit accepted, by the thread that completed it,
 * possibly before kolovod_submit returns. `message` (UTF-8, "" with KOLOVOD_OK) lives until the callback
 * returns. The thread drives the engine: return soon; submitting is allowed, waiting is refused. */
typedef void (*kolovod_callback)(void* user_data, int code, const char* message);

/* The version of the interface that the loaded module implements. */
KOLOVOD_API uint32_t kolovod_abi_version(void);

/* Why this thread's last call failed; "" if it did not. */
KOLOVOD_API const char* kolovod_error_message(void);

/* The world that this process is in (number 0), or the process set of this number that it is a member of.
 * NULL if there is none, for the reason that kolovod_error_message() gives. */
KOLOVOD_API kolovod_engine* kolovod_current(int32_t process_set);

/* This rank's place there, and the number of ranks; -1 when it is over. */
KOLOVOD_API int kolovod_rank(kolovod_engine* engine);
KOLOVOD_API int kolovod_size(kolovod_engine* engine);

/* This rank's place among those of its host, and their number; the place of its host among the hosts that
 * have a rank at that place, and the number of those hosts; -1 when it is over. */
KOLOVOD_API int kolovod_local_rank(kolovod_engine* engine);
KOLOVOD_API int kolovod_local_size(kolovod_engine* engine);
KOLOVOD_API int kolovod_cross_rank(kolovod_engine* engine);
KOLOVOD_API int kolovod_cross_size(kolovod_engine* engine);

/* Announces a request and returns at once; with drive_us > 0 maybe when it is done.
 *
 * With a callback nobody needs to wait: the engine's own thread works until the operation is done. Without
 * one, work may lie until kolovod_wait or kolovod_poll is called (it then costs the least on busy cores).
 * `operation`: receives a number for the functions below, before the callback can run; kolovod_release gives
 * it back. NULL, with a callback only: nothing is left to release. */
KOLOVOD_API int kolovod_submit(kolovod_engine* engine, const kolovod_request* request,
                               kolovod_callback callback, void* user_data, uint64_t* operation);

/* Returns when the operation is done, with its code. timeout_s < 0: no limit. Without a limit, this thread
 * drives the engine itself. */
KOLOVOD_API int kolovod_wait(kolovod_engine* engine, uint64_t operation, double timeout_s);

/* Sets *done to 1 if kolovod_wait would return at once, else to 0. */
KOLOVOD_API int kolovod_poll(kolovod_engine* engine, uint64_t operation, int* done);

/* Forgets an operation that is done, and frees the outputs that the engine made for it. KOLOVOD_TIMEOUT: it
 * is still pending, and stays known. */
KOLOVOD_API int kolovod_release(kolovod_engine* engine, uint64_t operation);

/* Allgather, alltoall, reducescatter, once done: the output for tensor `index`, valid until kolovod_release.
 */
KOLOVOD_API int kolovod_output(kolovod_engine* engine, uint64_t operation, size_t index, const void** data,
                               size_t* bytes);

/* The memory of an output that was taken. */
typedef struct kolovod_memory kolovod_memory;

/* The same, but from now on the output is the caller's, also when the world is over, until the caller gives
 * *memory to kolovod_free_memory (once; any thread). It may be written. An output can be taken once, and
 * kolovod_output does not find it any more. *data is aligned to 64 bytes and never NULL. */
KOLOVOD_API int kolovod_take_output(kolovod_engine* engine, uint64_t operation, size_t index,
                                    kolovod_memory** memory, void** data, size_t* bytes);
KOLOVOD_API void kolovod_free_memory(kolovod_memory* memory);

/* Allgather, alltoall, once done: how many rows of the output came from each rank; `count` is the number of
 * ranks. Join: one number, the rank that came last. Valid until kolovod_release. */
KOLOVOD_API int kolovod_rows(kolovod_engine* engine, uint64_t operation, size_t index, const int64_t** rows,
                             size_t* count);

#ifdef __cplusplus
}
#endif

#endif /* KOLOVOD_H_ */
