"""A check that ranks which give the same sources to their tapes still train one model.

A tape knows neither steps nor learning rates, so of some variables a sample is compared in every
step; see gradients/sentinel.py. Scripts in Horovod's way broadcast their variables after the first
step, so what differs is told when it has differed three times. Gradients that are not finite are
told once the variables are not, either: a script that scales its loss leaves such a step out.
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
"""How often variables differed, and their bits then; after ``_OFTEN`` times it was told."""
_bad: dict[tuple[Any, ...], tuple[list[int], str]] = {}
"""For variables still finite, the ranks whose gradients were not, and the first such variable."""
_MOST_KNOWN = 10_000


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def compare(
    sources: Sequence[tf.Variable],
    names: Sequence[str],
    gradients: Sequence[Any],
    verbs: TensorflowCollectives,
    process_set: Group | None,
) -> None:
    """Compare a sample of ``sources``, which all ranks give, called ``names``, over the ranks.

    ``gradients``: this rank's own of them; None is none. Not in graphs of TensorFlow 1, where a
    variable may be read while it changes, nor in elastic jobs.
    """
    is_ordered = tf.compat.v1.executing_eagerly_outside_functions()
    if not is_ordered or is_elastic() or sentinel.policy() == "off":
        return
    floats = [i for i, s in enumerate(sources) if tf.as_dtype(s.dtype).is_floating]
    chosen = sentinel.sample_of(floats, _VARIABLES)
    if not chosen:
        return
    place = VerbsOfSet(verbs, process_set)
    health = _health([sources[i] for i in chosen], [gradients[i] for i in chosen], place)
    sample = [1, *(_bits(sources[i]) for i in chosen), health]
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


def _health(variables: Sequence[Any], gradients: Sequence[Any], place: VerbsOfSet) -> tf.Tensor:
    """Return 0 if all is finite; else a number that no other rank has, for ``tell_where``.

    Negative if a variable is not finite; else (1 + the place of the first gradient) * size + rank.
    """

    def is_finite(value: Any) -> tf.Tensor:
        beginning = tf.reshape(tf.convert_to_tensor(value), [-1])[:_ELEMENTS]
        return tf.reduce_all(tf.math.is_finite(beginning))

    health = tf.zeros((), tf.int32)
    for i, gradient in reversed(list(enumerate(gradients))):
        if gradient is not None and tf.as_dtype(gradient.dtype).is_floating:
            bad = (i + 1) * place.size() + place.rank()
            health = tf.where(is_finite(gradient), health, bad)
    are_finite = tf.reduce_all([is_finite(variable) for variable in variables])
    return tf.where(are_finite, health, -1 - place.rank())


def _teller(
    known_by: tuple[Any, ...],
    names: Sequence[str],
    verbs: TensorflowCollectives,
    process_set: Group | None,
) -> Callable[[Any], None]:
    def tell(table: Any) -> None:
        rows = np.asarray(table, np.int32)
        world = verbs.membership(process_set)
        ranks = range(world.size) if process_set is None else process_set.ranks
        health, rows = rows[:, -1], rows[:, :-1]
        text = _news_of(health, known_by, names, ranks)
        if text and world.rank == 0:
            sentinel.warn(text, "this is said once")
        if (rows[rows[:, 0] > 0] == rows[rows[:, 0] > 0][:1]).all():
            return
        often, bits = _differed.get(known_by, (0, b""))
        if rows.tobytes() == bits:  # of the same step: several passes before an update
            return
        if len(_differed) >= _MOST_KNOWN:
            _differed.clear()
        _differed[known_by] = often + 1, rows.tobytes()
        if often + 1 < _OFTEN or (often + 1 > _OFTEN and sentinel.policy() != "error"):
            return
        there = [i for i, row in enumerate(rows) if row[0] > 0]  # others have joined
        said = [
            sentinel.Facts(None, {}, list(zip(names, rows[i, 1:].tolist(), strict=True)))
            for i in there
        ]
        like = sentinel.Like("TensorFlow's variables", [ranks[i] for i in there])
        text = sentinel.text_of([sentinel.WEIGHTS], said, like)
        sentinel.tell(text, is_first=world.rank == 0)

    return tell


def _news_of(
    health: Any, known_by: tuple[Any, ...], names: Sequence[str], ranks: Sequence[int]
) -> str:
    """Return the message about gradients that have made variables not finite; "" for none."""
    bad = [i for i, number in enumerate(health) if number > 0]
    if (health < 0).any():
        who, name = _bad.get(known_by, ([], ""))
        _bad[known_by] = [], ""
        return sentinel.of_gradients(who, "a step of TensorFlow's", name) if who else ""
    if bad:
        first = min(int(health[i]) for i in bad) // len(health) - 1
        if len(_bad) >= _MOST_KNOWN:
            _bad.clear()
        _bad[known_by] = [ranks[i] for i in bad], names[first]
    return ""


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
