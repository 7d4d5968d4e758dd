r"""Writes what DeePMD-kit's training reads: argon, half of it for each of two ranks, and all.

    python deepmd_data.py FOLDER
    cd FOLDER/all && dp --tf train start.json
    cd FOLDER && horovodrun -np 2 sh -c 'cd rank$HOROVOD_RANK && dp --tf train \
        --init-model ../all/start/model.ckpt-10 input.json'
    cd FOLDER/all && dp --tf train --init-model start/model.ckpt-10 input.json

The second trains from weights that the first has made, which have the statistics of all data. A
batch is all that a rank has, so the average of the ranks' gradients is that of all the data.
"""

import json
import sys
from pathlib import Path

import numpy

FRAMES, SIDE, STEPS = 12, 3, 60  # for each rank; atoms along an edge; of the optimizer
SPACING = 3.8  # Angstrom


def energies_and_forces(places: numpy.ndarray, edge: float) -> tuple[float, numpy.ndarray]:
    """Return those (eV, eV/Angstrom) of argon atoms in a periodic cube, by Lennard-Jones."""
    depth, width = 0.0103, 3.4
    steps = places[:, None] - places[None]
    steps -= edge * numpy.round(steps / edge)
    squares = (steps**2).sum(-1)
    numpy.fill_diagonal(squares, numpy.inf)
    sixth = (width**2 / squares) ** 3
    forces = ((24 * depth * (2 * sixth**2 - sixth) / squares)[..., None] * steps).sum(1)
    return 2 * depth * float((sixth**2 - sixth).sum()), forces


def write_system(folder: Path, frames: numpy.ndarray, edge: float) -> None:
    """Write frames as DeePMD wants them: one row for each."""
    found = [energies_and_forces(frame, edge) for frame in frames]
    values = folder / "set.000"
    values.mkdir(parents=True)
    (folder / "type.raw").write_text("0\n" * frames.shape[1])
    (folder / "type_map.raw").write_text("Ar\n")
    numpy.save(values / "coord.npy", frames.reshape(len(frames), -1))
    numpy.save(values / "box.npy", numpy.tile(edge * numpy.eye(3).ravel(), (len(frames), 1)))
    numpy.save(values / "energy.npy", [energy for energy, _ in found])
    numpy.save(values / "force.npy", [forces.ravel() for _, forces in found])


def options(system: Path, frames: int, steps: int, folder: str) -> dict[str, object]:
    """Return what ``dp train`` reads."""
    net = {"seed": 1, "resnet_dt": False}
    return {
        "model": {
            "type_map": ["Ar"],
            "descriptor": {
                "type": "se_e2_a", "sel": [32], "rcut": 5.5, "rcut_smth": 4.0,
                "neuron": [8, 16], "axis_neuron": 4, **net,
            },
            "fitting_net": {"neuron": [24, 24], **net},
        },
        "learning_rate": {
            "type": "exp", "start_lr": 0.01, "stop_lr": 0.001, "decay_steps": 10,
            "scale_by_worker": "none",
        },
        "loss": {"start_pref_e": 1, "limit_pref_e": 1, "start_pref_f": 10, "limit_pref_f": 10},
        "training": {
            "training_data": {"systems": [str(system)], "batch_size": frames},
            "numb_steps": steps, "seed": 7, "disp_freq": 10,
            "save_freq": steps, "save_ckpt": f"{folder}/model.ckpt",
        },
    }  # fmt: skip


def prepare(folder: Path) -> None:
    edge = SIDE * SPACING
    lattice = SPACING * numpy.stack(numpy.meshgrid(*3 * [numpy.arange(SIDE)]), -1).reshape(-1, 3)
    noise = numpy.random.default_rng(0).normal(0, 0.25, (2 * FRAMES, *lattice.shape))
    frames = (lattice + noise) % edge
    for name, part in {"rank0": frames[::2], "rank1": frames[1::2], "all": frames}.items():
        write_system(folder / name / "system", part, edge)
        (folder / name / "end").mkdir()
        given = options(folder / name / "system", len(part), STEPS, "end")
        (folder / name / "input.json").write_text(json.dumps(given))
    (folder / "all" / "start").mkdir()
    given = options(folder / "all" / "system", len(frames), 10, "start")
    (folder / "all" / "start.json").write_text(json.dumps(given))


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
