"""Parameters of which `make test` runs some, and `make test-all` every one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(fast: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """``values`` for ``parametrize``, all marked slow but those that are in ``fast``."""
    kept = list(fast)
    return [v if v in kept else pytest.param(v, marks=pytest.mark.slow) for v in values]
