"""Whether ranks that give the same sources to their tapes still train one model.

A tape knows neither steps nor learning rates, so of some variables a sample is compared in every
step; see gradients/sentinel.py. Scripts in Horovod's way broadcast their variables after the first
step, so what differs is told when it has differed three times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kolovod.core.ops import Sum
from kolovod.core.submission import Group
from kolovod.gradients import sentinel
from kolovod.gradients.spec import is_elastic
from kolovod.tensorflow.differentiable import VerbsOfSet
from kolovod.tensorflow.verbs import TensorflowCollectives

__all__ = ["compare", "tell_where"]

_VARIABLES = 4  # that are compared: the first, the last, and between them
_ELEMENTS = 1024  # of each
_OFTEN = 3
_differed: dict[tuple[Any, ...], tuple[int, bytes]] = {}
"""Of variables, how often they did, and their bits then; after ``_OFTEN`` times it was told."""
_MOST_KNOWN = 10_000


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def compare(
    sources: Sequence[tf.Variable],
    names: Sequence[str],
    verbs: TensorflowCollectives,
    process_set: Group | None,
) -> None:
    """Compare a sample of ``sources``, which all ranks give, called ``names``, over the ranks.

    Not in graphs of TensorFlow 1, where a variable may be read while it changes, nor in elastic
    jobs.
    """
    is_ordered = tf.compat.v1.executing_eagerly_outside_functions()
    if not is_ordered or is_elastic() or sentinel.policy() == "off":
        return
    floats = [i for i, s in enumerate(sources) if tf.as_dtype(s.dtype).is_floating]
    if not floats:
        return
    places = np.linspace(0, len(floats) - 1, _VARIABLES, dtype=int)
    chosen = [floats[i] for i in dict.fromkeys(places)]
    sample = [1, *(_bits(sources[i]) for i in chosen)]
    place = VerbsOfSet(verbs, process_set)
    own_row = tf.one_hot(place.rank(), place.size(), dtype=tf.int32)
    # A sum, to which ranks that have joined give zeros.
    mine = own_row[:, None] * tf.stack(sample)
    table = verbs.allreduce(mine, op=Sum, process_set=process_set)
    known_by = tuple(getattr(sources[i], "_unique_id", id(sources[i])) for i in chosen)
    tell_where(table, _teller(known_by, [names[i] for i in chosen], verbs, process_set))


def _bits(variable: Any) -> tf.Tensor:
    flat = tf.reshape(tf.convert_to_tensor(variable), [-1])[:_ELEMENTS]
    words = tf.bitcast(flat, {1: tf.int8, 2: tf.int16}.get(flat.dtype.size, tf.int32))
    return tf.reduce_sum(tf.cast(words, tf.int32))


def _teller(
    known_by: tuple[Any, ...],
    names: Sequence[str],
    verbs: TensorflowCollectives,
    process_set: Group | None,
) -> Callable[[Any], None]:
    def tell(table: Any) -> None:
        rows = np.asarray(table, np.int32)
        often, bits = _differed.get(known_by, (0, b""))
        if rows.tobytes() == bits:  # of the same step: several passes before an update
            return
        if len(_differed) >= _MOST_KNOWN:
            _differed.clear()
        _differed[known_by] = often + 1, rows.tobytes()
        if often + 1 < _OFTEN or (often + 1 > _OFTEN and sentinel.policy() != "error"):
            return
        world = verbs.membership(process_set)
        ranks = range(world.size) if process_set is None else process_set.ranks
        there = [i for i, row in enumerate(rows) if row[0] > 0]  # others have joined
        said = [
            sentinel.Facts(None, {}, list(zip(names, rows[i, 1:].tolist(), strict=True)))
            for i in there
        ]
        like = sentinel.Like("TensorFlow's variables", [ranks[i] for i in there])
        text = sentinel.text_of([sentinel.WEIGHTS], said, like)
        sentinel.tell(text, is_first=world.rank == 0)

    return tell


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def tell_where(table: tf.Tensor, tell: Callable[[Any], None]) -> None:
    """Have ``tell(table)`` called where its rows are not equal; those with a 0 first are empty."""
    is_there = table[:, :1] > 0
    least = tf.reduce_min(tf.where(is_there, table, tf.int32.max), 0)
    differ = tf.reduce_any(tf.reduce_max(tf.where(is_there, table, tf.int32.min), 0) > least)
    if tf.executing_eagerly():
        if bool(differ):
            tell(table)
        return

    def told() -> tf.Tensor:
        def call(given: tf.Tensor) -> Any:
            tell(given)
            return np.int32(1)

        return tf.py_function(call, [table], tf.int32)

    tf.cond(differ, told, lambda: tf.constant(0))
