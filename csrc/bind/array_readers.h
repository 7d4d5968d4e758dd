// Arrays and tensors as they lie in memory: to ask for address and shape by attributes of Python takes half a
// microsecond.
#pragma once

#include <Python.h>

#include <utility>
#include <vector>

#include "base/dtype_traits.h"
#include "bind/call_lines.h"

namespace kolovod {

// What an operation needs to know of a tensor.
struct ArrayView {
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;
  void* address = nullptr;
};

// Reads the tensors of one framework. With the GIL.
class ArrayReader {
 public:
  ArrayReader() = default;
  ArrayReader(const ArrayReader&) = delete;
  ArrayReader& operator=(const ArrayReader&) = delete;
  virtual ~ArrayReader() = default;

  // False: the tensor is not one that the engine can read, or with `written` write, where it is; or an
  // exception is set, which asking the tensor has raised (or a signal handler meanwhile).
  virtual bool Read(PyObject* tensor, bool written, ArrayView* view) const = 0;
  // Tells the framework that what was read to be written will be. False: an exception is set.
  virtual bool Claim(PyObject* tensor) const = 0;

  // A new reference to an uninitialised tensor like this one; null: an exception is set.
  virtual PyObject* MakeLike(PyObject* tensor, const ArrayView& view) const {
    return MakeOfShape(tensor, view.shape);
  }
  // The same, of another shape.
  PyObject* MakeOfShape(PyObject* tensor, const std::vector<int64_t>& shape) const {
    const Owned sizes(PyTuple_New(static_cast<Py_ssize_t>(shape.size())));
    for (size_t d = 0; sizes && d < shape.size(); ++d) {
      PyObject* const size = PyLong_FromLongLong(shape[d]);
      if (size == nullptr || PyTuple_SetItem(sizes.get(), static_cast<Py_ssize_t>(d), size) != 0) {
        return nullptr;
      }
    }
    return sizes ? CallingPython([&] { return Make(tensor, sizes.get()); }) : nullptr;
  }

 protected:
  virtual PyObject* Make(PyObject* tensor, PyObject* sizes) const = 0;
  // `samples`: tuples of a tensor, the number of its dtype, its shape and address, and whether Read takes it
  // as input and as output. False: one is not as it says.
  bool Take(PyObject* samples) {
    bool is_right = PyList_Size(samples) > 0;
    for (Py_ssize_t i = 0; is_right && i < PyList_Size(samples); ++i) {
      is_right = IsAsSaid(PyList_GetItem(samples, i));
    }
    PyErr_Clear();
    return is_right;
  }

 private:
  bool IsAsSaid(PyObject* sample) const {
    PyObject *tensor, *shape;
    int number, is_input, is_output;
    unsigned long long address;
    if (PyArg_ParseTuple(sample, "OiO!Kpp", &tensor, &number, &PyTuple_Type, &shape, &address, &is_input,
                         &is_output) == 0) {
      PyErr_Clear();
      return false;
    }
    ArrayView view;
    if (Read(tensor, /*written=*/true, &view) != (is_output != 0)) return false;
    if (Read(tensor, /*written=*/false, &view) != (is_input != 0)) return false;
    if (is_input == 0) return true;
    bool is_right = static_cast<int>(view.dtype) == number &&
                    reinterpret_cast<uintptr_t>(view.address) == address &&
                    static_cast<Py_ssize_t>(view.shape.size()) == PyTuple_Size(shape);
    for (size_t d = 0; is_right && d < view.shape.size(); ++d) {
      is_right = PyLong_AsLongLong(PyTuple_GetItem(shape, static_cast<Py_ssize_t>(d))) == view.shape[d];
    }
    return is_right;
  }
};

// Reads what NumPy's interface for C promises of an array's fields since its first version. Use checks that
// on samples, so that nothing is read where it does not hold.
class NumpyArrays : public ArrayReader {
 public:
  // Never destroyed, like CallLines.
  static NumpyArrays& Instance() {
    static auto* const instance = new NumpyArrays;
    return *instance;
  }

  // `dtypes`: by the dtype, its number. False, and no array is taken: a sample is not as it says.
  bool Use(PyObject* ndarray, PyObject* dtypes, PyObject* empty, PyObject* samples) {
    ndarray_ = Owned(Py_NewRef(ndarray));
    empty_ = Owned(Py_NewRef(empty));
    dtypes_.clear();
    PyObject *dtype, *number;
    for (Py_ssize_t at = 0; PyDict_Next(dtypes, &at, &dtype, &number) != 0;) {
      dtypes_.emplace_back(Owned(Py_NewRef(dtype)), static_cast<DType>(PyLong_AsLong(number)));
    }
    const bool is_right = Take(samples);
    if (!is_right) ndarray_ = Owned(nullptr);
    return is_right;
  }

  bool Read(PyObject* array, bool written, ArrayView* view) const override {
    if (reinterpret_cast<PyObject*>(Py_TYPE(array)) != ndarray_.get()) return false;
    const Fields& fields = *reinterpret_cast<const Fields*>(array);
    const unsigned flags = static_cast<unsigned>(fields.flags);
    const unsigned needed = kContiguous | kAligned | (written ? kWriteable : 0);
    if ((flags & needed) != needed || (written && (flags & kWarns) != 0)) return false;
    for (const auto& [dtype, number] : dtypes_) {
      if (dtype.get() != fields.dtype) continue;
      view->dtype = number;
      view->shape.assign(fields.shape, fields.shape + fields.dimensions);
      view->address = fields.data;
      return true;
    }
    return false;
  }

  bool Claim(PyObject*) const override { return true; }

 protected:
  PyObject* Make(PyObject* array, PyObject* sizes) const override {
    PyObject* const dtype = reinterpret_cast<const Fields*>(array)->dtype;
    return PyObject_CallFunctionObjArgs(empty_.get(), sizes, dtype, nullptr);
  }

 private:
  struct Fields {
    PyObject object;
    void* data;
    int dimensions;
    const Py_ssize_t* shape;
    const Py_ssize_t* strides;
    PyObject* base;
    PyObject* dtype;
    int flags;
  };
  // NPY_ARRAY_C_CONTIGUOUS and so on; the last: whoever writes is to be warned.
  static constexpr unsigned kContiguous = 0x1, kAligned = 0x100, kWriteable = 0x400, kWarns = 0x80000000;

  Owned ndarray_{nullptr};  // null: none is taken
  Owned empty_{nullptr};
  std::vector<std::pair<Owned, DType>> dtypes_;
};

// Reads what PyTorch tells by DLPack's table of functions (`__dlpack_c_exchange_api__`, DLPack 1.2 and
// later), as https://dmlc.github.io/dlpack/latest/c_api.html defines it.
class TorchTensors : public ArrayReader {
 public:
  static TorchTensors& Instance() {
    static auto* const instance = new TorchTensors;
    return *instance;
  }

  // `types`: the classes of tensors. `exchange`: the table. `claim`: is called with a tensor that will be
  // written. False, and no tensor is taken: a sample is not as it says, or the table is of another version.
  bool Use(PyObject* types, PyObject* exchange, PyObject* empty_like, PyObject* claim, PyObject* samples) {
    const auto* const table =
        static_cast<const Exchange*>(PyCapsule_GetPointer(exchange, "dlpack_exchange_api"));
    PyErr_Clear();
    types_.clear();
    if (table == nullptr || table->major != 1 || table->describe == nullptr) return false;
    describe_ = table->describe;
    empty_like_ = Owned(Py_NewRef(empty_like));
    claim_ = Owned(Py_NewRef(claim));
    for (Py_ssize_t i = 0; i < PyTuple_Size(types); ++i) {
      types_.emplace_back(Py_NewRef(PyTuple_GetItem(types, i)));
    }
    const bool is_right = Take(samples);
    if (!is_right) types_.clear();
    return is_right;
  }

  bool Read(PyObject* tensor, bool written, ArrayView* view) const override {
    bool is_known = false;
    for (const Owned& type : types_) is_known |= reinterpret_cast<PyObject*>(Py_TYPE(tensor)) == type.get();
    if (!is_known) return false;
    // Autograd goes back through new results.
    if (!written && !IsFalse(PyObject_GetAttr(tensor, requires_grad_.get()))) return false;
    // Its memory holds the values' opposites.
    if (!IsFalse(PyObject_CallMethodObjArgs(tensor, is_neg_.get(), nullptr))) return false;
    Description found{};
    if (describe_(tensor, &found) != 0) {  // it has no memory of its own
      PyErr_Clear();
      return false;
    }
    int64_t elements = 1;
    for (int d = found.dimensions - 1; d >= 0; --d) {
      if (found.shape[d] != 1 && found.strides[d] != elements && elements != 0) return false;
      elements *= found.shape[d];
    }
    if (found.device != kCpu || found.lanes != 1 || (found.data == nullptr && elements != 0)) return false;
    if (!ToDType(found.code, found.bits, &view->dtype)) return false;
    view->shape.assign(found.shape, found.shape + found.dimensions);
    view->address = static_cast<char*>(found.data) + found.byte_offset;
    return true;
  }

  bool Claim(PyObject* tensor) const override {
    const Owned nothing(
        CallingPython([&] { return PyObject_CallFunctionObjArgs(claim_.get(), tensor, nullptr); }));
    return static_cast<bool>(nothing);
  }

  // Takes half the time of new_empty.
  PyObject* MakeLike(PyObject* tensor, const ArrayView&) const override {
    return CallingPython([&] { return PyObject_CallFunctionObjArgs(empty_like_.get(), tensor, nullptr); });
  }

 protected:
  PyObject* Make(PyObject* tensor, PyObject* sizes) const override {
    return PyObject_CallMethodObjArgs(tensor, new_empty_.get(), sizes, nullptr);
  }

 private:
  // DLTensor.
  struct Description {
    void* data;
    int32_t device, device_id;
    int32_t dimensions;
    uint8_t code, bits;
    uint16_t lanes;
    const int64_t* shape;
    const int64_t* strides;  // in elements
    uint64_t byte_offset;
  };
  // DLPackExchangeAPI.
  struct Exchange {
    uint32_t major, minor;
    const void* older;
    void (*unused[3])();
    int (*describe)(void* tensor, Description* to);  // dltensor_from_py_object_no_sync
  };
  static constexpr int32_t kCpu = 1;

  static bool IsFalse(PyObject* answer) { return Owned(answer).get() == Py_False; }

  static bool ToDType(uint8_t code, uint8_t bits, DType* dtype) {
    enum Code : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kBool = 6 };
    static constexpr struct {
      Code code;
      uint8_t bits;
      DType dtype;
    } kKnown[] = {
        {kFloat, 32, DType::kFloat32}, {kBfloat, 16, DType::kBFloat16}, {kFloat, 16, DType::kFloat16},
        {kFloat, 64, DType::kFloat64}, {kInt, 64, DType::kInt64},       {kInt, 32, DType::kInt32},
        {kInt, 16, DType::kInt16},     {kInt, 8, DType::kInt8},         {kUInt, 16, DType::kUInt16},
        {kUInt, 8, DType::kUInt8},     {kBool, 8, DType::kBool},
    };
    for (const auto& known : kKnown) {
      if (known.code != code || known.bits != bits) continue;
      *dtype = known.dtype;
      return true;
    }
    return false;
  }

  std::vector<Owned> types_;  // none: no tensor is taken
  int (*describe_)(void*, Description*) = nullptr;
  Owned empty_like_{nullptr}, claim_{nullptr};
  const Owned requires_grad_{PyUnicode_InternFromString("requires_grad")};
  const Owned is_neg_{PyUnicode_InternFromString("is_neg")};
  const Owned new_empty_{PyUnicode_InternFromString("new_empty")};
};

}  // namespace kolovod
