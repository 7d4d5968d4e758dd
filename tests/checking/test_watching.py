"""What is noted in a rank, and that nothing is where no check was asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kolovod import checking
from kolovod.checking import places
from kolovod.checking.digests import array_values, digest_of
from kolovod.checking.facts import Facts, Loader, Values, load_all
from kolovod.checking.recorder import Recorder
from kolovod.checking.watch_torch import to_array

STARTUP = Path(checking.__file__).parent / "startup"


def run(code: str, *search: Path, **variables: str) -> str:
    path = os.pathsep.join([*map(str, search), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_costs_nothing_when_off() -> None:
    code = "import sys, kolovod; print([m for m in sys.modules if m.startswith('kolovod.check')])"
    assert run(code).strip() == "[]"


def test_the_sitecustomize_that_it_hides_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.hidden = 'found'")
    assert run("import sys; print(sys.hidden)", STARTUP, tmp_path).strip() == "found"


def test_what_a_process_writes(tmp_path: Path) -> None:
    script = (
        "import os\n"
        "open('out.txt', 'w').close(); open('log', 'a').close(); open('gone', 'w').close()\n"
        "os.remove('gone'); open('out.txt').close(); open(os.devnull, 'w').close()\n"
        "import tempfile; tempfile.TemporaryFile(dir='.').close()\n"
        "open('part', 'w').close(); os.replace('part', 'whole')\n"
        "if os.fork() == 0:\n"
        "    open('of a child', 'w').close(); os._exit(0)\n"
        "os.wait()\n"
    )
    facts_folder = tmp_path / "facts"
    facts_folder.mkdir()
    variables = {"KOLOVOD_CHECK": f"3 0 {facts_folder}", "KOLOVOD_RANK": "1"}
    run(f"import os; os.chdir({str(tmp_path)!r})\n{script}", STARTUP, **variables)
    none, facts = load_all(facts_folder, 2)
    assert none is None
    assert facts is not None
    assert (facts.ended, facts.steps, facts.world_size) == ("script", 0, None)
    found = {Path(file.path).name: file for file in facts.files}
    assert set(found) == {"out.txt", "log", "whole"}
    assert [found[name].appends for name in ("out.txt", "log", "whole")] == [False, True, False]
    assert found["out.txt"].line.endswith(":3")


def test_of_several_processes_that_which_trains_counts(tmp_path: Path) -> None:
    loader = Loader("t.py:1", "DataLoader", batches=[["a"]])
    trains = Facts(rank=0, pid=2, steps=3, loaders=[loader], weights_after={"w": Values("d")})
    for facts in (Facts(rank=0, pid=1, frameworks=["torch"]), trains, Facts(rank=0, pid=3)):
        facts.save(str(tmp_path))
    assert load_all(tmp_path, 1) == [trains]


def nothing(value: Any) -> Any:
    return None


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (np.ones(3), np.ones(3), True),
        (np.ones(3), np.ones(3, np.float32), False),
        (np.ones(4), np.ones((2, 2)), False),
        ([np.ones(2), {"a": 1}], [np.ones(2), {"a": 1}], True),
        ([np.ones(2), {"a": 1}], [np.ones(2), {"a": 2}], False),
        (("text", 1.5), ("text", 1.5), True),
        (torch.ones(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16), False),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), True),
        (torch.ones(2, requires_grad=True), torch.ones(2), True),
    ],
)
def test_digests(one: Any, other: Any, same: bool) -> None:
    first, second = digest_of(one, to_array), digest_of(other, to_array)
    assert first
    assert (first == second) is same


@pytest.mark.parametrize("value", [None, object(), [], {"a": None}, np.array([None])])
def test_what_has_no_content_has_no_digest(value: Any) -> None:
    assert digest_of(value, nothing) == ""


def test_samples_of_tensors() -> None:
    small, large = array_values(np.arange(6.0).reshape(2, 3)), array_values(np.arange(1000.0))
    assert (small.sample, small.is_whole) == ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], True)
    assert (len(large.sample), large.is_whole) == (256, False)
    assert (large.sample[0], large.sample[-1]) == (0.0, 999.0)
    json.dumps(large.sample)


def test_a_dtype_that_numpy_knows_by_name_only() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="comes with JAX and TensorFlow")
    array = np.array([1.5, np.nan], ml_dtypes.bfloat16)
    values = array_values(array)
    assert (values.sample[0], values.not_finite) == (1.5, 1)
    assert digest_of(array, nothing) == values.digest != ""


def test_steps_begin_with_the_gradients_of_their_closure(tmp_path: Path) -> None:
    """As Lightning steps: neither the model nor its gradients were there before."""
    script = (
        "import torch\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "def closure():\n"
        "    optimizer.zero_grad()\n"
        "    loss = model(torch.ones(1, 2)).sum() * float(scale)\n"
        "    loss.backward()\n"
        "    return loss\n"
        "for scale in ('1', 'nan'):\n"
        "    optimizer.step(closure)\n"
    )
    (tmp_path / "train.py").write_text(script)
    variables = {"KOLOVOD_CHECK": f"9 0 {tmp_path}", "KOLOVOD_RANK": "0"}
    run(f"import runpy; runpy.run_path({str(tmp_path / 'train.py')!r})", STARTUP, **variables)
    [facts] = load_all(tmp_path, 1)
    assert facts is not None
    [optimizer] = facts.optimizers
    assert set(facts.weights_before) == set(optimizer.parameters) == {"weight", "bias"}
    assert [set(each) for each in optimizer.gradients] == [{"weight", "bias"}] * 2
    assert {(each.what, each.step) for each in facts.not_finite} == {("gradient", 2), ("weight", 2)}


def test_lines_of_the_script() -> None:
    assert places.script_line().startswith(f"{__file__.removeprefix(os.getcwd() + '/')}:")
    with pytest.raises(ValueError, match="Expecting property name") as error:
        json.loads("{")
    name = Path(places.line_of_error(error.value.__traceback__)).name
    assert name.startswith("test_watching.py:")


def test_steps_are_counted(tmp_path: Path) -> None:
    recorder = Recorder({"KOLOVOD_CHECK": f"5 0 {tmp_path}", "KOLOVOD_RANK": "0"})
    seen: list[str] = []
    recorder.before_first_step.append(lambda: seen.append("before"))
    for _ in range(2):
        recorder.step_begins("t.py:3")
        recorder.step_ends()
    recorder.note_file(tmp_path.parent / "model.pt", "t.py:4")
    recorder.note_file("/dev/null", "t.py:5")
    recorder.save()
    [facts] = load_all(tmp_path, 1)
    assert facts is not None
    assert (facts.steps, facts.step_line, seen) == (2, "t.py:3", ["before"])
    assert [file.line for file in facts.files] == ["t.py:4"]
