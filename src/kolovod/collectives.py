"""Every verb, written once for all frameworks.

A verb asks the front end for views, submits one request to the engine and waits for it (or hands
out a Handle). What is common to all verbs:

- ``name``: operations of different ranks belong together by name, so named operations may be
  submitted
  in any order; the same name may be used again once the operation before is complete. Unnamed ones
  (None) are matched by their order and must be submitted in the same order everywhere.
- The result is the same, bit for bit, on every rank. Tensors that are not dense are copied first.
- Verbs ending in ``_`` work in place and return the tensor that they were given.
- Errors: NotInitializedError before ``init()``; InvalidArgumentError for what this rank got wrong;
  DuplicateNameError when the name is still pending here; MismatchError, on every rank, when the
  ranks did not submit the same thing; RankLostError, RankLeftError, ShutDownError and
  InterruptedByRankError when the operation can never complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from kolovod import _native
from kolovod.errors import InvalidArgumentError, from_engine
from kolovod.frontend import Frontend
from kolovod.handles import Handle, Keeper
from kolovod.ops import Average, Op, Sum

T = TypeVar("T")

_ALLREDUCE = _native.VERBS["allreduce"]
_BROADCAST = _native.VERBS["broadcast"]
_ALLGATHER = _native.VERBS["allgather"]
_BARRIER = _native.VERBS["barrier"]

_EngineTensor = tuple[int, tuple[int, ...], int, int]  # dtype, shape, input, output address


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


class Collectives(Generic[T]):
    """The verbs on the tensors of one framework. See the module's text for what they share."""

    def __init__(self, frontend: Frontend[T], world: Callable[[], WorldLike]) -> None:
        """``world`` is asked on every call, so that a new world needs no new Collectives."""
        self.frontend = frontend
        self.world = world
        self._keeper = Keeper()
        self._view = frontend.view
        self._empty_like = frontend.empty_like

    # allreduce ----------------------------------------------------------------------------------

    def allreduce(
        self,
        tensor: T,
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> T:
        """Combine ``tensor`` over all ranks; every rank gets ``postscale * op(prescale * tensor)``.

        ``tensor``: any shape, the same on all ranks, of any dtype that the engine knows (bool: no
        Average, no factors). Integers are truncated toward zero after each multiplication.
        """
        dtype, shape, source, owner = self._view(tensor)
        if owner is tensor:
            owner, target = self._empty_like(tensor)
        else:
            target = source  # `owner` is a private copy: reduce that in place
        self._run(
            _ALLREDUCE,
            name,
            [(dtype, shape, source, target)],
            op,
            prescale_factor,
            postscale_factor,
            0,
            (tensor, owner),
        )
        return owner  # type: ignore[no-any-return]

    def allreduce_async(
        self,
        tensor: T,
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> Handle[T]:
        """``allreduce`` that returns at once; leave ``tensor`` alone until ``wait`` returned."""
        entry, output = self._fresh(tensor)
        scales = (prescale_factor, postscale_factor)
        return self._start(_ALLREDUCE, name, [entry], op, *scales, 0, (tensor, output), output)

    def allreduce_(
        self,
        tensor: T,
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> T:
        """``allreduce`` in place."""
        self.frontend.claim(tensor)
        dtype, shape, address, owner = self._view(tensor)
        scales = (prescale_factor, postscale_factor)
        entries = [(dtype, shape, address, address)]
        self._run(_ALLREDUCE, name, entries, op, *scales, 0, owner)
        if owner is not tensor:
            self.frontend.copy_back(owner, tensor)
        return tensor

    def allreduce_async_(
        self,
        tensor: T,
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> Handle[T]:
        """``allreduce_`` that returns at once; leave ``tensor`` alone until ``wait`` returned."""
        entry, owner = self._own(tensor)
        finish = None if owner is tensor else self._copying_back([owner], [tensor], tensor)
        pre, post = prescale_factor, postscale_factor
        return self._start(_ALLREDUCE, name, [entry], op, pre, post, 0, owner, tensor, finish)

    # grouped allreduce --------------------------------------------------------------------------

    def grouped_allreduce(
        self,
        tensors: Sequence[T],
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> list[T]:
        """``allreduce`` of several tensors as one operation, in the order given.

        They may differ in shape and dtype; the group is ready when every rank has submitted it.
        """
        scales = (prescale_factor, postscale_factor)
        return self._grouped(tensors, name, op, scales, in_place=False, blocking=True).wait()

    def grouped_allreduce_async(
        self,
        tensors: Sequence[T],
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> Handle[list[T]]:
        """``grouped_allreduce`` that returns at once."""
        scales = (prescale_factor, postscale_factor)
        return self._grouped(tensors, name, op, scales, in_place=False, blocking=False)

    def grouped_allreduce_(
        self,
        tensors: Sequence[T],
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> list[T]:
        """``grouped_allreduce`` in place; returns a list of the tensors given."""
        scales = (prescale_factor, postscale_factor)
        return self._grouped(tensors, name, op, scales, in_place=True, blocking=True).wait()

    def grouped_allreduce_async_(
        self,
        tensors: Sequence[T],
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> Handle[list[T]]:
        """``grouped_allreduce_`` that returns at once."""
        scales = (prescale_factor, postscale_factor)
        return self._grouped(tensors, name, op, scales, in_place=True, blocking=False)

    # broadcast ----------------------------------------------------------------------------------

    def broadcast(self, tensor: T, root_rank: int = 0, name: str | None = None) -> T:
        """A new tensor with the values that ``tensor`` has on ``root_rank``; shapes must agree."""
        return self._broadcast(tensor, root_rank, name, in_place=False, blocking=True).wait()

    def broadcast_async(self, tensor: T, root_rank: int = 0, name: str | None = None) -> Handle[T]:
        """``broadcast`` that returns at once."""
        return self._broadcast(tensor, root_rank, name, in_place=False, blocking=False)

    def broadcast_(self, tensor: T, root_rank: int = 0, name: str | None = None) -> T:
        """``broadcast`` in place: ``tensor`` is overwritten on all ranks but ``root_rank``."""
        return self._broadcast(tensor, root_rank, name, in_place=True, blocking=True).wait()

    def broadcast_async_(self, tensor: T, root_rank: int = 0, name: str | None = None) -> Handle[T]:
        """``broadcast_`` that returns at once."""
        return self._broadcast(tensor, root_rank, name, in_place=True, blocking=False)

    # allgather, barrier -------------------------------------------------------------------------

    def allgather(self, tensor: T, name: str | None = None) -> T:
        """The ranks' tensors one after the other along dimension 0, in rank order.

        Dimension 0 may differ between ranks (0 included); the others must agree. A scalar has no
        dimension to join along: InvalidArgumentError.
        """
        return self._allgather(tensor, name, blocking=True).wait()

    def allgather_async(self, tensor: T, name: str | None = None) -> Handle[T]:
        """``allgather`` that returns at once."""
        return self._allgather(tensor, name, blocking=False)

    def barrier(self, name: str | None = None) -> None:
        """Return once every rank has called it. Other pending operations are not waited for."""
        self._run(_BARRIER, name, [], Sum, 1.0, 1.0, 0, None)

    # handles ------------------------------------------------------------------------------------

    def poll(self, handle: Handle[Any]) -> bool:
        """The same as ``handle.poll()``."""
        return handle.poll()

    def synchronize(self, handle: Handle[T]) -> T:
        """The same as ``handle.wait()``."""
        return handle.wait()

    # inside -------------------------------------------------------------------------------------

    def _grouped(
        self,
        tensors: Sequence[T],
        name: str | None,
        op: int,
        scales: tuple[float, float],
        *,
        in_place: bool,
        blocking: bool,
    ) -> Handle[list[T]]:
        if not isinstance(tensors, list | tuple):
            raise InvalidArgumentError(
                f"a grouped verb takes a list or tuple of tensors, not {type(tensors).__name__}"
            )
        pairs = [self._own(t) if in_place else self._fresh(t) for t in tensors]
        entries = [entry for entry, _ in pairs]
        outputs = [output for _, output in pairs]
        buffers = (tensors, outputs)
        if in_place:
            result = list(tensors)
            finish = self._copying_back(outputs, result, result)
        else:
            result, finish = outputs, None
        return self._start(
            _ALLREDUCE, name, entries, op, *scales, 0, buffers, result, finish, blocking
        )

    def _broadcast(
        self, tensor: T, root: int, name: str | None, *, in_place: bool, blocking: bool
    ) -> Handle[T]:
        finish = None
        if in_place:
            entry, output = self._own(tensor)
            finish = self._copying_back([output], [tensor], tensor)
        else:
            entry, output = self._fresh(tensor)
        result = tensor if in_place else output
        buffers = (tensor, output)
        return self._start(
            _BROADCAST, name, [entry], Sum, 1.0, 1.0, root, buffers, result, finish, blocking
        )

    def _allgather(self, tensor: T, name: str | None, *, blocking: bool) -> Handle[T]:
        dtype, shape, source, owner = self._view(tensor)
        from_bytes = self.frontend.from_bytes

        def finish(engine: _native.Engine, number: int) -> T:
            rows = sum(engine.first_dims(number, 0))
            return from_bytes(engine.output(number, 0), dtype, (rows, *shape[1:]))

        entries = [(dtype, shape, source, 0)]
        return self._start(
            _ALLGATHER, name, entries, Sum, 1.0, 1.0, 0, owner, None, finish, blocking
        )

    def _run(
        self,
        verb: int,
        name: str | None,
        entries: list[_EngineTensor],
        op: int,
        prescale: float,
        postscale: float,
        root: int,
        buffers: object,
    ) -> None:
        """Submit and wait. Three calls into the engine and nothing else on the good path.

        ``op + 0`` is the plain int of an Op, which the binding takes much faster.
        """
        engine = self.world().engine
        if self._keeper:
            self._keeper.sweep()
        number = 0
        try:
            number = engine.submit(
                verb, name or "", entries, op + 0, prescale, postscale, root, True
            )
            engine.wait(number, -1.0)
            engine.release(number)
        except BaseException as error:
            self._failed(error, engine, number, buffers, (name, op, prescale, postscale, root))

    def _start(
        self,
        verb: int,
        name: str | None,
        entries: list[_EngineTensor],
        op: int,
        prescale: float,
        postscale: float,
        root: int,
        buffers: object,
        result: Any,
        finish: Callable[[_native.Engine, int], Any] | None = None,
        blocking: bool = False,
    ) -> Handle[Any]:
        engine = self.world().engine
        if self._keeper:
            self._keeper.sweep()
        number = 0
        try:
            number = engine.submit(
                verb, name or "", entries, op + 0, prescale, postscale, root, blocking
            )
            return Handle(engine, number, buffers, result, finish, self._keeper)
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
            self._keeper.keep(engine, number, buffers)
        if isinstance(error, _native.EngineError):
            raise from_engine(error) from None
        if isinstance(error, TypeError | ValueError):
            _blame(*arguments)
        raise error

    def _fresh(self, tensor: T) -> tuple[_EngineTensor, T]:
        """What the engine is told about ``tensor``, and the new tensor that receives the result."""
        dtype, shape, source, owner = self._view(tensor)
        if owner is tensor:
            output, target = self._empty_like(tensor)
            return (dtype, shape, source, target), output
        return (dtype, shape, source, source), owner

    def _own(self, tensor: T) -> tuple[_EngineTensor, T]:
        """The same for work in place; the second is ``tensor`` or a dense stand-in for it."""
        self.frontend.claim(tensor)
        dtype, shape, address, owner = self._view(tensor)
        return (dtype, shape, address, address), owner

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


def _blame(name: object, op: object, prescale: object, postscale: object, root: object) -> None:
    """Say which argument the engine's binding could not take."""
    if not (name is None or isinstance(name, str)):
        raise InvalidArgumentError(
            f"name is {name!r}: give a str, or None for an unnamed operation"
        )
    if op not in _native.OPS.values():
        known = ", ".join(member.name for member in Op)
        raise InvalidArgumentError(f"op is {op!r}: give one of {known}")
    for label, factor in (("prescale_factor", prescale), ("postscale_factor", postscale)):
        if not isinstance(factor, int | float):
            raise InvalidArgumentError(f"{label} is {factor!r}: give a float")
    try:
        index(root)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidArgumentError(f"root_rank is {root!r}: give the number of a rank") from None
