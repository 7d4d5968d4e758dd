// Verbs that Python calls as one function of C, for the common case: one tensor of NumPy or PyTorch that the
// engine can read where it is, all ranks, no compression. Everything else, and all that is wrong with
// arguments, is handed to the verb that Python has for all cases.
#pragma once

#include <Python.h>
#if PY_VERSION_HEX < 0x030C0000
#include <structmember.h>
#define Py_T_PYSSIZET T_PYSSIZET
#define Py_READONLY READONLY
#endif
#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bind/array_readers.h"
#include "bind/handle.h"
#include "bind/py_calls.h"

namespace kolovod {

// What a verb does with its tensor, and whether it waits.
// The last two: the result has another number of rows, which the engine knows when the operation is complete;
// and the verb also returns how many of them each rank has sent.
enum class ShortForm { kWithoutTensor, kNew, kInPlace, kStartNew, kStartInPlace, kOtherRows, kSplitRows };

class ShortVerb {
 public:
  // What an instance refers to.
  enum Ref {
    kWhole,       // the verb for all cases, with the same arguments
    kWorld,       // returns the world, whose `engine` is used
    kFailed,      // raises the public error for one of the engine's
    kKept,        // true: buffers of handles that were dropped are to be let go of first
    kSpans,       // `on`: somebody wants to know how long is waited
    kHandleType,  // of what forms that start return: a subtype of OperationHandle
    kFromBytes,   // Frontend.from_bytes
    kHold,        // Holder.hold, for operations that go on; None: a weak reference does
    kMoved,       // Holder.has_moved as an error, with tensor, address and name; else returns the tensor
    kRefs,
  };

  static PyTypeObject* MakeType() {
    static PyMemberDef members[] = {
        {"__vectorcalloffset__", Py_T_PYSSIZET, offsetof(ShortVerb, call_), Py_READONLY, nullptr},
        {"__dictoffset__", Py_T_PYSSIZET, offsetof(ShortVerb, dict_), Py_READONLY, nullptr},
        {"__weaklistoffset__", Py_T_PYSSIZET, offsetof(ShortVerb, weak_), Py_READONLY, nullptr},
        {nullptr, 0, 0, 0, nullptr},
    };
    static PyMethodDef methods[] = {
        {"__reduce__", &Reduce, METH_NOARGS, nullptr},
        {nullptr, nullptr, 0, nullptr},
    };
    static PyType_Slot slots[] = {
        {Py_tp_new, reinterpret_cast<void*>(&New)},
        {Py_tp_dealloc, reinterpret_cast<void*>(&Dealloc)},
        {Py_tp_traverse, reinterpret_cast<void*>(&Traverse)},
        {Py_tp_clear, reinterpret_cast<void*>(&Clear)},
        {Py_tp_call, reinterpret_cast<void*>(&PyVectorcall_Call)},
        {Py_tp_repr, reinterpret_cast<void*>(&Repr)},
        {Py_tp_descr_get, reinterpret_cast<void*>(&Get)},
        {Py_tp_members, members},
        {Py_tp_methods, methods},
        {0, nullptr},
    };
    static PyType_Spec spec = {"kolovod._native.ShortVerb", sizeof(ShortVerb), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, slots};
    return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  }

 private:
  // In the order of a verb's parameters.
  enum Parameter {
    kTensor,
    kSplits,
    kRoot,
    kName,
    kOp,
    kPrescale,
    kPostscale,
    kProcessSet,
    kCompression,
    kParameters
  };
  static constexpr const char* kNames[kParameters] = {
      "tensor",          "splits",           "root_rank",   "name",       "op",
      "prescale_factor", "postscale_factor", "process_set", "compression"};
  using Given = std::array<PyObject*, kParameters>;  // null: not given

  static PyObject* New(PyTypeObject* type, PyObject* args, PyObject* keywords) {
    PyObject *refs, *parameters;
    int verb, form, is_torch;
    if (keywords != nullptr ||
        PyArg_ParseTuple(args, "iiO!O!p", &verb, &form, &PyTuple_Type, &parameters, &PyTuple_Type, &refs,
                         &is_torch) == 0 ||
        PyTuple_Size(refs) != kRefs || PyTuple_Size(parameters) > kParameters ||
        !OperationHandle::IsMadeBy(PyTuple_GetItem(refs, kHandleType))) {
      PyErr_SetString(PyExc_TypeError, "ShortVerb: need verb, form, parameters and what it refers to");
      return nullptr;
    }
    PyObject* const object = PyType_GenericAlloc(type, 0);
    if (object == nullptr) return nullptr;
    auto* const self = reinterpret_cast<ShortVerb*>(object);
    self->call_ = &Call;
    self->verb_ = static_cast<Verb>(verb);
    self->form_ = static_cast<ShortForm>(form);
    self->reader_ =
        is_torch != 0 ? static_cast<const ArrayReader*>(&TorchTensors::Instance()) : &NumpyArrays::Instance();
    for (int i = 0; i < kRefs; ++i) self->refs_[i] = Py_NewRef(PyTuple_GetItem(refs, i));
    for (Py_ssize_t i = 0; i < PyTuple_Size(parameters); ++i) {
      const int parameter = Find(PyTuple_GetItem(parameters, i));
      if (parameter == kParameters) {
        PyErr_SetString(PyExc_ValueError, "ShortVerb: a parameter that it does not know");
        Py_DECREF(object);
        return nullptr;
      }
      self->order_[self->parameters_++] = static_cast<Parameter>(parameter);
    }
    return object;
  }

  static PyObject* EngineName() {
    static PyObject* const name = PyUnicode_InternFromString("engine");
    return name;
  }
  static PyObject* OnName() {
    static PyObject* const name = PyUnicode_InternFromString("on");
    return name;
  }

  static int Find(PyObject* name) {
    int found = 0;
    while (found < kParameters && PyUnicode_CompareWithASCIIString(name, kNames[found]) != 0) ++found;
    return found;
  }

  static int Traverse(PyObject* object, visitproc visit, void* arg) {
    auto* const self = reinterpret_cast<ShortVerb*>(object);
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->dict_);
    for (PyObject* ref : self->refs_) Py_VISIT(ref);
    return 0;
  }

  static int Clear(PyObject* object) {
    auto* const self = reinterpret_cast<ShortVerb*>(object);
    Py_CLEAR(self->dict_);
    for (PyObject*& ref : self->refs_) Py_CLEAR(ref);
    return 0;
  }

  static void Dealloc(PyObject* object) {
    PyTypeObject* const type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    if (reinterpret_cast<ShortVerb*>(object)->weak_ != nullptr) PyObject_ClearWeakRefs(object);
    Clear(object);
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
  }

  static PyObject* Repr(PyObject* object) {
    const Owned name(PyObject_GetAttrString(object, "__qualname__"));
    return name ? PyUnicode_FromFormat("<verb %U>", name.get()) : nullptr;
  }

  // A verb that is an attribute of a class is no method of it. That it can be asked for one tells help() that
  // it is a function.
  static PyObject* Get(PyObject* object, PyObject*, PyObject*) { return Py_NewRef(object); }

  // Pickled by its name, like a function.
  static PyObject* Reduce(PyObject* object, PyObject*) { return PyObject_GetAttrString(object, "__name__"); }

  static PyObject* Call(PyObject* object, PyObject* const* args, size_t flagged, PyObject* keywords) {
    const auto& self = *reinterpret_cast<ShortVerb*>(object);
    PyObject* result = nullptr;
    Given given{};
    if (self.Sort(args, PyVectorcall_NARGS(flagged), keywords, &given) && self.Try(given, &result)) {
      return result;
    }
    return CallingPython([&] { return PyObject_Vectorcall(self.refs_[kWhole], args, flagged, keywords); });
  }

  // False: they are not those of the verb.
  bool Sort(PyObject* const* args, Py_ssize_t count, PyObject* keywords, Given* given) const {
    if (count > parameters_) return false;
    for (Py_ssize_t i = 0; i < count; ++i) (*given)[order_[i]] = args[i];
    const Py_ssize_t named = keywords == nullptr ? 0 : PyTuple_Size(keywords);
    for (Py_ssize_t i = 0; i < named; ++i) {
      const int parameter = Find(PyTuple_GetItem(keywords, i));
      Py_ssize_t place = 0;
      while (place < parameters_ && order_[place] != parameter) ++place;
      if (place == parameters_ || (*given)[parameter] != nullptr) return false;
      (*given)[parameter] = args[count + i];
    }
    return true;
  }

  // False: the whole verb is to be called, and nothing has happened. Else *result is what it returns; null:
  // an exception is set. Where code of Python runs, a signal handler may raise, and must be heard.
  bool Try(const Given& given, PyObject** result) const {
    Submission made;
    ArrayView view;
    void* target = nullptr;
    Owned output(nullptr);
    if (!IsShort(given, &made.request, &view) || !MakeOutput(given[kTensor], view, &output, &target)) {
      return PyErr_Occurred() != nullptr;
    }
    const Owned world(CallingPython([&] { return PyObject_CallNoArgs(refs_[kWorld]); }));
    if (!world) return true;
    const Owned engine(PyObject_GetAttr(world.get(), EngineName()));
    if (!engine || !nb::isinstance<PyEngine>(nb::handle(engine.get()))) {
      PyErr_Clear();
      return false;
    }
    if (form_ == ShortForm::kSplitRows &&
        !ReadSplits(given[kSplits], *nb::inst_ptr<PyEngine>(nb::handle(engine.get())), view, &made.request)) {
      return false;
    }
    if (given[kTensor] != nullptr) {
      SubmittedTensor& tensor = made.tensors.emplace_back();
      tensor.in = view.address;
      tensor.out = target;
      tensor.meta.dtype = view.dtype;
      tensor.meta.shape = std::move(view.shape);
    }
    *result = MakesRows() ? CarryOutRows(engine.get(), std::move(made), given[kTensor])
                          : CarryOut(engine.get(), std::move(made), given[kTensor], output.get());
    if (*result == nullptr && PyErr_ExceptionMatches(engine_error) != 0) Explain();
    return true;
  }

  bool MakesRows() const { return form_ == ShortForm::kOtherRows || form_ == ShortForm::kSplitRows; }
  bool IsNew() const { return form_ == ShortForm::kNew || form_ == ShortForm::kStartNew; }
  bool Writes() const { return form_ == ShortForm::kInPlace || form_ == ShortForm::kStartInPlace; }
  bool Starts() const { return form_ == ShortForm::kStartNew || form_ == ShortForm::kStartInPlace; }

  // What the verb gives back, and the address where the engine is to write. False as of IsShort.
  bool MakeOutput(PyObject* tensor, const ArrayView& view, Owned* output, void** target) const {
    if (MakesRows()) return true;
    *target = view.address;
    *output =
        Owned(IsNew() ? reader_->MakeLike(tensor, view) : Py_NewRef(tensor == nullptr ? Py_None : tensor));
    if (!IsNew()) return true;
    ArrayView made;
    if (!*output || !reader_->Read(output->get(), /*written=*/true, &made)) return false;
    *target = made.address;
    return true;
  }

  // False: the case is not the common one, or an exception is set.
  bool IsShort(const Given& given, Request* request, ArrayView* view) const {
    const auto is_none = [&](Parameter p) { return given[p] == nullptr || given[p] == Py_None; };
    const auto read_factor = [&](Parameter p, double* factor) {
      if (given[p] == nullptr) return true;
      if (!PyFloat_CheckExact(given[p])) return false;
      *factor = PyFloat_AsDouble(given[p]);
      return true;
    };
    if (!is_none(kProcessSet) || !is_none(kCompression)) return false;
    request->verb = verb_;
    request->op = TraitsOf(verb_).reduces ? Op::kAverage : Op::kSum;
    if (!is_none(kName)) {
      if (!PyUnicode_CheckExact(given[kName])) return false;
      Py_ssize_t length = 0;
      const char* const name = PyUnicode_AsUTF8AndSize(given[kName], &length);
      if (name == nullptr) PyErr_Clear();
      if (name == nullptr) return false;
      request->name.assign(name, static_cast<size_t>(length));
    }
    if (given[kOp] != nullptr) {
      const long op = ToLong(given[kOp]);
      if (op < 0 || op >= kOpCount || static_cast<Op>(op) == Op::kAdasum) return false;
      request->op = static_cast<Op>(op);
    }
    if (given[kRoot] != nullptr) {
      const long root = ToLong(given[kRoot]);
      if (root < 0 || root > INT32_MAX) return false;
      request->root = static_cast<int>(root);
    }
    if (!read_factor(kPrescale, &request->prescale) || !read_factor(kPostscale, &request->postscale)) {
      return false;
    }
    if (form_ != ShortForm::kWithoutTensor) {
      if (given[kTensor] == nullptr || !reader_->Read(given[kTensor], Writes(), view)) return false;
      if (MakesRows() && RowBytes(*view) == 0) return false;
    }
    if (PyObject_IsTrue(refs_[kKept]) != 0) return false;
    const Owned is_asked(PyObject_GetAttr(refs_[kSpans], OnName()));
    return is_asked.get() == Py_False;
  }

  // False: they are not plain numbers, or none are given and the rows are not equally many for all ranks.
  static bool ReadSplits(PyObject* given, const PyEngine& engine, const ArrayView& view, Request* request) {
    const int64_t size = engine.size();
    if (given == nullptr || given == Py_None) {
      request->splits.assign(static_cast<size_t>(size), view.shape[0] / size);
      return view.shape[0] % size == 0;
    }
    if (!PyList_CheckExact(given)) return false;
    for (Py_ssize_t i = 0; i < PyList_Size(given); ++i) {
      PyObject* const rows = PyList_GetItem(given, i);
      request->splits.push_back(PyLong_CheckExact(rows) ? ToLong(rows) : -1);
      if (request->splits.back() < 0) return false;
    }
    return true;
  }

  // -1: none, or too large.
  static long ToLong(PyObject* number) {
    const long value = PyLong_Check(number) ? PyLong_AsLong(number) : -1;
    if (value == -1) PyErr_Clear();
    return value;
  }

  PyObject* CarryOut(PyObject* engine, Submission made, PyObject* tensor, PyObject* output) const {
    uint64_t handle = 0;
    Owned buffers(nullptr);
    PyObject* const done = Guarded([&]() -> PyObject* {
      PyEngine& native = *nb::inst_ptr<PyEngine>(nb::handle(engine));
      native.Check();
      if (tensor != nullptr) {
        if (!IsNew() && !reader_->Claim(tensor)) throw ErrorIsSet();
        if (made.request.name.empty()) made.request.called_from = CallLines::Instance().Here();
      }
      const Owned held(Starts() ? Hold(tensor) : Py_NewRef(Py_None));
      if (!held) throw ErrorIsSet();
      const Owned finish(Moves() && form_ == ShortForm::kStartInPlace
                             ? MakeFinish(tensor, made.tensors[0].out, made.request.name)
                             : Py_NewRef(Py_None));
      if (!finish) throw ErrorIsSet();
      buffers = Owned(PyTuple_Pack(3, tensor == nullptr ? Py_None : tensor, output, held.get()));
      if (!buffers) throw ErrorIsSet();
      if (!Starts()) {
        native.SubmitAndWait(engine, std::move(made.request), std::move(made.tensors), &handle);
        if (handle != 0) native.Release(std::exchange(handle, 0));
        return Py_NewRef(output);
      }
      handle = native.Submit(std::move(made.request), std::move(made.tensors), /*blocking=*/false);
      return OperationHandle::Make(refs_[kHandleType], engine, handle, buffers.get(), output, finish.get());
    });
    if (done == nullptr && handle != 0 && keeper != nullptr) Keep(engine, handle, buffers.get());
    return done;
  }

  // Tensors may be given other memory while an operation is on its way.
  bool Moves() const { return refs_[kHold] != Py_None; }

  // What keeps the memory that the tensor has now. NumPy resizes no array to which there is a weak reference.
  PyObject* Hold(PyObject* tensor) const {
    if (!Moves()) return PyWeakref_NewRef(tensor, nullptr);
    return CallingPython([&] { return PyObject_CallFunctionObjArgs(refs_[kHold], tensor, nullptr); });
  }

  // What returns `tensor`, or raises if the result is not in it: it was given other memory than at `address`.
  PyObject* MakeFinish(PyObject* tensor, void* address, const std::string& name) const {
    static PyMethodDef method = {"finish", &Finish, METH_VARARGS, nullptr};
    const Owned place(PyLong_FromVoidPtr(address));
    const nb::object text = ToText(name);
    const Owned self(PyTuple_Pack(4, &object_, tensor, place.get(), text.ptr()));
    return self ? PyCFunction_New(&method, self.get()) : nullptr;
  }

  static PyObject* Finish(PyObject* self, PyObject*) {
    const auto& verb = *reinterpret_cast<ShortVerb*>(PyTuple_GetItem(self, 0));
    PyObject *const tensor = PyTuple_GetItem(self, 1), *const place = PyTuple_GetItem(self, 2);
    ArrayView view;
    const bool is_plain = verb.reader_->Read(tensor, /*written=*/true, &view);
    if (PyErr_Occurred() != nullptr) return nullptr;
    if (is_plain && view.address == PyLong_AsVoidPtr(place)) return Py_NewRef(tensor);
    return CallingPython([&] {
      return PyObject_CallFunctionObjArgs(verb.refs_[kMoved], tensor, place, PyTuple_GetItem(self, 3),
                                          nullptr);
    });
  }

  // Of a tensor of at least one dimension; 0: there are no bytes to count rows by.
  static size_t RowBytes(const ArrayView& view) {
    size_t bytes = view.shape.empty() ? 0 : SizeOf(view.dtype);
    for (size_t d = 1; d < view.shape.size(); ++d) bytes *= static_cast<size_t>(view.shape[d]);
    return bytes;
  }

  // Small results are copied, which takes less time than to give Python the engine's own memory.
  PyObject* CarryOutRows(PyObject* engine, Submission made, PyObject* tensor) const {
    uint64_t handle = 0;
    PyObject* const done = Guarded([&]() -> PyObject* {
      PyEngine& native = *nb::inst_ptr<PyEngine>(nb::handle(engine));
      native.Check();
      if (made.request.name.empty()) made.request.called_from = CallLines::Instance().Here();
      ArrayView view{made.tensors[0].meta.dtype, made.tensors[0].meta.shape, nullptr};
      native.SubmitAndWait(engine, std::move(made.request), std::move(made.tensors), &handle);
      const std::string_view bytes = native.Made(handle);
      view.shape[0] = static_cast<int64_t>(bytes.size() / RowBytes(view));
      Owned result(bytes.size() <= kMostCopied ? reader_->MakeOfShape(tensor, view.shape)
                                               : Py_NewRef(Py_None));
      if (!result) throw ErrorIsSet();
      if (ArrayView target; reader_->Read(result.get(), /*written=*/true, &target)) {
        std::memcpy(target.address, bytes.data(), bytes.size());
      } else {
        result = Owned(FromBytes(native.Output(handle, 0), view, tensor));
        if (!result) throw ErrorIsSet();
      }
      if (form_ == ShortForm::kSplitRows) {
        const nb::object received = nb::cast(native.Rows(handle, 0));
        result = Owned(PyTuple_Pack(2, result.get(), received.ptr()));
        if (!result) throw ErrorIsSet();
      }
      native.Release(std::exchange(handle, 0));
      return Py_NewRef(result.get());
    });
    if (done == nullptr && handle != 0 && keeper != nullptr) Keep(engine, handle, tensor);
    return done;
  }

  PyObject* FromBytes(const nb::object& bytes, const ArrayView& view, PyObject* tensor) const {
    nb::list sizes;
    for (const int64_t size : view.shape) sizes.append(size);
    const nb::tuple shape(sizes);
    const Owned dtype(PyLong_FromLong(static_cast<long>(view.dtype)));
    return CallingPython([&] {
      return PyObject_CallFunctionObjArgs(refs_[kFromBytes], bytes.ptr(), dtype.get(), shape.ptr(), tensor,
                                          nullptr);
    });
  }

  // Has kFailed raise what users see in place of the exception that is set.
  void Explain() const {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    const Owned given[3] = {Owned(type), Owned(value), Owned(trace)};
    const Owned nothing(
        CallingPython([&] { return PyObject_CallFunctionObjArgs(refs_[kFailed], value, nullptr); }));
  }

  static constexpr size_t kMostCopied = 16 << 10;

  PyObject object_;
  vectorcallfunc call_;
  PyObject* dict_;
  PyObject* weak_;
  Verb verb_;
  ShortForm form_;
  const ArrayReader* reader_;
  int parameters_;
  Parameter order_[kParameters];
  PyObject* refs_[kRefs];
};

}  // namespace kolovod
