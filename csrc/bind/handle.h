// Handles of asynchronous operations: what refers to an operation's buffers, and gives its result once.
// Python makes its class `Handle` of it (kolovod/core/handles.py says what it promises).
#pragma once

#include <Python.h>
#if PY_VERSION_HEX < 0x030C0000
#include <structmember.h>
#define Py_T_PYSSIZET T_PYSSIZET
#define Py_READONLY READONLY
#endif
#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "bind/py_calls.h"
#include "transport/waiter.h"

namespace kolovod {

// An instance and its fields are used with the GIL, which makes the taking of all fields one for other
// threads.
class OperationHandle {
 public:
  // `spans`: has `on`, and `waited(start_ns)`, called after a wait if it was on before. `failed`: raises the
  // public error for one of the engine's. `refused`: raises for a wrong use: with the time limit, or with
  // None for a second wait.
  static void SetHooks(PyObject* spans, PyObject* failed, PyObject* refused) {
    spans_ = Py_NewRef(spans);
    failed_ = Py_NewRef(failed);
    refused_ = Py_NewRef(refused);
  }

  static PyTypeObject* MakeType() {
    static PyMemberDef members[] = {
        {"__weaklistoffset__", Py_T_PYSSIZET, offsetof(OperationHandle, weak_), Py_READONLY, nullptr},
        {nullptr, 0, 0, 0, nullptr},
    };
    static PyMethodDef methods[] = {
        {"poll", &Poll, METH_NOARGS, "Return whether wait would return or raise at once."},
        {"wait", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&Wait)),
         METH_FASTCALL | METH_KEYWORDS, "Return the result when the operation is complete, once."},
        {"_drive", &WaitDriving, METH_O, "Do as wait does, but drive the engine also with a limit."},
        {nullptr, nullptr, 0, nullptr},
    };
    static PyType_Slot slots[] = {
        {Py_tp_new, reinterpret_cast<void*>(&New)},
        {Py_tp_dealloc, reinterpret_cast<void*>(&Dealloc)},
        {Py_tp_traverse, reinterpret_cast<void*>(&Traverse)},
        {Py_tp_clear, reinterpret_cast<void*>(&Clear)},
        {Py_tp_finalize, reinterpret_cast<void*>(&Finalize)},
        {Py_tp_repr, reinterpret_cast<void*>(&Repr)},
        {Py_tp_members, members},
        {Py_tp_methods, methods},
        {0, nullptr},
    };
    static PyType_Spec spec = {"kolovod._native.Handle", sizeof(OperationHandle), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, slots};
    return type_ = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  }

  // True if it is a subtype of ours.
  static bool IsMadeBy(PyObject* type) {
    return PyType_Check(type) && PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(type), type_);
  }

  // An instance of `type`, a subtype of ours; null: an exception is set. `finish`: makes the result of engine
  // and number; None: it is `result`.
  static PyObject* Make(PyObject* type, PyObject* engine, uint64_t number, PyObject* buffers,
                        PyObject* result, PyObject* finish) {
    PyObject* const object = PyType_GenericAlloc(reinterpret_cast<PyTypeObject*>(type), 0);
    if (object == nullptr) return nullptr;
    auto& self = Of(object);
    self.number_ = number;
    self.engine_ = Py_NewRef(engine);
    self.fields_ = {Py_NewRef(buffers), Py_NewRef(result), Py_NewRef(finish)};
    return object;
  }

 private:
  struct Fields {
    PyObject* buffers;
    PyObject* result;
    PyObject* finish;
  };

  static OperationHandle& Of(PyObject* object) { return *reinterpret_cast<OperationHandle*>(object); }

  static PyObject* New(PyTypeObject* type, PyObject* args, PyObject* keywords) {
    PyObject *engine, *buffers, *result, *finish;
    unsigned long long number;
    if (keywords != nullptr ||
        PyArg_ParseTuple(args, "OKOOO", &engine, &number, &buffers, &result, &finish) == 0 ||
        !nb::isinstance<PyEngine>(nb::handle(engine))) {
      PyErr_SetString(PyExc_TypeError, "Handle: need engine, number, buffers, result and finish");
      return nullptr;
    }
    return Make(reinterpret_cast<PyObject*>(type), engine, number, buffers, result, finish);
  }

  static int Traverse(PyObject* object, visitproc visit, void* arg) {
    auto& self = Of(object);
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self.engine_);
    Py_VISIT(self.fields_.buffers);
    Py_VISIT(self.fields_.result);
    Py_VISIT(self.fields_.finish);
    return 0;
  }

  // Of a circle that is collected all finalizers run before anything in it is cleared: so buffers that the
  // keeper gets here stay whole.
  static void Finalize(PyObject* object) { LetGo(object); }

  static int Clear(PyObject* object) {
    LetGo(object);
    Py_CLEAR(Of(object).engine_);
    return 0;
  }

  static void Dealloc(PyObject* object) {
    PyTypeObject* const type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    if (Of(object).weak_ != nullptr) PyObject_ClearWeakRefs(object);
    Clear(object);
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
  }

  static PyObject* Repr(PyObject* object) {
    const auto number = static_cast<unsigned long long>(Of(object).number_);
    return number == 0 ? PyUnicode_FromString("<kolovod Handle used>")
                       : PyUnicode_FromFormat("<kolovod Handle %llu>", number);
  }

  static PyEngine& EngineOf(PyObject* object) {
    return *nb::inst_ptr<PyEngine>(nb::handle(Of(object).engine_));
  }

  static PyObject* Poll(PyObject* object, PyObject*) {
    const uint64_t number = Of(object).number_;
    if (number == 0) Py_RETURN_TRUE;
    PyObject* const done = Guarded([&] { return PyBool_FromLong(EngineOf(object).Poll(number)); });
    if (done != nullptr || PyErr_ExceptionMatches(engine_error) == 0) return done;
    if (Of(object).number_ != 0) return Raise(failed_, TakeError().get());
    PyErr_Clear();  // another thread has taken the result meanwhile
    Py_RETURN_TRUE;
  }

  static PyObject* Wait(PyObject* object, PyObject* const* args, Py_ssize_t count, PyObject* names) {
    const Py_ssize_t given = count + (names == nullptr ? 0 : PyTuple_Size(names));
    if (given == 0) return Drive(object, kForever, false);
    if (given > 1 ||
        (count == 0 && PyUnicode_CompareWithASCIIString(PyTuple_GetItem(names, 0), "timeout_s") != 0)) {
      PyErr_SetString(PyExc_TypeError, "wait: takes one argument at most, timeout_s");
      return nullptr;
    }
    if (args[0] == Py_None) return Drive(object, kForever, false);
    const double limit_s = PyFloat_AsDouble(args[0]);
    if (limit_s == -1.0 && PyErr_Occurred() != nullptr) return nullptr;
    return limit_s >= 0 ? Drive(object, limit_s, false) : Raise(refused_, args[0]);
  }

  static PyObject* WaitDriving(PyObject* object, PyObject* limit) {
    const double limit_s = PyFloat_AsDouble(limit);
    if (limit_s == -1.0 && PyErr_Occurred() != nullptr) return nullptr;
    return Drive(object, limit_s, true);
  }

  static PyObject* Drive(PyObject* object, double limit_s, bool drives) {
    const uint64_t awaited = Of(object).number_;
    if (awaited == 0) return Raise(refused_, Py_None);
    static PyObject* const on = PyUnicode_InternFromString("on");
    const Owned is_seen(PyObject_GetAttr(spans_, on));
    if (!is_seen) return nullptr;
    const int64_t start_ns = is_seen.get() == Py_True ? NowNs() : 0;
    const Owned waited(Guarded([&] {
      EngineOf(object).Wait(awaited, limit_s, drives);
      return Py_NewRef(Py_None);
    }));
    if (!waited) {
      if (PyErr_ExceptionMatches(engine_error) == 0)
        return nullptr;  // an interrupt: it may be waited for again
      const Owned error = TakeError();
      if (!IsTimeout(error.get())) LetGo(object);
      return Raise(failed_, error.get());
    }
    if (start_ns != 0) {
      const Owned told(PyObject_CallMethod(spans_, "waited", "L", static_cast<long long>(start_ns)));
      if (!told) return nullptr;
    }
    const uint64_t number = std::exchange(Of(object).number_, 0);
    if (number == 0) return Raise(refused_, Py_None);  // another thread was faster
    const Fields taken = std::exchange(Of(object).fields_, {nullptr, nullptr, nullptr});
    const Owned buffers(taken.buffers), result(taken.result), finish(taken.finish);
    PyObject* const made = finish.get() == Py_None ? Py_NewRef(result.get()) : CallingPython([&] {
      return PyObject_CallFunction(finish.get(), "OK", Of(object).engine_,
                                   static_cast<unsigned long long>(number));
    });
    Release(object, number, buffers.get());
    return made;
  }

  // Leaves the buffers to the keeper if the engine may still use them. An exception that is set stays.
  static void LetGo(PyObject* object) {
    auto& self = Of(object);
    const uint64_t number = std::exchange(self.number_, 0);
    const Fields taken = std::exchange(self.fields_, {nullptr, nullptr, nullptr});
    if (number != 0) Release(object, number, taken.buffers);
    Py_XDECREF(taken.buffers);
    Py_XDECREF(taken.result);
    Py_XDECREF(taken.finish);
  }

  static void Release(PyObject* object, uint64_t number, PyObject* buffers) {
    bool done = false;
    try {
      done = EngineOf(object).Release(number);
    } catch (const EngineError&) {
      return;  // a forked child, or a number released before: the engine does not use the buffers
    }
    if (!done && keeper != nullptr) Keep(Of(object).engine_, number, buffers);
  }

  // The exception that is set, which is not any more.
  static Owned TakeError() {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    Py_XDECREF(type);
    Py_XDECREF(trace);
    return Owned(value);
  }

  static bool IsTimeout(PyObject* error) {
    const Owned args(PyObject_GetAttrString(error, "args"));
    if (!args || !PyTuple_Check(args.get()) || PyTuple_Size(args.get()) == 0) return false;
    return PyLong_AsLong(PyTuple_GetItem(args.get(), 0)) == static_cast<long>(Code::kTimeout);
  }

  static PyObject* Raise(PyObject* hook, PyObject* given) {
    const Owned nothing(CallingPython([&] { return PyObject_CallFunctionObjArgs(hook, given, nullptr); }));
    return nullptr;
  }

  static constexpr double kForever = -1;
  static inline PyObject* spans_ = nullptr;
  static inline PyObject* failed_ = nullptr;
  static inline PyObject* refused_ = nullptr;
  static inline PyTypeObject* type_ = nullptr;

  PyObject object_;
  PyObject* weak_;
  PyObject* engine_;
  uint64_t number_;  // of the operation; 0: the result was given
  Fields fields_;
};

}  // namespace kolovod
