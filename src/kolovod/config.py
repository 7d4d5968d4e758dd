"""The one table of knobs.

Each field of ``Settings`` declares a knob once: name, type, default, unit, environment names,
launcher flag and text. The command line, the engine's configuration and ``docs/configuration.md``
are made from it.

The core never reads the environment: ``load`` does, once, in ``init``.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kolovod.errors import SettingError

__all__ = ["KNOBS", "Knob", "Settings", "load", "parse_bool"]

_MEBI = 1 << 20
_INT64_MAX = (1 << 63) - 1
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})

Value = int | float | bool | str
TCP_ALGORITHMS = ("auto", "direct", "tree", "pairwise", "ring", "chain", "doubling", "halving")
"""By the number that the engine knows each by (csrc/collectives/select.h)."""


def parse_bool(text: str, what: str) -> bool:
    """The truth of ``text``: 1/0, true/false, yes/no, on/off in any case.

    Raises InvalidArgumentError naming ``what`` and the text for anything else.
    """
    word = text.strip().lower()
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise SettingError(f"{what}={text!r}: expected one of 1/0, true/false, yes/no, on/off")


def _is_on(text: str, what: str) -> bool:
    """Parse a boolean of Horovod's, which may be a number: above 0 means true."""
    try:
        return int(text) > 0
    except ValueError:
        return parse_bool(text, what)


@dataclass(frozen=True)
class Knob:
    """One thing that a user may set."""

    name: str
    type: type[Value]
    unit: str
    """Unit of the value, "" for none."""
    default: Value
    environment: str
    """The variable that sets it."""
    aliases: tuple[str, ...]
    """Further variables with the same meaning and unit; ``environment`` wins over them."""
    off: str
    """A variable that sets the value to 0 when it is true, "" for none; it wins over aliases."""
    flag: str
    """Option of ``kolovod run``, "" for none."""
    text: str
    minimum: float
    maximum: float
    choices: tuple[str, ...]
    pattern: str
    """The pattern of a text, "" for any; ``unit`` says it in words."""
    engine: bool
    """True: handed to the native engine under its own name."""
    switch: bool
    """The flag takes no value: it sets the value to true."""

    def parse(self, text: str, what: str) -> Value:
        """The value written as ``text``; ``what`` names the variable or flag in the error.

        Raises InvalidArgumentError.
        """
        if self.type is bool:
            return parse_bool(text, what)
        stripped = text.strip()
        if self.type is str:
            if self.choices and stripped not in self.choices:
                allowed = ", ".join(self.choices)
                raise SettingError(f"{what}={text!r}: expected one of {allowed}")
            if self.pattern and re.fullmatch(self.pattern, stripped, re.ASCII) is None:
                raise SettingError(f"{what}={text!r}: expected {self.unit}")
            return stripped
        try:
            value = self.type(stripped)
        except ValueError:
            kind = "a whole number" if self.type is int else "a number"
            unit = f" of {self.unit}" if self.unit else ""
            raise SettingError(f"{what}={text!r}: expected {kind}{unit}") from None
        if not self.minimum <= float(value) <= self.maximum:  # also refuses nan
            upper = "" if self.maximum >= _INT64_MAX else f" and at most {self.maximum:g}"
            raise SettingError(
                f"{what}={text!r}: must be at least {self.minimum:g}{upper} {self.unit}".rstrip()
            )
        return value


def _knob(
    default: Value,
    text: str,
    *,
    unit: str = "",
    aliases: tuple[str, ...] = (),
    off: str = "",
    minimum: float = -math.inf,
    maximum: float = _INT64_MAX,
    choices: tuple[str, ...] = (),
    pattern: str = "",
    engine: bool = True,
    switch: bool = False,
    flag: bool = True,
) -> Any:
    """A field of ``Settings`` that carries what makes it a knob."""
    metadata = {
        "type": type(default),
        "default": default,
        "unit": unit,
        "aliases": aliases,
        "off": off,
        "text": text,
        "minimum": minimum,
        "maximum": maximum,
        "choices": choices,
        "pattern": pattern,
        "engine": engine,
        "switch": switch,
        "flag": flag,
    }
    return dataclasses.field(default=default, metadata=metadata)


_COMPRESSIONS = ("fp16", "bf16", "int8", "int4")


@dataclass(frozen=True)
class Settings:
    """The settings of a user, or their defaults. Most users need none of them."""

    backend: str = _knob(
        "native",
        "Who carries the bytes: native (shared memory), mpi (an MPI library, by mpi4py), gloo "
        "(by torch.distributed) or nccl (the same; for tensors on GPUs, one GPU for each rank).",
        choices=("native", "mpi", "gloo", "nccl"),
        engine=False,
    )
    elastic: bool = _knob(
        False,
        "The world may change its size while the job runs: graphs traced in a world of one keep "
        "the operations that a larger one needs. The same for all ranks.",
        engine=False,
        flag=False,
    )
    min_np: int = _knob(
        0,
        "Ranks without which an elastic job waits. Set for ranks that Slurm, Kubernetes or others "
        "start, it makes their job an elastic one (docs/elastic.md). The same for all ranks.",
        unit="ranks",
        minimum=0,
        engine=False,
        flag=False,
    )
    max_np: int = _knob(
        0,
        "Ranks that such a job may have; 0: as many as it begins with.",
        unit="ranks",
        minimum=0,
        engine=False,
        flag=False,
    )
    elastic_timeout_s: float = _knob(
        600.0,
        "How long such a job waits for KOLOVOD_MIN_NP ranks, or for a majority of those that there "
        "were.",
        unit="seconds",
        minimum=0.1,
        maximum=30 * 86_400.0,
        engine=False,
        flag=False,
    )
    record_dir: str = _knob(
        "",
        "A folder that outlives a rank's host, where ranks of such a job note what they have "
        "agreed to: then a job on two hosts goes on whichever of them fails, once its rank is "
        "started again.",
        engine=False,
        flag=False,
    )
    interface: str = _knob(
        "",
        "Network interfaces by which ranks of different hosts reach each other: names, or networks "
        "as 10.1.0.0/16, separated by commas; ranks of a host take turns at several. By default "
        "all are tried, the fastest first.",
        aliases=("HOROVOD_GLOO_IFACE",),
        engine=False,
    )
    encrypt: bool = _knob(
        False,
        "Whether all that ranks of different hosts say to each other and to the launcher is "
        "encrypted, by the OpenSSL of each host (docs/security.md). The same for all ranks; with "
        "backend native only.",
        engine=False,
        switch=True,
    )
    start_timeout_s: float = _knob(
        60.0,
        "How long init() waits for all ranks to come.",
        unit="seconds",
        aliases=("HOROVOD_START_TIMEOUT",),
        minimum=0.1,
        maximum=30 * 86_400.0,
        engine=False,
    )
    host_lost_s: float = _knob(
        1.1,
        "Ranks of a host whose kernel acknowledges nothing for so long are lost: the host is down, "
        "or the network between is. Outages of the network up to about half of this are survived: "
        "set twice as much as the longest takes.",
        unit="seconds",
        minimum=0.5,
        maximum=3600.0,
        engine=False,
    )
    call_lines: bool = _knob(
        True,
        "Operations without a name, which are matched by their order, must be called from the same "
        "lines of the script on all ranks: a rank that makes one more or less gets a MismatchError "
        "with both lines. Off: they are matched by their order alone. The same for all ranks.",
        engine=False,
        flag=False,
    )
    sentinel: str = _knob(
        "warn",
        "What happens when ranks that train together are found to be different (parameters, "
        "learning rates and other options, numbers of steps), or a gradient is not finite: warn "
        "says so once, error raises MismatchError on all ranks where they differ, off does not "
        "look. The same for all ranks.",
        choices=("warn", "error", "off"),
        engine=False,
        flag=False,
    )
    deadlock_check: bool = _knob(
        True,
        "Ranks that wait for different operations, so that none can ever complete, get a "
        "MismatchError that says where each waits, within a second; in graphs of TensorFlow and "
        "programs of JAX, on the CPU, within some seconds. Off: they wait, and the report on late "
        "ranks names them. The same for all ranks.",
        engine=False,
        flag=False,
    )
    late_report_s: float = _knob(
        60.0,
        "An operation that waits longer for a rank is reported on standard error, with that rank's "
        "Python stack; again after twice the time. 0: never.",
        unit="seconds",
        aliases=("HOROVOD_STALL_CHECK_TIME_SECONDS",),
        off="HOROVOD_STALL_CHECK_DISABLE",
        minimum=0.0,
        maximum=30 * 86_400.0,
        engine=False,
    )
    late_failure_s: float = _knob(
        0.0,
        "After waiting so long for a rank, every rank fails with LateRankError. 0: never. In an "
        "elastic job 600 if nothing is set; a rank that does not notice it is killed and replaced.",
        unit="seconds",
        aliases=("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",),
        off="HOROVOD_STALL_CHECK_DISABLE",
        minimum=0.0,
        maximum=30 * 86_400.0,
        engine=False,
    )
    last_operations_dir: str = _knob(
        "",
        "Folder for the files with each rank's last operations, which are written when the world "
        "fails. none: no files. By default kolovod in $XDG_RUNTIME_DIR, or /tmp/kolovod-UID.",
        engine=False,
    )
    timeline: str = _knob(
        "",
        "File for a timeline of all ranks, written by rank 0 (docs/timeline.md). dynamic: none "
        "yet, but start_timeline() on rank 0 is enough to begin one.",
        aliases=("HOROVOD_TIMELINE",),
        engine=False,
    )
    timeline_mark_cycles: bool = _knob(
        False,
        "Whether the start of every bucket is marked in the timeline.",
        aliases=("HOROVOD_TIMELINE_MARK_CYCLES",),
        engine=False,
    )
    metrics_port: int = _knob(
        0,
        "Each rank serves metrics in OpenMetrics form (for Prometheus) at this port plus its local "
        "rank (docs/metrics.md). 0: none.",
        unit="port",
        minimum=0,
        maximum=65535,
        engine=False,
    )
    metrics_address: str = _knob(
        "127.0.0.1",
        "Address of the interface at which metrics are served; 0.0.0.0: all, so other hosts can "
        "read them.",
        engine=False,
    )
    tensorboard_dir: str = _knob(
        "",
        "Folder to which rank 0 writes scalars for TensorBoard every five seconds: steps per "
        "second, shares of waiting, communication and what is hidden of it (docs/metrics.md).",
        engine=False,
    )
    autotune: bool = _knob(
        False,
        "Whether bucket sizes are tried in the first hundred steps of a DistributedOptimizer of "
        "PyTorch, and the fastest one is kept; else they follow the link between hosts.",
        aliases=("HOROVOD_AUTOTUNE",),
        engine=False,
        switch=True,
    )
    autotune_log_file: str = _knob(
        "",
        "File to which rank 0 writes what --autotune has tried and chosen, a line of JSON each.",
        aliases=("HOROVOD_AUTOTUNE_LOG",),
        engine=False,
    )
    compression: str = _knob(
        "none",
        "How optimizers and gradient tapes send gradients that say no compression themselves: "
        "none, fp16, bf16, between hosts int8 or int4; auto:int8 (PyTorch): the least lossy up to "
        "that one whose bytes hide behind backward. The same for all ranks.",
        choices=("none", *_COMPRESSIONS, *(f"auto:{each}" for each in _COMPRESSIONS)),
        engine=False,
    )
    fusion_bytes: int = _knob(
        64 * _MEBI,
        "A bucket takes no further tensor beyond this size. 0: every tensor goes alone.",
        unit="bytes",
        aliases=("HOROVOD_FUSION_THRESHOLD",),
        minimum=0,
    )
    kick_bytes: int = _knob(
        0,
        "So many ready bytes start the engine's thread while nobody waits for a result. 0: 1 MiB "
        "if the host has two cores or more per rank; else the thread that waits does the work.",
        unit="bytes",
        minimum=0,
    )
    cache_capacity: int = _knob(
        8192,
        "Tensor names that can be announced by one bit. 0: all announcements are in full.",
        unit="names",
        aliases=("HOROVOD_CACHE_CAPACITY",),
        minimum=0,
        maximum=_MEBI,
    )
    chunk_bytes: int = _knob(
        0,
        "Bytes that a rank stages in shared memory per pipeline step, 4096 at least. 0: 64 KiB "
        "with a core for every rank of the host, else 256 KiB.",
        unit="bytes",
        minimum=0,
        maximum=1 << 30,
    )
    chunk_slots: int = _knob(
        3,
        "Depth of the pipeline. A rank takes chunk_bytes (256 KiB if that is 0) times chunk_slots "
        "of shared memory.",
        unit="chunks",
        minimum=3,
        maximum=64,
    )
    one_shot_bytes: int = _knob(
        0,
        "Up to this size, and chunk_bytes at most, every rank reduces the whole tensor by itself. "
        "0: chosen by size.",
        unit="bytes",
        minimum=0,
    )
    unused_output_bytes: int = _knob(
        256 * _MEBI,
        "Memory of results (of allgather, alltoall, reducescatter) that this process keeps, once "
        "they are let go, for the next ones: new memory costs more than to fill it. 0: none.",
        unit="bytes",
        minimum=0,
    )
    peer_read_bytes: int = _knob(
        _MEBI,
        "From this size on, what one rank of a host has for another in an allgather or alltoall is "
        "read from its memory (process_vm_readv) if the system allows that, which is tried when a "
        "world begins; what is smaller goes through shared memory. 0: all. Where ranks outnumber "
        "cores a broadcast is read, too, from eight times this size on.",
        unit="bytes",
        minimum=0,
    )
    spin_us: int = _knob(
        50,
        "How long a wait looks before it sleeps, when there are cores to spare.",
        unit="microseconds",
        minimum=0,
        maximum=1_000_000,
    )
    cores: int = _knob(
        0,
        "Cores that the ranks of this host may use. 0: what the system allows this process.",
        unit="cores",
        minimum=0,
        maximum=1 << 16,
    )
    thread_affinity: str = _knob(
        "",
        "Cores to which the engine's own thread of the first, second, ... rank of each host is "
        "bound. The thread that waits for a result works for the engine, too, and stays free.",
        unit="core numbers, as 0,1",
        aliases=("HOROVOD_THREAD_AFFINITY",),
        pattern=r"(\d{1,5}(\s*,\s*\d{1,5})*)?",
        engine=False,
    )

    tcp_algorithm: str = _knob(
        "auto",
        "How an operation goes between hosts: direct, tree, pairwise, ring, chain, doubling "
        "or halving; auto: chosen by what it costs. An operation that the algorithm cannot do is "
        "done as by auto.",
        choices=TCP_ALGORITHMS,
        engine=False,
    )

    connections: int = _knob(
        0,
        "TCP connections between two ranks of different hosts, at most. 0: one, and more over "
        "links of 4 ms or more that one cannot fill.",
        unit="connections",
        minimum=0,
        maximum=8,  # _native.MOST_STRIPES
    )

    def check_elastic(self) -> None:
        """Raise InvalidArgumentError if worlds of an elastic job cannot have this backend."""
        if self.backend == "mpi":
            raise SettingError(
                "an elastic job with backend mpi: MPI cannot go on without a rank, nor take one "
                "in. Leave out --backend, or KOLOVOD_BACKEND, for the native one"
            )

    @property
    def interface_names(self) -> list[str]:
        """The items of ``interface``."""
        return [name.strip() for name in self.interface.split(",") if name.strip()]

    def engine_config(self) -> dict[str, int]:
        """Every field of the native engine's configuration."""
        config = {knob.name: int(getattr(self, knob.name)) for knob in KNOBS if knob.engine}
        config["start_timeout_ms"] = max(1, round(self.start_timeout_s * 1000))
        config["host_lost_ms"] = round(self.host_lost_s * 1000)
        config["late_report_ms"] = math.ceil(self.late_report_s * 1000)
        config["tcp_algorithm"] = TCP_ALGORITHMS.index(self.tcp_algorithm)
        config["late_failure_ms"] = math.ceil(self.late_failure_s * 1000)
        return config


def _make_knob(field: dataclasses.Field[Any]) -> Knob:
    flag = f"--{field.name.replace('_', '-')}" if field.metadata["flag"] else ""
    return Knob(
        name=field.name,
        environment=f"KOLOVOD_{field.name.upper()}",
        **{**field.metadata, "flag": flag},
    )


KNOBS: tuple[Knob, ...] = tuple(_make_knob(field) for field in dataclasses.fields(Settings))


def load(environ: Mapping[str, str]) -> Settings:
    """The settings that ``environ`` asks for; an empty variable counts as unset.

    Raises InvalidArgumentError naming the variable and its value.
    """
    values: dict[str, Value] = {}
    for knob in KNOBS:
        for name in (knob.environment, knob.off, *knob.aliases):
            text = environ.get(name, "")
            if not text.strip():
                continue
            if name != knob.off:
                values[knob.name] = knob.parse(text, name)
                break
            if _is_on(text, name):
                values[knob.name] = knob.type(0)
                break
    settings = Settings(**values)  # type: ignore[arg-type]
    if settings.encrypt and settings.backend != "native":
        raise SettingError(
            f"KOLOVOD_ENCRYPT=1 with KOLOVOD_BACKEND={settings.backend!r}: that library's own "
            "connections would not be encrypted. Use the backend native, or a network that "
            "encrypts (WireGuard, IPsec)"
        )
    return settings
