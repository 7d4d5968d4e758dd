"""The time that a bucket takes: on links, and on processors. PURE.

The model is alpha-beta (R. Hockney, Parallel Computing 20(3), 1994), hierarchical: every rank of a
host carries its slice between hosts by the algorithm that the engine would choose there, which the
engine itself is asked for (csrc/collectives/select.h), and with a codec by that of coded.h.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from kolovod import _native

__all__ = ["Cluster", "Costs", "Link", "Load", "bucket_load", "wire_bytes"]

_TREE = 4  # children of a leader, csrc/base/tree.h
_PORTION_S = 125e-6  # a message is what the link carries in that time (PortionBytes)
_LEAST_PORTION, _MOST_PORTION = 4 << 10, 256 << 10


@dataclass(frozen=True)
class Link:
    """A link from a host to the others, in each direction."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True)
class Costs:
    """The costs on processors: seconds of one core.

    The defaults were measured (docs/plan.md says how).
    """

    sent_s_per_byte: float = 0.8e-9
    """The cost to send a byte and to receive one, over TCP, and to add it up."""
    message_s: float = 5e-6
    """The cost to send and to receive a message, besides its bytes."""
    turn_s: float = 200e-6
    """The time that a message waits until a thread gets a core, for each other thread of the
    core."""
    local_s_per_byte: float = 0.15e-9
    """The cost to exchange a byte of a tensor within a host, through shared memory."""
    coded_s_per_byte: float = 0.25e-9
    """The cost to encode and decode a byte of float32, twice each."""
    cast_s_per_byte: float = 0.5e-9
    """The cost to round a byte of float32 to 16 bits before, and to widen it after."""
    operation_s: float = 30e-6
    """The cost of a bucket, whatever is in it: hand-over and waking."""

    def times(self, factor: float) -> Costs:
        """Return costs that are all so many times as high."""
        return Costs(*(factor * value for value in vars(self).values()))


@dataclass(frozen=True)
class Cluster:
    """The hosts that ranks run on."""

    hosts: int
    ranks_per_host: int
    cores: float
    """The cores of a machine."""
    link: Link
    hosts_per_machine: int = 1
    """More than one: containers or namespaces that share its cores."""

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def ranks_per_machine(self) -> int:
        return self.ranks_per_host * min(self.hosts, self.hosts_per_machine)


class Load(NamedTuple):
    """The load of a bucket, on each rank; seconds."""

    fixed_s: float
    """The time in which messages are on their way."""
    link_s: float
    """The time in which the host's link is busy."""
    cpu_s: float
    """The time of one core."""
    messages: float = 0.0
    """The messages that a thread must take up one after the other."""

    def plus(self, other: Load) -> Load:
        """Return the load of both, one after the other."""
        return Load(*(mine + more for mine, more in zip(self, other, strict=True)))


class _Traffic(NamedTuple):
    """The traffic of one rank in an allreduce between hosts."""

    rounds: int
    messages: float
    bytes: float


def bucket_load(bytes_: float, dtype: str, codec: str, cluster: Cluster, costs: Costs) -> Load:
    """Return the load of an allreduce of ``bytes_`` of tensors on each rank; ``codec``: or ""."""
    if cluster.ranks == 1 or bytes_ <= 0:
        return Load(0.0, 0.0, 0.0)
    cpu_s = costs.local_s_per_byte * bytes_ if cluster.ranks_per_host > 1 else 0.0
    if cluster.hosts == 1:
        return Load(costs.operation_s, 0.0, cpu_s)
    slice_bytes = bytes_ / cluster.ranks_per_host
    traffic = _traffic(slice_bytes, dtype, codec, cluster.hosts, cluster.link)
    if codec:
        floats = slice_bytes / _size(dtype)
        cpu_s += costs.coded_s_per_byte * 4 * floats
    return Load(
        costs.operation_s + traffic.rounds * cluster.link.latency_s,
        cluster.ranks_per_host * traffic.bytes / cluster.link.bytes_per_s,
        cpu_s + traffic.bytes * costs.sent_s_per_byte + traffic.messages * costs.message_s,
        traffic.messages,
    )


def wire_bytes(bytes_: float, dtype: str, codec: str, cluster: Cluster) -> float:
    """Return the bytes that a host sends in an allreduce of ``bytes_`` of tensors."""
    slice_bytes = bytes_ / cluster.ranks_per_host
    traffic = _traffic(slice_bytes, dtype, codec, cluster.hosts, cluster.link)
    return cluster.ranks_per_host * traffic.bytes


def rounds(bytes_: float, dtype: str, codec: str, cluster: Cluster) -> int:
    """Return how many messages of an allreduce must follow each other."""
    slice_bytes = bytes_ / cluster.ranks_per_host
    return _traffic(slice_bytes, dtype, codec, cluster.hosts, cluster.link).rounds


def negotiation_s(cluster: Cluster) -> float:
    """Return the time from the last rank's submission of an operation until all ranks know it.

    Between hosts announcements go up a tree of leaders, and the answer comes down.
    """
    if cluster.hosts == 1:
        return 0.0
    levels = math.ceil(math.log(cluster.hosts * (_TREE - 1) + 1, _TREE)) - 1
    return 2 * max(1, levels) * cluster.link.latency_s


def _traffic(slice_bytes: float, dtype: str, codec: str, hosts: int, link: Link) -> _Traffic:
    if hosts == 1:
        return _Traffic(0, 0.0, 0.0)
    if codec:
        part = slice_bytes / _size(dtype) * _native.CODEC_BYTES[codec] / 256 / hosts
        portion = min(max(_PORTION_S * link.bytes_per_s, _LEAST_PORTION), _MOST_PORTION)
        messages = 2 * (hosts - 1) * max(1.0, math.ceil(part / portion))
        return _Traffic(2, messages, 2 * (hosts - 1) * part)
    return _uncoded(
        round(slice_bytes), dtype, hosts, min(link.bytes_per_s, 1e15), max(link.latency_s, 0.0)
    )


@lru_cache(maxsize=1 << 14)
def _uncoded(
    slice_bytes: int, dtype: str, hosts: int, bytes_per_s: float, latency_s: float
) -> _Traffic:
    number = _native.DTYPES.get(dtype, _native.DTYPES["float32"])
    _, in_a_row, messages, sent = _native.allreduce_between_hosts(
        max(1, slice_bytes), hosts, number, 1e6 * latency_s, bytes_per_s / 1e6
    )
    return _Traffic(in_a_row, messages, sent)


def _size(dtype: str) -> int:
    traits = _native.DTYPE_TRAITS.get(dtype)
    return 4 if traits is None else traits["bytes"]
