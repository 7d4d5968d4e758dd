"""Each error that Horovod documents, provoked by its names: the right kind, on the right ranks.

One job provokes nearly all of them in turn, since starting PyTorch takes seconds; a test looks at
what each rank said of one. After each row the same world is used again.
"""

import functools
import re

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from dying import die  # noqa: E402
from errors_to_provoke import FACTS, MISMATCH, ROWS, VERBS, f, waited  # noqa: E402
from forked import run_torch_ranks as run_ranks  # noqa: E402

import horovod.torch as hvd  # noqa: E402
from horovod.common.exceptions import HorovodInternalError  # noqa: E402
from kolovod.testing import RankFailed  # noqa: E402

KINDS = (HorovodInternalError, RuntimeError, ValueError)


def outcome(call):
    """The kinds of error that ``call`` raises, or nothing; and its text."""
    try:
        call()
    except Exception as error:
        kinds = [kind.__name__ for kind in KINDS if isinstance(error, kind)]
        names = [{"CollectiveError": "HorovodInternalError"}.get(name, name) for name in kinds]
        return " ".join(sorted(names)), str(error)
    return "", ""


def provoke_all(rank, size):
    torch.set_num_threads(1)
    found = {}
    for label, call in {**VERBS, **FACTS}.items():
        found[f"before init: {label}"] = outcome(call)
    hvd.init()
    for label, (odd, even, *_) in ROWS.items():
        hvd.barrier()
        found[label] = outcome(odd if rank == 1 else even)
        hvd.barrier()
        total = hvd.allreduce(torch.full((2,), float(rank)), name="t", op=hvd.Sum)
        assert total.tolist() == [size * (size - 1) / 2] * 2, label
    pending = {} if rank == 1 else {"allreduce": hvd.allreduce_async(f(3), name="pending")}
    hvd.barrier()
    if rank == 1:
        hvd.shutdown()
    for label, handle in pending.items():
        found[f"pending: {label}"] = outcome(lambda handle=handle: waited(handle))
    for label, call in VERBS.items():
        found[f"after shutdown: {label}"] = outcome(call)
    hvd.shutdown()
    hvd.init()
    assert hvd.allreduce(f(1), op=hvd.Sum).item() == size
    return found


@functools.cache
def job(size, work, *arguments, **options):
    """What ``run_ranks`` returns or raises; it is not tried again for the next row."""
    try:
        return run_ranks(size, work, *arguments, timeout_s=110, **options)
    except RankFailed as failure:
        return failure


def all_outcomes():
    found = job(3, provoke_all, 3)
    if isinstance(found, RankFailed):
        raise found
    return found


def check(found, kinds, text):
    said, message = found
    assert said == " ".join(sorted(kinds.split())), message
    assert re.search(text, message) if kinds else not message


@pytest.mark.parametrize("label", ROWS)
def test_the_right_error_on_the_right_ranks(label):
    *_, text, there, here = ROWS[label]
    for rank, found in enumerate(all_outcomes()):
        check(found[label], there if rank == 1 else here, text)


@pytest.mark.parametrize("label", [*VERBS, *FACTS])
def test_before_init(label):
    for found in all_outcomes():
        kinds, message = found[f"before init: {label}"]
        assert ("ValueError" if label in FACTS else "HorovodInternalError") in kinds.split()
        assert message.startswith("Horovod has not been initialized")
        assert "init()" in message


@pytest.mark.parametrize("label", VERBS)
def test_after_a_shutdown_of_one_rank(label):
    for rank, found in enumerate(all_outcomes()):
        if rank == 1:
            kinds, message = found[f"after shutdown: {label}"]
            assert "HorovodInternalError" in kinds.split()
            assert "init()" in message
            continue
        # Rank 1, but the third rank may have come to its own shutdown by then.
        check(found[f"after shutdown: {label}"], MISMATCH, "rank [012] .*(left|shut down)")
        check(found["pending: allreduce"], MISMATCH, "rank [012] .*(left|shut down)")


def dies(rank):
    torch.set_num_threads(1)
    hvd.init()
    handle = None if rank == 1 else hvd.allreduce_async(f(1), name="pending")
    die(rank, 1)
    found = {"pending": outcome(lambda: waited(handle))}
    for label, call in VERBS.items():
        found[label] = outcome(call)
    return found


@pytest.mark.parametrize("label", ["pending", *VERBS])
def test_after_the_death_of_one_rank(label):
    zero, _, two = job(3, dies, keep_going=True)
    for found in (zero, two):
        check(found[label], MISMATCH, "rank 1")
