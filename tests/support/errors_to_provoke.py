"""What test_horovod_errors.py provokes: calls, and the error that Horovod documents for each."""

import functools

import torch

import horovod.torch as hvd

MISMATCH, ENQUEUE, NONE = "HorovodInternalError RuntimeError", "ValueError RuntimeError", ""

f = torch.ones


def ints(*shape):
    return torch.ones(shape, dtype=torch.int32)


def waited(handle):
    return hvd.synchronize(handle)


def members(ranks, call):
    """``call`` with a process set of ``ranks``, which every rank adds and removes."""

    def with_set():
        process_set = hvd.add_process_set(ranks)
        try:
            return call(process_set)
        finally:
            hvd.barrier()  # so that nobody removes it in the middle
            hvd.remove_process_set(process_set)

    return with_set


def removed_set():
    process_set = hvd.add_process_set([0])
    hvd.remove_process_set(process_set)
    return process_set


def twice(verb, *arguments):
    """The second has the name of the first, which the other ranks have not submitted yet."""
    first = verb(*arguments, name="twice")
    try:
        verb(*arguments, name="twice")
    finally:
        hvd.barrier()
        waited(first)


def late(verb, *arguments):
    hvd.barrier()
    waited(verb(*arguments, name="twice"))


def nothing():
    """The other ranks are not disturbed."""


splits = functools.partial(torch.tensor, dtype=torch.int32)
# label: (what rank 1 does, what the others do, what the error says). Calls that fail on one rank
# have names, since even a call that fails takes the number of an unnamed one, as with Horovod.
MISMATCHES = {
    # 1: dtype
    "allreduce dtype": (
        lambda: hvd.allreduce(ints(3), name="t", op=hvd.Sum),
        lambda: hvd.allreduce(f(3), name="t", op=hvd.Sum),
        "dtype.*rank 0 has float32, rank 1 has int32",
    ),
    "allreduce_async_ dtype": (
        lambda: waited(hvd.allreduce_async_(f(3).double(), name="t")),
        lambda: waited(hvd.allreduce_async_(f(3), name="t")),
        "dtype.*rank 0 has float32, rank 1 has float64",
    ),
    "grouped_allreduce dtype": (
        lambda: hvd.grouped_allreduce([f(3), ints(3)], name="t", op=hvd.Sum),
        lambda: hvd.grouped_allreduce([f(3), f(3)], name="t", op=hvd.Sum),
        "dtype of tensor 1.*rank 0 has float32, rank 1 has int32",
    ),
    "allgather dtype": (
        lambda: hvd.allgather(ints(3), name="t"),
        lambda: hvd.allgather(f(3), name="t"),
        "dtype.*rank 1 has int32",
    ),
    "broadcast dtype": (
        lambda: hvd.broadcast(ints(3), 0, name="t"),
        lambda: hvd.broadcast(f(3), 0, name="t"),
        "dtype.*rank 1 has int32",
    ),
    "alltoall dtype": (
        lambda: hvd.alltoall(ints(6), name="t"),
        lambda: hvd.alltoall(f(6), name="t"),
        "dtype.*rank 1 has int32",
    ),
    "reducescatter dtype": (
        lambda: hvd.reducescatter(ints(6), name="t", op=hvd.Sum),
        lambda: hvd.reducescatter(f(6), name="t", op=hvd.Sum),
        "dtype.*rank 1 has int32",
    ),
    # 2: kind. Names say the kind, so that it can differ where there is no name only.
    "kind": (
        lambda: hvd.allgather(f(3)),
        lambda: hvd.allreduce(f(3)),
        "rank 0 has allreduce, rank 1 has allgather",
    ),
    "kind of handle": (
        lambda: waited(hvd.broadcast_async(f(3), 0)),
        lambda: waited(hvd.reducescatter_async(f(3))),
        "rank 0 has reducescatter, rank 1 has broadcast",
    ),
    # 3: shape
    "allreduce shape": (
        lambda: hvd.allreduce(f(2, 3), name="t"),
        lambda: hvd.allreduce(f(3, 2), name="t"),
        r"shape.*rank 0 has \(3, 2\), rank 1 has \(2, 3\)",
    ),
    "grouped_allreduce_ shape": (
        lambda: hvd.grouped_allreduce_([f(2), f(2)], name="t"),
        lambda: hvd.grouped_allreduce_([f(2), f(3)], name="t"),
        r"shape of tensor 1.*rank 0 has \(3,\), rank 1 has \(2,\)",
    ),
    "broadcast_ shape": (
        lambda: hvd.broadcast_(f(2), 0, name="t"),
        lambda: hvd.broadcast_(f(3), 0, name="t"),
        r"shape.*rank 1 has \(2,\)",
    ),
    "reducescatter shape": (
        lambda: hvd.reducescatter(f(4), name="t"),
        lambda: hvd.reducescatter(f(5), name="t"),
        r"shape.*rank 1 has \(4,\)",
    ),
    # 4: factors
    "prescale": (
        lambda: hvd.allreduce(f(3), name="t", prescale_factor=0.5),
        lambda: hvd.allreduce(f(3), name="t", prescale_factor=0.25),
        "prescale.*rank 0 has 0.25, rank 1 has 0.5",
    ),
    "postscale": (
        lambda: hvd.reducescatter(f(3), name="t", postscale_factor=0.5),
        lambda: hvd.reducescatter(f(3), name="t"),
        "postscale.*rank 0 has 1, rank 1 has 0.5",
    ),
    # 5: operation
    "allreduce op": (
        lambda: hvd.allreduce(f(3), name="t", op=hvd.Sum),
        lambda: hvd.allreduce(f(3), name="t", op=hvd.Min),
        "op.*rank 0 has Min, rank 1 has Sum",
    ),
    "reducescatter op": (
        lambda: hvd.reducescatter(f(3), name="t", op=hvd.Sum),
        lambda: hvd.reducescatter(f(3), name="t"),
        "op.*rank 0 has Average, rank 1 has Sum",
    ),
    # 6: dimensions that are not joined along
    "allgather dimensions": (
        lambda: hvd.allgather(f(2, 3, 1), name="t"),
        lambda: hvd.allgather(f(2, 3), name="t"),
        r"shape.*rank 0 has \(2, 3\), rank 1 has \(2, 3, 1\)",
    ),
    "allgather dimension 1": (
        lambda: waited(hvd.allgather_async(f(2, 4), name="t")),
        lambda: waited(hvd.allgather_async(f(2, 3), name="t")),
        r"shape.*rank 0 has \(2, 3\), rank 1 has \(2, 4\)",
    ),
    "grouped_allgather dimension 1": (
        lambda: hvd.grouped_allgather([f(2), f(2, 4)], name="t"),
        lambda: hvd.grouped_allgather([f(2), f(2, 3)], name="t"),
        r"shape of tensor 1.*rank 1 has \(2, 4\)",
    ),
    "alltoall dimension 1": (
        lambda: hvd.alltoall(f(6, 4), name="t"),
        lambda: hvd.alltoall(f(6, 3), name="t"),
        r"shape.*rank 0 has \(6, 3\), rank 1 has \(6, 4\)",
    ),
    # 7: root
    "root": (
        lambda: hvd.broadcast(f(3), 1, name="t"),
        lambda: hvd.broadcast(f(3), 0, name="t"),
        "root.*rank 0 has 0, rank 1 has 1",
    ),
    "parameters": (
        lambda: hvd.broadcast_parameters({"weight": f(3)}, 0),
        lambda: hvd.broadcast_parameters({"weight": f(2)}, 0),
        "'weight'",
    ),
}
WRONG_CALLS = {
    "no member": (
        members([0], lambda s: hvd.allreduce(f(1), process_set=s)),
        members([0], lambda s: None),
        "rank 1 is not in .*only its members",
    ),
    "unregistered set": (
        lambda: hvd.allgather(f(1), process_set=hvd.ProcessSet([0, 1])),
        nothing,
        "add_process_set",
    ),
    "removed set": (
        lambda: hvd.barrier(removed_set()),
        removed_set,
        "add_process_set",
    ),
    "root outside the set": (
        members([1], lambda s: hvd.broadcast(f(1), 0, process_set=s)),
        members([1], lambda s: None),
        "rank 0 is not in ",
    ),
    "no such root": (lambda: hvd.broadcast_(f(1), 7, "t"), nothing, "root rank 7"),
    "splits of two dimensions": (
        lambda: hvd.alltoall(f(4), splits([[1, 1]]), "t"),
        nothing,
        "one whole number of rows for each rank",
    ),
    "splits of another dtype": (
        lambda: hvd.alltoall_async(f(4), torch.tensor([1.0, 1.0])),
        nothing,
        "dtype torch.float32",
    ),
    "number of splits": (
        lambda: hvd.alltoall(f(4), splits([1] * (hvd.size() + 1)), "t"),
        nothing,
        "splits for",
    ),
    "sum of splits": (
        lambda: hvd.alltoall(f(4), splits([3] * hvd.size()), "t"),
        nothing,
        "split 3 for rank 1",
    ),
    "no splits": (lambda: hvd.alltoall(f(7)), nothing, "7 rows cannot be split evenly"),
    "scalar reducescatter": (lambda: hvd.reducescatter(f(()), "t"), nothing, "reshape"),
    "scalar allgather": (lambda: hvd.allgather(f(()), "t"), nothing, "reshape"),
    "scalar alltoall": (lambda: hvd.alltoall_async(f(()), None, "t"), nothing, "reshape"),
    "adasum scattered": (
        lambda: hvd.reducescatter(f(2), "t", op=hvd.Adasum),
        nothing,
        "Adasum is for allreduce only",
    ),
    "the same name again": (
        lambda: twice(hvd.allreduce_async, f(1)),
        lambda: late(hvd.allreduce_async, f(1)),
        "'allreduce.twice' is already pending",
    ),
    "the same name of a group again": (
        lambda: twice(hvd.grouped_allreduce_async, [f(1), f(2)]),
        lambda: late(hvd.grouped_allreduce_async, [f(1), f(2)]),
        "already pending",
    ),
    "the same name of a gather again": (
        lambda: twice(hvd.allgather_async, f(1)),
        lambda: late(hvd.allgather_async, f(1)),
        "already pending",
    ),
}


def joined(verb):
    """Rank 1 has no data left; the others ask for what cannot do without it."""

    def others():
        try:
            verb()
        finally:
            hvd.join()

    return hvd.join, others, "join"


JOINED = {
    "allgather": joined(lambda: hvd.allgather(f(1))),
    "broadcast": joined(lambda: hvd.broadcast(f(1), 0)),
    "alltoall": joined(lambda: hvd.alltoall(f(6))),
    "reducescatter": joined(lambda: hvd.reducescatter(f(6))),
}
# label: (what rank 1 does, what the others do, text), kinds of error on rank 1 and on the others
ROWS = {
    **{label: (*row, MISMATCH, MISMATCH) for label, row in MISMATCHES.items()},
    **{label: (*row, ENQUEUE, NONE) for label, row in WRONG_CALLS.items()},
    **{f"joined {label}": (*row, NONE, MISMATCH) for label, row in JOINED.items()},
}

VERBS = {
    "allreduce": lambda: hvd.allreduce(f(2)),
    "allreduce_": lambda: hvd.allreduce_(f(2)),
    "grouped_allreduce": lambda: hvd.grouped_allreduce([f(2), f(1)]),
    "allgather": lambda: hvd.allgather(f(2)),
    "grouped_allgather": lambda: hvd.grouped_allgather([f(2)]),
    "broadcast": lambda: hvd.broadcast(f(2), 0),
    "alltoall": lambda: hvd.alltoall(f(6)),
    "reducescatter": lambda: hvd.reducescatter(f(6)),
    "grouped_reducescatter": lambda: hvd.grouped_reducescatter([f(6)]),
    "sparse_allreduce_async": lambda: hvd.sparse_allreduce_async(f(2).to_sparse(), "s", hvd.Sum)(),
    "barrier": lambda: hvd.barrier(),
    "join": lambda: hvd.join(),
    "broadcast_object": lambda: hvd.broadcast_object(1),
    "allgather_object": lambda: hvd.allgather_object(1),
    "broadcast_parameters": lambda: hvd.broadcast_parameters({"w": f(2)}, 0),
    "add_process_set": lambda: hvd.add_process_set([0]),
    "a step": lambda: step(),
}
FACTS = {
    name: getattr(hvd, name)
    for name in ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
}


def step():
    """Of an optimizer that is new, so that the ranks must talk."""
    parameter = torch.nn.Parameter(f(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
    parameter.sum().backward()
    optimizer.step()
