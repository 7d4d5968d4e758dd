"""What --rename takes for the same in Horovod's module and Kolovod's has the same arguments."""

from __future__ import annotations

import importlib
import inspect
from operator import attrgetter

import pytest
from frameworks import is_installed

from kolovod.migrate.horovod_script import MODULES, SAME


@pytest.mark.parametrize(
    ("theirs", "needs"),
    [
        ("horovod.torch", "torch"),
        pytest.param("horovod.keras", "keras", marks=[pytest.mark.frameworks, pytest.mark.slow]),
        pytest.param(
            "horovod.tensorflow", "tensorflow", marks=[pytest.mark.frameworks, pytest.mark.slow]
        ),
    ],
)
def test_arguments(theirs: str, needs: str) -> None:
    if not is_installed(needs):
        pytest.skip(f"{needs} is not installed")
    ours = MODULES[theirs]
    modules = [importlib.import_module(name) for name in (theirs, ours)]
    for name, (places, keywords) in SAME[ours].items():
        old, new = (
            list(inspect.signature(attrgetter(name)(module)).parameters) for module in modules
        )
        assert keywords <= set(old), name
        assert keywords <= set(new), name
        assert len(old) >= places, name
        # The first may have another name, if the table does not have it as a keyword.
        assert old[1:places] == new[1:places], name
        assert old[:1] == new[:1] or places == 0 or old[0] not in keywords, name
