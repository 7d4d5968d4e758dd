"""The world that this process is a rank of: facts, engines, and who asks for them.

``lifecycle.py`` forms a world and ends it; whatever needs the present one asks here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kolovod import _native
from kolovod.config import Settings
from kolovod.errors import NotInitializedError
from kolovod.rendezvous.rank_environment import RankEnvironment

__all__ = [
    "World",
    "current",
    "current_tracked",
    "enter",
    "explain_missing",
    "is_initialized",
    "take",
    "takes_gpus",
    "when_engine_ends",
    "when_entered",
    "when_rank_is_asked",
    "word_with",
]


class Formed(NamedTuple):
    """An engine, and what carries buckets for it when the backend is not the native one."""

    engine: _native.Engine
    carrier: Any
    """Its ``stop()`` ends it, after the engine; None: there is none."""


@dataclass(slots=True)
class Sets:
    """The process sets of a world."""

    by_id: dict[int, Any] = field(default_factory=dict)
    next_id: int = 1
    carriers: dict[_native.Engine, Any] = field(default_factory=dict)
    """The carrier of each engine of the sets that this rank is a member of; see Formed."""

    @property
    def engines(self) -> list[_native.Engine]:
        """The engines of the sets that this rank is a member of, the oldest first."""
        return list(self.carriers)


@dataclass(frozen=True, slots=True)
class World:
    """Facts that hold from ``init`` to ``shutdown``."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    host: str
    epoch: int
    engine: _native.Engine
    settings: Settings
    environment: RankEnvironment = field(repr=False)
    """The launcher's settings for this process; they hold the secret."""
    former: Callable[[World, Sequence[int]], Formed] = field(repr=False)
    """Makes an engine among some of the ranks (ascending, with this one); they all call it."""
    members: tuple[int, ...] = (0,)
    """The launcher's rank of each rank of this world; in an elastic job its process's number."""
    scope: int = 0
    """The number under which ranks of process sets count at the rendezvous
    (rendezvous/server.py)."""
    hosts: tuple[str, ...] = ("localhost",)
    """The host of each rank."""
    sets: Sets = field(default_factory=Sets, repr=False)
    carrier: Any = field(default=None, repr=False)
    """The world's carrier, see Formed."""
    takes_gpus: bool = False
    """True: the engine takes tensors on GPUs as they are, and not in copies in host memory."""
    core: int | None = None
    """The core on which the engine's threads run, if they are bound to one."""

    def form(self, ranks: Sequence[int]) -> _native.Engine:
        """An engine among ``ranks`` (ascending, with this one); called by these ranks only.

        It shares the fate of this world, and ends with it. Raises what ``init`` raises.
        """
        engine, carrier = self.former(self, ranks)
        self.sets.carriers[engine] = carrier
        return engine

    def dissolve(self, engine: _native.Engine) -> None:
        """Shut down an engine that ``form`` made."""
        for hook in _ending_hooks:
            hook()
        carrier = self.sets.carriers.pop(engine)
        engine.shutdown()
        if carrier is not None:
            carrier.stop()


_world: World | None = None
_ending_hooks: list[Callable[[], None]] = []
_entering_hooks: list[Callable[[World], None]] = []
_asking_hooks: list[Callable[[], None]] = []
_wording: Callable[[str], str] = str  # what is said of a missing world
_why_missing = ""


def current() -> World:
    """The world of this process. Raises NotInitializedError if there is none."""
    world = _world
    if world is None:
        text = _why_missing or "there is no world in this process: call init() first"
        raise NotInitializedError(_wording(text))
    return world


def current_tracked() -> World:
    """Return the world, as ``current`` does, for code that asks for the rank or the size.

    A program that is being traced will depend on the answer; see ``when_rank_is_asked``.
    """
    for hook in _asking_hooks:
        hook()
    return current()


def is_initialized() -> bool:
    """Return whether this process is in a world."""
    return _world is not None


def enter(world: World) -> None:
    """From now on ``world`` is the current one."""
    global _world
    _world = world
    for hook in _entering_hooks:
        hook(world)


def take() -> World | None:
    """The current world, which is none from now on."""
    global _world
    world, _world = _world, None
    return world


def explain_missing(why: str) -> None:
    """Say ``why`` in the error about a missing world, instead of the usual advice."""
    global _why_missing
    _why_missing = why


def word_with(wording: Callable[[str], str]) -> None:
    """Have ``wording`` say what is said of a missing world: for an interface with other names."""
    global _wording
    _wording = wording


def when_engine_ends(hook: Callable[[], None]) -> None:
    """Call ``hook`` before ``World.dissolve`` ends the engine of a process set."""
    _ending_hooks.append(hook)


def when_entered(hook: Callable[[World], None]) -> Callable[[World], None]:
    """Call ``hook(world)`` whenever this process has entered a world. Returns ``hook``."""
    _entering_hooks.append(hook)
    return hook


def when_rank_is_asked(hook: Callable[[], None]) -> None:
    """Call ``hook`` before rank, size or the like are told, which differ in other worlds."""
    _asking_hooks.append(hook)


def takes_gpus() -> bool:
    """Return whether this process is in a world whose engine takes tensors on GPUs; see World."""
    return _world is not None and _world.takes_gpus
