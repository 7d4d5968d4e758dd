"""The elastic step: after a death at any point of it all have what a replay without it computes.

One table: rows are drawn in ``tests/support/elastic_rows.py`` and ``seldom_rows.py``; ranks are
threads. That processes which are killed at any time do the same is in the front ends' files
(``test_whenever_the_kill_comes``).
"""

from __future__ import annotations

import pytest
from exchange_rows import deterministic
from hypothesis import given

pytest.importorskip("torch", reason="PyTorch is not installed")

import elastic_rows
import seldom_rows
from elastic_rows import ElasticRow
from seldom_rows import SeldomRow


@given(elastic_rows.elastic_rows())
@deterministic(40)
def test_optimizers(case: ElasticRow) -> None:
    elastic_rows.run(case)


@pytest.mark.slow
@pytest.mark.timeout(300)
@given(elastic_rows.elastic_rows())
@deterministic(300)
def test_more_optimizers(case: ElasticRow) -> None:
    elastic_rows.run(case)


@given(seldom_rows.seldom_rows())
@deterministic(20)
def test_local_sgd_and_diloco(row: SeldomRow) -> None:
    seldom_rows.run(row)


@pytest.mark.slow
@pytest.mark.timeout(300)
@given(seldom_rows.seldom_rows())
@deterministic(100)
def test_more_of_local_sgd_and_diloco(row: SeldomRow) -> None:
    seldom_rows.run(row)
