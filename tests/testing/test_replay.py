"""kolovod.testing.replay: it agrees with what is right, and names the first step that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kolovod import elastic
from kolovod.core.ops import Average, Max, Sum
from kolovod.elastic import MembershipLog
from kolovod.elastic.membership_log import checksums
from kolovod.errors import InvalidArgumentError
from kolovod.testing import ReplayDiffers, loopback, replay

Arrays = dict[str, Any]
Change = Callable[[int, Arrays, Arrays], None]
SHAPES = {"bias": (7,), "weight": (300, 5)}
# Who is used in each step: 3 ranks, one dies in step 4, another in 7, two come, and one leaves.
USED = [(0, 1, 2)] * 4 + [(0, 2)] * 3 + [(2,)] * 2 + [(2, 4, 3)] * 2 + [(4, 3)]


def drawn(seed: tuple[int, ...]) -> Arrays:
    draw = np.random.default_rng(seed)
    return {name: draw.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


class Model:
    """Weights and their momentum: what a step does depends on all steps before."""

    def __init__(self) -> None:
        self.weights = drawn((99,))
        self.momentum = {name: np.zeros_like(value) for name, value in self.weights.items()}

    def compute(self, step: int, member: int) -> Arrays:
        noise = drawn((step, member))
        return {name: noise[name] + np.float32(0.1) * self.weights[name] for name in SHAPES}

    def apply(self, gradients: Arrays) -> None:
        for name, weight in self.weights.items():
            self.momentum[name] = np.float32(0.9) * self.momentum[name] + gradients[name]
            self.weights[name] = weight - np.float32(0.1) * self.momentum[name]

    def tensors(self) -> Arrays:
        return self.weights


def average(all_of: list[Arrays]) -> Arrays:
    """Added in the order of ranks, by NumPy."""
    totals = {name: all_of[0][name].copy() for name in SHAPES}
    for other in all_of[1:]:
        for name in SHAPES:
            totals[name] = totals[name] + other[name]
    return {name: total / np.float32(len(all_of)) for name, total in totals.items()}


def job(change: Change = lambda step, gradients, weights: None, every: int = 1) -> MembershipLog:
    """The log of a process; ``change`` makes it go wrong."""
    model = Model()
    log = MembershipLog(model.tensors, every)
    for step, used in enumerate(USED):
        log.follow(used, ["a"] * len(used), 0)
        gradients = average([model.compute(step, member) for member in used])
        change(step, gradients, model.weights)
        model.apply(gradients)
        change(step + 1000, gradients, model.weights)
        log.record(used)
    return log


def replayed(log: MembershipLog, **options: Any) -> Model:
    model = Model()
    replay(log, model.compute, model.apply, model.tensors, **options)
    return model


@pytest.mark.parametrize("every", [1, 5])
def test_a_right_job_is_the_same_bit_for_bit(every: int) -> None:
    log = job(every=every)
    assert [step.sums is not None for step in log.steps].count(True) == len(USED) // every
    replayed(log)


def test_the_order_of_addition_matters_and_is_that_of_ranks() -> None:
    log = job()
    first = log.steps[0]
    log.steps[0] = first._replace(used=(2, 0, 1))
    with pytest.raises(ReplayDiffers, match="step 0 of the members"):
        replayed(log)


def tear(step: int, gradients: Arrays, weights: Arrays) -> None:
    if step == 1006:  # after the step: one element in which another rank's part is missing
        weights["weight"][17, 3] += np.float32(1e-6) * weights["weight"][17, 3] or 1e-30


def leave_out(step: int, gradients: Arrays, weights: Arrays) -> None:
    if step == 5:
        for name in SHAPES:
            gradients[name] *= np.float32(0)


def count_twice(step: int, gradients: Arrays, weights: Arrays) -> None:
    if step == 1008:
        for name in SHAPES:
            weights[name] -= np.float32(0.1) * gradients[name]


def add_a_dead_one(step: int, gradients: Arrays, weights: Arrays) -> None:
    if step == 4:  # in whose result rank 1 is, though the log says that it is not
        gradients.update(average([Model().compute(step, rank) for rank in range(3)]))


@pytest.mark.parametrize(
    ("change", "step", "tensors"),
    [
        (tear, 6, ("weight",)),
        (leave_out, 5, ("bias", "weight")),
        (count_twice, 8, ("bias", "weight")),
        (add_a_dead_one, 4, ("bias", "weight")),
    ],
)
def test_the_first_wrong_step_and_its_tensors_are_named(
    change: Change, step: int, tensors: tuple[str, ...]
) -> None:
    with pytest.raises(ReplayDiffers, match=f"step {step} .* is the first that differs") as found:
        replayed(job(change))
    assert (found.value.step, found.value.tensors) == (step, tensors)


def test_a_step_that_was_not_applied_is_said_to_be_one() -> None:
    kept: list[Arrays] = []

    def skip(step: int, gradients: Arrays, weights: Arrays) -> None:
        if step == 3:
            kept.append({name: value.copy() for name, value in weights.items()})
        if step == 1003:
            weights.update(kept[0])

    with pytest.raises(ReplayDiffers, match="as they were before the step, as if it had been"):
        replayed(job(skip))


def test_a_log_that_misses_a_step_or_has_it_twice_differs() -> None:
    for change in (lambda steps: steps.pop(4), lambda steps: steps.insert(4, steps[4])):
        log = job()
        change(log.steps)
        with pytest.raises(ReplayDiffers) as found:
            replayed(log)
        assert found.value.step in (4, 5)


@pytest.mark.parametrize("used", [(), (0, 0, 1)])
def test_members_that_cannot_be_are_named(used: tuple[int, ...]) -> None:
    log = job()
    log.steps[2] = log.steps[2]._replace(used=used)
    with pytest.raises(ReplayDiffers, match="step 2 has used the gradients of the members") as said:
        replayed(log)
    assert str(list(used)) in str(said.value)


def test_tensors_of_torch_and_sums() -> None:
    """In bfloat16, which NumPy lacks; four ranks on two hosts, whose order has two levels."""
    hosts = [0, 1, 0, 1]
    start = torch.zeros(1000, dtype=torch.bfloat16)

    def compute(step: int, member: int) -> dict[str, torch.Tensor]:
        seed = torch.Generator().manual_seed(100 * step + member)
        return {"w": torch.randn(1000, generator=seed).bfloat16()}

    from kolovod.torch import TorchFrontend

    weights = start.clone()
    log = MembershipLog(lambda: {"w": weights})
    with loopback(4, TorchFrontend(), hosts=hosts) as world:
        for step in range(3):
            log.follow(range(4), [str(host) for host in hosts], 0)
            weights += world.run(
                lambda kv, step=step: kv.allreduce(compute(step, kv.world().rank)["w"], "w", Sum)
            )[0]
            log.record(range(4))
    again = start.clone()
    replay(log, compute, lambda g: again.add_(g["w"]), lambda: {"w": again}, op=Sum)
    assert torch.equal(weights, again)
    log.hosts = dict.fromkeys(range(4), "one")
    again = start.clone()
    with pytest.raises(ReplayDiffers, match="step 0"):
        replay(log, compute, lambda g: again.add_(g["w"]), lambda: {"w": again}, op=Sum)


@pytest.mark.parametrize("op", [Sum, Average])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_ranks_of_one_host_are_added_as_the_engine_does(dtype: str, op: Any) -> None:
    from kolovod.torch import TorchFrontend

    draw = torch.Generator().manual_seed(1)
    mine = [torch.randn(4099, generator=draw).to(getattr(torch, dtype)) for _ in range(3)]
    with loopback(3, TorchFrontend()) as world:
        right = world.run(lambda kv: kv.allreduce(mine[kv.world().rank], "w", op))[0]
    found: list[Any] = []
    log = MembershipLog()
    log.record(range(3))
    replay(log, lambda step, member: {"w": mine[member]}, lambda g: found.append(g["w"]), op=op)
    assert torch.equal(found[0], right)
    if dtype != "bfloat16":
        arrays = [value.numpy() for value in mine]
        replay(log, lambda step, m: {"w": arrays[m]}, lambda g: found.append(g["w"]), op=op)
        np.testing.assert_array_equal(found[1], right.numpy())


def test_gradients_of_two_dtypes_are_named() -> None:
    log = MembershipLog()
    log.record(range(2))
    kinds = [np.zeros(1, np.float32), np.zeros(1, np.int32)]
    with pytest.raises(InvalidArgumentError, match="of dtype float32, int32: give floats"):
        replay(log, lambda step, member: {"w": kinds[member]}, lambda gradients: None)


def test_a_log_travels_as_a_file(tmp_path: Path) -> None:
    log = job(every=3)
    log.save(tmp_path / "log.json")
    again = MembershipLog.load(tmp_path / "log.json")
    assert (again.steps, again.hosts) == (log.steps, log.hosts)
    replayed(again)


def test_other_files_and_states_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no json")
    with pytest.raises(InvalidArgumentError, match="text is no saved MembershipLog"):
        MembershipLog.load(tmp_path / "text")
    good = job().state_dict()
    for bad in ({}, {**good, "version": 2}, {**good, "worlds": []}, {**good, "steps": [[0]]}):
        with pytest.raises(InvalidArgumentError, match="no state of a MembershipLog of version 1"):
            MembershipLog().load_state_dict(bad)


def test_wrong_arguments_are_named() -> None:
    model = Model()
    bare = MembershipLog()
    with pytest.raises(InvalidArgumentError, match="this process has no number yet"):
        bare.member  # noqa: B018
    bare.follow([0], ["a"], 0)
    assert bare.member == 0
    bare.record([0])
    with pytest.raises(InvalidArgumentError, match="no checksums in its 1 steps"):
        replayed(bare)
    with pytest.raises(InvalidArgumentError, match="combined by Average or Sum"):
        replayed(job(), op=Max)
    with pytest.raises(InvalidArgumentError, match="every is 0"):
        MembershipLog(every=0)
    with pytest.raises(InvalidArgumentError, match="give zeros where a rank has none"):
        replay(job(), lambda step, member: {str(member): np.zeros(1)}, model.apply)
    with pytest.raises(ReplayDiffers, match="the log is of the tensors"):
        replay(job(), model.compute, model.apply, lambda: {"bias": model.weights["bias"]})


def test_checksums_see_every_byte() -> None:
    value = np.zeros((3, 4), np.float32)
    first = checksums({"x": value, "y": value.T, "z": torch.zeros(3, 4)})
    assert len(set(first.values())) == 1
    value[2, 3] = -0.0
    assert checksums({"x": value})["x"] != first["x"]
    assert checksums({"s": np.float32(1)}) == checksums({"s": torch.tensor(1.0)})


def test_without_an_elastic_job_a_log_is_kept_too() -> None:
    import kolovod

    kolovod.init()
    try:
        weights = np.zeros(3)
        state = elastic.State(log=MembershipLog(lambda: {"w": weights}))
        for _ in range(3):
            weights += 1
            state.commit()
    finally:
        kolovod.shutdown()
    again = np.zeros(3)
    replay(
        state.log,
        lambda step, member: {"w": np.ones(3)},
        lambda gradients: again.__iadd__(gradients["w"]),
        lambda: {"w": again},
    )
