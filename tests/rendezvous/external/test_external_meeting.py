"""kolovod.rendezvous.external.meeting: worlds of ranks that somebody else has started.

The launchers themselves are in scripts/: here their variables are set by hand.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest
import test_launchers as recorded
from ports import reserve_port

from kolovod.errors import BootstrapError
from kolovod.rendezvous.external import meeting
from kolovod.rendezvous.external.launchers import find

CODE = """
import os, sys, numpy, kolovod
members = eval(sys.argv[1]) if len(sys.argv) > 1 else None
kolovod.init(members)
total = kolovod.allreduce(numpy.array([1 + kolovod.rank()]), op=kolovod.Sum).item()
world = kolovod.core.world.current()
numbers = [kolovod.rank(), kolovod.size(), kolovod.local_rank(), kolovod.cross_rank(), total]
os.write(1, f"{' '.join(map(str, numbers))} {world.host}\\n".encode())
"""
TOLD = (
    "KOLOVOD_",
    "TORCHELASTIC",
    "SLURM",
    "PMI",
    "OMPI_",
    "RANK",
    "WORLD_SIZE",
    "MASTER_",
    "LOCAL_",
    "MPI_",
)
WITHOUT_MPI4PY = "import sys; sys.modules['mpi4py'] = None\n"
LIMIT_S = "20"
SECRET = "a random text of the user's"


def run(ranks, arguments=(), code=CODE):
    """Start a process with each of the ``ranks``' variables; their codes and output, in order."""
    base = {name: value for name, value in os.environ.items() if not name.startswith(TOLD)}
    with ExitStack() as stack:
        started = []
        for variables in ranks:
            files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)]
            environ = {**base, "KOLOVOD_START_TIMEOUT_S": LIMIT_S, **variables}
            process = subprocess.Popen(
                [sys.executable, "-c", code, *arguments],
                env=environ,
                stdout=files[0],
                stderr=files[1],
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append((process, files))
        deadline = time.monotonic() + 60
        done = []
        for process, files in started:
            code_ = process.wait(max(0.1, deadline - time.monotonic()))
            texts = [(file.seek(0), file.read())[1] for file in files]
            done.append((code_, *texts))
        return done


def texts(done):
    assert [code for code, _, _ in done] == [0] * len(done), done
    return [text.strip() for _, text, _ in done]


def slurm(rank, nodes, size=2, **variables):
    """Ranks in turn on ``nodes`` nodes."""
    return {
        **recorded.SLURM,
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank // nodes),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NODELIST": f"n[1-{nodes}]",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURMD_NODENAME": f"n{1 + rank % nodes}",
        **variables,
    }


def open_mpi(rank, size=2):
    numbers = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
    told = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in numbers.items()}
    return {**told, "PMIX_NAMESPACE": f"test-{os.getpid()}"}


def mpich(rank, size=2):
    names = {"PMI_RANK": rank, "PMI_SIZE": size, "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": size}
    return {name: str(value) for name, value in names.items()}


def torchrun(rank):
    return {**recorded.TORCHRUN, "RANK": str(rank), "TORCHELASTIC_RUN_ID": f"test-{os.getpid()}"}


@pytest.mark.parametrize(
    "told", [open_mpi, mpich, torchrun, lambda rank: slurm(rank, 1)],
    ids=["Open MPI", "MPICH", "torchrun", "Slurm"],
)  # fmt: skip
def test_on_one_host(told):
    found = texts(run([told(rank) for rank in range(2)]))
    assert [line.split()[:5] for line in found] == [
        ["0", "2", "0", "0", "3"],
        ["1", "2", "1", "0", "3"],
    ]


def test_on_several_hosts():
    common = {"KOLOVOD_SECRET": SECRET, "KOLOVOD_STORE_HOST": "localhost"}
    found = texts(run([slurm(rank, 2, 3, **common) for rank in range(3)]))
    assert found == ["0 3 0 0 6 n1", "1 3 0 1 6 n2", "2 3 1 0 6 n1"]


def test_insecure_on_several_hosts():
    common = {"KOLOVOD_INSECURE": "1", "KOLOVOD_STORE_HOST": "127.0.0.1"}
    done = run([slurm(rank, 2, **common) for rank in range(2)])
    assert texts(done) == ["0 2 0 0 3 n1", "1 2 0 1 3 n2"]
    warned = [
        "KOLOVOD_INSECURE: whoever reaches this job's ports can join it" in e for *_, e in done
    ]
    assert warned == [True, False]


def test_a_secret_is_needed_between_hosts():
    for code, _, error in run([slurm(rank, 2) for rank in range(2)]):
        assert code == 1
        assert re.search(r"rank . of 2, started by Slurm: .* no secret in common", error)
        assert "export KOLOVOD_SECRET=$(openssl rand -hex 32)" in error


@pytest.mark.slow
def test_two_jobs_of_one_user_at_one_port():
    place = {
        "KOLOVOD_SECRET": SECRET,
        "KOLOVOD_STORE_HOST": "localhost",
        "KOLOVOD_STORE_PORT": str(reserve_port()),
    }
    # Of the other job, whose rank 0 could not open the port.
    stranger = slurm(1, 2, SLURM_JOB_ID="5", KOLOVOD_START_TIMEOUT_S="5", **place)
    ours = [slurm(rank, 2, **place) for rank in range(2)]
    done = run([ours[0], stranger])
    assert f"rank 1 did not call init() within {LIMIT_S} s" in done[0][2]
    assert f"rank 1 cannot meet rank 0 at localhost:{place['KOLOVOD_STORE_PORT']}" in done[1][2]
    assert "not that of the job" in done[1][2]


def test_mpi_on_one_host_without_mpi4py():
    found = texts(run([open_mpi(rank) for rank in range(2)], code=WITHOUT_MPI4PY + CODE))
    assert [line.split()[:2] for line in found] == [["0", "2"], ["1", "2"]]


@pytest.mark.slow
def test_who_waits_alone_hears_soon_that_the_variables_may_be_left_over():
    code = f"import kolovod.lifecycle\nkolovod.lifecycle._DOUBT_S = 0.1\n{CODE}"
    lonely = [{**open_mpi(rank), "KOLOVOD_START_TIMEOUT_S": "1"} for rank in (0, 1)]
    doubt = "If Open MPI has not started this process, and the variables that say so are left over"
    for rank, variables in enumerate(lonely):
        ((code_, _, error),) = run([variables], code=code)
        said = (
            f"kolovod: rank {rank} of 2, started by Open MPI, waits for the other ranks, up to 1 s"
        )
        assert (code_, said in error, error.count(doubt)) == (1, rank == 0, 2 - rank), error


def test_mpi_between_hosts_without_mpi4py():
    told = [{**open_mpi(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": "1"} for rank in range(2)]
    for code, _, error in run(told, code=WITHOUT_MPI4PY + CODE):
        assert code == 1
        assert "nothing tells where rank 0 is. MPI could carry all that, but mpi4py cannot" in error
        assert "KOLOVOD_STORE_HOST" in error
        assert "are left over, unset OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE" in error


def test_rank_0_is_elsewhere():
    # 192.0.2.0/24 is nobody's (RFC 5737).
    place = {"KOLOVOD_SECRET": SECRET, "KOLOVOD_STORE_HOST": "192.0.2.77"}
    ((_, _, error),) = run([slurm(0, 2, **place)])
    assert "192.0.2.77 (192.0.2.77), where rank 0 should be, is not this host" in error


def test_an_address_that_no_other_host_can_use():
    place = {"KOLOVOD_SECRET": SECRET, "MASTER_ADDR": "nowhere.invalid", "LOCAL_WORLD_SIZE": "1"}
    ((_, _, error),) = run([{**torchrun(0), **place, "KOLOVOD_START_TIMEOUT_S": "1"}])
    assert "the name of its host, nowhere.invalid, is not known here" in error


def test_some_ranks_only():
    found = texts(run([open_mpi(rank, 3) for rank in (0, 2)], ["[2, 0]"]))
    assert [line.split()[:2] for line in found] == [["0", "2"], ["1", "2"]]
    for code, _, error in run([open_mpi(rank, 3) for rank in (1, 2)], ["[1, 2]"]):
        assert code == 1
        assert "init(comm=[1, 2]): the ranks that Open MPI has started meet at rank 0" in error


def test_a_rank_that_does_not_come_is_named():
    ((code, _, error),) = run([{**open_mpi(0), "KOLOVOD_START_TIMEOUT_S": "0.5"}])
    assert code == 1
    assert "rank 1 did not call init() within 0.5 s" in error
    ((code, _, error),) = run([{**open_mpi(1), "KOLOVOD_START_TIMEOUT_S": "0.5"}])
    assert code == 1
    assert "rank 1 cannot reach rank 0 on this host" in error


TWICE = """
import os, sys, kolovod
for members in (None, [0, 1], None):
    kolovod.init(members)
    assert kolovod.size() == 2
    kolovod.shutdown()
    if pid := os.fork():  # what ends there must not shut the door that both hold
        assert os.waitpid(pid, 0) == (pid, 0)
    else:
        sys.exit()
"""


@pytest.mark.slow
def test_again_and_two_programs_one_after_the_other():
    texts(run([open_mpi(rank) for rank in range(2)], code=TWICE))
    texts(run([open_mpi(rank) for rank in range(2)], code=TWICE))


@pytest.mark.parametrize(
    ("resolved", "towards_n2", "expected"),
    [
        ("10.1.1.1", None, "10.1.1.1"),
        ("127.0.1.1", "10.1.1.1", "10.1.1.1"),  # many systems give their own name that address
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),  # all hosts are this one
        ("127.0.0.1", None, "127.0.0.1"),
    ],
)
def test_the_address_at_which_others_look_for_rank_0(monkeypatch, resolved, towards_n2, expected):
    def interface_to(address):
        assert address.startswith("n2:")
        if towards_n2 is None:
            raise OSError("not known")
        return towards_n2

    monkeypatch.setattr(meeting, "resolve", lambda name: [resolved])
    monkeypatch.setattr(meeting, "interface_to", interface_to)
    assert meeting.store_addresses(find(recorded.SLURM), 1.0) == [expected]


def test_a_name_that_means_something_else_on_each_host(monkeypatch):
    told = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    monkeypatch.setattr(meeting, "resolve", lambda name: ["127.0.1.1"])
    with pytest.raises(
        BootstrapError, match=r"a is 127\.0\.1\.1 here, where no other host reaches"
    ):
        meeting.store_addresses(find(told), 1.0)


@pytest.mark.parametrize("facts", [{}, {"rendezvous": 5}, {"rendezvous": "here:1", "secret": []}])
def test_facts_of_rank_0_that_make_no_sense(facts, monkeypatch):
    variables = {"PMI_RANK": "1", "PMI_SIZE": "2"}
    found = find({**variables, "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}, meeting.read_hosts)
    assert found is not None
    monkeypatch.setattr(meeting, "ask", lambda *given: facts)
    with pytest.raises(BootstrapError, match="what rank 0 tells of the rendezvous makes no sense"):
        meeting.meet(found, {}, range(2), 1.0)


@pytest.mark.parametrize("is_one_host", [True, False])
def test_a_rendezvous_that_cannot_be_opened_says_where(is_one_host, monkeypatch):
    variables = {"PMI_RANK": "0", "PMI_SIZE": "2"}
    found = find({**variables, "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "0"}, meeting.read_hosts)

    assert found is not None
    found = replace(found, store_host="b")

    def fail(*given):
        raise BootstrapError("it is not ours")

    monkeypatch.setattr(meeting, "RendezvousServer", fail)
    with pytest.raises(BootstrapError) as raised:
        meeting._open(found, "h", ["127.0.0.1"], SECRET, "a name" if is_one_host else "")
    assert "  " not in str(raised.value)
    assert ("KOLOVOD_STORE_HOST" in str(raised.value)) != is_one_host
