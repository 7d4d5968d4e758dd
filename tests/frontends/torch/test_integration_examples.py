"""The examples of integrations, as a user starts them."""

from __future__ import annotations

import ast
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from frameworks import is_installed
from paths import EXAMPLES, ROOT

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch_launching import entry_point  # noqa: E402

pytestmark = pytest.mark.timeout(250)  # several jobs in a test

FOLDER = EXAMPLES / "integrations"
DEADLINE_S = 100


def start(script, folder, *arguments, np=2):
    """``script``, as a job of ``np`` ranks, to its end; ``folder`` is put on the search path."""
    launcher = [sys.executable, "-m", "kolovod", "run", "-np", str(np), "--", sys.executable]
    return subprocess.run(
        [*launcher, str(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": entry_point(folder)},
    )


def said(name, folder, *arguments, np=2):
    """What each rank has printed of itself, by rank, without its number."""
    done = start(FOLDER / f"{name}.py", folder, *arguments, np=np)
    assert done.returncode == 0, done.stderr
    found = [re.findall(rf"rank {rank} of {np}[,:] (.*)", done.stdout) for rank in range(np)]
    assert all(found), done.stdout
    return found


def needs(*packages):
    """Marks of a test that wants more than PyTorch."""
    lacking = [name for name in packages if not is_installed(name)]
    skipped = pytest.mark.skipif(bool(lacking), reason=f"not installed: {', '.join(lacking)}")
    return lambda test: pytest.mark.frameworks(skipped(test))


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_examples_are_short_and_say_how_they_are_started(path):
    text = path.read_text()
    assert len(text.splitlines()) < 60
    place = path.relative_to(ROOT).as_posix()
    assert f"kolovod run -np 2 -- python {place}" in (ast.get_docstring(ast.parse(text)) or "")
    assert f"../{place}" in (ROOT / "docs" / "integrations.md").read_text()


@pytest.mark.slow
@needs("lightning", "sklearn")
def test_lightning(tmp_path):
    (mine,), (others,) = said("lightning_fit", tmp_path)
    assert mine == others
    assert float(re.match(r"accuracy (\S+), sum of weights", mine)[1]) > 0.85


@needs("accelerate", "sklearn")
def test_accelerate(tmp_path):
    (mine,), (others,) = said("accelerate_loop", tmp_path)
    assert mine == others
    assert float(re.match(r"accuracy (\S+) on 360 images, sum of weights", mine)[1]) > 0.85


@pytest.mark.slow
@needs("transformers", "accelerate")
def test_transformers(tmp_path):
    (mine,), (others,) = said("transformers_trainer", tmp_path)
    assert mine == others
    # Of 31 words at random it would be 3.4; the first two of 16 cannot be known.
    assert float(re.match(r"loss (\S+) on other texts, sum of weights", mine)[1]) < 1.5


@pytest.mark.slow
@needs("optuna", "sklearn")
def test_optuna(tmp_path):
    mine, others = said("optuna_trials", tmp_path)
    assert mine == others
    results = [line.rpartition(" -> ")[2] for line in mine]
    assert len(results) == 6
    assert "None" in results  # ended early, on both ranks
    assert max(float(result) for result in results if result != "None") > 0.8


@pytest.mark.slow
@needs("tensorboard")
def test_tensorboard(tmp_path):
    from tensorboard.compat.proto.event_pb2 import Event

    # TensorBoard would use TensorFlow if it could be imported, and take seconds to do so.
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text("raise ImportError('left out')")
    (mine,), (others,) = said("tensorboard_scalars", tmp_path, tmp_path / "runs")
    assert mine == others
    mean, largest = map(float, re.match(r"loss (\S+), largest (\S+)", mine).groups())
    (file,) = (tmp_path / "runs").iterdir()  # of rank 0 only
    data, scalars = file.read_bytes(), {}
    while data:  # records: a length in 8 bytes, its checksum in 4, the event, its checksum in 4
        (length,) = struct.unpack("<Q", data[:8])
        event = Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]
        for value in event.summary.value:
            # A scalar is either, as the version will have it.
            scalar = value.simple_value or sum(value.tensor.float_val)
            scalars.setdefault(value.tag, []).append(scalar)
    means, maxima = scalars["loss/mean"], scalars["loss/largest"]
    assert (len(means), len(maxima)) == (20, 20)
    assert all(one <= other for one, other in zip(means, maxima, strict=True))
    assert means[-1] < means[0]
    assert (means[-1], maxima[-1]) == pytest.approx((mean, largest), abs=1e-5)


@needs("safetensors")
def test_safetensors(tmp_path):
    assert (
        said("safetensors_weights", tmp_path) == [["loaded weights are the saved ones: True"]] * 2
    )


@pytest.mark.slow
@needs("webdataset", "sklearn")
def test_tar_shards(tmp_path):
    ranks = said("tar_shards", tmp_path)
    read = r"epoch (\d): (\d+) samples, accuracy (\S+), (sum of weights \S+)"
    epochs = [[re.fullmatch(read, line).groups() for line in rank] for rank in ranks]
    for epoch, (mine, others) in enumerate(zip(*epochs, strict=True)):
        assert mine[0] == others[0] == str(epoch)
        assert int(mine[1]) + int(others[1]) == 1797  # each sample once, though in 5 files
        assert mine[3] == others[3]
    assert float(epochs[0][-1][2]) > 0.8


def checkpoint_in_one_process(steps):
    """The sum of weights of the example of checkpoints, by ordinary PyTorch."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 18), torch.nn.Tanh(), torch.nn.Linear(18, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        inputs = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return sum(parameter.double().sum().item() for parameter in model.parameters())


@pytest.mark.slow
def test_checkpoints_of_another_number_of_ranks(tmp_path):
    folder = tmp_path / "checkpoint"
    for np, first in ((2, 0), (3, 6)):
        lines = said("torch_checkpoint", tmp_path, folder, np=np)
        steps, weights = re.match(r"(steps .*), sum of weights (\S+)", lines[0][0]).groups()
        assert steps == f"steps {first} to {first + 6}"
        assert lines == [lines[0]] * np
        assert float(weights) == pytest.approx(checkpoint_in_one_process(first + 6), abs=1e-4)


def check_workers(folder, method):
    mine, others = said("dataloader_workers", folder, method)
    assert mine == others
    read = r"epoch \d: 100 of 200 samples by workers \[0, 1\], loss (\S+)"
    losses = [float(re.fullmatch(read, line)[1]) for line in mine]
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.slow
def test_workers_of_a_loader(tmp_path):
    check_workers(tmp_path, "fork")


@pytest.mark.slow
def test_workers_of_a_loader_that_are_spawned(tmp_path):
    check_workers(tmp_path, "spawn")


FAILING = """
import time, torch
import kolovod.torch as kv

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        if kv_rank == 1 and index == 27:
            raise ValueError("sample 27 cannot be read")
        return torch.ones(2)

kv.init()
kv_rank = kv.rank()
loader = torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=2, persistent_workers=True)
for batch in loader:
    kv.allreduce(batch, "batch")
"""


@pytest.mark.slow
def test_a_worker_that_fails_ends_the_job(tmp_path: Path):
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    done = start(script, tmp_path)
    assert done.returncode == 1
    assert "[1]<stderr>:ValueError: sample 27 cannot be read" in done.stderr
    assert "kolovod: rank 1 " in done.stderr
