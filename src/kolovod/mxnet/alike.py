"""Comparison of the ranks' models, learning rates and steps; see gradients/alike.py.

Gradients are not looked at: a rank that waits for those of the first layers cannot send the others'
while MXNet computes these.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kolovod.core.collectives import Collectives
from kolovod.core.numpy_frontend import NumpyFrontend
from kolovod.core.ops import Sum
from kolovod.core.submission import Group
from kolovod.gradients import sentinel
from kolovod.gradients.alike import EVERY, NUMBERS, Alike
from kolovod.gradients.spec import is_elastic
from kolovod.mxnet.verbs import MxnetCollectives

_PARAMETERS = 4  # that are compared
_ELEMENTS = 1024  # of each


class Updated(NamedTuple):
    """A parameter of a loop that calls an updater, as Gluon has them."""

    name: str
    weight: Any

    def list_data(self) -> list[Any]:
        """Return the values on each device: there is one."""
        return [self.weight]


def compare(
    alike: Alike,
    parameters: Sequence[Any],
    verbs: MxnetCollectives,
    process_set: Group | None,
    name: str,
    *,
    is_first: bool = False,
) -> None:
    """Compare the ranks' facts. Not in elastic jobs.

    ``parameters``: Gluon's, or ``Updated``; their values are looked at in each tenth step, and
    where it ``is_first``. Raises MismatchError where ranks differ and that is to be an error.
    """
    numbers = None if is_elastic() else alike.numbers()
    world = verbs.membership(process_set)
    if numbers is None or world.size == 1 or not parameters:
        return
    steps_taken, rate = int(numbers[0]), float(numbers[1])
    sampled = sentinel.sample_of(parameters, _PARAMETERS)
    total = 0
    for parameter in sampled if is_first or steps_taken % EVERY == 0 else ():
        values = parameter.list_data()[0].reshape((-1,))[:_ELEMENTS].asnumpy()
        total = zlib.crc32(values.tobytes(), total)
    table = np.zeros((world.size, NUMBERS), np.int32)
    numbers_of_rate = struct.unpack("<i", struct.pack("<f", rate))
    table[world.rank] = [steps_taken + 1, *numbers_of_rate, total % 2**31, 0]
    # A sum, to which ranks that have joined give zeros.
    on_arrays = Collectives(NumpyFrontend(), verbs.world)
    table = on_arrays.allreduce(table, name, Sum, process_set=process_set)
    there = table[table[:, 0] > 0]
    if (there != there[0]).any():
        ranks = range(world.size) if process_set is None else process_set.ranks
        names = [parameter.name for parameter in sampled]
        alike.teller(ranks, names, [], world.rank == 0)(table)
