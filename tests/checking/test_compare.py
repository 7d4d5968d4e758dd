"""What is made of the facts of all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kolovod.checking.compare import judge
from kolovod.checking.compare_steps import failed_by_itself
from kolovod.checking.facts import (
    Facts,
    File,
    Loader,
    NotFinite,
    Operation,
    Optimizer,
    Values,
)
from kolovod.checking.findings import HINT, OK, PROBLEM, UNKNOWN, Finding, Rank
from kolovod.checking.report import as_json, summary, text
from kolovod.gradients.sentinel import NOT_FINITE

SIZE = 2


def facts(rank: int) -> Facts:
    """Of a script without a mistake, after two steps."""
    weights = {"w": Values("a", [1.0, 2.0]), "b": Values("c", [0.0])}
    return Facts(
        rank=rank, world_rank=rank, world_size=SIZE, init_line="t.py:3", frameworks=["torch"],
        steps=2, step_line="t.py:9", broadcasts=True, ended="steps",
        optimizers=[
            Optimizer(
                "SGD", "t.py:9", True, 2, [[0.1], [0.1]], ["w", "b"], [{"w": "g", "b": "h"}] * 2
            )
        ],
        loaders=[
            Loader(
                "t.py:7", "DataLoader", 8, 64, "DistributedSampler", True,
                shuffles_by_epoch=True, trains=2,
                orders=[[f"o{rank}", f"p{rank}"]], batches=[[f"d{rank}", f"e{rank}"]],
                epochs_set=[0],
            )
        ],
        inputs=[f"i{rank}", f"j{rank}"], inputs_line="t.py:8",
        seeds={"torch": f"s{rank}", "numpy": f"n{rank}"},
        weights_before=dict(weights), weights_after=dict(weights), trainable=["w", "b"],
        operations=[Operation("allreduce", "loss", "t.py:11", 1)],
        files=[File("/nowhere/model.pt", "t.py:12")] if rank == 0 else [],
    )  # fmt: skip


Change = Callable[[Facts], None]


def found(change: Change, *, of: tuple[int, ...] = (1,), **rank: object) -> list[Finding]:
    """``change`` is made to the facts of these ranks, ``rank`` is what else is known of them."""
    ranks = []
    for number in range(SIZE):
        each = facts(number)
        if number in of:
            change(each)
        ranks.append(Rank(number, each))
        if number in of:
            ranks[number] = replace(ranks[number], **rank)  # type: ignore[arg-type]
    return judge(ranks)


def nothing(each: Facts) -> None:
    """No change."""


def test_without_a_mistake() -> None:
    findings = found(nothing)
    assert {finding.verdict for finding in findings} == {OK}, text(findings)
    assert len({finding.check for finding in findings}) == len(findings) == 15
    assert summary(findings) == "no problems, no hints"


def _set(**values: object) -> Change:
    def change(each: Facts) -> None:
        for name, value in values.items():
            setattr(each, name, value)

    return change


def _loader(**values: object) -> Change:
    def change(each: Facts) -> None:
        each.loaders = [replace(each.loaders[0], **values)]  # type: ignore[arg-type]

    return change


def _optimizer(**values: object) -> Change:
    def change(each: Facts) -> None:
        each.optimizers = [replace(each.optimizers[0], **values)]  # type: ignore[arg-type]

    return change


def _all_of(*changes: Change) -> Change:
    def change(each: Facts) -> None:
        for one in changes:
            one(each)

    return change


def _weight(name: str, digest: str, *sample: float) -> dict[str, Values]:
    return {**facts(0).weights_after, name: Values(digest, list(sample))}


def _jax(each: Facts) -> None:
    """Steps of optax, which kolovod's watcher has seen in programs."""
    each.framework, each.loaders, each.own_gradients = "jax", [], []
    updates = [{"w": "u", "b": "v"}] * 2
    own = Optimizer("optax.apply_updates", "t.py:9", None, 2, [], ["w", "b"], updates)
    each.optimizers = [replace(own, uses="updates")]


def _running(*digests: str) -> dict[str, list[Values]]:
    """What a layer's mean was in the first step, and those that followed."""
    return {"bn.mean": [Values("zeros", [0.0]), *(Values(each, [1.0]) for each in digests)]}


OTHER = _weight("w", "x", 1.0, 2.5)


def _apart_by_hook(each: Facts, **values: object) -> None:
    """DDP's hook for post-local SGD has let gradients and weights differ."""
    if each.rank:
        values["weights_after"] = OTHER
        _optimizer(gradients=[{"w": "g", "b": "h"}, {"w": "x", "b": "h"}])(each)
    _set(local_from=0, **values)(each)


SAME_DATA = _loader(batches=[["d", "e"]], orders=[["o", "p"]])
BOTH = (0, 1)
NAN = {"w": Values("a", [math.nan, 2.0], not_finite=1), "b": Values("c", [0.0])}
CASES: dict[str, tuple[Change, tuple[int, ...], str, str, str]] = {
    "one has no world": (
        _set(world_size=None, world_rank=None), (1,),
        "world", PROBLEM, "init() was not called, or has not returned, on rank 1",
    ),
    "worlds of one": (
        _set(world_size=1), BOTH, "world", PROBLEM, "the 2 ranks are not in one world of 2"
    ),
    "another library": (
        _set(world_size=None, other_world="torch.distributed (gloo)"), BOTH,
        "world", HINT, "Kolovod was not initialized; torch.distributed (gloo) is used",
    ),
    "all weights are lost": (
        _set(weights_after=NAN), BOTH,
        "weights", PROBLEM, "after 2 steps 1 of 2 weights hold NaN or infinity"
    ),
    "nothing was done": (
        _set(world_size=None, steps=0), BOTH, "world", UNKNOWN, "and no step was seen"
    ),
    "other weights at first": (
        _set(weights_before=OTHER), (1,),
        "initial-weights", HINT, "1 of 2 weights differed before the first step, and none at",
    ),
    "other weights at last": (
        _set(weights_before=OTHER, weights_after=OTHER), (1,),
        "weights", PROBLEM, "after 2 steps 1 of 2 weights differ between ranks: they differed",
    ),
    "a weight less": (
        _set(weights_after={"w": Values("a", [1.0, 2.0])}), (1,),
        "weights", PROBLEM, "something besides the optimizer",
    ),
    "parts of weights": (
        _set(sharded=True, weights_after=OTHER), BOTH,
        "weights", UNKNOWN, "ranks have different parts of the parameters",
    ),
    "apart on purpose": (
        _set(apart="DiLoCo", weights_after=OTHER), (1,),
        "weights", UNKNOWN, "DiLoCo lets ranks differ between exchanges",
    ),
    "unequal steps": (
        _set(steps=1, weights_after=OTHER), (1,),
        "weights", UNKNOWN, "ranks have taken different numbers of steps",
    ),
    "nothing was combined": (
        _set(steps=0, optimizers=[], reductions={}, ended="script"), BOTH,
        "optimizer", PROBLEM, "nothing was averaged over ranks",
    ),
    "gradients in programs": (
        _set(steps=0, optimizers=[], reductions={"gradients.0": 3, "x": 2}), BOTH,
        "optimizer", OK, "gradients were combined in 3 operations at least",
    ),
    "metrics in programs": (
        _set(steps=0, operations=[], reductions={"gradients.0": 3, "loss": 2}), BOTH,
        "metrics", OK, "ranks combine more than gradients: 'loss'",
    ),
    "metrics averaged": (
        _set(averages="MetricAverageCallback", operations=[]), BOTH,
        "metrics", OK, "MetricAverageCallback averages those of an epoch over ranks",
    ),
    "the script combines": (
        _all_of(_optimizer(wrapped=False), _set(operations=[Operation("allreduce", "", "t:5", 4)])),
        BOTH, "optimizer", OK, "the script itself combines, by t:5",
    ),
    "DDP": (
        _all_of(
            _optimizer(wrapped=True),
            _set(other_world="DistributedDataParallel over torch.distributed"),
        ),
        BOTH, "optimizer", OK, "gradients are combined by DistributedDataParallel",
    ),
    "an optimizer whose parameters DDP does not have": (
        _all_of(
            _optimizer(wrapped=False),
            _set(other_world="DistributedDataParallel over torch.distributed"),
        ),
        BOTH, "optimizer", PROBLEM, "SGD steps with the gradients of its own rank only",
    ),
    "DDP's hook for post-local SGD": (
        _set(local_from=100), BOTH, "optimizer", HINT,
        "from step 100 on DDP's hook for post-local SGD averages gradients within a group of ranks "
        "only (by default those of a host), and nothing was seen that averages parameters, unless "
        "t.py:11 does",
    ),
    "ranks that post-local SGD lets go": (
        lambda each: _apart_by_hook(each, operations=[]), BOTH,
        "optimizer", PROBLEM, "nothing was seen that averages parameters",
    ),
    "weights that post-local SGD lets go": (
        lambda each: _apart_by_hook(each), BOTH,
        "weights", PROBLEM, "DDP's hook for post-local SGD lets ranks train apart",
    ),
    "post-local SGD with an averager": (
        lambda each: _apart_by_hook(each, apart="PyTorch's PeriodicModelAverager"), BOTH,
        "weights", UNKNOWN, "PyTorch's PeriodicModelAverager lets ranks differ",
    ),
    "DDP without a broadcast": (
        _set(other_world="DistributedDataParallel over torch.distributed", broadcasts=False), BOTH,
        "initial-weights", OK, "2 weights are equal on all ranks",
    ),
    "not wrapped": (
        _optimizer(wrapped=False), BOTH, "optimizer", PROBLEM, "SGD steps with the gradients of its"
    ),
    "no gradient on one": (
        _optimizer(gradients=[{"w": "g", "b": "h"}, {"w": "g"}]), (1,),
        "gradients", PROBLEM, "in step 2 the gradients of b differ",
    ),
    "the same data": (
        SAME_DATA, BOTH, "data", PROBLEM, "gave the same batches on all ranks, in all 2 steps"
    ),
    "the same indices only": (
        _loader(orders=[["o", "p"]], batches=[["", ""]]), BOTH,
        "data", PROBLEM, "gave the same indices on all ranks",
    ),
    "the same indices, other contents": (
        _loader(orders=[["o", "p"]], is_sharded=False), BOTH,
        "data", UNKNOWN, "right if each rank's data set is a part",
    ),
    "nothing to compare": (
        _loader(orders=[["", ""]], batches=[["", ""]]), BOTH, "data", UNKNOWN, "no tensors"
    ),
    "some batches are the same": (
        lambda each: _loader(batches=[["d", f"e{each.rank}"]])(each), BOTH,
        "data", HINT, "the same on all ranks in 1 of 2 steps",
    ),
    "no loader, the same inputs": (
        _set(loaders=[], inputs=["i", "j"]), BOTH,
        "data", PROBLEM, "the model was given the same inputs on all ranks in all 2 steps",
    ),
    "no loader, other inputs": (
        _set(loaders=[]), BOTH, "data", OK, "the inputs of the model differ between ranks in all"
    ),
    "no loader, no inputs": (
        _set(loaders=[], inputs=["", ""]), BOTH, "data", UNKNOWN, "neither a DataLoader nor"
    ),
    "the same arrays": (
        _loader(is_whole=True, is_sharded=False, batches=[["d"]]), BOTH,
        "data", PROBLEM, "fit() is given the same 64 samples on all ranks",
    ),
    "arrays without a digest": (
        _loader(is_whole=True, batches=[[""]]), BOTH, "data", UNKNOWN, "cannot be compared"
    ),
    "the same arrays, but fewer steps": (
        _loader(is_whole=True, batches=[["d"]]), BOTH,
        "data", HINT, "fit() is given the same 64 samples on all ranks",
    ),
    "statistics in a loop of TensorFlow": (
        _set(framework="tensorflow"), BOTH, "batch-norm", UNKNOWN, "in TensorFlow's own loops"
    ),
    "gradients of TensorFlow outside of a graph": (
        _set(framework="tensorflow", operations=[], reductions={"unnamed.3": 2}), BOTH,
        "metrics", UNKNOWN, "no numbers were printed, or combined",
    ),
    "metrics in a graph of TensorFlow": (
        _set(framework="tensorflow", operations=[], reductions={"loss": 2, "unnamed.3": 2}), BOTH,
        "metrics", OK, "ranks combine more than gradients: 'loss'",
    ),
    "statistics of JAX that differ": (
        lambda each: _set(framework="jax", running=_running(f"{each.rank}"))(each), BOTH,
        "batch-norm", HINT, "each rank has running statistics of its own data",
    ),
    "statistics of JAX that are averaged": (
        _set(framework="jax", running=_running("a")), BOTH,
        "batch-norm", OK, "running statistics are equal on all ranks",
    ),
    "statistics of JAX, one step later on a rank": (
        lambda each: _set(framework="jax", running=_running(*"ab"[: each.rank + 1]))(each), BOTH,
        "batch-norm", OK, "running statistics are equal on all ranks",
    ),
    "statistics of JAX in the first step": (
        _set(framework="jax", running=_running()), BOTH,
        "batch-norm", UNKNOWN, "before they could differ",
    ),
    "no statistics of JAX": (
        _set(framework="jax"), BOTH, "batch-norm", UNKNOWN, "no BatchNorm of Flax's was seen"
    ),
    "set_epoch is missing": (
        _loader(orders=[["a", "b"], ["a"]], epochs_set=[]), BOTH,
        "epochs", PROBLEM, "epochs 1 and 2 begin with the same 1 batches",
    ),
    "set_epoch is perhaps missing": (
        _loader(epochs_set=[]), BOTH, "epochs", UNKNOWN, "no other was seen"
    ),
    "unequal batches": (
        _loader(length=7), (1,), "batches", PROBLEM, "other numbers of batches on other ranks"
    ),
    "unequal batches with join": (
        _all_of(_set(joins=True), lambda each: _loader(length=8 - each.rank)(each)), BOTH,
        "batches", OK, "and they join()",
    ),
    "the same seed": (
        _set(seeds={"torch": "s", "numpy": "n"}, draws=["Dropout"]), BOTH,
        "random-numbers", HINT, "the same state of torch, numpy, which Dropout draws from",
    ),
    "rates": (
        _optimizer(rates=[[0.1], [0.2]]), (1,),
        "learning-rate", PROBLEM, "in step 2 ranks have different learning rates",
    ),
    "one file": (
        _set(files=[File("/nowhere/model.pt", "t.py:12")]), BOTH,
        "files", PROBLEM, "ranks 0 and 1 write /nowhere/model.pt",
    ),
    "one log": (
        _set(files=[File("/nowhere/log", "t.py:12", True)]), BOTH,
        "files", HINT, "ranks 0 and 1 append to /nowhere/log",
    ),
    "TensorBoard": (
        lambda each: setattr(each, "files", [File(f"/l/events.out.tfevents.{each.rank}", "")]),
        BOTH, "files", HINT, "ranks 0 and 1 write events for TensorBoard",
    ),
    "no files": (_set(files=[]), BOTH, "files", UNKNOWN, "no file was written"),
    "statistics": (
        _set(buffers_after={"n": Values("q", [1.0])}), (1,),
        "batch-norm", HINT, "each rank has running statistics of its own data",
    ),
    "no numbers": (_set(operations=[]), BOTH, "metrics", UNKNOWN, "no numbers were printed"),
    "other numbers of steps": (
        _set(steps=3), (1,), "steps", PROBLEM, "ranks have taken different numbers of steps"
    ),
    "what cannot be watched": (
        _set(trouble="torch cannot be watched: x"), (1,), "world", UNKNOWN, "torch cannot be"
    ),
    "other gradients, equal updates": (
        _all_of(_jax, lambda each: _set(own_gradients=[f"o{each.rank}"] * 2)(each)), BOTH,
        "optimizer", OK, "optax.apply_updates (2 steps): with the gradients of all ranks",
    ),
    "other gradients, other updates": (
        _all_of(
            _jax,
            lambda each: _set(own_gradients=[f"o{each.rank}"] * 2)(each),
            lambda each: _optimizer(gradients=[{"w": f"u{each.rank}"}] * 2)(each),
        ),
        BOTH, "optimizer", PROBLEM, "optax.apply_updates steps with the gradients of its own rank",
    ),
    "other updates of averages": (
        _all_of(
            _jax,
            _set(reductions={"gradients.0": 2}),
            lambda each: _optimizer(gradients=[{"w": f"u{each.rank}"}] * 2)(each),
        ),
        BOTH, "gradients", PROBLEM, "in step 1 the updates of w differ between ranks where optax",
    ),
    "equal gradients, nothing combined": (
        _all_of(_jax, _set(own_gradients=["o", "o"])), BOTH,
        "optimizer", PROBLEM, "optax.apply_updates steps with the gradients of its own rank",
    ),
    "equal updates": (
        _all_of(_jax, _set(reductions={"pytree.0": 2})), BOTH,
        "learning-rate", OK, "the same on all ranks, as the updates are",
    ),
    "equal gradients, no inputs": (
        _all_of(_jax, _set(inputs=["", ""], own_gradients=["o", "p"])), BOTH,
        "data", PROBLEM, "gradients are the same on all ranks before they are averaged, in all 2",
    ),
    "other gradients, no inputs": (
        _all_of(
            _jax,
            _set(inputs=["", ""]),
            lambda each: _set(own_gradients=[f"o{each.rank}"])(each),
        ),
        BOTH, "data", OK, "gradients differ between ranks before they are averaged, so the data do",
    ),
    "other gradients of other weights": (
        _all_of(
            _jax,
            _set(inputs=["", ""]),
            lambda each: _set(own_gradients=[f"o{each.rank}"])(each),
            lambda each: _set(weights_before=OTHER if each.rank else each.weights_before)(each),
        ),
        BOTH, "data", UNKNOWN, "gradients differ between ranks, but so do the weights",
    ),
    "equal inputs, other gradients": (
        _all_of(
            _jax,
            _set(inputs=["i", "j"]),
            lambda each: _set(own_gradients=[f"o{each.rank}"])(each),
        ),
        BOTH, "data", HINT, "right if it has other data from elsewhere",
    ),
    "metrics in programs of JAX": (
        _all_of(_jax, _set(operations=[], reductions={"jit_step.allreduce#1": 2})), BOTH,
        "metrics", OK, "ranks combine more than gradients: 'jit_step.allreduce#1'",
    ),
    "a gradient is NaN": (
        _set(weights_after=NAN, not_finite=[NotFinite("gradient", "w", 2)]), (1,),
        "gradients", PROBLEM, "gradients hold NaN or infinity before they are averaged",
    ),
    "a gradient is infinite, and left out": (
        _set(not_finite=[NotFinite("gradient", "w", 2)]), (1,),
        "gradients", HINT, "and weights are finite: such steps are left out",
    ),
}  # fmt: skip


def test_the_first_that_is_not_finite_is_named() -> None:
    def change(each: Facts) -> None:
        each.weights_after = NAN
        gradient = NotFinite("gradient", "w", 3 - each.rank)
        each.not_finite = [gradient, NotFinite("weight", "b", 2)]

    findings = found(change, of=BOTH)
    (gradients,) = [f for f in findings if f.check == "gradients" and f.verdict == PROBLEM]
    assert gradients.evidence == ["rank 1: the gradient of w in step 2, first"]
    (weights,) = [f for f in findings if f.check == "weights"]
    assert weights.evidence[:2] == [
        "rank 0: the weight of b in step 2, first",
        "rank 1: the weight of b in step 2, first",
    ]


@pytest.mark.parametrize(
    ("framework", "own", "others"),
    [
        ("torch", "kolovod.torch.", ("kolovod.keras", "kolovod.jax")),
        ("keras", "kolovod.keras.", ("kolovod.torch", "kolovod.jax")),
        ("tensorflow", "kolovod.tensorflow.", ("kolovod.torch", "kolovod.keras", "kolovod.jax")),
        ("jax", "kolovod.jax.", ("kolovod.torch", "kolovod.keras")),
        ("ddp", "DistributedDataParallel(model)", ("kolovod.torch", "kolovod.keras")),
        ("lightning", "DistributedDataParallel(model)", ("kolovod.torch", "kolovod.keras")),
    ],
)
def test_remedies_are_of_the_framework(framework: str, own: str, others: tuple[str, ...]) -> None:
    def change(each: Facts) -> None:
        each.framework, each.operations = framework, []
        each.seeds = {"numpy": "n"}
        _optimizer(wrapped=False, rates=[[0.1 + each.rank]] * 2)(each)
        _loader(batches=[["d", "e"]])(each)
        if each.rank == 1:
            each.weights_before = each.weights_after = OTHER

    findings = found(change, of=BOTH, stdout=["loss 0.25"])
    advised = {f.check: f.advice for f in findings if f.verdict in (PROBLEM, HINT)}
    assert {"initial-weights", "optimizer", "data", "learning-rate", "random-numbers"} <= set(
        advised
    )
    assert own in advised["initial-weights"], advised
    said = " ".join(advised.values())
    assert not any(each in said for each in others), advised


def test_metrics_of_a_rank_are_averaged_by_the_framework() -> None:
    ranks = [Rank(n, facts(n), stdout=["loss 0.25"] if n == 0 else []) for n in range(SIZE)]
    for framework, part in (("keras", "MetricAverageCallback"), ("lightning", "sync_dist=True")):
        for rank in ranks:
            assert rank.facts is not None
            rank.facts.operations, rank.facts.framework = [], framework
        (metrics,) = [f for f in judge(ranks) if f.check == "metrics"]
        assert (metrics.verdict, part in metrics.advice) == (HINT, True), metrics


@pytest.mark.parametrize(
    ("lines", "part", "evidence"),
    [
        (["loss 0.5"] * 2, "all ranks print 1 line alike", ["loss 0.5"]),
        (
            ["loss 0.31", "loss 0.45"],
            "but for numbers in it; expected where each rank shows the loss of its own data",
            ["rank 0: loss 0.31", "rank 1: loss 0.45"],
        ),
        (
            ["epoch took 3.1 s", "epoch took 4 s"],
            "times and speeds are each rank's own, as expected",
            ["rank 0: epoch took 3.1 s", "rank 1: epoch took 4 s"],
        ),
        (
            ["a 1", "a 2"], "alike, but for numbers in it", ["rank 0: a 1", "rank 1: a 2"]
        ),
    ],
)  # fmt: skip
def test_lines_that_are_alike_but_for_numbers(
    lines: list[str], part: str, evidence: list[str]
) -> None:
    ranks = [Rank(n, facts(n), stdout=[lines[n]]) for n in range(SIZE)]
    (output,) = [f for f in judge(ranks) if f.check == "output"]
    assert output.verdict == HINT
    assert part in output.found
    assert output.evidence == evidence


@pytest.mark.parametrize("name", CASES)
def test_one_thing_is_other(name: str) -> None:
    change, of, check, verdict, part = CASES[name]
    findings = found(change, of=of)
    matching = [f for f in findings if f.check == check and f.verdict == verdict]
    assert any(part in f.found for f in matching), text(findings)
    if verdict == PROBLEM:
        assert all(f.advice for f in matching)


def test_how_much_weights_differ() -> None:
    change = _set(weights_before=OTHER, weights_after=_weight("b", "y", math.nan))
    (weights,) = [f for f in found(change) if f.check == "weights"]
    assert weights.evidence == ["b differs by up to nan"]
    (before,) = [f for f in found(change) if f.check == "initial-weights"]
    assert before.evidence == ["w differs by up to 0.5"]


def _error(kind: str, rank: int | None, ended: str = "error") -> Change:
    values = {"error_kind": f"kolovod.errors.{kind}", "error": f"{kind} said", "error_rank": rank}
    return _set(**values, error_line="t.py:20", ended=ended)


@pytest.mark.parametrize(
    ("kind", "rank", "part"),
    [
        ("LateRankError", 0, "rank 0 let the others wait"),
        ("RankLeftError", 0, "rank 0 ended while rank 1 waited for a step of all"),
        ("MismatchError", None, "MismatchError said"),
    ],
)
def test_ranks_that_wait(kind: str, rank: int | None, part: str) -> None:
    report = (
        "kolovod: rank 0 on host a (pid 7) has not submitted 'loss' (allreduce, 2.2 s); rank 1 "
        "waits"
    )
    findings = found(_error(kind, rank), code=1, stderr=[report, "else"])
    (steps,) = [f for f in findings if f.check == "steps"]
    assert (steps.verdict, steps.found) == (PROBLEM, part)
    assert "rank 0 has not submitted 'loss' (allreduce)" in steps.evidence
    assert f"rank 1: 2 steps, the last at t.py:9; {kind} at t.py:20" in steps.evidence


def test_both_wait() -> None:
    findings = found(lambda each: _error("LateRankError", 1 - each.rank)(each), of=BOTH, code=1)
    (steps,) = [f for f in findings if f.check == "steps"]
    assert steps.found == "ranks wait for each other in different operations"


def test_too_little_time() -> None:
    (steps,) = [
        f
        for f in found(_set(ended=""), is_late=True, was_ended=True, code=134)
        if f.check == "steps"
    ]
    assert (steps.verdict, steps.found) == (UNKNOWN, "rank 1 had not come so far within the time")


def test_a_script_that_fails() -> None:
    failing = _set(error_kind="builtins.ValueError", error="no", error_line="t.py:4", ended="error")
    findings = found(failing, code=1, stderr=["Traceback", "ValueError: no"])
    assert [f.check for f in findings] == ["script"]
    assert findings[0].line == "t.py:4"
    assert findings[0].evidence == ["Traceback", "ValueError: no"]
    told = Rank(0, facts(0), 143, was_ended=True)
    failed = Rank(1, facts(1), 1)
    assert failed_by_itself([told, failed]) is failed
    assert failed_by_itself([told]) is None


def test_who_was_not_watched() -> None:
    findings = judge([Rank(0, facts(0)), Rank(1, None)])
    assert (findings[0].verdict, findings[0].found) == (UNKNOWN, "nothing was seen of rank 1")


def test_lines_of_all_ranks() -> None:
    change = _set(operations=[])
    findings = found(change, of=BOTH, stdout=["loss 0.5", "rank 0 is here", ""])
    (output,) = [f for f in findings if f.check == "output"]
    assert (output.verdict, output.found, output.evidence) == (
        HINT, "all ranks print 1 line alike", ["loss 0.5"]
    )  # fmt: skip
    (metrics,) = [f for f in found(change, of=BOTH) if f.check == "metrics"]
    assert metrics.verdict == UNKNOWN
    of_one = judge([Rank(0, _without(facts(0)), stdout=["loss 0.5"]), Rank(1, _without(facts(1)))])
    (metrics,) = [f for f in of_one if f.check == "metrics"]
    assert (metrics.verdict, metrics.evidence) == (HINT, ["loss 0.5"])


def _without(each: Facts) -> Facts:
    each.operations = []
    return each


def test_the_report() -> None:
    finding = Finding("data", "the same " * 20, PROBLEM, ["rank 0: a"], "t.py:7", "shard it")
    lines = text([finding, Finding("weights", "equal", advice="never shown")]).splitlines()
    assert lines[0].startswith("PROBLEM      data            the same the same")
    assert max(map(len, lines)) <= 100
    assert lines[-3].strip() == "rank 0: a"
    assert lines[-2].strip() == "-> shard it [docs/check.md#data]"
    assert lines[-1] == "ok           weights         equal"
    assert summary([finding, Finding("x", "", UNKNOWN), Finding("x", "", HINT)]) == (
        "1 problem, 1 hint, 1 that this run cannot tell"
    )
    listed = as_json([finding], 2, 1)
    assert listed["findings"][0]["page"] == "docs/check.md#data"
    assert (listed["ranks"], listed["exit_code"]) == (2, 1)


def test_each_check_has_a_section_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "check.md").read_text(encoding="utf-8")
    sections = {
        line[4:].lower().replace(" ", "-") for line in page.splitlines() if line[:4] == "### "
    }
    assert sections == {*(finding.check for finding in found(nothing)), "script"}


def test_lost_weights_are_told_with_what_pytorchs_optimizer_has_said() -> None:
    said = f"kolovod: gradients of rank 1 {NOT_FINITE} step 1, before they are averaged: of 'w'"
    findings = found(_set(weights_after=NAN), of=(1,), stderr=["something", said])
    (finding,) = [each for each in findings if each.check == "weights"]
    assert finding.evidence == ["w on rank 1, not in the beginning", said.removeprefix("kolovod: ")]


def test_what_is_not_trained_may_be_infinite() -> None:
    """A mask of an attention."""
    mask = {**NAN, "w": facts(0).weights_after["w"], "mask": Values("m", [-math.inf], not_finite=1)}
    (finding,) = [
        each for each in found(_set(weights_after=mask), of=BOTH) if each.check == "weights"
    ]
    assert finding.verdict == OK


def test_weights_that_are_lost_and_differ_are_two_findings() -> None:
    findings = found(_set(weights_after={**NAN, "b": Values("other", [1.0])}), of=(1,))
    said = [each.found for each in findings if each.check == "weights"]
    assert "hold NaN or infinity" in said[0]
    assert any("differ between ranks" in each for each in said[1:])
