"""kolovod.rendezvous.external.mpi: ranks that MPI has started, as if on several hosts.

The launcher's count of the ranks on this host is changed and KOLOVOD_HOST set, so they all believe
in hosts of their own; their addresses are this machine's.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import worlds
from slow import slow_but

from kolovod.errors import InvalidArgumentError
from kolovod.net.addresses import LOOPBACK, own_addresses
from kolovod.rendezvous.external.mpi import ranks_of

pytestmark = pytest.mark.frameworks

HEAD = """
import os, numpy
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"] = "1"
os.environ["KOLOVOD_HOST"] = f"host{rank // 2}"
import kolovod
from kolovod.core.world import current

def facts():
    total = kolovod.allreduce(numpy.array([1 << rank]), op=kolovod.Sum).item()
    return kolovod.rank(), kolovod.size(), kolovod.local_rank(), kolovod.cross_rank(), total
"""

MEETINGS = """
from mpi4py import MPI
kolovod.init()  # MPI carries the secret
assert facts() == (rank, 3, rank % 2, rank // 2, 7), facts()
store = current().environment.rendezvous
assert not store.startswith("127."), store
kolovod.shutdown()
if rank:
    kolovod.init(comm=[1, 2])  # at the same store
    assert facts() == (rank - 1, 2, 0, rank - 1, 6), facts()
    assert current().environment.rendezvous == store
    kolovod.shutdown()
MPI.COMM_WORLD.Barrier()
half = MPI.COMM_WORLD.Split(rank == 1, rank)
kolovod.init(comm=half)  # a meeting of its own
assert facts()[1:2] + facts()[4:] == ((1, 2) if rank == 1 else (2, 5)), facts()
kolovod.init(comm=half)  # it is there
try:
    kolovod.init(comm=MPI.COMM_WORLD)
except ValueError as error:
    assert "is in a world of the launcher ranks" in str(error)
else:
    raise SystemExit("a second world")
kolovod.shutdown()
MPI.COMM_WORLD.Barrier()
os.write(1, f"done {rank}\\n".encode())
"""

SOME_ONLY = """
if rank < 2:
    kolovod.init(comm=[0, 1])  # rank 2 need not know
    assert facts() == (rank, 2, rank, 0, 3), facts()
    kolovod.shutdown()
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
os.write(1, f"done {rank}\\n".encode())
"""

UNREACHABLE = """
from kolovod.rendezvous.external import mpi
mpi._is_reached = lambda address, secret: False  # a firewall
try:
    kolovod.init()
except kolovod.errors.BootstrapError as error:
    assert "and none of this is reached from host host1" in str(error), error
    os.write(1, f"done {rank}\\n".encode())
"""


@pytest.mark.parametrize(
    "code",
    slow_but((MEETINGS,), (MEETINGS, SOME_ONLY, UNREACHABLE)),
    ids=["all", "some", "apart"],
)
def test_several_hosts(code):
    if why := worlds.no_mpi():
        pytest.skip(why)
    if own_addresses() == [LOOPBACK]:
        pytest.skip("this machine has no network interface beside the loopback one")
    command = [sys.executable, "-m", "kolovod", "run", "--backend", "mpi", "-np", "3", "--"]
    environment = ["env", "KOLOVOD_BACKEND=native"]
    done = subprocess.run(
        [*command, *environment, sys.executable, "-c", HEAD + code],
        env=worlds.mpi_environment(), capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done ") == 3, done.stdout


def test_what_is_no_communicator():
    with pytest.raises(InvalidArgumentError, match="an mpi4py communicator, not 5"):
        ranks_of(5)


def test_an_mpi4py_of_another_mpi():
    if why := worlds.no_mpi():
        pytest.skip(why)
    told = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    code = (
        "from kolovod.rendezvous.external.launchers import find\n"
        "from kolovod.rendezvous.external.mpi import why_unusable\n"
        f"print(why_unusable(find({told})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "mpi4py uses another MPI (" in done.stdout, done.stderr
    assert "for which this is rank 0 of 1" in done.stdout
