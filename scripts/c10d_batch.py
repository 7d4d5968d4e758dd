"""A batch of PyTorch's own tests of torch.distributed, over one backend: started by c10d.py.

    python scripts/c10d_batch.py BACKEND RANKS LIMIT_S RESULTS [TEST ...]

Appends to RESULTS, one JSON object a line, each test as it begins and as it ends; with no TEST it
prints the names of all.

PyTorch's tests compare the backend's name with "gloo" while their class is made, to skip what other
backends lack. Here they are made for gloo, and then run over BACKEND, so what runs over gloo runs
over any backend. Not done is one thing: the names of a profiler's events are looked at for the
backends that PyTorch lists only, since events of this kind are made in C++.

Ranks are forked from this process, which has imported everything, instead of being started anew:
importing takes several seconds of a core for each.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import tempfile
import unittest
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

__all__ = ["AsGloo", "Result", "imported", "made"]

MODULE = "torch.testing._internal.distributed.distributed_test"
HELPERS = "torch.testing._internal.common_distributed"
GRACE_S = 30  # for PyTorch's own limit, which says more


class AsGloo(str):
    """A backend's name that passes for gloo's, too, where a test asks for it as it runs."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or other == "gloo"

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class Result(unittest.TestResult):
    """Writes what has become of each test as soon as it is known, and ends what has no end."""

    def __init__(self, path: Path, limit_s: int) -> None:
        """``path``: the file, to which lines are appended."""
        super().__init__()
        self._path = path
        self._limit_s = limit_s
        signal.signal(signal.SIGALRM, self._late)

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._write(test)
        signal.alarm(self._limit_s)

    def stopTest(self, test: unittest.TestCase) -> None:
        signal.alarm(0)
        super().stopTest(test)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._write(test, outcome="passed", text="")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._write(test, outcome="skipped", text=reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._write(test, outcome="failed", text=str(err[1]) or repr(err[1]))

    addError = addFailure

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._write(test, outcome="passed", text="")

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        self._write(test, outcome="failed", text="it passes, though PyTorch expects it to fail")

    def _late(self, number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"no end after {self._limit_s} s")

    def _write(self, test: unittest.TestCase, **what: str) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"test": test.id().rsplit(".", 1)[-1], **what}) + "\n")


def imported(backend: str, ranks: int, limit_s: int) -> ModuleType:
    """Return PyTorch's module of tests, made for gloo, to be run over ``backend``."""
    os.environ |= {
        "BACKEND": "gloo",
        "WORLD_SIZE": str(ranks),
        "TEMP_DIR": tempfile.gettempdir(),
        "INIT_METHOD": "file://",  # tests look at how it begins; ``made`` has the rest
    }
    helpers = importlib.import_module(HELPERS)
    module = importlib.import_module(MODULE)
    helpers.TIMEOUT_OVERRIDE.clear()  # some have most of an hour
    vars(helpers)["TIMEOUT_DEFAULT"] = limit_s
    os.environ["BACKEND"] = backend
    vars(module)["BACKEND"] = AsGloo(backend)
    return module


def made(module: ModuleType) -> type[unittest.TestCase]:
    """Return the class of tests, as PyTorch's own script makes it, but with forked ranks."""
    import torch.multiprocessing

    def set_up(self: Any) -> None:
        module.TestDistBackend.setUp(self)
        vars(module)["INIT_METHOD"] = os.environ["INIT_METHOD"]  # a file in a folder of this test
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    bases = (module.TestDistBackend, module.DistributedTest._DistTestBase)
    return type("C10d", bases, {"setUp": set_up})


def main() -> int:
    backend, ranks, limit, results, *names = sys.argv[1:]
    tests = made(imported(backend, int(ranks), int(limit)))
    if not names:
        print(json.dumps(unittest.TestLoader().getTestCaseNames(tests)))
        return 0
    suite = unittest.TestSuite(tests(name) for name in names)
    suite.run(Result(Path(results), int(limit) + GRACE_S))
    return 0


if __name__ == "__main__":
    sys.exit(main())
