// Engine.submit and Engine.run: what every operation of Python goes through. They are functions of Python's
// own calling convention: to convert eleven arguments nanobind takes as long as the engine takes for a small
// operation.
#pragma once

#include <Python.h>
#include <nanobind/nanobind.h>

#include <utility>
#include <vector>

#include "bind/call_lines.h"
#include "bind/further_dtypes.h"
#include "bind/py_engine.h"

namespace kolovod {

// A Python exception is set.
struct ErrorIsSet {};

inline int64_t ToInteger(PyObject* object, const char* what) {
  const int64_t value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Format(PyExc_TypeError, "%s: need an integer of 64 bits, not %R", what, object);
    throw ErrorIsSet();
  }
  return value;
}

inline int ToSmallInteger(PyObject* object, const char* what) {
  const int64_t value = ToInteger(object, what);
  if (value < INT32_MIN || value > INT32_MAX) throw nb::value_error(what);
  return static_cast<int>(value);
}

inline double ToDouble(PyObject* object) {
  const double value = PyFloat_AsDouble(object);
  if (value == -1.0 && PyErr_Occurred() != nullptr) throw ErrorIsSet();
  return value;
}

inline bool ToBool(PyObject* object) {
  const int value = PyObject_IsTrue(object);
  if (value < 0) throw ErrorIsSet();
  return value != 0;
}

inline uintptr_t ToAddress(PyObject* object) {
  const unsigned long long value = PyLong_AsUnsignedLongLong(object);
  if (value == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr) throw ErrorIsSet();
  return static_cast<uintptr_t>(value);
}

// Calls take(index, item) for each item of a tuple or list, or of what else Python can make a list of.
template <class Take>
void ForEach(PyObject* sequence, const Take& take) {
  if (PyTuple_Check(sequence)) {
    const Py_ssize_t count = PyTuple_Size(sequence);
    for (Py_ssize_t i = 0; i < count; ++i) take(static_cast<size_t>(i), PyTuple_GetItem(sequence, i));
    return;
  }
  // To convert an item may run code of Python's, which may change a list.
  const Owned list(PyList_Check(sequence) ? Py_NewRef(sequence) : PySequence_List(sequence));
  if (!list) throw ErrorIsSet();
  for (Py_ssize_t i = 0; i < PyList_Size(list.get()); ++i) {
    const Owned item(Py_XNewRef(PyList_GetItem(list.get(), i)));
    if (!item) throw ErrorIsSet();
    take(static_cast<size_t>(i), item.get());
  }
}

// (dtype, shape, input address, output address), for `request`, of which all but the tensors is known.
inline SubmittedTensor ToTensor(PyObject* item, const Request& request) {
  if (!PyTuple_Check(item) || PyTuple_Size(item) != 4 || !PyTuple_Check(PyTuple_GetItem(item, 1))) {
    throw nb::value_error("tensor: need (dtype, shape, input, output)");
  }
  SubmittedTensor tensor;
  const int code = ToSmallInteger(PyTuple_GetItem(item, 0), "tensor: unknown dtype number");
  const int dtype = code < 0 ? code : code % kOnDevice;
  const int codec = code < 0 ? 0 : code >> kCodecShift & 15;
  if (codec >= kCodecCount) throw nb::value_error("tensor: unknown codec number");
  tensor.meta.codec = static_cast<Codec>(codec);
  if (code > 0 && (code & kOnDevice) != 0) {
    tensor.meta.device = Device::kGpu;
    tensor.gpu = code >> kDeviceShift;
  }
  const FurtherDType* const further = FindFurther(dtype);
  if (further != nullptr) {
    const bool has_factors = request.prescale != 1.0 || request.postscale != 1.0;
    const std::string reason = WhyNot(*further, request.verb, request.op, has_factors);
    if (!reason.empty()) throw EngineError{static_cast<int>(Code::kInvalidArgument), reason};
    tensor.meta.dtype = further->dtype;
  } else if (dtype < 0 || dtype >= kDTypeCount) {
    throw nb::value_error("tensor: unknown dtype number");
  } else {
    tensor.meta.dtype = static_cast<DType>(dtype);
  }
  PyObject* const shape = PyTuple_GetItem(item, 1);
  const auto dims = static_cast<size_t>(PyTuple_Size(shape));
  tensor.meta.shape.reserve(dims + 1);
  for (size_t d = 0; d < dims; ++d) {
    const int64_t dim = ToInteger(PyTuple_GetItem(shape, static_cast<Py_ssize_t>(d)), "tensor: dimension");
    if (dim < 0) throw nb::value_error("tensor: negative dimension");
    tensor.meta.shape.push_back(dim);
  }
  // A scalar of a verb that joins or splits rows stays one: the engine says what is wrong.
  const bool has_rows = TraitsOf(request.verb).makes_outputs;
  if (further != nullptr && further->kind == FurtherDType::Kind::kPair && (dims > 0 || !has_rows)) {
    tensor.meta.shape.push_back(2);
  }
  tensor.in = reinterpret_cast<const void*>(ToAddress(PyTuple_GetItem(item, 2)));
  tensor.out = reinterpret_cast<void*>(ToAddress(PyTuple_GetItem(item, 3)));
  return tensor;
}

struct Submission {
  Request request;
  std::vector<SubmittedTensor> tensors;
};

// What a Request of Python says, in the order of the arguments of submit. Null: the default.
struct SubmissionArguments {
  PyObject* const* first;  // verb, name, tensors, op, prescale, postscale, root
  PyObject* splits;
  PyObject* out_bytes;
  PyObject* tells_lines;
};

inline Submission ToSubmission(const SubmissionArguments& given) {
  Submission made;
  Request& request = made.request;
  PyObject* const* const first = given.first;
  const int verb = ToSmallInteger(first[0], "unknown verb number");
  const int op = ToSmallInteger(first[3], "unknown op number");
  if (verb < 0 || verb >= kVerbCount) throw nb::value_error("unknown verb number");
  if (op < 0 || op >= kOpCount) throw nb::value_error("unknown op number");
  request.verb = static_cast<Verb>(verb);
  request.op = static_cast<Op>(op);
  if (first[1] != Py_None) {
    if (!PyUnicode_Check(first[1])) {
      PyErr_SetString(PyExc_TypeError, "name: need a str or None");
      throw ErrorIsSet();
    }
    Py_ssize_t length = 0;
    const char* const name = PyUnicode_AsUTF8AndSize(first[1], &length);
    if (name == nullptr) throw ErrorIsSet();
    request.name.assign(name, static_cast<size_t>(length));
  }
  request.prescale = ToDouble(first[4]);
  request.postscale = ToDouble(first[5]);
  request.root = ToSmallInteger(first[6], "root: out of range");
  if (given.splits != nullptr) {
    ForEach(given.splits,
            [&](size_t, PyObject* item) { request.splits.push_back(ToInteger(item, "splits")); });
  }
  ForEach(first[2], [&](size_t, PyObject* item) { made.tensors.push_back(ToTensor(item, request)); });
  // Ranks come to a barrier from different lines on purpose: one after the others.
  if (request.name.empty() && !made.tensors.empty() && given.tells_lines != nullptr &&
      ToBool(given.tells_lines)) {
    request.called_from = CallLines::Instance().Here();
  }
  if (given.out_bytes == nullptr) return made;
  size_t sizes = 0;
  ForEach(given.out_bytes, [&](size_t i, PyObject* item) {
    sizes = i + 1;
    if (i < made.tensors.size()) made.tensors[i].out_bytes = ToAddress(item);
  });
  if (sizes != 0 && sizes != made.tensors.size()) {
    throw nb::value_error("out_bytes: need one for each tensor, or none");
  }
  return made;
}

inline PyObject* engine_error = nullptr;  // the class of Python
// Called with (engine, handle, buffers) for an operation that may go on although its caller does not.
inline PyObject* keeper = nullptr;

inline void SetEngineError(const EngineError& error) {
  PyErr_SetObject(engine_error, nb::make_tuple(error.code, ToText(error.message)).ptr());
}

// What `call` returns; null, and a Python exception set, if it throws.
template <class Call>
PyObject* Guarded(const Call& call) {
  try {
    return call();
  } catch (const ErrorIsSet&) {
  } catch (const EngineError& error) {
    SetEngineError(error);
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const nb::builtin_exception& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

inline PyObject* SubmitCall(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return Guarded([&]() -> PyObject* {
    if (count < 8 || count > 11) throw nb::value_error("submit: need 8 to 11 arguments");
    PyEngine& engine = *nb::inst_ptr<PyEngine>(self);
    engine.Check();
    const auto given = [&](Py_ssize_t i) { return i < count ? args[i] : nullptr; };
    Submission made = ToSubmission({args, given(8), given(9), given(10)});
    const bool blocking = ToBool(args[7]);
    return PyLong_FromUnsignedLongLong(
        engine.Submit(std::move(made.request), std::move(made.tensors), blocking));
  });
}

// The exception that is set stays.
inline void Keep(PyObject* self, uint64_t handle, PyObject* buffers) {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyObject* const kept = CallingPython([&] {
    return PyObject_CallFunction(keeper, "OKO", self, static_cast<unsigned long long>(handle), buffers);
  });
  Py_XDECREF(kept);
  if (kept == nullptr) PyErr_WriteUnraisable(keeper);
  PyErr_Restore(type, value, trace);
}

inline PyObject* RunCall(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  uint64_t handle = 0;
  PyObject* const result = Guarded([&]() -> PyObject* {
    if (count != 11) throw nb::value_error("run: need 11 arguments");
    PyObject* const finish = args[10];
    PyEngine& engine = *nb::inst_ptr<PyEngine>(self);
    engine.Check();
    Submission made = ToSubmission({args, args[7], nullptr, args[8]});
    engine.SubmitAndWait(self, std::move(made.request), std::move(made.tensors), &handle);
    Owned made_by_finish(finish == Py_None ? Py_NewRef(Py_None) : CallingPython([&] {
      return PyObject_CallFunction(finish, "OK", self, static_cast<unsigned long long>(handle));
    }));
    if (!made_by_finish) throw ErrorIsSet();
    if (handle != 0) engine.Release(std::exchange(handle, 0));
    return Py_NewRef(made_by_finish.get());
  });
  if (result == nullptr && handle != 0 && keeper != nullptr) Keep(self, handle, args[9]);
  return result;
}

inline void AddCalls(const nb::handle& engine_class) {
  static PyMethodDef calls[] = {
      {"submit", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&SubmitCall)), METH_FASTCALL,
       nullptr},
      {"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&RunCall)), METH_FASTCALL, nullptr},
  };
  for (PyMethodDef& call : calls) {
    PyObject* const method = PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(engine_class.ptr()), &call);
    if (method == nullptr) throw nb::python_error();
    engine_class.attr(call.ml_name) = nb::steal(method);
  }
}

}  // namespace kolovod
