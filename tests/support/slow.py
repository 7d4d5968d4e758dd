"""Parameters of which `make test`, or `make test-all`, runs some, and `make thorough` every one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(fast: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """``values`` for ``parametrize``, all marked slow but those that are in ``fast``."""
    return _marked(fast, values, [pytest.mark.slow])


def thorough_but(shorter: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """``values`` of a slow test, all marked thorough but those that are in ``shorter``."""
    return _marked(shorter, values, THOROUGH)


THOROUGH = [pytest.mark.slow, pytest.mark.thorough]


def _marked(
    kept: Iterable[Any], values: Iterable[Any], marks: list[pytest.MarkDecorator]
) -> list[Any]:
    kept = list(kept)
    return [v if v in kept else pytest.param(v, marks=marks) for v in values]
