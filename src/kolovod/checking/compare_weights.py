"""Weights, gradients and running statistics: equal on all ranks, or which differ, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kolovod.checking.facts import Facts, Values
from kolovod.checking.findings import (
    HINT,
    NO_STEP,
    PROBLEM,
    UNKNOWN,
    Finding,
    counted,
    few,
    names_of,
)
from kolovod.checking.remedies import remedy
from kolovod.gradients.sentinel import NOT_FINITE

__all__ = ["differences", "gradients", "initial_weights", "statistics", "weights"]


def differences(known: Mapping[int, Facts], what: str) -> dict[str, float]:
    """Return the largest difference seen, by name; infinite if a rank does not have that weight."""
    found: dict[str, float] = {}
    values: list[dict[str, Values]] = [getattr(facts, what) for facts in known.values()]
    names = dict.fromkeys(name for each in values for name in each)
    for name in names:
        there = [each[name] for each in values if name in each]
        if len(there) < len(values):
            found[name] = math.inf
        elif len({each.digest for each in there}) > 1:
            found[name] = max(_difference(there[0], other) for other in there[1:])
    return found


def _difference(a: Values, b: Values) -> float:
    if len(a.sample) != len(b.sample):
        return math.inf
    pairs = zip(a.sample, b.sample, strict=True)
    return max((abs(x - y) for x, y in pairs if x == x and y == y), default=math.nan)


def _listed(differing: Mapping[str, float]) -> list[str]:
    def worded(name: str, difference: float) -> str:
        if math.isinf(difference):
            return f"{name} is missing on a rank, or has another shape"
        return f"{name} differs by up to {difference:.3g}"

    most = sorted(differing.items(), key=lambda pair: -pair[1] if pair[1] == pair[1] else 0.0)
    return _few_lines([worded(*pair) for pair in most])


def _few_lines(lines: Sequence[str]) -> list[str]:
    more = [f"and {len(lines) - 4} more"] if len(lines) > 4 else []
    return [*lines[:4], *more]


def _not_finite(known: Mapping[int, Facts]) -> list[str]:
    """Return a line for each trained weight that is not finite: on which ranks, since when."""
    lines = []
    trained = {name for each in known.values() for name in each.trainable}
    for name in dict.fromkeys(name for each in known.values() for name in each.weights_after):
        if trained and name not in trained:  # a mask of an attention, say
            continue
        of_ranks = {rank: each.weights_after.get(name) for rank, each in known.items()}
        ranks = [rank for rank, values in of_ranks.items() if values and values.not_finite]
        if not ranks:
            continue
        before = known[ranks[0]].weights_before.get(name)
        since = "from the beginning" if before and before.not_finite else "not in the beginning"
        who = "all ranks" if len(ranks) == len(known) else names_of(ranks)
        lines.append(f"{name} on {who}, {since}")
    return lines


def _first_not_finite(what: str, known: Mapping[int, Facts]) -> list[str]:
    """Return a line for each rank that had such values first: the parameter, and the step."""
    events = [
        (each.step, rank, each.name)
        for rank, facts in known.items()
        for each in facts.not_finite
        if each.what == what
    ]
    return [
        f"rank {rank}: the {what} of {name} in step {step}, first"
        for step, rank, name in sorted(events)
        if step == min(events)[0]
    ]


def _apart(known: Mapping[int, Facts]) -> str:
    for facts in known.values():
        if facts.sharded:
            return "ranks have different parts of the parameters"
        if facts.apart:
            return f"{facts.apart} lets ranks differ between exchanges"
    return ""


def initial_weights(known: Mapping[int, Facts]) -> Finding:
    """Compare the weights before the first step."""
    check = "initial-weights"
    facts = next(iter(known.values()))
    if not all(each.weights_before for each in known.values()):
        text = f"{NO_STEP} on all ranks"
        if all(each.broadcasts for each in known.values()):
            text += "; but parameters were broadcast"
        return Finding(check, text, UNKNOWN)
    if any(each.sharded for each in known.values()):
        return Finding(check, _apart(known), UNKNOWN)
    differing = differences(known, "weights_before")
    if not differing:
        is_by_model = facts.other_world.startswith("DistributedDataParallel")
        how = (
            ""
            if facts.broadcasts or is_by_model
            else ", without a broadcast: the ranks have the same seed"
        )
        return Finding(check, f"{len(facts.weights_before)} weights are equal on all ranks{how}")
    count = f"{len(differing)} of {len(facts.weights_before)} weights"
    line = facts.step_line
    if all(each.weights_after for each in known.values()) and not differences(
        known, "weights_after"
    ):
        text = f"{count} differed before the first step, and none at the end"
        return Finding(check, text, HINT, _listed(differing), line, "broadcast them before")
    text = f"before the first step {count} differ between ranks"
    return Finding(check, text, PROBLEM, _listed(differing), line, remedy("broadcast", known))


def gradients(known: Mapping[int, Facts]) -> list[Finding]:
    """Check whether all ranks have the same gradients when wrapped optimizers use them."""
    check = "gradients"
    found = []
    seen = 0
    for number, optimizer in enumerate(next(iter(known.values())).optimizers):
        all_of_them = [
            facts.optimizers[number] for facts in known.values() if number < len(facts.optimizers)
        ]
        if not all(each.wrapped and each.gradients for each in all_of_them):
            continue
        if any(each.apart or each.local_from is not None for each in known.values()):
            continue  # by design
        seen += 1
        for step in range(min(len(each.gradients) for each in all_of_them)):
            differing = _unequal([each.gradients[step] for each in all_of_them])
            if differing:
                text = (
                    f"in step {step + 1} the {optimizer.uses} of {few(differing)} differ between "
                    f"ranks where {optimizer.name} uses them, after gradients were averaged"
                )
                advice = remedy(check, known)
                found.append(Finding(check, text, PROBLEM, [], optimizer.line, advice))
                break
    lost = _first_not_finite("gradient", known)
    if not found and seen and not lost:
        kinds = dict.fromkeys(each.uses for each in next(iter(known.values())).optimizers)
        text = f"the {' and '.join(kinds)} that optimizers have used are equal on all ranks"
        found.append(Finding(check, text))
    if lost:
        text, are_lost = (
            "gradients hold NaN or infinity before they are averaged",
            _not_finite(known),
        )
        if not are_lost:
            text += ", and weights are finite: such steps are left out, or weights not seen"
        found.append(Finding(check, text, PROBLEM if are_lost else HINT, lost, "", _FINITE))
    return found


def _unequal(of_ranks: Sequence[Mapping[str, str]]) -> list[str]:
    names = dict.fromkeys(name for each in of_ranks for name in each)
    return [name for name in names if len({each.get(name) for each in of_ranks}) > 1]


def weights(known: Mapping[int, Facts], stderr: Sequence[str]) -> list[Finding]:
    """Compare the weights after the last step: a finding for each cause. ``stderr``: all ranks'."""
    check = "weights"
    facts = next(iter(known.values()))
    counts = {each.steps for each in known.values()}
    if not all(each.weights_after and each.steps for each in known.values()):
        return [Finding(check, f"{NO_STEP} on all ranks", UNKNOWN)]
    if reason := _apart(known):
        return [Finding(check, reason, UNKNOWN)]
    differing = differences(known, "weights_after")
    steps = f"after {counted(max(counts))}"
    lost: list[Finding] = []
    if bad := _not_finite(known):
        text = f"{steps} {len(bad)} of {len(facts.weights_after)} weights hold NaN or infinity"
        said = [line.removeprefix("kolovod: ") for line in stderr if NOT_FINITE in line]
        if not _first_not_finite("gradient", known):  # which has a finding of its own
            bad += said[:1]
        lines = [*_first_not_finite("weight", known), *_few_lines(bad)]
        lost = [Finding(check, text, PROBLEM, lines, facts.step_line, _FINITE)]
    if not differing:
        text = f"{len(facts.weights_after)} weights are equal on all ranks {steps}"
        return lost or [Finding(check, text)]
    if len(counts) > 1:
        text = "ranks have taken different numbers of steps, so their weights say nothing"
        return [*lost, Finding(check, text, UNKNOWN)]
    causes: dict[str, dict[str, float]] = {}
    for name, difference in differing.items():
        causes.setdefault(_cause(name, known), {})[name] = difference
    return lost + [
        Finding(
            check,
            f"{steps} {len(names)} of {len(facts.weights_after)} weights differ between ranks: "
            f"{cause}",
            PROBLEM,
            [] if cause == _STARTED else _listed(names),
            facts.step_line,
            _CURES[cause],
        )
        for cause, names in causes.items()
    ]


_FINITE = (
    "the loss has no value, or steps are too large: see whether the data are finite on the ranks "
    "named, lower the learning rate, clip gradients"
)
_STARTED = "they differed from the beginning"
_ALONE = "an optimizer that is not wrapped has changed them"
_LOCAL = "DDP's hook for post-local SGD lets ranks train apart"
_OUTSIDE = "no optimizer has them, so something else has changed them"
_GRADIENTS = "their gradients differed in the optimizer"
_RATES = "their learning rates differed"
_ELSE = "something besides the optimizer has changed them"
_CURES = {
    _STARTED: "see the finding on initial weights",
    _ALONE: "see the finding on the optimizer",
    _LOCAL: "see the finding on the optimizer",
    _OUTSIDE: "give them to the optimizer that is wrapped, or change them on all ranks alike: "
    "from values that were averaged or broadcast",
    _GRADIENTS: "see the finding on gradients",
    _RATES: "see the finding on the learning rate",
    _ELSE: "change weights on all ranks alike, from values that were averaged or broadcast",
}


def _cause(name: str, known: Mapping[int, Facts]) -> str:
    before = [facts.weights_before.get(name) for facts in known.values()]
    if len({each.digest for each in before if each is not None}) > 1:
        return _STARTED
    owners = [each for each in next(iter(known.values())).optimizers if name in each.parameters]
    if not owners:
        return _OUTSIDE
    if not all(each.wrapped for each in owners):
        return _ALONE
    if any(facts.local_from is not None for facts in known.values()):
        return _LOCAL
    for number, optimizer in enumerate(next(iter(known.values())).optimizers):
        of_ranks = [f.optimizers[number] for f in known.values() if number < len(f.optimizers)]
        if optimizer not in owners:
            continue
        if any(each.rates != optimizer.rates for each in of_ranks):
            return _RATES
        steps = zip(*(each.gradients for each in of_ranks), strict=False)
        if any(name in _unequal(of_step) for of_step in steps):
            return _GRADIENTS
    return _ELSE


def statistics(known: Mapping[int, Facts]) -> Finding:
    """Compare the running statistics of batch normalization."""
    check = "batch-norm"
    if any(facts.framework == "jax" for facts in known.values()):
        uses = [len(of_uses) for facts in known.values() for of_uses in facts.running.values()]
        if not uses:
            text = "no BatchNorm of Flax's was seen in training, and no other of JAX is looked at"
            return Finding(check, text, UNKNOWN)
        if min(uses) < 2:
            text = "running statistics were seen before they could differ only; --steps 2 shows it"
            return Finding(check, text, UNKNOWN)
        known = _last_running(known, min(uses) - 1)
    if any(facts.framework == "tensorflow" and facts.steps for facts in known.values()):
        text = "running statistics are not looked at in TensorFlow's own loops"
        return Finding(check, text, UNKNOWN)
    if not any(facts.buffers_after for facts in known.values()):
        return Finding(check, "no running statistics were seen")
    differing = differences(known, "buffers_after")
    if not differing:
        return Finding(check, "running statistics are equal on all ranks")
    text = (
        "each rank has running statistics of its own data; a checkpoint has those of the rank "
        "that writes it"
    )
    return Finding(check, text, HINT, _listed(differing), advice=remedy(check, known))


def _last_running(known: Mapping[int, Facts], use: int) -> dict[int, Facts]:
    """Return the facts with the statistics that a use of each layer has found, on all ranks."""
    return {
        rank: replace(
            facts, buffers_after={name: of_uses[use] for name, of_uses in facts.running.items()}
        )
        for rank, facts in known.items()
    }
