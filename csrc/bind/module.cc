// Python <-> engine. The GIL is held only to convert arguments: every wait releases it, and the core
// never takes it, except through the `interrupted` callback that this file hands in.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <optional>

#include "bind/bucket.h"
#include "bind/capi.h"
#include "bind/graph_clients.h"
#include "engine/engine.h"
#include "transport/loopback.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kolovod {
namespace {

struct EngineError {
  int code;
  std::string message;
};

void ThrowIfError(const Status& status) {
  if (!status.ok()) throw EngineError{static_cast<int>(status.code()), status.message()};
}

using ConfigMap = std::map<std::string, int64_t>;

Config ToConfig(const ConfigMap& values) {
  Config config;
  size_t used = 0;
  VisitConfig(config, [&](std::string_view name, int64_t& value) {
    const auto found = values.find(std::string(name));
    if (found == values.end()) return;
    value = found->second;
    ++used;
  });
  if (used != values.size()) {
    throw nb::key_error("config: a name that the engine does not know; see config_defaults()");
  }
  return config;
}

// True once a signal handler raised: the exception stays set for the caller.
bool SignalPending() {
  nb::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

void ThrowWaitError(const Status& status) {
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
  ThrowIfError(status);
}

std::vector<SubmittedTensor> ToTensors(const nb::sequence& sequence, const std::vector<size_t>& out_bytes) {
  std::vector<SubmittedTensor> tensors;
  tensors.reserve(nb::len(sequence));
  if (!out_bytes.empty() && out_bytes.size() != nb::len(sequence)) {
    throw nb::value_error("out_bytes: need one for each tensor, or none");
  }
  for (nb::handle item : sequence) {
    const nb::tuple fields = nb::borrow<nb::tuple>(item);
    if (fields.size() != 4) throw nb::value_error("tensor: need (dtype, shape, input, output)");
    SubmittedTensor tensor;
    const int dtype = nb::cast<int>(fields[0]);
    if (dtype < 0 || dtype >= kDTypeCount) throw nb::value_error("tensor: unknown dtype number");
    tensor.meta.dtype = static_cast<DType>(dtype);
    const nb::tuple shape = nb::borrow<nb::tuple>(fields[1]);
    tensor.meta.shape.reserve(shape.size());
    for (nb::handle dim : shape) {
      tensor.meta.shape.push_back(nb::cast<int64_t>(dim));
      if (tensor.meta.shape.back() < 0) throw nb::value_error("tensor: negative dimension");
    }
    tensor.in = reinterpret_cast<const void*>(nb::cast<uintptr_t>(fields[2]));
    tensor.out = reinterpret_cast<void*>(nb::cast<uintptr_t>(fields[3]));
    if (!out_bytes.empty()) tensor.out_bytes = out_bytes[tensors.size()];
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

// Engine as Python sees it. The segment of a forked child is gone, so every call asks first.
class PyEngine {
 public:
  explicit PyEngine(EngineOptions options) : options_rank_(options.rank) {
    Status status;
    std::unique_ptr<Engine> engine;
    {
      nb::gil_scoped_release release;
      status = Engine::Create(std::move(options), &engine, SignalPending);
    }
    ThrowWaitError(status);
    engine_ = std::move(engine);
    handle_ = Attach(engine_);
  }
  ~PyEngine() {
    if (engine_ == nullptr) return;
    if (forgotten_) {
      // The parent's; its thread does not exist in this process. The C handle keeps it.
      return;
    }
    nb::gil_scoped_release release;
    engine_->Shutdown();  // here, since the last user of the C handle may be the engine's own thread
    Detach(handle_);
    engine_.reset();
  }

  kolovod_engine* handle() const { return handle_; }

  uint64_t Submit(int verb, std::string name, const nb::sequence& tensors, int op, double prescale,
                  double postscale, int root, bool blocking, std::vector<int64_t> splits,
                  const std::vector<size_t>& out_bytes) {
    Check();
    if (verb < 0 || verb >= kVerbCount) throw nb::value_error("unknown verb number");
    if (op < 0 || op >= kOpCount) throw nb::value_error("unknown op number");
    Request request;
    request.name = std::move(name);
    request.verb = static_cast<Verb>(verb);
    request.op = static_cast<Op>(op);
    request.prescale = prescale;
    request.postscale = postscale;
    request.root = root;
    request.splits = std::move(splits);
    std::vector<SubmittedTensor> converted = ToTensors(tensors, out_bytes);
    uint64_t handle = 0;
    Status status;
    {
      nb::gil_scoped_release release;
      status = engine_->Submit(std::move(request), std::move(converted), blocking, &handle);
    }
    ThrowIfError(status);
    return handle;
  }

  void Wait(uint64_t handle, double timeout_s, bool drives) {
    Check();
    Status status;
    {
      nb::gil_scoped_release release;
      status = drives && timeout_s >= 0 ? engine_->WaitDriving(handle, timeout_s, SignalPending)
                                        : engine_->Wait(handle, timeout_s, SignalPending);
    }
    ThrowWaitError(status);
  }

  bool Poll(uint64_t handle) {
    Check();
    bool done = false;
    Status status;
    {
      nb::gil_scoped_release release;
      status = engine_->Poll(handle, &done);
    }
    ThrowIfError(status);
    return done;
  }

  bool Release(uint64_t handle) {
    Check();
    bool done = false;
    ThrowIfError(engine_->Release(handle, &done));
    return done;
  }

  nb::object Output(uint64_t handle, size_t index) {
    const OperationPtr op = Completed(handle, index);
    if (index >= op->buffers.size() || op->buffers[index].data == nullptr) {
      throw nb::value_error("output: taken before, or of a verb that makes none");
    }
    OutputBuffer& buffer = op->buffers[index];
    char* data = buffer.data.release();
    nb::capsule owner(data, [](void* p) noexcept { std::free(p); });
    const size_t shape[1] = {buffer.bytes};
    return nb::cast(nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(data, 1, shape, owner));
  }

  std::vector<int64_t> Rows(uint64_t handle, size_t index) {
    const OperationPtr op = Completed(handle, index);
    if (index >= op->rows.size()) throw nb::value_error("rows: not an allgather or alltoall");
    return op->rows[index];
  }

  void HandOver() {
    Check();
    External().HandOver();
  }

  nb::object NextBucket(double timeout_s) {
    Check();
    ExternalJob job;
    Status status;
    {
      nb::gil_scoped_release release;
      status = External().NextJob(timeout_s, &job);
    }
    if (status.code() == Code::kTimeout) return nb::none();
    ThrowIfError(status);
    return ToBucket(job);
  }

  void OpenBucket(uint64_t token) {
    Check();
    nb::gil_scoped_release release;
    ThrowIfError(External().OpenMemory(token));
  }

  void CloseBucket() {
    nb::gil_scoped_release release;
    External().CloseMemory();
  }

  void BucketDone(uint64_t token, const std::string& error) {
    Check();
    nb::gil_scoped_release release;
    ThrowIfError(External().JobDone(token, error));
  }

  void Abort(const std::string& message) {
    Check();
    nb::gil_scoped_release release;
    engine_->Abort(message);
  }

  std::shared_ptr<Segment> segment() const {
    Check();
    return engine_->segment();
  }
  size_t Pending() {
    Check();
    return engine_->Pending();
  }

  void Shutdown() {
    if (forgotten_) return;
    nb::gil_scoped_release release;
    engine_->Shutdown();
  }

  void Forget() {
    forgotten_ = true;
    engine_->Forget();
  }

  std::vector<uint64_t> SentBytes() {
    Check();
    return engine_->SentBytes();
  }

  std::map<std::string, uint64_t> Stats() {
    Check();
    const EngineStats stats = engine_->Stats();
    return {{"full_announcements", stats.control.full_announcements},
            {"bit_announcements", stats.control.bit_announcements},
            {"control_message_bytes", stats.control.message_bytes},
            {"operations", stats.operations},
            {"buckets", stats.buckets},
            {"bytes", stats.bytes},
            {"buckets_by_caller", stats.drives_caller},
            {"buckets_by_thread", stats.drives_thread},
            {"late_reports", stats.late_reports},
            {"line_latency_ns", stats.line_latency_ns}};
  }

  nb::list LastOperations() {
    Check();
    nb::list list;
    for (const OperationRecord& record : engine_->LastOperations()) {
      nb::dict fields;
      fields["number"] = record.number;
      fields["name"] = record.name;
      fields["verb"] = NameOf(record.verb);
      fields["dtype"] = record.tensors > 0 ? nb::cast(NameOf(record.dtype)) : nb::none();
      fields["tensors"] = record.tensors;
      fields["bytes"] = record.bytes;
      fields["bucket"] = record.bucket > 0 ? nb::cast(record.bucket) : nb::none();
      fields["state"] = NameOf(record.state);
      fields["submitted_ns"] = record.submitted_ns;
      fields["started_ns"] = record.started_ns;
      fields["ended_ns"] = record.ended_ns;
      list.append(fields);
    }
    return list;
  }

  std::string LastLateReport() {
    Check();
    return engine_->LastLateReport();
  }

 private:
  void Check() const {
    if (forgotten_) {
      throw EngineError{static_cast<int>(Code::kShutDown), "this process was forked from rank " +
                                                               std::to_string(options_rank_) +
                                                               " and has no world of its own"};
    }
  }
  ExternalBackend& External() {
    if (engine_->external() == nullptr) throw nb::value_error("this engine is not external");
    return *engine_->external();
  }
  OperationPtr Completed(uint64_t handle, size_t) {
    Check();
    OperationPtr op = engine_->Find(handle);
    if (op == nullptr || !op->done.load(std::memory_order_acquire)) {
      throw nb::value_error("the handle is unknown or still pending");
    }
    return op;
  }

  const int options_rank_;
  bool forgotten_ = false;
  std::shared_ptr<Engine> engine_;
  kolovod_engine* handle_ = nullptr;
};

EngineOptions ProcessOptions(int rank, int size, uint32_t epoch, int segment_fd,
                             const std::vector<std::pair<int, std::string>>& peers, const ConfigMap& config,
                             bool external, std::vector<int> ranks, const PyEngine* world,
                             std::vector<int> hosts, std::vector<int> uplink_fds, std::vector<int> mesh_fds,
                             std::shared_ptr<StackSource> stacks, std::string last_operations_prefix) {
  if (size < 1 || static_cast<size_t>(size) != peers.size()) {
    throw nb::value_error("peers: need one (pidfd, description) for each rank");
  }
  if (segment_fd < 0 && size > 1) throw nb::value_error("segment_fd: several ranks need a segment");
  EngineOptions options;
  options.rank = rank;
  options.size = size;
  options.epoch = epoch;
  options.config = ToConfig(config);
  options.external = external;
  options.ranks = std::move(ranks);
  if (!options.ranks.empty() && options.ranks.size() != peers.size()) {
    throw nb::value_error("ranks: need one for each rank of the set, or none");
  }
  options.stacks = std::move(stacks);
  options.last_operations_prefix = std::move(last_operations_prefix);
  options.hosts = std::move(hosts);
  options.uplink_fds = std::move(uplink_fds);
  options.mesh_fds = std::move(mesh_fds);
  int on_host = size;
  if (!options.hosts.empty()) {
    const Topology topology(rank, options.hosts);
    on_host = topology.local_size();
    if (options.hosts.size() != peers.size() || options.mesh_fds.size() != peers.size() ||
        options.uplink_fds.size() != topology.leaders.size()) {
      throw nb::value_error("hosts, mesh_fds: need one for each rank; uplink_fds: one for each host");
    }
  }
  options.liveness = std::make_unique<PidfdLiveness>(rank, peers);
  ThrowIfError(Segment::Map(segment_fd, SegmentLayout(on_host, size, options.config), &options.segment));
  if (world != nullptr) options.segment->BelongTo(world->segment());
  return options;
}

EngineOptions LoopbackOptions(LoopbackWorld& world, int rank) {
  EngineOptions options;
  options.rank = rank;
  options.size = world.size();
  options.config = world.config;
  options.hosts = world.hosts;
  options.uplink_fds = world.TakeUplinks(rank);
  options.mesh_fds = world.TakeMesh(rank);
  options.segment = world.SegmentOf(rank);
  options.faults = world.faults;
  options.ranks = world.ranks;
  options.liveness = std::make_unique<LoopbackLiveness>(world.faults, world.ranks);
  return options;
}

class PyLoopbackWorld {
 public:
  PyLoopbackWorld(const std::vector<int>& hosts, const ConfigMap& config) {
    if (hosts.empty() || hosts.size() > kMaxSources) throw nb::value_error("loopback: size out of range");
    ThrowIfError(LoopbackWorld::Create(hosts, ToConfig(config), &world_));
  }
  PyEngine* MakeEngine(int rank) const { return new PyEngine(LoopbackOptions(*world_, Rank(rank))); }
  PyLoopbackWorld* MakeSet(const std::vector<int>& members) const {
    for (int rank : members) Rank(rank);
    auto set = std::make_unique<PyLoopbackWorld>();
    ThrowIfError(world_->MakeSet(members, &set->world_));
    return set.release();
  }
  void Kill(int rank) { world_->Kill(Rank(rank)); }
  void Delay(int rank, int us) { world_->Delay(Rank(rank), us); }
  void Drop(int rank, int count) { world_->Drop(Rank(rank), count); }
  PyLoopbackWorld() = default;

 private:
  int Rank(int rank) const {
    if (rank < 0 || rank >= world_->size()) {
      throw nb::value_error("loopback: rank out of range");
    }
    return rank;
  }
  std::shared_ptr<LoopbackWorld> world_;
};

template <class Enum>
nb::dict Names(int count) {
  nb::dict names;
  for (int i = 0; i < count; ++i) names[NameOf(static_cast<Enum>(i))] = i;
  return names;
}

nb::dict StatusNames() {
  nb::dict names;
  const char* const kNames[] = {"ok",        "invalid_argument", "duplicate_name", "mismatch",    "rank_lost",
                                "rank_left", "shut_down",        "timeout",        "interrupted", "internal",
                                "late"};
  int code = 0;
  for (const char* name : kNames) names[name] = code++;
  return names;
}

}  // namespace

NB_MODULE(_native, m) {
  static PyObject* engine_error = PyErr_NewException("kolovod._native.EngineError", nullptr, nullptr);
  m.attr("EngineError") = nb::borrow(engine_error);
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const EngineError& e) {
      nb::object args = nb::make_tuple(e.code, e.message);
      PyErr_SetObject(engine_error, args.ptr());
    }
  });
  nb::class_<StackSource>(m, "StackSource").def(nb::init<int, int>(), "signum"_a, "read_fd"_a);
  nb::class_<PyEngine>(m, "Engine")
      .def(
          "__init__",
          [](PyEngine* self, int rank, int size, uint32_t epoch, int segment_fd,
             const std::vector<std::pair<int, std::string>>& peers, const ConfigMap& config, bool external,
             std::vector<int> ranks, const PyEngine* world, std::vector<int> hosts,
             std::vector<int> uplink_fds, std::vector<int> mesh_fds, std::shared_ptr<StackSource> stacks,
             std::string last_operations_prefix) {
            new (self) PyEngine(ProcessOptions(rank, size, epoch, segment_fd, peers, config, external,
                                               std::move(ranks), world, std::move(hosts),
                                               std::move(uplink_fds), std::move(mesh_fds), std::move(stacks),
                                               std::move(last_operations_prefix)));
          },
          "rank"_a, "size"_a, "epoch"_a, "segment_fd"_a, "peers"_a, "config"_a, "external"_a = false,
          "ranks"_a = std::vector<int>{}, "world"_a = nb::none(), "hosts"_a = std::vector<int>{},
          "uplink_fds"_a = std::vector<int>{}, "mesh_fds"_a = std::vector<int>{}, "stacks"_a = nb::none(),
          "last_operations_prefix"_a = "")
      .def("submit", &PyEngine::Submit, "verb"_a, "name"_a, "tensors"_a, "op"_a, "prescale"_a, "postscale"_a,
           "root"_a, "blocking"_a, "splits"_a = std::vector<int64_t>{}, "out_bytes"_a = std::vector<size_t>{})
      .def("wait", &PyEngine::Wait, "handle"_a, "timeout_s"_a, "drives"_a = false)
      .def("poll", &PyEngine::Poll, "handle"_a)
      .def("release", &PyEngine::Release, "handle"_a)
      .def("output", &PyEngine::Output, "handle"_a, "index"_a)
      .def("rows", &PyEngine::Rows, "handle"_a, "index"_a)
      .def("hand_over", &PyEngine::HandOver)
      .def("next_bucket", &PyEngine::NextBucket, "timeout_s"_a)
      .def("open_bucket", &PyEngine::OpenBucket, "token"_a)
      .def("close_bucket", &PyEngine::CloseBucket)
      .def("bucket_done", &PyEngine::BucketDone, "token"_a, "error"_a)
      .def("pending", &PyEngine::Pending)
      .def("abort", &PyEngine::Abort, "message"_a)
      .def("shutdown", &PyEngine::Shutdown)
      .def("forget", &PyEngine::Forget)
      .def("sent_bytes", &PyEngine::SentBytes)
      .def("stats", &PyEngine::Stats)
      .def("last_operations", &PyEngine::LastOperations)
      .def("last_late_report", &PyEngine::LastLateReport)
      .def("c_handle", [](const PyEngine& engine) { return reinterpret_cast<uintptr_t>(engine.handle()); });
  nb::class_<PyLoopbackWorld>(m, "LoopbackWorld")
      .def(nb::init<const std::vector<int>&, const ConfigMap&>(), "hosts"_a, "config"_a)
      .def("engine", &PyLoopbackWorld::MakeEngine, "rank"_a, nb::rv_policy::take_ownership)
      .def("make_set", &PyLoopbackWorld::MakeSet, "members"_a, nb::rv_policy::take_ownership)
      .def("kill", &PyLoopbackWorld::Kill, "rank"_a)
      .def("delay", &PyLoopbackWorld::Delay, "rank"_a, "delay_us"_a)
      .def("drop", &PyLoopbackWorld::Drop, "rank"_a, "count"_a);
  m.def(
      "segment_bytes",
      [](int on_host, int size, const ConfigMap& config) {
        return SegmentLayout(on_host, size, ToConfig(config)).total_bytes;
      },
      "on_host"_a, "size"_a, "config"_a);
  m.def("config_defaults", [] {
    ConfigMap defaults;
    const Config config;
    VisitConfig(config, [&](std::string_view name, int64_t value) { defaults[std::string(name)] = value; });
    return defaults;
  });
  m.def(
      "publish",
      [](int process_set, const PyEngine* engine) {
        Publish(process_set, engine == nullptr ? nullptr : engine->handle());
      },
      "process_set"_a, "engine"_a.none());
  m.def("register_tensorflow_ops", &RegisterTensorFlowOps);
  m.def(
      "xla_allreduce_handler",
      [](int major, int minor) { return reinterpret_cast<uintptr_t>(XlaAllreduceHandler(major, minor)); },
      "major"_a, "minor"_a);
  m.attr("VERBS") = Names<Verb>(kVerbCount);
  m.attr("DTYPES") = Names<DType>(kDTypeCount);
  m.attr("OPS") = Names<Op>(kOpCount);
  m.attr("STATUS") = StatusNames();
}

}  // namespace kolovod
