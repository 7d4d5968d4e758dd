"""From a verb's arguments to the engine: what all verbs do alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from time import monotonic_ns
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from kolovod import _native
from kolovod.core import spans
from kolovod.core.frontend import Frontend
from kolovod.core.handles import Handle, keeper
from kolovod.core.ops import Op
from kolovod.errors import InvalidArgumentError, from_engine

T = TypeVar("T")
Finish = Callable[[_native.Engine, int], T]

EngineTensor = tuple[int, tuple[int, ...], int, int]
"""dtype, shape, input address, output address (0, or no ``out_bytes``: the engine makes outputs of
other sizes than the inputs)"""


class WorldLike(Protocol):
    """What verbs need to know about the world."""

    @property
    def engine(self) -> _native.Engine:
        """The engine of this rank."""
        ...

    @property
    def rank(self) -> int:
        """The number of this rank."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...


class Group(Protocol):
    """Some ranks of the world: what verbs need of a ``kolovod.ProcessSet``."""

    def membership(self) -> WorldLike:
        """Its engine, and rank and size within it. Raises InvalidArgumentError for non-members."""
        ...

    @property
    def ranks(self) -> list[int]:
        """World ranks of the members, ascending."""
        ...

    def position(self, rank: int) -> int:
        """Where world rank ``rank`` stands in it. Raises InvalidArgumentError if nowhere."""
        ...


class Submitter(Generic[T]):
    """Submits requests and makes their results; the verbs are in Collectives."""

    _handle_type: type[Handle[Any]] = Handle

    def __init__(self, frontend: Frontend[T], world: Callable[[], WorldLike]) -> None:
        """``world`` is asked on every call, so that a new world needs no new Collectives."""
        self.frontend = frontend
        self.world = world
        self._view = frontend.view
        self._empty_like = frontend.empty_like

    def membership(self, process_set: Group | None) -> WorldLike:
        """The engine to use, and this rank's place in it. InvalidArgumentError for no set."""
        if process_set is None:
            return self.world()
        try:
            membership = process_set.membership
        except AttributeError:
            raise no_process_set(process_set) from None
        return membership()

    def _run(
        self,
        process_set: Group | None,
        verb: int,
        name: str | None,
        entries: list[EngineTensor],
        op: int,
        prescale: float,
        postscale: float,
        root: int,
        buffers: object,
        finish: Callable[[_native.Engine, int], Any] | None = None,
        splits: Sequence[int] = (),
    ) -> Any:
        """Submit, wait, and make the result by ``finish(engine, number)``, else None.

        Three calls into the engine and nothing else on the good path. ``op + 0`` is the plain int
        of an Op, which the binding takes much faster.
        """
        engine = self.membership(process_set).engine
        if keeper:
            keeper.sweep()
        number = 0
        start_ns = monotonic_ns() if spans.log.on else 0
        try:
            number = engine.submit(
                verb, name or "", entries, op + 0, prescale, postscale, root, True, splits
            )
            engine.wait(number, -1.0)
            result = None if finish is None else finish(engine, number)
            engine.release(number)
            if start_ns:
                spans.log.add(spans.WAIT, start_ns, monotonic_ns())
            return result
        except BaseException as error:
            self._failed(error, engine, number, buffers, (name, op, prescale, postscale, root))

    def _start(
        self,
        process_set: Group | None,
        verb: int,
        name: str | None,
        entries: list[EngineTensor],
        op: int,
        prescale: float,
        postscale: float,
        root: int,
        buffers: object,
        result: Any,
        finish: Callable[[_native.Engine, int], Any] | None = None,
        blocking: bool = False,
        splits: Sequence[int] = (),
        out_bytes: Sequence[int] = (),
    ) -> Handle[Any]:
        engine = self.membership(process_set).engine
        if keeper:
            keeper.sweep()
        number = 0
        try:
            number = engine.submit(
                verb,
                name or "",
                entries,
                op + 0,
                prescale,
                postscale,
                root,
                blocking,
                splits,
                out_bytes,
            )
            return self._handle_type(engine, number, buffers, result, finish)
        except BaseException as error:
            self._failed(error, engine, number, buffers, (name, op, prescale, postscale, root))

    def _failed(
        self,
        error: BaseException,
        engine: _native.Engine,
        number: int,
        buffers: object,
        arguments: tuple[object, object, object, object, object],
    ) -> NoReturn:
        if number != 0 or not isinstance(error, Exception):
            keeper.keep(engine, number, buffers)
        if isinstance(error, _native.EngineError):
            raise from_engine(error) from None
        if isinstance(error, TypeError | ValueError):
            check_arguments(*arguments)
        raise error

    def _fresh(self, tensor: T) -> tuple[EngineTensor, T, Finish[T] | None]:
        """What the engine is told about ``tensor``, and the new tensor that receives the result.

        Third, what brings the result to where ``tensor`` is, if it is received in a private copy.
        """
        dtype, shape, source, owner = self._view(tensor)
        if owner is tensor:
            output, target = self._empty_like(tensor)
            return (dtype, shape, source, target), output, None
        return (dtype, shape, source, source), owner, self._placing(owner, tensor)

    def _placing(self, owner: T, tensor: T) -> Finish[T]:
        placed = self.frontend.placed
        return lambda engine, number: placed(owner, tensor)

    def _own(self, tensor: T) -> tuple[EngineTensor, T]:
        """The same for work in place; the second is ``tensor`` or a dense stand-in for it."""
        self.frontend.claim(tensor)
        dtype, shape, address, owner = self._view(tensor)
        return (dtype, shape, address, address), owner

    @staticmethod
    def _together(
        outputs: Sequence[T], finishes: Sequence[Finish[T] | None]
    ) -> Finish[list[T]] | None:
        """What finishes several results of ``_fresh``, if any needs it."""
        if not any(finishes):
            return None

        def finish(engine: _native.Engine, number: int) -> list[T]:
            return [
                output if one is None else one(engine, number)
                for output, one in zip(outputs, finishes, strict=True)
            ]

        return finish

    def _copying_back(
        self, owners: Sequence[T], tensors: Sequence[T], result: Any
    ) -> Callable[[_native.Engine, int], Any] | None:
        pairs = [(owner, t) for owner, t in zip(owners, tensors, strict=True) if owner is not t]
        if not pairs:
            return None
        copy_back = self.frontend.copy_back

        def finish(engine: _native.Engine, number: int) -> Any:
            for owner, tensor in pairs:
                copy_back(owner, tensor)
            return result

        return finish


def no_process_set(given: object) -> InvalidArgumentError:
    """The error for what was given as one."""
    return InvalidArgumentError(
        f"process_set is {given!r}: give a ProcessSet, as add_process_set() returns it, or None "
        "for all ranks"
    )


def position_of(rank: int, process_set: Group | None) -> int:
    """Where world rank ``rank`` stands. InvalidArgumentError if nowhere, or for no set."""
    if process_set is None:
        return rank
    try:
        position = process_set.position
    except AttributeError:
        raise no_process_set(process_set) from None
    return position(rank)


def check_arguments(
    name: object, op: object, prescale: object, postscale: object, root: object
) -> None:
    """Raise InvalidArgumentError for the first one that the engine's binding cannot take."""
    if not (name is None or isinstance(name, str)):
        raise InvalidArgumentError(
            f"name is {name!r}: give a str, or None for an unnamed operation"
        )
    if name is not None and not _is_encodable(name):
        raise InvalidArgumentError(f"name is {name!r}, which cannot be written in UTF-8")
    if op not in _native.OPS.values():
        known = ", ".join(member.name for member in Op)
        raise InvalidArgumentError(f"op is {op!r}: give one of {known}")
    for label, factor in (("prescale_factor", prescale), ("postscale_factor", postscale)):
        if not isinstance(factor, int | float):
            raise InvalidArgumentError(f"{label} is {factor!r}: give a float")
    rank_number("root_rank", root)


def rank_number(label: str, value: Any) -> int:
    """``value`` as the binding takes a rank. InvalidArgumentError, which calls it ``label``."""
    try:
        number = index(value)
    except TypeError:
        raise InvalidArgumentError(f"{label} is {value!r}: give the number of a rank") from None
    if abs(number) >= 1 << 31:
        raise InvalidArgumentError(f"{label} is {number}: there are not so many ranks")
    return number


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def several(tensors: Sequence[T]) -> Sequence[T]:
    """The tensors of a grouped verb, if they are several."""
    if not isinstance(tensors, list | tuple):
        raise InvalidArgumentError(
            f"a grouped verb takes a list or tuple of tensors, not {type(tensors).__name__}"
        )
    return tensors
