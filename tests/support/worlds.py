"""The conformance table: every verb in every world, for every front end and dtype.

Adding a world is one row of ``WORLDS``, adding a verb one of ``VERBS``, ``GROUPS`` or ``OTHERS``.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from conformance import (
    FLOATS,
    INTEGERS,
    MODES,
    NUMPY_DTYPES,
    SHAPES,
    TORCH_DTYPES,
    check_adasum,
    check_allgather,
    check_allreduce,
    check_alltoall,
    check_broadcast,
    check_grouped,
    check_grouped_allgather,
    check_grouped_reducescatter,
    check_join,
    check_objects,
    check_reducescatter,
    reductions,
)
from forked import (
    run_jax_ranks,
    run_mxnet_ranks,
    run_ranks,
    run_tensorflow_ranks,
    run_torch_ranks,
)
from frameworks import is_installed

from kolovod.testing import loopback

# What is checked ----------------------------------------------------------------------------------


class Extent(NamedTuple):
    """How much of the table is run, for one front end."""

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    modes: tuple[tuple[bool, bool], ...] = MODES
    large: tuple[tuple[int, ...], ...] = ()
    """Further shapes, for float32."""


FULL = {
    "numpy": Extent(NUMPY_DTYPES, SHAPES),
    "torch": Extent(TORCH_DTYPES, ((), (0,), (3, 5))),
}
_NEW = tuple(mode for mode in MODES if not mode[0])
_ALL_DTYPES = (*INTEGERS, *FLOATS, "bool")
_MXNET_DTYPES = ("uint8", "int8", "int32", "int64", "float16", "float32", "float64", "bool")
OTHERS_FULL = {
    "tensorflow": Extent(_ALL_DTYPES, ((), (0,), (3, 5))),
    "jax": Extent(_ALL_DTYPES, ((), (0,), (3, 5)), _NEW),
    "mxnet": Extent(_MXNET_DTYPES, ((), (0,), (3, 5))),
    "mxnet-np": Extent(_MXNET_DTYPES, ((), (0,), (3, 5)), _NEW),
}
_TWO_MODES = ((True, False), (False, True))
_BRIEF_DTYPES = ("uint8", "int16", "uint16", "int64", "float16", "float32", "float64", "bool")
BRIEF = {
    "numpy": Extent(_BRIEF_DTYPES, ((), (0,), (3, 5), (1025,)), _TWO_MODES, ((20_001, 5),)),
    "torch": Extent(("int32", "float32", "bfloat16"), ((3, 5),), _TWO_MODES),
}
NOTHING_LARGE = {name: extent._replace(large=()) for name, extent in BRIEF.items()}
SOME = {
    "numpy": Extent(("int16", "float16", "float32"), ((0,), (3, 5)), _TWO_MODES, ((7, 10_001),)),
}
SLICE = {"numpy": Extent(("int32", "float32"), ((3, 5), (1025,)), _TWO_MODES)}


class Line(NamedTuple):
    """A verb for one dtype, or for all at once (``dtype`` is "" then)."""

    verb: str
    dtype: str


def _allreduce(kv: Any, frontend: str, dtype: str, extent: Extent) -> None:
    for case in reductions(dtype, extent.shapes, extent.modes):
        check_allreduce(kv, frontend, case)
    for shape in extent.large if dtype == "float32" else ():
        for case in reductions(dtype, (shape,), extent.modes[:1]):
            check_allreduce(kv, frontend, case)


def _reducescatter(kv: Any, frontend: str, dtype: str, extent: Extent) -> None:
    shapes = tuple(shape for shape in extent.shapes if shape)
    for case in reductions(dtype, shapes, ((False, False), (False, True))):
        check_reducescatter(kv, frontend, case)
    for shape in extent.large if dtype == "float32" else ():
        for case in reductions(dtype, (shape,), ((False, False),)):
            check_reducescatter(kv, frontend, case)


def _alltoall(kv: Any, frontend: str, dtype: str, extent: Extent) -> None:
    check_alltoall(kv, frontend, dtype)
    if extent.large and dtype == "float32":
        check_alltoall(kv, frontend, dtype, scale=1111)


def _mixed(extent: Extent) -> tuple[str, ...]:
    return tuple(dtype for dtype in ("int32", "float16", "float64") if dtype in extent.dtypes)


def _works_in_place(extent: Extent) -> bool:
    return any(in_place for in_place, _ in extent.modes)


def _modes(extent: Extent) -> tuple[tuple[bool, bool], ...]:
    """All modes that the front end has, of verbs that have few cases."""
    return MODES if _works_in_place(extent) else _NEW


Check = Callable[[Any, str, str, Extent], None]
VERBS: dict[str, Check] = {
    "allreduce": _allreduce,
    "broadcast": lambda kv, frontend, dtype, extent: check_broadcast(
        kv, frontend, dtype, extent.shapes[-3:], _modes(extent)
    ),
    "allgather": lambda kv, frontend, dtype, extent: check_allgather(kv, frontend, dtype),
    "alltoall": _alltoall,
    "reducescatter": _reducescatter,
    "adasum": lambda kv, frontend, dtype, extent: check_adasum(
        kv, frontend, dtype, _works_in_place(extent)
    ),
}
GROUPS: dict[str, Check] = {
    "grouped_allreduce": lambda kv, frontend, dtype, extent: check_grouped(
        kv, frontend, _mixed(extent), extent.shapes, _modes(extent)
    ),
    "grouped_allgather": lambda kv, frontend, dtype, extent: check_grouped_allgather(
        kv, frontend, _mixed(extent)
    ),
    "grouped_reducescatter": lambda kv, frontend, dtype, extent: check_grouped_reducescatter(
        kv, frontend, _mixed(extent)
    ),
}


OTHERS: dict[str, Callable[[Any], None]] = {"objects": check_objects, "join": check_join}


def lines(extent: Extent, frontend: str) -> list[Line]:
    """All lines of an extent."""
    by_dtype = [
        Line(verb, dtype)
        for verb in VERBS
        for dtype in extent.dtypes
        if verb != "adasum" or dtype in FLOATS
    ]
    at_once = [Line(verb, "") for verb in GROUPS]
    others = [Line(verb, "") for verb in OTHERS if frontend == "numpy"]
    return by_dtype + at_once + others


def check(kv: Any, frontend: str, line: Line, extent: Extent) -> None:
    """Run one line on this rank; an AssertionError says which case of it failed."""
    if line.verb in OTHERS:
        OTHERS[line.verb](kv)
    else:
        {**VERBS, **GROUPS}[line.verb](kv, frontend, line.dtype, extent)


# Where it is checked ------------------------------------------------------------------------------


Runner = Callable[[str, int, str, list[Line]], None]


class World(NamedTuple):
    """A row of the table: ranks that communicate in one way."""

    name: str
    extents: Mapping[int, Mapping[str, Extent]]
    """By number of ranks, then by front end."""
    run: Runner
    """``run(name, size, frontend, lines)`` runs the lines on that many ranks, or raises."""
    at_once: bool = True
    """All lines in one go: where ranks are processes, which take long to start."""
    missing: Callable[[], str] = lambda: ""
    """Why the world cannot be had here, or nothing."""
    skips: Mapping[str, str] = {}
    """Verbs that it does not run, and why."""
    slow: Mapping[str, tuple[int, ...]] = {}
    """By front end, numbers of ranks that `make test` leaves out."""

    def rows(self) -> list[Row]:
        """The tests of this world."""
        found = []
        for size, by_frontend in self.extents.items():
            for frontend, extent in by_frontend.items():
                mine = [line for line in lines(extent, frontend) if line.verb not in self.skips]
                groups = [mine] if self.at_once else [[line] for line in mine]
                found += [Row(self, size, frontend, group) for group in groups]
        return found


class Row(NamedTuple):
    """One test: lines that run together."""

    world: World
    size: int
    frontend: str
    lines: list[Line]

    @property
    def slow(self) -> bool:
        """Whether `make test` leaves it out."""
        return self.size in self.world.slow.get(self.frontend, ())

    def __str__(self) -> str:
        line = [] if self.world.at_once else [part for part in self.lines[0] if part]
        return "-".join([self.world.name, str(self.size), self.frontend, *line])


def one_host(rank: int) -> int:
    """All ranks share memory."""
    return 0


def own_host(rank: int) -> int:
    """No two ranks do; they are on one machine all the same, as in all these worlds."""
    return rank


def in_pairs(rank: int) -> int:
    """Ranks 0 and 1 do, 2 and 3, ..."""
    return rank // 2


def on_threads(host_of: Callable[[int], int] = one_host) -> Runner:
    """Ranks that are threads of this process."""

    def run(name: str, size: int, frontend: str, lines: list[Line]) -> None:
        extent = WORLDS[name].extents[size][frontend]

        def work(kv: Any) -> None:
            for line in lines:
                check(kv, frontend, line, extent)

        hosts = list(map(host_of, range(size)))
        with loopback(size, _frontend(frontend), hosts=hosts) as world:
            world.run(work, timeout_s=100)

    return run


def _frontend(name: str) -> Any:
    if name == "numpy":
        from kolovod.numpy import NumpyFrontend

        return NumpyFrontend()
    from kolovod.torch import TorchFrontend

    return TorchFrontend()


def on_processes(host_of: Callable[[int], int] = one_host, **env: str) -> Runner:
    """Ranks that are processes, as the launcher starts them, with these variables."""

    def run(name: str, size: int, frontend: str, lines: list[Line]) -> None:
        hosts = [f"host{host_of(rank)}" for rank in range(size)]
        arguments = (name, size, frontend, lines)
        start = _STARTERS[_module(frontend)]
        if env.get("KOLOVOD_BACKEND") == "gloo":
            start = run_torch_ranks
        start(size, as_a_process, *arguments, timeout_s=110, env=env, hosts=hosts)

    return run


_STARTERS = {
    "numpy": run_ranks,
    "torch": run_torch_ranks,
    "tensorflow": run_tensorflow_ranks,
    "jax": run_jax_ranks,
    "mxnet": run_mxnet_ranks,
}


def _module(frontend: str) -> str:
    """A front end may have several kinds of tensors."""
    return frontend.partition("-")[0]


def as_a_process(rank: int, name: str, size: int, frontend: str, lines: list[Line]) -> None:
    """What a rank in a process of its own does."""
    import kolovod

    collectives = importlib.import_module(f"kolovod.{_module(frontend)}").collectives
    kolovod.init()
    assert (kolovod.rank(), kolovod.size()) == (rank, size)
    for line in lines:
        check(collectives, frontend, line, WORLDS[name].extents[size][frontend])
    kolovod.shutdown()
    assert not kolovod.is_initialized()
    kolovod.init()  # again, in the same processes
    assert kolovod.allreduce(1, op=kolovod.Sum) == size
    kolovod.shutdown()


def under_mpirun(name: str, size: int, frontend: str, lines: list[Line]) -> None:
    """Ranks that are processes started by mpirun."""
    code = (
        "import os, sys, worlds; name, size, frontend = sys.argv[1:]; size = int(size); "
        "rank = int(os.environ.get('OMPI_COMM_WORLD_RANK', os.environ.get('PMI_RANK'))); "
        "(row,) = (row for row in worlds.WORLDS[name].rows() if row[1:3] == (size, frontend)); "
        "worlds.as_a_process(rank, name, size, frontend, row.lines); print('conforms')"
    )
    command = [mpirun(), "-n", str(size), sys.executable, "-c", code, name, str(size), frontend]
    ended = subprocess.run(
        command,
        env=mpi_environment(KOLOVOD_BACKEND="mpi"),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("conforms") == size


def mpirun() -> str:
    """The command that starts MPI processes; "" if there is none."""
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun") or ""


def mpi_environment(**extra: str) -> dict[str, str]:
    """Variables that let Open MPI start more ranks than cores, and as the superuser."""
    path = [str(Path(__file__).parent), *sys.path]
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    allowed["OMPI_MCA_rmaps_base_oversubscribe"] = "1"  # Open MPI 4; on one core
    allowed["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
    allowed |= {"PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**os.environ, **allowed, "PYTHONPATH": os.pathsep.join(filter(None, path)), **extra}


def no_mpi() -> str:
    """Why MPI cannot be tested here, or nothing."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed: pip install 'kolovod[mpi]'"
    return "" if mpirun() else "there is no mpirun: pip install 'kolovod[mpi]'"


def no_framework(frontend: str) -> str:
    """Why that front end cannot be tested here, or nothing."""
    framework = _module(frontend)
    return "" if is_installed(framework) else f"{framework} is not installed"


def no_torch() -> str:
    """The same for PyTorch."""
    return no_framework("torch")


WORLDS = {
    world.name: world
    for world in (
        World(
            "loopback",
            {1: FULL, 2: FULL, 3: FULL, 4: NOTHING_LARGE, 8: NOTHING_LARGE},
            on_threads(),
            at_once=False,
            slow={"numpy": (1, 4, 8), "torch": (1, 3, 4, 8)},
        ),
        World(
            "processes",
            dict.fromkeys((1, 2, 3), OTHERS_FULL),
            on_processes(),
            slow={"tensorflow": (1, 3), "jax": (1, 3), "mxnet": (1, 3), "mxnet-np": (1, 3)},
        ),
        World("loopback-tcp", {2: SOME, 3: SOME, 5: SLICE}, on_threads(own_host)),
        World(
            "loopback-hosts",
            {3: SOME, 4: SOME, 8: SLICE},
            on_threads(in_pairs),
            slow={"numpy": (8,)},
        ),
        World(
            "shm",
            {1: SLICE, 2: BRIEF, 3: SOME, 4: SLICE, 8: SLICE},
            on_processes(),
            slow={"numpy": (8,)},
        ),
        World("shm-reads", {3: SOME}, on_processes(KOLOVOD_PEER_READ_BYTES="1")),
        World("tcp", {2: BRIEF, 3: SOME}, on_processes(own_host)),
        World("hosts", {3: SLICE, 4: SOME}, on_processes(in_pairs)),
        World("hosts-encrypted", {3: SOME}, on_processes(in_pairs, KOLOVOD_ENCRYPT="1")),
        World(
            "mpi",
            {2: BRIEF, 3: SOME, 4: SLICE},
            under_mpirun,
            missing=no_mpi,
            slow={"torch": (2,), "numpy": (2, 4)},
        ),
        World(
            "gloo",
            {2: BRIEF, 3: SOME},
            on_processes(KOLOVOD_BACKEND="gloo"),
            missing=no_torch,
            slow={"numpy": (2,)},
        ),
        World(
            "gloo-hosts",
            {4: SLICE},
            on_processes(in_pairs, KOLOVOD_BACKEND="gloo"),
            missing=no_torch,
            slow={"numpy": (4,)},
        ),
    )
}
