"""The elastic step: after a death at any point of it all have what a replay without it computes.

One table: rows are drawn in ``tests/support/elastic_rows.py`` and ``periodic_rows.py``; ranks are
threads. That processes which are killed at any time do the same is in the front ends' files
(``test_whenever_the_kill_comes``).
"""

from __future__ import annotations

import pytest
from exchange_rows import chosen, each
from slow import THOROUGH, slow_but

pytest.importorskip("torch", reason="PyTorch is not installed")

import elastic_rows
import periodic_rows


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "count", [*slow_but([20], [20, 40, 120]), pytest.param(300, marks=THOROUGH)]
)
def test_optimizers(count: int) -> None:
    rows = chosen(elastic_rows.elastic_rows(), elastic_rows.options, count)
    each(elastic_rows.run, rows)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "count", [*slow_but([10], [10, 20, 40]), pytest.param(100, marks=THOROUGH)]
)
def test_local_sgd_and_diloco(count: int) -> None:
    each(periodic_rows.run, chosen(periodic_rows.periodic_rows(), periodic_rows.options, count))
