#pragma once

// The engine as Python sees it: arguments converted, errors thrown, the GIL released while it waits.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <optional>
#include <utility>

#include "bind/bucket.h"
#include "bind/capi.h"
#include "bind/gil.h"
#include "bind/long_wait.h"
#include "engine/engine.h"

namespace kolovod {

namespace nb = nanobind;

struct EngineError {
  int code;
  std::string message;
};

// Names and texts of others come from C callers and other hosts, and need not be UTF-8.
inline nb::object ToText(const std::string& text) {
  PyObject* const decoded =
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace");
  if (decoded == nullptr) throw nb::python_error();
  return nb::steal(decoded);
}

inline void ThrowIfError(const Status& status) {
  if (!status.ok()) throw EngineError{static_cast<int>(status.code()), status.message()};
}

using ConfigMap = std::map<std::string, int64_t>;

inline Config ToConfig(const ConfigMap& values) {
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
inline bool SignalPending() {
  GilHeld gil;
  return PyErr_CheckSignals() != 0;
}

inline void ThrowWaitError(const Status& status) {
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
  ThrowIfError(status);
}

// What Python adds to the number of a dtype: for a tensor on a GPU this, and the GPU's number shifted; and
// the number of a codec, shifted.
inline constexpr int kOnDevice = 1 << 8;
inline constexpr int kCodecShift = 12;
inline constexpr int kDeviceShift = 16;

// Engine as Python sees it. The segment of a forked child is gone, so every call asks first.
class PyEngine {
 public:
  // `links`: None, or what makes connections for it (`Links` of kolovod.rendezvous.mesh), which ends with it.
  explicit PyEngine(EngineOptions options, nb::object links = nb::none())
      : options_rank_(options.rank), links_(std::move(links)) {
    Status status;
    std::unique_ptr<Engine> engine;
    {
      GilReleased release;
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
    try {
      Shutdown();  // here, since the last user of the C handle may be the engine's own thread
    } catch (nb::python_error& error) {
      error.discard_as_unraisable("links of an engine");  // the interpreter ends, and modules are gone
    }
    GilReleased release;
    Detach(handle_);
    engine_.reset();
  }

  kolovod_engine* handle() const { return handle_; }
  int size() const { return engine_->size(); }  // ranks

  // `blocking`: Wait follows at once.
  uint64_t Submit(Request request, std::vector<SubmittedTensor> tensors, bool blocking) {
    uint64_t handle = 0;
    Status status;
    {
      GilReleased release;
      status = engine_->Submit(std::move(request), std::move(tensors), blocking, &handle);
    }
    ThrowIfError(status);
    return handle;
  }

  // Engine::Run. `self`: this, as Python sees it. *handle: what is to be released, also when this throws; 0:
  // nothing.
  void SubmitAndWait(nb::handle self, Request request, std::vector<SubmittedTensor> tensors,
                     uint64_t* handle) {
    LongWait wait(self, handle, /*lasts=*/true);
    Status status;
    {
      GilReleased release;
      status = engine_->Run(std::move(request), std::move(tensors), [&] { return wait.Look(); }, handle);
    }
    wait.End();
    ThrowWaitError(status);
  }

  void Wait(uint64_t handle, double timeout_s, bool drives) {
    Check();
    LongWait wait(nb::find(this), &handle, timeout_s < 0 || (drives && timeout_s >= kLastingS));
    Status status;
    {
      GilReleased release;
      const auto look = [&] { return wait.Look(); };
      status = drives && timeout_s >= 0 ? engine_->WaitDriving(handle, timeout_s, look)
                                        : engine_->Wait(handle, timeout_s, look);
    }
    wait.End();
    ThrowWaitError(status);
  }

  bool Poll(uint64_t handle) {
    Check();
    bool done = false;
    Status status;
    {
      GilReleased release;
      status = engine_->Poll(handle, &done);
    }
    ThrowIfError(status);
    return done;
  }

  bool Release(uint64_t handle) {
    Check();
    bool done = false;
    const OperationPtr op = device_outputs_.empty() ? nullptr : engine_->Find(handle);
    ThrowIfError(engine_->Release(handle, &done));
    if (op != nullptr && done) {
      for (const OutputBuffer& output : op->buffers) device_outputs_.erase(AddressOf(output));
    }
    return done;
  }

  nb::object Output(uint64_t handle, size_t index) {
    const OperationPtr op = Completed(handle, index);
    if (op->request.device() != Device::kHost && index < op->buffers.size()) {
      const auto made = device_outputs_.extract(AddressOf(op->buffers[index]));
      return made.empty() ? nb::none() : std::move(made.mapped());
    }
    if (index >= op->buffers.size() || op->buffers[index].data == nullptr) {
      throw nb::value_error("output: taken before, or of a verb that makes none");
    }
    OutputBuffer& buffer = op->buffers[index];
    auto taken = std::make_unique<OutputMemory>(std::move(buffer.data));
    char* const data = taken->get();
    nb::capsule owner(taken.get(), [](void* memory) noexcept { delete static_cast<OutputMemory*>(memory); });
    taken.release();
    const size_t shape[1] = {buffer.bytes};
    return nb::cast(nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(data, 1, shape, owner));
  }

  // What the engine has made as the first result, until Release.
  std::string_view Made(uint64_t handle) {
    const OutputBuffer& made = Completed(handle, 0)->buffers.at(0);
    return {made.data.get(), made.bytes};
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
      GilReleased release;
      status = External().NextJob(timeout_s, &job);
    }
    if (status.code() == Code::kTimeout) return nb::none();
    ThrowIfError(status);
    return ToBucket(job);
  }

  void OpenBucket(uint64_t token) {
    Check();
    GilReleased release;
    ThrowIfError(External().OpenMemory(token));
  }

  void CloseBucket() {
    GilReleased release;
    External().CloseMemory();
  }

  // On a device: `tensor` is the output of the bucket at hand that has this address.
  void KeepOutput(uintptr_t address, nb::object tensor) { device_outputs_[address] = std::move(tensor); }

  void BucketDone(uint64_t token, const std::string& error) {
    Check();
    GilReleased release;
    ThrowIfError(External().JobDone(token, error));
  }

  // What a rank says while it waits, see WaitBoard.
  bool SayWaits(const nb::bytes& text) {
    Check();
    return engine_->waits().Say(std::string_view(text.c_str(), text.size()));
  }
  nb::list ReadWaits() {
    Check();
    nb::list list;
    for (const WaitBoard::Said& said : engine_->waits().Read()) {
      list.append(nb::make_tuple(said.rank, said.version, nb::bytes(said.text.data(), said.text.size())));
    }
    return list;
  }
  // (buckets begun, whether all that is pending is known, (hash of the name, verb) of each).
  nb::tuple Standing() {
    Check();
    nb::list pending;
    bool has_begun = false;  // one whose data are on their way waits for no rank's submission
    for (const OperationRecord& record : engine_->ReadLastOperations()) {
      if (!record.pending()) continue;
      pending.append(nb::make_tuple(record.name_hash, NameOf(record.verb)));
      const bool is_message = record.verb == Verb::kSend || record.verb == Verb::kRecv;
      has_begun |= record.started_ns != 0 && !is_message;
    }
    return nb::make_tuple(engine_->buckets(), !engine_->has_unrecorded() && !has_begun, pending);
  }
  // (name, verb).
  nb::object Describe(uint64_t handle) {
    Check();
    const OperationPtr op = engine_->Find(handle);
    if (op == nullptr) return nb::none();
    return nb::make_tuple(ToText(op->request.name), NameOf(op->request.verb));
  }
  // (verb, peer) of a send or recv that waits for what the other end may never do; else None.
  nb::object Asks(uint64_t handle) {
    Check();
    const OperationPtr op = engine_->Find(handle);
    if (op == nullptr || op->meeting.load() != Meeting::kAsks) return nb::none();
    return nb::make_tuple(NameOf(op->request.verb), op->request.root);
  }
  nb::list Exchanged() {
    Check();
    nb::list found;
    for (const PointToPoint::Exchanged& with : engine_->transfers().exchanged()) {
      found.append(
          nb::make_tuple(with.sent.load(), with.seen.load(), with.answered.load(), with.answers.load()));
    }
    return found;
  }
  void Refuse(const std::string& reason) {
    Check();
    GilReleased release;
    engine_->Refuse(reason);
  }

  void Abort(const std::string& message) {
    Check();
    GilReleased release;
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

  // Throws in a forked child.
  void Check() const {
    if (forgotten_) {
      throw EngineError{static_cast<int>(Code::kShutDown), "this process was forked from rank " +
                                                               std::to_string(options_rank_) +
                                                               " and has no world of its own"};
    }
  }

  void Shutdown() {
    if (forgotten_) return;
    {
      GilReleased release;
      engine_->Shutdown();
    }
    const nb::object links = std::exchange(links_, nb::none());
    if (!links.is_none()) links.attr("close")();
  }

  void Forget() {
    forgotten_ = true;
    engine_->Forget();
    if (!links_.is_none()) links_.attr("forget")();
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
            {"control_messages_sent", stats.control.messages_sent},
            {"control_messages_received", stats.control.messages_received},
            {"operations", stats.operations},
            {"staged_operations", stats.staged},
            {"buckets", stats.buckets},
            {"bytes", stats.bytes},
            {"buckets_by_caller", stats.drives_caller},
            {"buckets_by_thread", stats.drives_thread},
            {"late_reports", stats.late_reports},
            {"data_connections", stats.connections},
            {"line_latency_ns", stats.line_latency_ns},
            {"link_bytes_per_us", stats.link_bytes_per_us},
            {"link_latency_ns", stats.link_latency_ns},
            {"link_revisions", stats.link_revisions}};
  }

  nb::list LastOperations(uint64_t after) {
    Check();
    nb::list list;
    for (const OperationRecord& record : engine_->ReadLastOperations()) {
      if (record.number <= after) continue;
      nb::dict fields;
      fields["number"] = record.number;
      fields["name"] = ToText(record.name);
      fields["verb"] = NameOf(record.verb);
      fields["dtype"] = record.tensors > 0 ? nb::cast(NameOf(record.dtype)) : nb::none();
      fields["device"] = NameOf(record.device);
      fields["codec"] = record.codec == Codec::kNone ? nb::none() : nb::cast(NameOf(record.codec));
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

  void KeepExactTimes(bool exact) {
    Check();
    engine_->KeepExactTimes(exact);
  }

  nb::object LastLateReport() {
    Check();
    return ToText(engine_->LastLateReport());
  }

 private:
  ExternalBackend& External() {
    if (engine_->external() == nullptr) throw nb::value_error("this engine is not external");
    return *engine_->external();
  }
  static uintptr_t AddressOf(const OutputBuffer& output) { return reinterpret_cast<uintptr_t>(&output); }
  OperationPtr Completed(uint64_t handle, size_t) {
    Check();
    OperationPtr op = engine_->Find(handle);
    if (op == nullptr || !op->done.load(std::memory_order_acquire)) {
      throw nb::value_error("the handle is unknown or still pending");
    }
    return op;
  }

  const int options_rank_;
  nb::object links_;
  std::map<uintptr_t, nb::object> device_outputs_;  // with the GIL
  bool forgotten_ = false;
  std::shared_ptr<Engine> engine_;
  kolovod_engine* handle_ = nullptr;
};

}  // namespace kolovod
