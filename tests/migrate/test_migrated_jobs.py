"""Scripts that kolovod init has changed run on two ranks, and end with equal weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from frameworks import is_installed
from migrated import SCRIPTS, proposed, run_on_two_ranks
from slow import THOROUGH


def changed(name: str, folder: Path, *, rename: bool = False) -> Path:
    """The changed script, in a folder of its own."""
    path = folder / f"{name}.py"
    path.write_bytes(proposed(name, rename).new)
    return path


@pytest.mark.slow
def test_the_script_of_one_process_ends_with_other_weights_on_each_rank(tmp_path: Path) -> None:
    """So equal weights below are a result of the changes."""
    path = tmp_path / "train.py"
    path.write_bytes((SCRIPTS / "torch_module_level.py").read_bytes())
    (first, second), said = run_on_two_ranks(path)
    assert first[0] != second[0]
    assert first[1] == second[1] == 3 * 8
    assert said.count("loss ") == 2 * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "steps", "rename"),
    [
        ("torch_module_level", 3 * 4, False),  # half as many, of twice as many samples
        ("torch_main", 2 * 4, False),
        ("ddp", 2 * 4, False),
        pytest.param("torch_gan", 3 * 2 * 4, False, marks=THOROUGH),
        ("horovod_torch", 2 * 4, False),
        pytest.param("horovod_torch", 2 * 4, True, marks=THOROUGH),
    ],
)
def test_pytorch(name: str, steps: int, rename: bool, tmp_path: Path) -> None:
    (first, second), said = run_on_two_ranks(changed(name, tmp_path, rename=rename))
    assert first == second
    assert first[1] == steps
    if name == "torch_main":
        assert said.count("test loss") == 2  # one rank prints
        assert sorted(path.name for path in tmp_path.glob("*.pt")) == [
            "checkpoint-1.pt",
            "checkpoint-2.pt",
        ]


@pytest.mark.frameworks
@pytest.mark.parametrize(
    ("name", "needs", "steps"),
    [
        ("jax_optax", ("jax", "optax"), 0),
        pytest.param("jax_flax", ("jax", "optax", "flax"), 0, marks=THOROUGH),
        # 128 of 257 samples on a rank, of which 115 are trained on.
        pytest.param("keras_fit", ("keras", "tensorflow"), 2 * 4, marks=pytest.mark.slow),
        pytest.param("keras_dataset", ("keras", "tensorflow"), 2 * 4, marks=THOROUGH),
        pytest.param("tensorflow_tape", ("tensorflow",), 2 * 4, marks=pytest.mark.slow),
    ],
)
def test_other_frameworks(name: str, needs: tuple[str, ...], steps: int, tmp_path: Path) -> None:
    for framework in needs:
        if not is_installed(framework):
            pytest.skip(f"{framework} is not installed")
    (first, second), _ = run_on_two_ranks(changed(name, tmp_path))
    assert first == second
    assert first[1] == steps
