"""A state's values are taken apart here, so that each rank's objects stay what they are.

What a script puts into a state it also holds elsewhere: an optimizer has parameters, a schedule an
optimizer, a training function a model. A copy of rank 0's would leave those with the old one. So an
outline is a pickle of the values in which some objects are numbers, wherever in a value they are:

- **Shared objects**, for which somebody has said how they get to other ranks (``State``): models,
  optimizers, schedules.
- **Leaves**, which are sent beside the pickle, and whose contents are put into those of the rank
  that receives them: arrays, tensors, generators of random numbers. Where two of them have the same
  memory on one rank and not on the other, this would change one by the other: new ones are made.
"""

from __future__ import annotations

import collections
import copy
import io
import pickle
import random
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import cloudpickle
import numpy as np

from kolovod.errors import ElasticArgumentError

__all__ = ["Leaf", "Outline", "Packed", "leaves_are"]

KindOf = Callable[[Any, bool], str | None]
"""``kind_of(value, is_whole)``: how a shared object is shared; None: it is none. ``is_whole``: the
object is a value of the state by itself, and not within one."""
_Place = tuple[str, int]
"""Where an object is: in the value of which name, the how-manyth there; -1: it is that value."""


class Leaf(NamedTuple):
    """A type of leaves: how one is compared with another, and changed."""

    put: Callable[[Any, Any], bool]
    """``put(own, new)``: puts the contents of ``new`` into ``own``; False: that is not possible."""
    form: Callable[[Any], tuple[Any, ...]] = lambda value: ()
    """Its shape and the like."""
    memory: Callable[[Any], int] = id
    """Where its memory begins, which others may have, too."""


def _put_array(own: Any, new: Any) -> bool:
    if own.shape != new.shape or own.dtype != new.dtype or not own.flags.writeable:
        return False
    own[...] = new
    return True


def _memory_of_array(array: Any) -> int:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return int(array.ctypes.data)


def _put_bits(own: Any, new: Any) -> bool:
    if type(own.bit_generator) is not type(new.bit_generator):
        return False
    own.bit_generator.state = new.bit_generator.state
    return True


def _put_legacy(own: Any, new: Any) -> bool:
    own.set_state(new.get_state())
    return True


def _put_random(own: Any, new: Any) -> bool:
    own.setstate(new.getstate())
    return True


_leaves: dict[type, Leaf] = {
    np.ndarray: Leaf(
        _put_array,
        lambda array: (array.shape, array.strides, array.dtype.str),
        _memory_of_array,
    ),
    np.random.Generator: Leaf(_put_bits),
    np.random.RandomState: Leaf(_put_legacy),
    random.Random: Leaf(_put_random),
}
_ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes, type, types.FunctionType))


def leaves_are(kinds: Iterable[type], leaf: Leaf) -> None:
    """Have objects of exactly these types be leaves."""
    _leaves.update(dict.fromkeys(kinds, leaf))


class Packed(NamedTuple):
    """An outline as rank 0 sends it; it can be pickled."""

    names: list[str]
    pickles: bytes
    leaves: dict[str, list[Any]]
    forms: dict[str, list[Any]]
    failures: dict[str, str]


class Outline:
    """An outline of values: they are taken apart.

    Attributes, all by name: ``objects``, the shared ones; ``kinds`` of them, with whether each is
    the value by itself; ``results``, what sharing has made of them; ``leaves``; ``failures``, why a
    value cannot be pickled.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        others: Mapping[str, Any],
        kind_of: KindOf,
        tensors_of: Callable[[Any], Iterable[Any]],
        only: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        """``values`` and ``others``: by name; the latter are not pickled, but may be within those.

        ``tensors_of(shared object)``: leaves whose memory it has. ``only``: the shared objects, by
        name, where others are to be pickled.
        """
        self.objects: dict[str, list[Any]] = {name: [] for name in values}
        self.kinds: dict[str, list[tuple[str, bool]]] = {name: [] for name in values}
        self.leaves: dict[str, list[Any]] = {name: [] for name in values}
        self.failures: dict[str, str] = {}
        self._values, self._others = values, others
        self._kind_of, self._tensors_of, self._finds = kind_of, tensors_of, only is None
        self._places = {id(value): (name, -1) for name, value in others.items()}
        self._leaf_places: dict[int, _Place] = {}
        self._seen = collections.Counter[int]()  # of the values themselves
        for name, objects in (only or {}).items():
            self.objects[name] = list(objects)
            self._places.update((id(each), (name, n)) for n, each in enumerate(objects))
        self._pickled = self._pickle()
        self.results = {name: list(objects) for name, objects in self.objects.items()}

    def _pickle(self) -> bytes:
        if self._finds:  # a value before it may refer to it
            for name, value in self._values.items():
                self._name, self._whole = name, value
                self._found(value)
        whole = {id(value) for value in self._values.values()}
        file = io.BytesIO()
        pickler = _Pickler(file, self._number, whole, self._seen)
        for name, value in self._values.items():
            self._name, self._whole = name, value
            try:
                pickler.dump(value)
            except ElasticArgumentError:
                raise
            except Exception as error:  # whatever the object's own __reduce__ raises
                self.failures[name] = f"{type(error).__name__}: {error}"
                pickler = _Pickler(file, self._number, whole, self._seen)
        return file.getvalue()

    def _number(self, value: Any) -> tuple[str, int, bool] | None:
        """Return the number that stands for ``value``; None: it is pickled."""
        if type(value) in _leaves:
            place = self._leaf_places.get(id(value))
            if place is None:
                leaves = self.leaves[self._name]
                place = self._leaf_places[id(value)] = self._name, len(leaves)
                leaves.append(value)  # and so its id stays its own
            return *place, True
        place = self._places.get(id(value)) or (self._found(value) if self._finds else None)
        return None if place is None else (*place, False)

    def _found(self, value: Any) -> _Place | None:
        """Return the place of an object that is shared, and was not known yet."""
        if type(value) in _ATOMS or id(value) in self._places:
            return None
        is_whole = value is self._whole
        kind = self._kind_of(value, is_whole)
        if kind is None:
            return None
        objects = self.objects[self._name]
        place = self._places[id(value)] = self._name, len(objects)
        objects.append(value)
        self.kinds[self._name].append((kind, is_whole))
        return place

    def shared(self, name: str | None = None) -> list[tuple[Any, tuple[str, bool]]]:
        """Return the shared objects, all or those of a value, with their kinds."""
        names = list(self._values) if name is None else [name]
        return [
            pair
            for each in names
            for pair in zip(self.objects[each], self.kinds[each], strict=True)
        ]

    def whole(self) -> dict[str, Any]:
        """Return the values that are shared objects by themselves."""
        return {
            name: self._as_own(name, self.results[name][0])
            for name, kinds in self.kinds.items()
            if kinds and kinds[0][1]
        }

    def without(self, names: Sequence[str]) -> Outline:
        """Return one in which the shared objects of ``names`` are pickled; itself without names."""
        if not names:
            return self
        only = {name: each for name, each in self.objects.items() if name not in set(names)}
        return Outline(self._values, self._others, self._kind_of, self._tensors_of, only)

    def packed(self) -> Packed:
        """Return what other ranks need."""
        forms = self._forms()
        return Packed(list(self._values), self._pickled, self.leaves, forms, self.failures)

    def _forms(self) -> dict[str, list[Any]]:
        """Return the form of each leaf, and which was the first with the same memory."""
        first: dict[int, Any] = {}
        for name, objects in self.objects.items():
            for n, each in enumerate(objects):
                for k, tensor in enumerate(self._tensors_of(each)):
                    leaf = _leaves.get(type(tensor))
                    if leaf is not None:
                        first.setdefault(leaf.memory(tensor), (name, n, k))
        forms: dict[str, list[Any]] = {}
        for name, leaves in self.leaves.items():
            forms[name] = []
            for n, value in enumerate(leaves):
                leaf = _leaves[type(value)]
                of = first.setdefault(leaf.memory(value), (name, n))
                forms[name].append((type(value).__name__, leaf.form(value), of))
        return forms

    def take(self, packed: Packed) -> dict[str, Any]:
        """Return rank 0's values, as this rank's objects where it has such."""
        own_forms = self._forms()
        leaves = dict(packed.leaves)
        for name, received in packed.leaves.items():
            if own_forms.get(name) == packed.forms[name]:
                leaves[name] = [
                    own if _leaves[type(own)].put(own, new) else new
                    for own, new in zip(self.leaves[name], received, strict=True)
                ]

        def find(number: Any) -> Any:
            name, n, is_leaf = number
            if n < 0:
                return self._others[name]
            return leaves[name][n] if is_leaf else self.results[name][n]

        unpickler = _Unpickler(io.BytesIO(packed.pickles), find)
        return {name: self._as_own(name, unpickler.load()) for name in packed.names}

    def copies(self) -> Callable[[], dict[str, Any]]:
        """Return a function that returns the values as they are now.

        They are this rank's objects. Shared ones are as they are then, leaves are changed back.
        """
        leaves = [leaf for each in self.leaves.values() for leaf in each]
        objects = [each for objects in self.objects.values() for each in objects]
        kept = [copy.deepcopy(leaf) for leaf in leaves]
        stay = {id(each): each for each in (*leaves, *objects, *self._others.values())}
        values = copy.deepcopy(dict(self._values), dict(stay))

        def restore() -> dict[str, Any]:
            for leaf, before in zip(leaves, kept, strict=True):
                _leaves[type(leaf)].put(leaf, before)
            again = copy.deepcopy(values, dict(stay))
            return {name: self._as_own(name, value) for name, value in again.items()}

        return restore

    def _as_own(self, name: str, new: Any) -> Any:
        """Return ``new``: its contents in this rank's value of that name, unless others have it."""
        own = self._values.get(name)
        if own is new or self._seen[id(own)] > 1 or not _put_into(own, new):
            return new
        return own


def _put_into(own: Any, new: Any) -> bool:
    """Put the contents of ``new`` into ``own``; False: that is not possible."""
    kind, other = type(own), type(new)
    # By name, since a class of the script itself is pickled with the object.
    if (kind.__module__, kind.__name__) != (other.__module__, other.__name__):
        return False
    if kind in (list, bytearray):
        own[:] = new
    elif kind in (dict, set, collections.OrderedDict, collections.defaultdict, collections.Counter):
        own.clear()
        own.update(new)
    elif kind is collections.deque and own.maxlen == new.maxlen:
        own.clear()
        own.extend(new)
    elif kind is types.SimpleNamespace or _is_plain(kind):
        own.__dict__.clear()
        own.__dict__.update(new.__dict__)
    else:
        return False
    return True


def _is_plain(kind: type) -> bool:
    """Return whether all that an object of this class is, is in its ``__dict__``."""
    frozen = getattr(getattr(kind, "__dataclass_params__", None), "frozen", False)
    own_ways = {"__slots__", "__reduce__", "__reduce_ex__"}
    return (
        kind.__dictoffset__ != 0
        and not frozen
        and all(
            base.__flags__ & _HEAP_TYPE and not own_ways & vars(base).keys()
            for base in kind.__mro__[:-1]
        )
    )


_HEAP_TYPE = 1 << 9
"""The flag of classes that Python code has made: ``Py_TPFLAGS_HEAPTYPE``."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(
        self,
        file: io.BytesIO,
        number: Callable[[Any], object],
        watched: set[int],
        seen: collections.Counter[int],
    ) -> None:
        super().__init__(file)
        self._of, self._watched, self._seen = number, watched, seen

    def persistent_id(self, value: Any) -> object:
        if type(value) in _ATOMS:
            return None
        if id(value) in self._watched:
            self._seen[id(value)] += 1
        return self._of(value)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, find: Callable[[Any], Any]) -> None:
        super().__init__(file)
        self._find = find

    def persistent_load(self, number: Any) -> Any:
        return self._find(number)
