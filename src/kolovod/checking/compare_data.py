"""Comparison of the data that ranks train on: different parts, or the same data for all."""

from __future__ import annotations

from collections.abc import Mapping

from kolovod.checking.compare_weights import differences
from kolovod.checking.facts import Facts, Loader
from kolovod.checking.findings import HINT, PROBLEM, UNKNOWN, Finding, by_rank
from kolovod.checking.remedies import remedy

__all__ = ["data", "epochs", "lengths"]


def _training_loaders(known: Mapping[int, Facts]) -> list[dict[int, Loader]]:
    """Return the loaders of training, each by rank: those that all ranks have."""
    of_ranks = {
        rank: [each for each in facts.loaders if each.trains] for rank, facts in known.items()
    }
    count = min(len(loaders) for loaders in of_ranks.values())
    return [{rank: of_ranks[rank][i] for rank in of_ranks} for i in range(count)]


def data(known: Mapping[int, Facts]) -> list[Finding]:
    """Check whether ranks train on the same samples."""
    loaders = _training_loaders(known)
    if loaders:
        return [_of_loader(each, known) for each in loaders]
    inputs = {rank: facts.inputs for rank, facts in known.items()}
    line = next((facts.inputs_line for facts in known.values()), "")
    own = {rank: facts.own_gradients for rank, facts in known.items()}
    if not all(any(each) for each in inputs.values()):
        return [_by_gradients(known, line)]
    is_jax = any(facts.framework == "jax" for facts in known.values())
    function = "the function that is differentiated" if is_jax else "the model"
    same, seen = _same(inputs)
    if not seen or same < seen:
        return [_different(same, seen, f"the inputs of {function}", line, remedy("data", known))]
    text = f"{function} was given the same inputs on all ranks in {_all(seen)}"
    same_gradients, gradients = _same(own)
    if same_gradients < gradients and not differences(known, "weights_before"):
        text += (
            ", and gradients differ: right if it has other data from elsewhere, wrong if only "
            "random numbers differ"
        )
        return [Finding("data", text, HINT, line=line, advice=remedy("data", known))]
    return [Finding("data", text, PROBLEM, line=line, advice=remedy("data", known))]


def _by_gradients(known: Mapping[int, Facts], line: str) -> Finding:
    """Nothing was seen of the data, but perhaps the gradients that follow from them."""
    same, seen = _same({rank: facts.own_gradients for rank, facts in known.items()})
    if not seen:
        text = "neither a DataLoader nor arguments of a model were seen in training"
        return Finding("data", text, UNKNOWN)
    if same == seen:
        text = f"gradients are the same on all ranks before they are averaged, in {_all(seen)}"
        return Finding("data", text, PROBLEM, line=line, advice=remedy("data", known))
    if differences(known, "weights_before"):
        text = "gradients differ between ranks, but so do the weights"
        return Finding("data", text, UNKNOWN, line=line)
    text = "gradients differ between ranks before they are averaged, so the data do"
    return Finding("data", text, line=line)


def _same(of_ranks: Mapping[int, list[str]]) -> tuple[int, int]:
    """Return in how many places all have the same digest, and the number of places."""
    rows = [row for row in zip(*of_ranks.values(), strict=False) if all(row)]
    return sum(len(set(row)) == 1 for row in rows), len(rows)


def _all(count: int) -> str:
    return "the only step seen" if count == 1 else f"all {count} steps"


def _different(same: int, seen: int, what: str, line: str, advice: str) -> Finding:
    if same:
        text = f"{what} are the same on all ranks in {same} of {seen} steps"
        return Finding("data", text, HINT, line=line, advice=advice)
    return Finding("data", f"{what} differ between ranks in all steps", line=line)


def _of_loader(of_ranks: Mapping[int, Loader], known: Mapping[int, Facts]) -> Finding:
    first = next(iter(of_ranks.values()))
    line, kind, advice = first.line, first.kind, _advice(first.kind, known)
    if first.is_whole:
        return _of_arrays(of_ranks)
    same, seen = _same({rank: _flat(each.batches) for rank, each in of_ranks.items()})
    same_order, orders = _same({rank: _flat(each.orders) for rank, each in of_ranks.items()})
    by_order = not seen and orders > 0
    if by_order:
        same, seen = same_order, orders
    evidence = by_rank({rank: _described(each) for rank, each in of_ranks.items()})
    if seen and same == seen:
        what = "indices" if by_order else "batches"
        text = f"the {kind} gave the same {what} on all ranks, in {_all(seen)}"
        return Finding("data", text, PROBLEM, evidence, line, advice)
    if not seen:
        return Finding("data", "the batches have no tensors to compare", UNKNOWN, line=line)
    if any(each.is_sharded for each in of_ranks.values()) or same:
        return _different(same, seen, f"the {kind}'s batches", line, advice)
    sizes = {each.samples for each in of_ranks.values()}
    if orders and same_order == orders:
        text = (
            f"the {kind} gave the same indices on all ranks, but other contents: right if each "
            "rank's data set is a part of its own, wrong if only augmentation differs"
        )
        return Finding("data", text, UNKNOWN, evidence, line, advice)
    if len(sizes) == 1 and None not in sizes and first.sampler == "RandomSampler":
        text = (
            f"each rank draws from {first.samples} samples by itself: right if these are its own "
            "part, else an epoch has as many passes over the data as there are ranks"
        )
        return Finding("data", text, HINT, evidence, line, advice)
    return _different(same, seen, f"the {kind}'s batches", line, advice)


def _of_arrays(of_ranks: Mapping[int, Loader]) -> Finding:
    first = next(iter(of_ranks.values()))
    digests = {each.batches[0][0] for each in of_ranks.values()}
    if "" in digests:
        return Finding("data", "fit() is given what cannot be compared", UNKNOWN, line=first.line)
    if len(digests) > 1:
        return Finding("data", "fit() is given other arrays on each rank", line=first.line)
    text = f"fit() is given the same {first.samples} samples on all ranks"
    verdict = HINT if first.is_sharded else PROBLEM
    advice = "give each rank a part: x[kolovod.rank()::kolovod.size()], y alike"
    return Finding("data", text, verdict, line=first.line, advice=advice)


def _advice(kind: str, known: Mapping[int, Facts]) -> str:
    if kind == "tf.data.Dataset":
        return "dataset = dataset.shard(kolovod.size(), kolovod.rank()), before shuffle and batch"
    if kind != "DataLoader":
        return (
            f"let the {kind} give each rank batches of its own: number "
            "index * kolovod.size() + kolovod.rank(), say"
        )
    return remedy("loader", known)


def _flat(epochs: list[list[str]]) -> list[str]:
    return [digest for epoch in epochs for digest in epoch]


def _described(loader: Loader) -> str:
    length = "" if loader.length is None else f", {loader.length} batches"
    samples = "" if loader.samples is None else f", {loader.samples} samples"
    return f"{loader.sampler}{samples}{length}"


def epochs(known: Mapping[int, Facts]) -> list[Finding]:
    """Check whether each epoch has an order of its own."""
    check, found = "epochs", []
    for of_ranks in _training_loaders(known):
        loader = next(iter(of_ranks.values()))
        if not loader.shuffles_by_epoch:
            continue
        line, advice = loader.line, "call sampler.set_epoch(epoch) before each epoch"
        seen = [order for order in loader.orders if any(order)]
        if len(seen) > 1:
            common = min(len(order) for order in seen[:2])
            if seen[0][:common] == seen[1][:common] and not loader.epochs_set:
                text = f"epochs 1 and 2 begin with the same {common} batches"
                found.append(Finding(check, text, PROBLEM, [], line, advice))
                continue
        if loader.epochs_set:
            text = f"set_epoch was called with {', '.join(map(str, loader.epochs_set[:4]))}"
            found.append(Finding(check, text, line=line))
        elif len(seen) < 2:
            text = "set_epoch was not called before the first epoch, and no other was seen"
            longer = (
                "" if loader.length is None else f"; --steps {loader.length + 1} shows a second"
            )
            found.append(Finding(check, text, UNKNOWN, [], line, advice + longer))
        else:
            found.append(Finding(check, "epochs have different orders", line=line))
    return found or [Finding(check, "no sampler was seen whose order depends on set_epoch")]


def lengths(known: Mapping[int, Facts]) -> Finding:
    """Check whether ranks have equally many batches."""
    check = "batches"
    loaders = _training_loaders(known)
    for of_ranks in loaders:
        counts = {rank: each.length for rank, each in of_ranks.items()}
        if len(set(counts.values())) > 1:
            line = next(iter(of_ranks.values())).line
            evidence = by_rank({rank: f"{count} batches" for rank, count in counts.items()})
            if all(facts.joins for facts in known.values()):
                text = "an epoch has other numbers of batches on other ranks, and they join()"
                return Finding(check, text, evidence=evidence, line=line)
            text = "an epoch has other numbers of batches on other ranks, so that steps are unequal"
            advice = (
                "pad or cut the data, or end each epoch by join(), see docs/uneven-data.md; else "
                "the ranks with more wait for ever"
            )
            return Finding(check, text, PROBLEM, evidence, line, advice)
    if not loaders:
        return Finding(check, "no DataLoader was seen in training", UNKNOWN)
    length = next(iter(loaders[0].values())).length
    if length is None:
        return Finding(check, "the DataLoader does not know how many batches it has", UNKNOWN)
    return Finding(check, f"an epoch has {length} batches on all ranks")
