"""What every test must do: leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import forked
import left_behind
import psutil
import pytest
import rotation

from kolovod.launch import orphan_reaper

_OTHER_FRAMEWORKS = {"tensorflow", "keras", "jax", "mxnet"}  # folders of tests
_PATIENCE_S = 30.0  # for what is just about to end


def pytest_addoption(parser: pytest.Parser) -> None:
    """The part of the slow tests that is run."""
    parser.addoption(
        "--slow-parts",
        type=int,
        default=1,
        metavar="N",
        help="of the tests marked slow run an N-th part, another after each commit, and half "
        "as many of those that the last commits concern [1: all]",
    )


@pytest.hookimpl(tryfirst=True)  # so that -m sees the marks
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    """Mark what needs other frameworks, leave out slow tests that are not drawn, sort the rest."""
    for item in items:  # what is of another framework than PyTorch needs that; others say so
        if _OTHER_FRAMEWORKS & set(item.path.parts):
            item.add_marker(pytest.mark.frameworks)
    _leave_out_slow(items, config)
    if hasattr(config, "workerinput"):  # files are given out in this order
        _longest_first(items)


def _leave_out_slow(items: list[pytest.Item], config: pytest.Config) -> None:
    rows = [
        item.nodeid
        for item in items
        if item.get_closest_marker("slow") and not item.get_closest_marker("thorough")
    ]
    change = rotation.last_change(config.rootpath)
    left_out = set(rows) - rotation.chosen(rows, change, config.getoption("slow_parts"))
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
        items[:] = [item for item in items if item.nodeid not in left_out]


def _longest_first(items: list[pytest.Item]) -> None:
    """Sort files of tests by about how long they take, so that workers end at the same time."""
    seconds: dict[Path, float] = defaultdict(float)
    for item in items:
        slow = item.get_closest_marker("slow")
        frameworks = item.get_closest_marker("frameworks")
        seconds[item.path] += 5.0 if slow else 1.5 if frameworks else 0.15
    items.sort(key=lambda item: (-seconds[item.path], str(item.path)))


@pytest.fixture(autouse=True, scope="session")
def last_operations_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Worlds that fail on purpose write their files here, not among the user's."""
    name = "KOLOVOD_LAST_OPERATIONS_DIR"
    before = os.environ.get(name)
    os.environ[name] = str(tmp_path_factory.mktemp("last-operations"))
    yield
    if before is None:
        del os.environ[name]
    else:
        os.environ[name] = before


@pytest.fixture(autouse=True, scope="session")
def forked_ranks() -> Iterator[None]:
    """The processes that ranks are forked from end with the tests."""
    yield
    forked.stop()


@pytest.fixture(autouse=True, scope="session")
def no_job_outlives_its_tests() -> Iterator[None]:
    """Elastic jobs go on when a test that fails kills their launcher: they end with the tests."""
    mark = secrets.token_hex(16)
    before = os.environ.get(orphan_reaper.MARK_NAME)
    os.environ[orphan_reaper.MARK_NAME] = mark if before is None else f"{before},{mark}"
    yield
    for pid in orphan_reaper.job_processes(mark):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if "--elastic" in process.cmdline():
                process.kill()
    if before is None:
        del os.environ[orphan_reaper.MARK_NAME]
    else:
        os.environ[orphan_reaper.MARK_NAME] = before


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a child process, a thread or a file in shared memory behind."""
    before = left_behind.everything()
    yield
    deadline, of_others = time.monotonic() + _PATIENCE_S, set[str]()
    while left := left_behind.everything() - before - of_others:
        of_others |= left_behind.held_elsewhere(left)
        if time.monotonic() >= deadline:
            break
        time.sleep(0.02)
    if left := left - of_others:
        pytest.fail("left behind: " + "; ".join(sorted(left)))
