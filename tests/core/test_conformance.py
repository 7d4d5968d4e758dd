"""Every row of the conformance table in worlds.py."""

from __future__ import annotations

import pytest
import worlds

from kolovod.core.collectives import Collectives
from kolovod.core.verbs import VERBS

ROWS = [row for world in worlds.WORLDS.values() for row in world.rows()]


def marks_of(row):
    needs_more = row.frontend not in ("numpy", "torch") or row.world.name == "mpi"
    return [pytest.mark.slow] * row.slow + [pytest.mark.frameworks] * needs_more


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=marks_of(row), id=str(row)) for row in ROWS],
)
def test_conformance(row):
    why = row.world.missing() or worlds.no_framework(row.frontend)
    if why:
        pytest.skip(why)
    row.world.run(row.world.name, row.size, row.frontend, row.lines)


def test_every_verb_is_in_the_table():
    """Those that only differ in being asynchronous or in place are checked beside their verb."""
    forms = {form for verb in VERBS.values() for form in verb.forms if hasattr(Collectives, form)}
    verbs = {form.removesuffix("_").removesuffix("_async") for form in forms}
    assert verbs - {"barrier"} <= {*worlds.VERBS, *worlds.GROUPS, *worlds.OTHERS}
