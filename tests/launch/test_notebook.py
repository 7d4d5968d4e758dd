"""``kolovod.run`` in the cells of a notebook, whose kernel is a real one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launched import wait_until_gone
from paths import EXAMPLES

import kolovod

nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")

pytestmark = pytest.mark.frameworks

DEADLINE_S = 60
WORK = """
import os, time
import kolovod
from pathlib import Path

def work(path):
    kolovod.init()
    print("pid", os.getpid())
    while not Path(path).exists():
        time.sleep(0.02)
    if kolovod.rank() == 1 and Path(path).read_text() == "fail":
        raise ValueError("the loss is nan")
    return kolovod.allgather_object(kolovod.rank())
"""


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the user's is read or written; the kernel finds the package."""
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    source = str(Path(kolovod.__file__).parents[1])
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)


class Kernel:
    """A kernel in which ``run`` runs cells, one after the other."""

    def __init__(self, manager: Any, client: Any) -> None:
        self.manager = manager
        self._client = client

    def run(self, code: str, look: Callable[[list[str], list[str]], None] | None = None) -> Cell:
        """Run a cell. ``look`` is given texts and lines, as of ``Cell``, when more have come."""
        cell = Cell()
        request = self._client.execute(code)
        deadline = time.monotonic() + DEADLINE_S
        while True:
            message = self._client.get_iopub_msg(timeout=max(0.0, deadline - time.monotonic()))
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return cell
            cell.take(kind, content)
            if look is not None:
                look(cell.printed, cell.lines)


class Cell:
    """What a cell shows."""

    def __init__(self) -> None:
        self.printed: list[str] = []
        self.lines: list[str] = []
        """What the line of progress has been."""
        self.result = ""
        self.error = ""
        self.traceback: list[str] = []

    def take(self, kind: str, content: dict[str, Any]) -> None:
        """A message of the kernel."""
        if kind == "stream":
            self.printed += content["text"].splitlines()
        elif kind in ("display_data", "update_display_data"):
            self.lines.append(content["data"]["text/plain"])
        elif kind == "execute_result":
            self.result = content["data"]["text/plain"]
        elif kind == "error":
            self.error, self.traceback = content["ename"], content["traceback"]


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(startup_timeout=DEADLINE_S, kernel_name="python3")
    try:
        kernel = Kernel(manager, client)
        assert not kernel.run(WORK).error
        yield kernel
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def pids(printed: list[str]) -> list[int]:
    return [int(line.partition(":pid ")[2]) for line in printed if ":pid " in line]


def test_what_ranks_print_is_seen_while_they_run(kernel: Kernel, tmp_path: Path) -> None:
    go_on = tmp_path / "go on"

    def look(printed: list[str], lines: list[str]) -> None:
        if len(pids(printed)) == 2 and lines and "; rank 0: pid " in lines[-1]:
            go_on.touch()  # they end only after that

    cell = kernel.run(f"kolovod.run(work, args=({str(go_on)!r},), np=2)", look)
    assert cell.result == "[[0, 1], [0, 1]]"
    assert cell.lines[0].startswith("kolovod.run: 2 of 2 ranks running, ")
    assert cell.lines[-1].startswith("kolovod.run: 2 ranks succeeded after ")


def test_the_error_of_a_rank_is_shown_as_it_was_there(kernel: Kernel, tmp_path: Path) -> None:
    orders = tmp_path / "orders"
    orders.write_text("fail")
    cell = kernel.run(f"kolovod.run(work, args=({str(orders)!r},), np=2)")
    assert cell.error == "RankFailed"
    assert cell.traceback[:2] == ["rank 1 raised", "Traceback (most recent call last):"]
    assert cell.traceback[2].endswith("in work")
    assert cell.traceback[-1] == "ValueError: the loss is nan"
    assert len(cell.traceback) == 4  # nothing of the launcher
    assert cell.lines[-1].startswith("kolovod.run: ended after ")


def test_an_interrupt_ends_the_ranks(kernel: Kernel, tmp_path: Path) -> None:
    interrupted: list[int] = []

    def look(printed: list[str], lines: list[str]) -> None:
        if len(pids(printed)) == 2 and not interrupted:
            interrupted.extend(pids(printed))
            kernel.manager.interrupt_kernel()

    never = str(tmp_path / "never")
    cell = kernel.run(f"kolovod.run(work, args=({never!r},), np=2)", look)
    assert cell.error == "KeyboardInterrupt"
    assert len(interrupted) == 2
    wait_until_gone(interrupted)
    assert cell.lines[-1].endswith("without success: rank 0, 1")
    (tmp_path / "again").touch()  # the kernel is as good as before
    again = kernel.run(f"kolovod.run(work, args=({str(tmp_path / 'again')!r},), np=2)")
    assert again.result == "[[0, 1], [0, 1]]"


class _SeenEnoughError(Exception):
    pass


def test_the_end_of_the_kernel_ends_the_ranks(kernel: Kernel, tmp_path: Path) -> None:
    running: list[int] = []

    def look(printed: list[str], lines: list[str]) -> None:
        if len(pids(printed)) == 2:
            running.extend(pids(printed))
            raise _SeenEnoughError

    with pytest.raises(_SeenEnoughError):
        kernel.run(f"kolovod.run(work, args=({str(tmp_path / 'never')!r},), np=2)", look)
    kernel.manager.shutdown_kernel(now=True)
    wait_until_gone(running)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_the_example_runs() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    import nbformat

    notebook = nbformat.read(EXAMPLES / "integrations" / "notebook.ipynb", as_version=4)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
    nbclient.NotebookClient(notebook, timeout=100, kernel_name="python3").execute()
    training, results = (cell for cell in notebook.cells[2:] if cell.cell_type == "code")
    printed = "".join(output.get("text", "") for output in training.outputs)
    for rank in range(2):
        for epoch in range(4):
            assert f"[{rank}]<stdout>:epoch {epoch}: loss " in printed
    (shown,) = results.outputs
    is_equal, losses = eval(shown.data["text/plain"])
    assert is_equal
    assert losses[-1] < losses[0] / 2
