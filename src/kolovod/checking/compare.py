"""From the facts of all ranks to findings. Pure functions: they read what they are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kolovod.checking.compare_data import data, epochs, lengths
from kolovod.checking.compare_output import files, metrics, output
from kolovod.checking.compare_steps import failures, has_missed_init, steps
from kolovod.checking.compare_weights import (
    differences,
    gradients,
    initial_weights,
    statistics,
    weights,
)
from kolovod.checking.facts import Facts
from kolovod.checking.findings import (
    GRADIENTS,
    HINT,
    NO_STEP,
    PROBLEM,
    UNKNOWN,
    Finding,
    Rank,
    by_rank,
    counted,
    names_of,
)
from kolovod.checking.remedies import remedy

__all__ = ["judge"]


def judge(ranks: Sequence[Rank]) -> list[Finding]:
    """Return all findings in the order that a reader wants: causes before their effects."""
    known = _decided({each.rank: each.facts for each in ranks if each.facts is not None})
    if len(known) < len(ranks):
        missing = [each.rank for each in ranks if each.facts is None]
        return [*failures(ranks), _unwatched(missing), *output(ranks)]
    failed = failures(ranks)
    if failed:  # what it has not come to is no fault of it
        seen = _all(ranks, known)
        return [*failed, *(each for each in seen if each.verdict in (PROBLEM, HINT))]
    return _all(ranks, known)


def _all(ranks: Sequence[Rank], known: dict[int, Facts]) -> list[Finding]:
    troubles = {facts.trouble for facts in known.values() if facts.trouble}
    return [
        *(Finding("world", trouble, UNKNOWN) for trouble in sorted(troubles)),
        world(known, len(ranks)),
        initial_weights(known),
        optimizer(known),
        *gradients(known),
        *weights(known, [line for rank in ranks for line in rank.stderr]),
        *data(known),
        *epochs(known),
        lengths(known),
        steps(ranks),
        seeds(known),
        rates(known),
        *files(known),
        statistics(known),
        metrics(ranks),
        *output(ranks),
    ]


def _decided(known: dict[int, Facts]) -> dict[int, Facts]:
    """Return the facts, with what their values tell of optimizers that are not wrapped.

    Gradients of ranks that differ, and make equal updates or weights, were combined.
    """
    first = next(iter(known.values()), None)
    if first is None or all(each.wrapped is not None for each in first.optimizers):
        return known
    decided = {}
    for rank, facts in known.items():
        optimizers = [
            replace(each, wrapped=_combines(known, number)) if each.wrapped is None else each
            for number, each in enumerate(facts.optimizers)
        ]
        decided[rank] = replace(facts, optimizers=optimizers)
    return decided


def _combines(known: dict[int, Facts], number: int) -> bool:
    of_ranks = [each.optimizers[number] for each in known.values() if number < len(each.optimizers)]
    own = {facts.own_gradients[0] for facts in known.values() if facts.own_gradients}
    updates = [each.gradients[0] for each in of_ranks if each.gradients]
    if len(own) > 1:
        if updates and all(each == updates[0] for each in updates):
            return True
        if not updates and not differences(known, "weights_after"):
            return True
    counts = [
        sum(count for name, count in facts.reductions.items() if name.startswith(_OF_TREES))
        for facts in known.values()
    ]
    return min(counts) >= max(1, of_ranks[0].steps)


_OF_TREES = (*GRADIENTS, "pytree")
"""Beginnings of the names of operations that combine all of a tree's arrays."""


def _unwatched(missing: Sequence[int]) -> Finding:
    return Finding(
        "world",
        f"nothing was seen of {names_of(missing)}",
        UNKNOWN,
        advice="the script must run in a Python that has Kolovod and heeds PYTHONPATH (not -I, -E "
        "or -S), and import PyTorch, Keras or Kolovod",
    )


def world(known: dict[int, Facts], size: int) -> Finding:
    """Check whether all ranks are in one world of Kolovod's."""
    outside = [rank for rank, facts in known.items() if facts.world_size is None]
    advice = "call kolovod.init() before training, on all ranks"
    line = next((facts.init_line for facts in known.values() if facts.init_line), "")
    missed = [rank for rank in outside if has_missed_init(known[rank])]
    if missed:
        text = f"{names_of(missed)} used Kolovod without init()"
        return Finding("world", text, PROBLEM, line=known[missed[0]].error_line, advice=advice)
    if len(outside) == size and not any(facts.steps for facts in known.values()):
        return Finding("world", "init() was called on no rank, and no step was seen", UNKNOWN)
    if len(outside) == size:
        other = next((facts.other_world for facts in known.values() if facts.other_world), "")
        if other:
            text = f"Kolovod was not initialized; {other} is used"
            return Finding("world", text, HINT, advice="docs/from-ddp.md has both ways to move")
        text = f"init() was called on no rank: {size} processes train, each by itself"
        return Finding("world", text, PROBLEM, advice=advice)
    if outside:
        text = f"init() was not called, or has not returned, on {names_of(outside)}"
        return Finding("world", text, PROBLEM, line=line, advice=advice)
    sizes = {rank: facts.world_size for rank, facts in known.items()}
    if set(sizes.values()) != {size}:
        found = {rank: f"rank {known[rank].world_rank} of {sizes[rank]}" for rank in sizes}
        text = f"the {size} ranks are not in one world of {size}"
        advice = "call init() without comm, unless fewer ranks are wanted"
        return Finding("world", text, PROBLEM, by_rank(found), line, advice)
    return Finding("world", f"all {size} ranks are in one world", line=line)


def optimizer(known: dict[int, Facts]) -> Finding:
    """Check whether optimizers step with the gradients of all ranks."""
    check, facts = "optimizer", next(iter(known.values()))
    stepped = [each for each in facts.optimizers if each.steps]
    if not stepped:
        return _without_optimizer(known)
    if facts.world_size is None and not facts.other_world:
        return Finding(check, "without a world none steps with the gradients of all", UNKNOWN)
    named = ", ".join(f"{each.name} ({counted(each.steps)})" for each in stepped)
    line = stepped[0].line
    if facts.apart:
        return Finding(check, f"{named}: ranks exchange seldom, by {facts.apart}", line=line)
    if facts.local_from is not None:
        return _local(known, named)
    alone = [each for each in stepped if not each.wrapped]
    is_by_model = facts.other_world.startswith(("DistributedDataParallel", "FullySharded"))
    if is_by_model and (facts.sharded or not alone):
        return Finding(check, f"{named}: gradients are combined by {facts.other_world}", line=line)
    if not alone:
        return Finding(check, f"{named}: with the gradients of all ranks", line=line)
    reduces = [each for each in facts.operations if each.verb == "allreduce"]
    if sum(each.count for each in reduces) >= facts.steps:
        where = reduces[0].line
        return Finding(check, f"{named}: the script itself combines, by {where}", line=line)
    text = f"{alone[0].name} steps with the gradients of its own rank only"
    advice = remedy("optimizer", known)
    return Finding(check, text, PROBLEM, line=alone[0].line, advice=advice)


def _local(known: dict[int, Facts], named: str) -> Finding:
    """DDP's hook for post-local SGD leaves it to the script to average parameters."""
    facts = next(iter(known.values()))
    reduces = [each.line for each in facts.operations if each.verb == "allreduce"]
    text = (
        f"{named}: from step {facts.local_from} on DDP's hook for post-local SGD averages "
        "gradients within a group of ranks only (by default those of a host), and nothing was seen "
        f"that averages parameters{f', unless {reduces[0]} does' if reduces else ''}"
    )
    # Here all ranks are on one host, so they may be one group.
    verdict = PROBLEM if differences(known, "weights_after") else HINT
    advice = remedy("local-sgd", known)
    return Finding("optimizer", text, verdict, line=facts.local_line, advice=advice)


def _without_optimizer(known: dict[int, Facts]) -> Finding:
    """Steps within programs of JAX and TensorFlow, or in NumPy, are seen by the engine only."""
    check = "optimizer"
    counts = {
        rank: sum(count for name, count in each.reductions.items() if name.startswith(GRADIENTS))
        for rank, each in known.items()
    }
    if min(counts.values()) > 0:
        text = f"gradients were combined in {min(counts.values())} operations at least"
        return Finding(check, text)
    has_ended = all(each.ended == "script" and each.world_size for each in known.values())
    if has_ended and not any(each.reductions for each in known.values()):
        text = "from the beginning to the end of the script nothing was averaged over ranks"
        advice = (
            f"{remedy(check, known)} (a script that resumes a run that had come to its end has "
            "made no step: check it from the beginning)"
        )
        return Finding(check, text, PROBLEM, advice=advice)
    return Finding(check, NO_STEP, UNKNOWN)


def seeds(known: dict[int, Facts]) -> Finding:
    """Check whether ranks draw the same random numbers."""
    check, facts = "random-numbers", next(iter(known.values()))
    if not facts.seeds:
        return Finding(check, "no generator was seen", UNKNOWN)
    same = [
        name
        for name, state in facts.seeds.items()
        if all(each.seeds.get(name) == state for each in known.values())
    ]
    if not same:
        return Finding(check, "the generators of ranks are in different states")
    uses = f", which {' and '.join(facts.draws)} draws from" if facts.draws else ""
    text = f"before the first step all ranks have the same state of {', '.join(same)}{uses}"
    return Finding(check, text, HINT, advice=remedy(check, known))


def rates(known: dict[int, Facts]) -> Finding:
    """Check whether the learning rate is the same on all ranks."""
    check = "learning-rate"
    seen = {
        rank: [each.rates for each in facts.optimizers if each.rates]
        for rank, facts in known.items()
    }
    if not all(seen.values()):
        return _rates_in_updates(known)
    first = next(iter(seen.values()))
    for number, own in enumerate(first):
        of_ranks = {rank: rates[number] for rank, rates in seen.items() if number < len(rates)}
        for step in range(min(map(len, of_ranks.values()))):
            values = {rank: rates[step] for rank, rates in of_ranks.items()}
            if any(value != own[step] for value in values.values()):
                text = f"in step {step + 1} ranks have different learning rates"
                advice = remedy(check, known)
                listed = by_rank({r: ", ".join(f"{v:g}" for v in vs) for r, vs in values.items()})
                return Finding(check, text, PROBLEM, listed, _line(known, number), advice)
    lowest = min(min(rates) for rates in first[0])
    highest = max(max(rates) for rates in first[0])
    value = f"{lowest:g}" if lowest == highest else f"{lowest:g} to {highest:g}"
    text = (
        f"{value}, the same on all ranks; whether it fits batches {len(known)} times as large, "
        "only training shows"
    )
    return Finding(check, text, line=_line(known, 0))


def _rates_in_updates(known: dict[int, Facts]) -> Finding:
    """JAX's optimizers have no rate that is seen, but it is a factor of the updates."""
    check = "learning-rate"
    of_ranks = [facts.optimizers for facts in known.values()]
    used = [each for each in of_ranks[0] if each.wrapped and each.uses == "updates"]
    steps = [[each.gradients for each in own] for own in of_ranks]
    if used and all(each.gradients for each in used) and all(own == steps[0] for own in steps):
        text = "the same on all ranks, as the updates are that it is a factor of"
        return Finding(check, text, line=used[0].line)
    return Finding(check, "no learning rate was seen", UNKNOWN)


def _line(known: dict[int, Facts], number: int) -> str:
    found = [each for each in next(iter(known.values())).optimizers if each.rates]
    return found[number].line
