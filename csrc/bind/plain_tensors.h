// What is asked of several tensors, as one call for all of them: the tensors of a group, and the gradients
// and parameters of a step of PyTorch. Python's own loops, which are out of the caches after each layer's
// backward, take longer than the exchange.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "base/memory_facts.h"
#include "bind/array_readers.h"

namespace kolovod {

namespace nb = nanobind;

// An attribute of `object`. Throws what asking for it raises.
inline Owned Attribute(const Owned& object, PyObject* name) {
  Owned found(PyObject_GetAttr(object.get(), name));
  if (!found) throw nb::python_error();
  return found;
}
inline Owned GradOf(const Owned& parameter) {
  static PyObject* const name = PyUnicode_InternFromString("grad");
  return Attribute(parameter, name);
}
// How often the tensor was written.
inline Owned VersionOf(const Owned& tensor) {
  static PyObject* const name = PyUnicode_InternFromString("_version");
  return Attribute(tensor, name);
}

// A reference of its own: to ask a tensor may run code of Python's, which may change the list.
inline Owned ItemOf(const nb::list& list, size_t place) {
  Owned item(Py_XNewRef(PyList_GetItem(list.ptr(), static_cast<Py_ssize_t>(place))));
  if (!item) throw nb::python_error();
  return item;
}

// ArrayReader::Read, which throws an exception that is set.
inline bool ReadPlain(const ArrayReader& reader, const Owned& tensor, bool written, ArrayView* view) {
  const bool is_plain = reader.Read(tensor.get(), written, view);
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
  return is_plain;
}
inline bool ReadPlain(const Owned& tensor, ArrayView* view) {
  return ReadPlain(TorchTensors::Instance(), tensor, /*written=*/true, view);
}

// (dtype, shape, input address, output address), as Engine.submit gets it.
inline nb::tuple EntryOf(const ArrayView& view, void* output) {
  const nb::object shape = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(view.shape.size())));
  for (size_t d = 0; shape.is_valid() && d < view.shape.size(); ++d) {
    PyTuple_SetItem(shape.ptr(), static_cast<Py_ssize_t>(d), PyLong_FromLongLong(view.shape[d]));
  }
  return nb::make_tuple(static_cast<int>(view.dtype), shape, reinterpret_cast<uintptr_t>(view.address),
                        reinterpret_cast<uintptr_t>(output));
}

// The entries of a group whose results replace its tensors, or for `makes` come into new ones; and the new
// ones. None, and nothing has happened: one of the tensors is to be looked at more closely.
inline nb::object PlainViews(const std::string& framework, const nb::list& tensors, bool makes) {
  const ArrayReader& reader = framework == "torch" ? static_cast<const ArrayReader&>(TorchTensors::Instance())
                                                   : NumpyArrays::Instance();
  std::vector<ArrayView> views(tensors.size());
  for (size_t i = 0; i < views.size(); ++i) {
    if (!ReadPlain(reader, ItemOf(tensors, i), !makes, &views[i])) return nb::none();
  }
  nb::list entries, made;
  for (size_t i = 0; i < views.size(); ++i) {
    const Owned tensor = ItemOf(tensors, i);
    if (!makes) {
      if (!reader.Claim(tensor.get())) throw nb::python_error();
      entries.append(EntryOf(views[i], views[i].address));
      continue;
    }
    const Owned output(reader.MakeLike(tensor.get(), views[i]));
    if (!output) throw nb::python_error();
    ArrayView target;
    if (!ReadPlain(reader, output, /*written=*/true, &target)) return nb::none();
    entries.append(EntryOf(views[i], target.address));
    made.append(nb::handle(output.get()));
  }
  return nb::make_tuple(entries, made);
}

// The gradients of the parameters at `indices`, as the engine gets them and as Sender keeps them
// (kolovod/torch/buckets.py: Item). None: one is to be looked at more closely.
inline nb::object PlainGradients(const nb::list& parameters, const nb::list& indices) {
  nb::list entries, items;
  for (size_t i = 0; i < indices.size(); ++i) {
    const nb::object index = nb::borrow(indices[i]);
    const Owned grad = GradOf(ItemOf(parameters, nb::cast<size_t>(index)));
    ArrayView view;
    if (!ReadPlain(grad, &view)) return nb::none();
    const Owned version = VersionOf(grad);
    entries.append(EntryOf(view, view.address));
    items.append(nb::make_tuple(index, nb::handle(grad.get()), nb::handle(version.get()),
                                nb::handle(grad.get()), nb::none()));
  }
  return nb::make_tuple(entries, items);
}

// The place among `items`, as PlainGradients makes them, of the first whose parameter has another gradient by
// now, or whose gradient was written since. None: there is none.
inline std::optional<size_t> FirstChanged(const nb::list& parameters, const nb::list& items) {
  for (size_t i = 0; i < items.size(); ++i) {
    const nb::tuple item = nb::borrow<nb::tuple>(items[i]);
    const Owned grad = GradOf(ItemOf(parameters, nb::cast<size_t>(item[0])));
    if (grad.get() != nb::object(item[1]).ptr()) return i;
    if (grad.get() == Py_None) continue;
    const Owned version = VersionOf(grad);
    const int is_same = PyObject_RichCompareBool(version.get(), nb::object(item[2]).ptr(), Py_EQ);
    if (is_same < 0) throw nb::python_error();
    if (is_same == 0) return i;
  }
  return std::nullopt;
}

// A hash of the bytes from `begin` to `end` of all tensors, counted as if they lay one after the other. None:
// a tensor among them has to be looked at more closely.
inline std::optional<uint64_t> HashTensors(const nb::list& tensors, uint64_t begin, uint64_t end) {
  uint64_t hash = 0, at = 0;
  for (size_t i = 0; i < tensors.size() && at < end; ++i) {
    ArrayView view;
    if (!ReadPlain(ItemOf(tensors, i), &view)) return std::nullopt;
    uint64_t bytes = SizeOf(view.dtype);
    for (const int64_t size : view.shape) bytes *= static_cast<uint64_t>(size);
    const uint64_t first = std::max(begin, at), last = std::min(end, at + bytes);
    if (first < last) {
      hash = HashMemory(static_cast<const char*>(view.address) + (first - at), last - first, hash);
    }
    at += bytes;
  }
  return hash;
}

}  // namespace kolovod
