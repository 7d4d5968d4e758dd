// Python <-> engine. The GIL is held only to convert arguments: every wait releases it, and the core
// never takes it, except through the `interrupted` callback that py_engine.h hands in.
#include "base/memory_facts.h"
#include "base/tree.h"
#include "base/version.h"
#include "bind/graph_clients.h"
#include "bind/handle.h"
#include "bind/held_storage.h"
#include "bind/plain_tensors.h"
#include "bind/py_calls.h"
#include "bind/py_engine.h"
#include "bind/py_sealing.h"
#include "bind/short_verb.h"
#include "collectives/codec.h"
#include "collectives/select.h"
#include "transport/loopback.h"

using namespace nanobind::literals;

namespace kolovod {
namespace {

using ControlLinkKeys = std::vector<std::shared_ptr<const ConnectionKeys>>;

ControlLinkKeys ToControlLinkKeys(const nb::sequence& given) {
  ControlLinkKeys keys;
  for (nb::handle item : given) {
    keys.push_back(item.is_none() ? nullptr : nb::cast<std::shared_ptr<ConnectionKeys>>(item));
  }
  return keys;
}

EngineOptions ProcessOptions(int rank, int size, uint32_t epoch, int segment_fd,
                             const std::vector<std::pair<int, std::string>>& peers, const ConfigMap& config,
                             const std::string& external, std::vector<int> ranks, const PyEngine* world,
                             std::vector<int> hosts, std::vector<int> control_fds,
                             ControlLinkKeys control_keys, std::shared_ptr<ConnectionBroker> broker,
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
  if (external == "gpu") {
    options.external = Device::kGpu;
  } else if (external == "host") {
    options.external = Device::kHost;
  } else if (!external.empty()) {
    throw nb::value_error("external: need 'host', 'gpu' or ''");
  }
  options.ranks = std::move(ranks);
  if (!options.ranks.empty() && options.ranks.size() != peers.size()) {
    throw nb::value_error("ranks: need one for each rank of the set, or none");
  }
  options.stacks = std::move(stacks);
  options.last_operations_prefix = std::move(last_operations_prefix);
  options.hosts = std::move(hosts);
  options.control_fds = std::move(control_fds);
  options.control_keys = std::move(control_keys);
  if (!options.control_keys.empty() && options.control_keys.size() != options.control_fds.size()) {
    throw nb::value_error("control_keys: need one for each of control_fds, or none");
  }
  options.broker = std::move(broker);
  int on_host = size;
  if (!options.hosts.empty()) {
    const Topology topology(rank, options.hosts);
    on_host = topology.local_size();
    if (options.hosts.size() != peers.size()) throw nb::value_error("hosts: need one for each rank");
    if (topology.hosts() > 1 && options.broker == nullptr) {
      throw nb::value_error("links: several hosts need them");
    }
    if (topology.hosts() > 1 && topology.leads() && options.control_fds.size() != topology.leaders.size()) {
      throw nb::value_error("control_fds: need one for each host");
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
  options.control_fds = world.TakeControlLinks(rank);
  options.broker = world.BrokerOf(rank);
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

// By name: what 256 elements take between hosts.
nb::dict EncodedBytes() {
  static_assert(kCodecBlock == 256);
  nb::dict bytes;
  for (int i = 1; i < kCodecCount; ++i) {
    const auto codec = static_cast<Codec>(i);
    bytes[NameOf(codec)] = EncodedBlockBytes(codec);
  }
  return bytes;
}

// By name: what the table of a dtype says, for Python.
nb::dict DTypeTable() {
  nb::dict table;
  for (const DTypeTraits& dtype : kDTypeTable) {
    nb::dict row;
    row["number"] = static_cast<int>(dtype.dtype);
    row["bytes"] = dtype.bytes;
    row["kind"] = dtype.kind == DTypeKind::kBool    ? "bool"
                  : dtype.kind == DTypeKind::kFloat ? "float"
                                                    : "integer";
    row["accumulator"] = NameOf(dtype.accumulator);
    row["mean_accumulator"] = NameOf(dtype.mean_accumulator);
    row["scales"] = dtype.scales;
    row["adasum"] = dtype.adasum;
    table[dtype.name] = row;
  }
  return table;
}

nb::dict VerbTable() {
  nb::dict table;
  for (const VerbTraits& verb : kVerbTable) {
    nb::dict row;
    row["number"] = static_cast<int>(verb.verb);
    row["tensors"] = verb.tensors == TensorCount::kNone  ? "none"
                     : verb.tensors == TensorCount::kOne ? "one"
                                                         : "any";
    row["reduces"] = verb.reduces;
    row["fuses"] = verb.fuses;
    row["makes_outputs"] = verb.makes_outputs;
    row["has_root"] = verb.has_root;
    row["has_splits"] = verb.rows_differ == RowsDiffer::kSplits;
    row["rows_differ"] = verb.rows_differ != RowsDiffer::kNo;
    row["is_transfer"] = verb.is_transfer;
    row["allows_joined"] = verb.allows_joined;
    table[verb.name] = row;
  }
  return table;
}

// What an allreduce by Average among hosts sends: algorithm, rounds, and of the member that has most of them
// messages and bytes. As the ranks of a world decide, and count.
nb::tuple AllreduceBetweenHosts(size_t bytes, int hosts, int dtype, double latency_us, double bytes_per_us) {
  if (hosts < 1 || dtype < 0 || dtype >= kDTypeCount || !(latency_us >= 0) || !(bytes_per_us > 0)) {
    throw nb::value_error("allreduce_between_hosts: out of range");
  }
  LinkCost cost;
  cost.latency_us = latency_us;
  cost.bytes_per_us = bytes_per_us;
  const size_t portion = PortionBytes(cost, 256 << 10);
  const auto type = static_cast<DType>(dtype);
  const Choice choice =
      Select({Verb::kAllreduce, bytes, hosts, type, Op::kAverage, portion}, Algorithm::kAuto, cost);
  uint64_t messages = 0, sent = 0;
  for (const int member : {0, hosts - 1}) {
    const Traffic traffic =
        TrafficOf(choice.algorithm, {Verb::kAllreduce, bytes, hosts, type, Op::kAverage, portion}, member);
    messages = std::max({messages, traffic.sent_messages, traffic.received_messages});
    sent = std::max({sent, traffic.sent_bytes, traffic.received_bytes});
  }
  return nb::make_tuple(NameOf(choice.algorithm), RoundsOf(choice.algorithm, Verb::kAllreduce, hosts),
                        messages, sent);
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

// The places in `tensors`, as the engine gets them, of those that hold inf or nan; and the bytes of all. Of a
// tensor that begins from byte `due.first` up to `due.second`, counted from `begin` on, all elements are
// looked at, else the first `beginning`.
nb::tuple WhichNotFinite(const nb::sequence& tensors, int64_t beginning, uint64_t begin,
                         std::pair<uint64_t, uint64_t> due) {
  nb::list found;
  size_t place = 0;
  uint64_t bytes = 0;
  for (nb::handle item : tensors) {
    const nb::tuple fields = nb::borrow<nb::tuple>(item);
    const int code = nb::cast<int>(fields[0]);
    int dtype = code % kOnDevice;
    int64_t count = 1;
    for (nb::handle dim : nb::borrow<nb::tuple>(fields[1])) count *= nb::cast<int64_t>(dim);
    if (const FurtherDType* const further = FindFurther(dtype)) {
      dtype = static_cast<int>(further->dtype);
      count *= further->kind == FurtherDType::Kind::kPair ? 2 : 1;
    }
    if (dtype < 0 || dtype >= kDTypeCount) throw nb::value_error("unknown dtype number");
    const uint64_t first = begin + bytes;
    bytes += static_cast<uint64_t>(count) * SizeOf(static_cast<DType>(dtype));
    if ((code & kOnDevice) == 0) {
      if (first < due.first || due.second <= first) count = std::min(count, beginning);
      const auto* const data = reinterpret_cast<const void*>(nb::cast<uintptr_t>(fields[2]));
      if (HasNonFinite(data, static_cast<size_t>(count), static_cast<DType>(dtype))) found.append(place);
    }
    ++place;
  }
  return nb::make_tuple(found, bytes);
}

PyObject* told_of_unlike = nullptr;

std::string TellPythonOfUnlike(const Unlike& unlike) {
  GilHeld gil;
  const nb::object about = ToText(unlike.about), columns = nb::int_(unlike.columns),
                   rank = nb::int_(unlike.rank);
  const nb::bytes table(reinterpret_cast<const char*>(unlike.table.data()),
                        unlike.table.size() * sizeof(int32_t));
  PyObject* const answer = CallingPython([&] {
    return PyObject_CallFunctionObjArgs(told_of_unlike, about.ptr(), table.ptr(), columns.ptr(), rank.ptr(),
                                        nullptr);
  });
  Py_XDECREF(answer);
  if (answer != nullptr) return "";
  const nb::python_error error;
  const nb::object text = nb::str(error.value());
  return nb::cast<std::string>(text);
}

}  // namespace

NB_MODULE(_native, m) {
  // What a framework keeps for good, a thread of autograd say, may hold an engine at the interpreter's end:
  // twenty lines about that would hide the traceback which the user looks for.
  nb::set_leak_warnings(false);
  engine_error = PyErr_NewException("kolovod._native.EngineError", nullptr, nullptr);
  m.attr("EngineError") = nb::borrow(engine_error);
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const EngineError& e) {
      SetEngineError(e);
    }
  });
  BindSealing(m);
  nb::class_<StackSource>(m, "StackSource").def(nb::init<int, int>(), "signum"_a, "read_fd"_a);
  nb::class_<ConnectionBroker>(m, "ConnectionBroker")
      .def(nb::init<>())
      .def("fileno", &ConnectionBroker::wanted_fd)
      .def("wanted", &ConnectionBroker::TakeWanted)
      .def(
          "connected",
          [](ConnectionBroker& self, int peer, int stripe, int fd, std::shared_ptr<ConnectionKeys> keys) {
            self.Connected({peer, fd, std::move(keys), stripe});
          },
          "peer"_a, "stripe"_a, "fd"_a, "keys"_a = nb::none())
      .def("failed", &ConnectionBroker::Failed, "text"_a)
      .def("close", &ConnectionBroker::Close)
      .def("forget", &ConnectionBroker::Forget)
      .def_prop_ro("closed", &ConnectionBroker::closed);
  nb::class_<PyEngine> engine(m, "Engine", nb::is_weak_referenceable());
  AddCalls(engine);
  engine
      .def(
          "__init__",
          [](PyEngine* self, int rank, int size, uint32_t epoch, int segment_fd,
             const std::vector<std::pair<int, std::string>>& peers, const ConfigMap& config,
             const std::string& external, std::vector<int> ranks, const PyEngine* world,
             std::vector<int> hosts, std::vector<int> control_fds, const nb::sequence& control_keys,
             const nb::object& links, std::shared_ptr<StackSource> stacks,
             std::string last_operations_prefix) {
            std::shared_ptr<ConnectionBroker> broker;
            if (!links.is_none()) broker = nb::cast<std::shared_ptr<ConnectionBroker>>(links.attr("broker"));
            new (self)
                PyEngine(ProcessOptions(rank, size, epoch, segment_fd, peers, config, external,
                                        std::move(ranks), world, std::move(hosts), std::move(control_fds),
                                        ToControlLinkKeys(control_keys), std::move(broker), std::move(stacks),
                                        std::move(last_operations_prefix)),
                         links);
          },
          "rank"_a, "size"_a, "epoch"_a, "segment_fd"_a, "peers"_a, "config"_a, "external"_a = "",
          "ranks"_a = std::vector<int>{}, "world"_a = nb::none(), "hosts"_a = std::vector<int>{},
          "control_fds"_a = std::vector<int>{}, "control_keys"_a = nb::make_tuple(), "links"_a = nb::none(),
          "stacks"_a = nb::none(), "last_operations_prefix"_a = "")
      .def("wait", &PyEngine::Wait, "handle"_a, "timeout_s"_a, "drives"_a = false)
      .def("poll", &PyEngine::Poll, "handle"_a)
      .def("release", &PyEngine::Release, "handle"_a)
      .def("output", &PyEngine::Output, "handle"_a, "index"_a)
      .def("rows", &PyEngine::Rows, "handle"_a, "index"_a)
      .def("hand_over", &PyEngine::HandOver)
      .def("next_bucket", &PyEngine::NextBucket, "timeout_s"_a)
      .def("open_bucket", &PyEngine::OpenBucket, "token"_a)
      .def("close_bucket", &PyEngine::CloseBucket)
      .def("keep_output", &PyEngine::KeepOutput, "address"_a, "tensor"_a)
      .def("bucket_done", &PyEngine::BucketDone, "token"_a, "error"_a)
      .def("pending", &PyEngine::Pending)
      .def("say_waits", &PyEngine::SayWaits, "text"_a)
      .def("read_waits", &PyEngine::ReadWaits)
      .def("standing", &PyEngine::Standing)
      .def("describe", &PyEngine::Describe, "handle"_a)
      .def("asks", &PyEngine::Asks, "handle"_a)
      .def("exchanged", &PyEngine::Exchanged)
      .def("refuse", &PyEngine::Refuse, "reason"_a)
      .def("abort", &PyEngine::Abort, "message"_a)
      .def("shutdown", &PyEngine::Shutdown)
      .def("forget", &PyEngine::Forget)
      .def("sent_bytes", &PyEngine::SentBytes)
      .def("stats", &PyEngine::Stats)
      .def("last_operations", &PyEngine::LastOperations, "after"_a = 0)
      .def("keep_exact_times", &PyEngine::KeepExactTimes, "exact"_a)
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
  m.def(
      "tree_neighbours",
      [](int hosts, int host) {
        if (host < 0 || host >= hosts) throw nb::value_error("tree_neighbours: no such host");
        return Tree(hosts, host).neighbours;
      },
      "hosts"_a, "host"_a);
  m.def("allreduce_between_hosts", &AllreduceBetweenHosts, "bytes"_a, "hosts"_a, "dtype"_a, "latency_us"_a,
        "bytes_per_us"_a);
  m.def(
      "use_call_lines",
      [](const nb::object& kind_of) {
        CallLines::Instance().Use(kind_of.is_none() ? nullptr : kind_of.ptr());
      },
      "kind_of"_a.none());
  m.def(
      "use_keeper", [](const nb::callable& keep) { Py_XDECREF(std::exchange(keeper, keep.inc_ref().ptr())); },
      "keep"_a);
  nb::class_<HeldStorage>(m, "HeldStorage")
      .def(nb::init<nb::object, uintptr_t, int>(), "storage"_a, "at"_a, "mark"_a)
      .def_static("is_in_use", &HeldStorage::IsInUse, "at"_a);
  m.def("calls_under_way", &GilReleased::Count);
  m.def("forget_calls", &GilReleased::Forget);
  m.attr("Handle") = nb::steal(reinterpret_cast<PyObject*>(OperationHandle::MakeType()));
  m.def(
      "use_handles",
      [](const nb::object& spans, const nb::callable& failed, const nb::callable& refused) {
        OperationHandle::SetHooks(spans.ptr(), failed.ptr(), refused.ptr());
      },
      "spans"_a, "failed"_a, "refused"_a);
  m.attr("ShortVerb") = nb::steal(reinterpret_cast<PyObject*>(ShortVerb::MakeType()));
  m.def(
      "use_numpy",
      [](const nb::type_object& ndarray, const nb::dict& dtypes, const nb::callable& empty,
         const nb::list& samples) {
        return NumpyArrays::Instance().Use(ndarray.ptr(), dtypes.ptr(), empty.ptr(), samples.ptr());
      },
      "ndarray"_a, "dtypes"_a, "empty"_a, "samples"_a);
  m.def(
      "use_torch",
      [](const nb::tuple& types, const nb::object& exchange, const nb::callable& empty_like,
         const nb::callable& claim, const nb::list& samples) {
        return TorchTensors::Instance().Use(types.ptr(), exchange.ptr(), empty_like.ptr(), claim.ptr(),
                                            samples.ptr());
      },
      "types"_a, "exchange"_a, "empty_like"_a, "claim"_a, "samples"_a);
  m.def(
      "watch_long_waits",
      [](const nb::object& hook) { LongWait::SetHook(hook.is_none() ? nullptr : hook.ptr()); },
      "hook"_a.none());
  m.def(
      "hash_memory",
      [](uintptr_t address, size_t bytes, uint64_t seed) {
        return HashMemory(reinterpret_cast<const void*>(address), bytes, seed);
      },
      "address"_a, "bytes"_a, "seed"_a = 0);
  m.def("hash_tensors", &HashTensors, "tensors"_a, "begin"_a, "end"_a);
  m.def("plain_views", &PlainViews, "framework"_a, "tensors"_a, "makes"_a);
  m.def("plain_gradients", &PlainGradients, "parameters"_a, "indices"_a);
  m.def("first_changed", &FirstChanged, "parameters"_a, "items"_a);
  m.def("which_not_finite", &WhichNotFinite, "tensors"_a, "beginning"_a, "begin"_a, "due"_a);
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
      "xla_collective_handler",
      [](int major, int minor) { return reinterpret_cast<uintptr_t>(XlaCollectiveHandler(major, minor)); },
      "major"_a, "minor"_a);
  m.def(
      "on_unlike_in_programs",
      [](const nb::callable& tell) {
        Py_XDECREF(std::exchange(told_of_unlike, tell.inc_ref().ptr()));
        OnUnlikeInPrograms(&TellPythonOfUnlike);
      },
      "tell"_a);
  m.attr("ON_DEVICE") = kOnDevice;
  m.attr("DEVICE_SHIFT") = kDeviceShift;
  m.attr("CODEC_SHIFT") = kCodecShift;
  m.attr("PROTOCOL") = kProtocolVersion;
  m.attr("RELEASE") = ReleaseVersion();
  m.attr("VERBS") = Names<Verb>(kVerbCount);
  m.attr("DTYPES") = Names<DType>(kDTypeCount);
  nb::dict further;
  for (size_t i = 0; i < std::size(kFurtherDTypes); ++i) {
    further[kFurtherDTypes[i].name] = kFirstFurther + static_cast<int>(i);
  }
  m.attr("FURTHER_DTYPES") = further;
  m.def(
      "why_not",
      [](int dtype, int verb, int op, bool has_factors) {
        const FurtherDType* const found = FindFurther(dtype);
        const bool known = found != nullptr && verb >= 0 && verb < kVerbCount && op >= 0 && op < kOpCount;
        return known ? WhyNot(*found, static_cast<Verb>(verb), static_cast<Op>(op), has_factors) : "";
      },
      "dtype"_a, "verb"_a, "op"_a, "has_factors"_a);
  m.attr("VERB_TRAITS") = VerbTable();
  m.attr("DTYPE_TRAITS") = DTypeTable();
  m.attr("OPS") = Names<Op>(kOpCount);
  m.attr("CODECS") = Names<Codec>(kCodecCount);
  m.attr("CODEC_BYTES") = EncodedBytes();
  m.attr("MOST_STRIPES") = Mesh::kMostStripes;
  m.attr("STATUS") = StatusNames();
}

}  // namespace kolovod
