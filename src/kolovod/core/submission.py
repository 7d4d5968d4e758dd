"""From a verb's arguments to the engine: what all verbs do alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from time import monotonic_ns
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

from kolovod import _native
from kolovod.core import spans
from kolovod.core.codecs import coded, tell_where_useless
from kolovod.core.handles import Handle, held_buffers, kept
from kolovod.core.ops import Op, Sum
from kolovod.core.verbs import Verb
from kolovod.errors import InvalidArgumentError, from_engine

T = TypeVar("T")
Finish = Callable[[_native.Engine, int], T]

EngineTensor = tuple[int, tuple[int, ...], int, int]
"""dtype, shape, input address, output address (0, or no ``out_bytes``: the engine makes outputs of
other sizes than the inputs)"""


class WorldLike(Protocol):
    """The facts that verbs need of the world."""

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
        """The number of ranks."""
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
        """Return the position of world rank ``rank``; InvalidArgumentError if it is no member."""
        ...


class Request(NamedTuple):
    """One operation, but for its tensors."""

    verb: Verb
    name: str | None = None
    process_set: Group | None = None
    op: int = Sum
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    """Position in the process set of the rank that a broadcast comes from; of messages, the peer's
    (-1: any)."""
    splits: Any = None
    """For an alltoall, rows for each rank; for messages, the tag."""
    codecs: Sequence[int] = ()
    """The codecs of tensors between hosts: see ``codecs_of``."""


class Submitter:
    """Hands requests to the engine of the world, or of a process set, and waits for them."""

    takes_all = False
    """True: no operation may go another way (``short_verbs``), since somebody stands in for
    ``run`` and ``start`` and is to see them all."""

    def __init__(
        self,
        world: Callable[[], WorldLike],
        handle_type: type[Handle[Any]] = Handle,
        *,
        tells_lines: bool = True,
    ) -> None:
        """``world`` is asked on every call, so that a new world needs no new Submitter.

        ``tells_lines``: operations without a name carry the lines that call them.
        """
        self.world = world
        self._tells_lines = tells_lines
        self._handle_type = handle_type

    def membership(self, process_set: Group | None) -> WorldLike:
        """The engine to use, and this rank's place in it. InvalidArgumentError otherwise."""
        if process_set is None:
            return self.world()
        try:
            membership = process_set.membership
        except AttributeError:
            raise no_process_set(process_set) from None
        return membership()

    def run(
        self,
        request: Request,
        entries: list[EngineTensor],
        buffers: object,
        finish: Callable[[_native.Engine, int], Any] | None = None,
        splits: Sequence[int] = (),
    ) -> Any:
        """Submit, wait, and make the result by ``finish(engine, number)``, else None.

        ``buffers`` stay alive until then. One call into the engine and nothing else on the good
        path.
        """
        verb, name, process_set, op, prescale, postscale, root, _, codecs = request
        world = self.world() if process_set is None else self.membership(process_set)
        if codecs:
            entries = coded(entries, codecs)
            tell_where_useless(world)
        if kept:
            held_buffers.sweep()
        start_ns = monotonic_ns() if spans.log.on else 0
        try:
            result = world.engine.run(
                verb.number,
                name,
                entries,
                op,
                prescale,
                postscale,
                root,
                splits,
                self._tells_lines,
                buffers,
                finish,
            )
        except Exception as error:
            _failed(error, request)
        if start_ns:
            spans.log.waited(start_ns)
        return result

    def start(
        self,
        request: Request,
        entries: list[EngineTensor],
        buffers: object,
        result: Any,
        finish: Callable[[_native.Engine, int], Any] | None = None,
        splits: Sequence[int] = (),
        *,
        blocking: bool = False,
        out_bytes: Sequence[int] = (),
    ) -> Handle[Any]:
        """Submit. ``blocking``: whoever calls will wait at once, and drive the engine."""
        verb, name, process_set, op, prescale, postscale, root, _, codecs = request
        world = self.world() if process_set is None else self.membership(process_set)
        if codecs:
            entries = coded(entries, codecs)
            tell_where_useless(world)
        engine = world.engine
        if kept:
            held_buffers.sweep()
        number = 0
        try:
            number = engine.submit(
                verb.number,
                name,
                entries,
                op,
                prescale,
                postscale,
                root,
                blocking,
                splits,
                out_bytes,
                self._tells_lines,
            )
            return self._handle_type(engine, number, buffers, result, finish)
        except BaseException as error:
            if number != 0 or not isinstance(error, Exception):
                held_buffers.keep(engine, number, buffers)
            _failed(error, request)


def _failed(error: BaseException, request: Request) -> NoReturn:
    if isinstance(error, _native.EngineError):
        raise from_engine(error) from None
    if isinstance(error, TypeError | ValueError):
        check_request(request)
    raise error


def no_process_set(given: object) -> InvalidArgumentError:
    """The error for what was given as one."""
    return InvalidArgumentError(
        f"process_set is {given!r}: give a ProcessSet, as add_process_set() returns it, or None "
        "for all ranks"
    )


def position_of(rank: int, process_set: Group | None) -> int:
    """Return the position of world rank ``rank`` in the set; InvalidArgumentError for others."""
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


def check_further(dtype: int, request: Request) -> None:
    """Raise InvalidArgumentError if ``request`` is nothing for one of ``FURTHER_DTYPES``.

    For graphs and programs, which see it as another dtype; elsewhere the binding says so.
    """
    has_factors = (request.prescale, request.postscale) != (1.0, 1.0)
    reason = _native.why_not(dtype, request.verb.number, request.op, has_factors)
    if reason:
        raise InvalidArgumentError(reason)


def check_request(request: Request) -> None:
    """Raise InvalidArgumentError for the first of its fields that the binding cannot take."""
    check_arguments(request.name, request.op, request.prescale, request.postscale, request.root)


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
    """The tensors of a grouped verb; InvalidArgumentError if they are no list or tuple."""
    if not isinstance(tensors, list | tuple):
        raise InvalidArgumentError(
            f"a grouped verb takes a list or tuple of tensors, not {type(tensors).__name__}"
        )
    return tensors
