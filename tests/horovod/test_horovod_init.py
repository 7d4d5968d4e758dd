"""hvd.init: which ranks, which process sets; and the place of a rank among several hosts."""

import subprocess
import sys

import numpy as np
import pytest
import worlds
from forked import run_ranks

import kolovod
from horovod.common import basics as hvd
from horovod.common.process_sets import ProcessSet, add_process_set, remove_process_set


def refused(match, *arguments, error=ValueError):
    with pytest.raises(error, match=match):
        hvd.init(*arguments)
    assert not hvd.is_initialized()


def init_with_sets(rank):
    """One world after the other in the same processes; a failed init leaves none behind."""
    refused(r"process_sets\[1\] has the same members as .*\[0\], \[1\]",
            None, [ProcessSet([1]), ProcessSet([1])])  # fmt: skip
    refused("same members as the global", None, [ProcessSet([2, 1, 0])])
    refused(r"rank 9 is not in 0\.\.2", None, [ProcessSet([0, 9])])
    refused(r"rank 0 calls init\(\[\[0\]\]\), rank 1 init\(\[\[1\]\]\)", None, [ProcessSet([rank])])
    one, two = [ProcessSet([0])], [ProcessSet([0]), ProcessSet([1])]
    refused(r"rank 0 calls init\(\[\[0\]\]\), rank 1 init\(\[\[0\], \[1\]\]\)",
            None, two if rank == 1 else one)  # fmt: skip
    refused(r"rank 0 calls init\(\[\[0\]\]\), rank 1 init\(\[\]\)",
            None, [one, None, "dynamic"][rank])  # fmt: skip
    refused("expected a list, or 'dynamic'", None, "static")

    sets = [ProcessSet([0]), ProcessSet([2, 1])]
    hvd.init(process_sets=sets)
    assert [(ps.process_set_id, ps.ranks) for ps in sets] == [(1, [0]), (2, [1, 2])]
    mine = sets[rank > 0]
    assert mine.included()
    assert kolovod.allgather(np.array([rank]), process_set=mine).tolist() == mine.ranks
    with pytest.raises(ValueError, match="same members as"):
        add_process_set([1, 2])
    assert remove_process_set(sets[1]) is True
    assert sets[1].process_set_id is None
    assert add_process_set(range(1, 3)).process_set_id == 3
    hvd.shutdown()
    assert sets[0].process_set_id is None

    hvd.init(process_sets="Dynamic")
    assert add_process_set(sets[0]) is sets[0]
    assert sets[0].process_set_id == 1
    hvd.shutdown()
    return True


def test_process_sets_of_init_are_the_same_on_all_ranks():
    assert all(run_ranks(3, init_with_sets))


ITERABLES = (reversed, iter, set, np.array, dict.fromkeys, lambda ranks: range(2, -1, -1))


def init_with_some(rank):
    refused("expected launcher ranks from 0 to 2", [0, 9])
    refused("a rank is named twice", [0, 0, 1])
    refused("expected a list of ranks or an mpi4py communicator, not 5", 5)
    refused("whole numbers", "012")
    refused("whole numbers", np.array([0.0, 1.0]))
    if rank == 1:
        refused("does not contain this process", [0, 2])
    hvd.init([2, 0] if rank != 1 else [1])
    hvd.init()  # does nothing in a world
    facts = hvd.rank(), hvd.size(), kolovod.allreduce(np.array([rank]), op=kolovod.Sum).item()
    hvd.shutdown()
    hvd.init([])  # Horovod's older default: all ranks
    assert hvd.size() == 3
    hvd.shutdown()
    for comm in ITERABLES:
        hvd.init(comm(range(3)))
        assert (hvd.rank(), hvd.size()) == (rank, 3)
        hvd.shutdown()
    return facts


def test_a_list_of_ranks():
    assert run_ranks(3, init_with_some) == [(0, 2, 2), (0, 1, 1), (1, 2, 2)]


def place(rank):
    with pytest.raises(ValueError, match=r"init\(\) first"):
        hvd.is_homogeneous()
    hvd.init()
    local, cross = (hvd.local_rank(), hvd.local_size()), (hvd.cross_rank(), hvd.cross_size())
    return local, cross, hvd.is_homogeneous()


@pytest.mark.parametrize(
    ("hosts", "wanted"),
    [
        (["a", "a", "b"], [((0, 2), (0, 2)), ((1, 2), (0, 1)), ((0, 1), (1, 2))]),
        (["a", "b", "a", "b"], [((0, 2), (0, 2)), ((0, 2), (1, 2)),
                                ((1, 2), (0, 2)), ((1, 2), (1, 2))]),
        (["b", "a", "a", "c", "c"], [((0, 1), (0, 3)), ((0, 2), (1, 3)), ((1, 2), (0, 2)),
                                     ((0, 2), (2, 3)), ((1, 2), (1, 2))]),
    ],
    ids=["aab", "abab", "baacc"],
)  # fmt: skip
def test_cross_numbers_count_the_hosts_that_have_this_local_rank(hosts, wanted):
    is_even = len({hosts.count(host) for host in hosts}) == 1
    found = run_ranks(len(hosts), place, hosts=hosts)
    assert found == [(*numbers, is_even) for numbers in wanted]


UNDER_MPI = """
import numpy as np
from mpi4py import MPI
import kolovod
from horovod.common import basics as hvd
from horovod.common.process_sets import ProcessSet

world = MPI.COMM_WORLD
rank = world.Get_rank()

def total(process_set=None):
    return kolovod.allreduce(np.array([rank]), op=kolovod.Sum, process_set=process_set).item()

def refused(kind, text, *arguments):
    try:
        hvd.init(*arguments)
    except kind as error:
        assert text in str(error), error
    else:
        raise SystemExit(f"not refused: {text}")

hvd.init(comm=world)
assert (hvd.rank(), hvd.size(), total()) == (rank, 3, 3)
assert hvd.mpi_enabled() and not hvd.gloo_enabled() and hvd.mpi_threads_supported()
hvd.shutdown()

later = world.Split(int(rank > 0))
assert ProcessSet(later).ranks == ([1, 2] if rank else [0])
backwards = world.Split(0, -rank)
refused(ValueError, "[2, 1, 0]", backwards)
if rank:
    refused(NotImplementedError, "made of a communicator", [1, 2], [ProcessSet(MPI.COMM_SELF)])
    alone = world.Create_group(world.Get_group().Incl([2])) if rank == 2 else None
    last = ProcessSet([1]) if alone is None else ProcessSet(alone)
    hvd.init(comm=later, process_sets=[last])
    assert (hvd.rank(), hvd.size(), total()) == (rank - 1, 2, 3)
    assert (last.ranks, last.included()) == ([1], rank == 2)
    assert rank == 1 or total(last) == 2
else:
    hvd.init(comm=later)
    assert (hvd.rank(), hvd.size(), total()) == (0, 1, 0)
hvd.shutdown()
world.Barrier()  # rank 0 is where the others meet
print(f"done {rank}\\n", end="", flush=True)
"""


@pytest.mark.frameworks
def test_communicators():
    if why := worlds.no_mpi():
        pytest.skip(why)
    command = [sys.executable, "-m", "horovod.runner.launch", "-np", "3", "--mpi"]
    done = subprocess.run(
        [*command, "--mpi-args=--timestamp-output", sys.executable, "-c", UNDER_MPI],
        env=worlds.mpi_environment(), capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done ") == 3


def with_a_communicator_but_without_mpi(rank):
    from mpi4py import MPI

    refused("2 ranks were started without MPI, which knows 1", MPI.COMM_WORLD)


@pytest.mark.frameworks
def test_communicators_need_mpi():
    if why := worlds.no_mpi():
        pytest.skip(why)
    run_ranks(2, with_a_communicator_but_without_mpi)
