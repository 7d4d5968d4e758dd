"""kolovod.rendezvous.external.launchers: who started this process, from recorded environments."""

from __future__ import annotations

import re

import pytest

from kolovod.errors import InvalidArgumentError
from kolovod.rendezvous.external.launchers import LAUNCHERS, expand_hosts, find, why_alone

# What each launcher was seen to set on rank 1 of 2 (Slurm 22.05, Open MPI 4.1 and 5.0, MPICH 4.0,
# torchrun 2.13), without what is of no use here. Not seen, but after the vendors' manuals: jsrun,
# LSF, PBS, Intel MPI and Kubernetes.
SLURM = {
    "SLURMD_NODENAME": "n2",
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-vm-18871@1",
    "PMIX_RANK": "1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "8", "MPI_LOCALRANKID": "1"}
INTEL_MPI = {**MPICH, "MPI_LOCALNRANKS": "1", "I_MPI_MPIRUN": "mpirun", "MPI_LOCALRANKID": "0"}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "34859",
    "TORCHELASTIC_RUN_ID": "353ed2d7",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
JSRUN = {
    **OPEN_MPI,
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "JSM_NAMESPACE_RANK": "1",
    "JSM_NAMESPACE_SIZE": "2",
    "JSM_NAMESPACE_LOCAL_RANK": "0",
    "JSM_NAMESPACE_LOCAL_SIZE": "1",
    "LSB_JOBID": "900",
    "LSB_MCPU_HOSTS": "batch3 1 h41n03 42 h41n04 42",
}
KUBERNETES = {"JOB_COMPLETION_INDEX": "1", "KOLOVOD_SIZE": "2", "KOLOVOD_STORE_HOST": "j-0.svc"}
PMI_OF_SLURM = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "11", "PMI_JOBID": "17.0"}
TWO_HOSTS = {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
BY_HAND = {"KOLOVOD_RANK": "1", "KOLOVOD_SIZE": "2", "KOLOVOD_STORE_HOST": "a"}
ENV = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")}

# name: environment, launcher, (local rank, local size), one host?, this host, rank 0's host
CASES = {
    "srun": (SLURM, "Slurm", (0, None), False, "n2", "n1"),
    "srun, one node": (
        {**SLURM, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "n2", "SLURM_LOCALID": "1"},
        "Slurm", (1, None), True, "n2", "n2"),
    "srun --mpi=pmi2": ({**SLURM, **PMI_OF_SLURM}, "Slurm", (0, None), False, "n2", "n1"),
    "mpirun": (OPEN_MPI, "Open MPI", (1, 2), True, "", ""),
    "mpirun in sbatch": (
        {**SLURM, **OPEN_MPI, **TWO_HOSTS, "SLURM_STEP_NODELIST": "n2"},
        "Open MPI", (0, 1), False, "", "n1"),
    "mpirun of MPICH": ({**MPICH, "MPI_LOCALNRANKS": "2"}, "MPICH or Intel MPI",
        (1, 2), True, "", ""),
    "mpirun of MPICH in sbatch": ({**SLURM, **INTEL_MPI}, "MPICH or Intel MPI",
        (0, 1), False, "", "n1"),
    "mpirun of Intel MPI in LSF": (
        {**INTEL_MPI, "LSB_JOBID": "5", "LSB_HOSTS": "a a b b"}, "MPICH or Intel MPI",
        (0, 1), False, "", "a"),
    "mpirun in PBS": (
        {**OPEN_MPI, **TWO_HOSTS, "PBS_JOBID": "7.head", "PBS_NODEFILE": "/var/spool/nodes"},
        "Open MPI", (0, 1), False, "", "x1"),
    "PMI without Hydra": (PMI_OF_SLURM, "an MPI launcher", (None, None), False, "", ""),
    "jsrun": (JSRUN, "jsrun", (0, 1), False, "", "h41n03"),
    "torchrun": (TORCHRUN, "torchrun", (1, 2), True, "", "localhost"),
    "torchrun on two hosts": (
        {**TORCHRUN, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "a"},
        "torchrun", (0, 1), False, "", "a"),
    "torchrun in srun": ({**SLURM, **TORCHRUN}, "torchrun", (1, 2), True, "", "localhost"),
    "env://": ({**ENV, "MASTER_ADDR": "a"}, "torch's env://", (None, None), False, "", "a"),
    "env:// on one host": (
        {**ENV, "MASTER_ADDR": "127.0.0.1"}, "torch's env://", (None, None), True, "", "127.0.0.1"),
    "mpirun with env:// set by hand": ({**ENV, "MASTER_ADDR": "a", **OPEN_MPI}, "Open MPI",
        (1, 2), True, "", ""),
    "Kubernetes": (KUBERNETES, "Kubernetes", (None, None), False, "", "j-0.svc"),
    "by hand": (BY_HAND, "your own launcher", (None, None), False, "", "a"),
    "a host of one's own choice": (
        {**SLURM, "SLURM_STEP_NUM_NODES": "1", "KOLOVOD_STORE_HOST": "x", "KOLOVOD_HOST": "h"},
        "Slurm", (0, None), False, "h", "x"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_a_launcher_tells(case):
    environ, launcher, local, is_one_host, host, store_host = CASES[case]
    found = find(environ, {"/var/spool/nodes": "x1\nx1\nx2\n"}.__getitem__)
    assert found.launcher.name == launcher
    assert (found.rank, found.size, (found.local_rank, found.local_size)) == (1, 2, local)
    assert (found.is_one_host, found.host, found.store_host) == (is_one_host, host, store_host)
    assert 20_000 <= found.store_port < 29_000


def test_every_row_of_the_table_is_tested():
    assert {case[1] for case in CASES.values()} == {launcher.name for launcher in LAUNCHERS}


BATCH = {name: value for name, value in SLURM.items() if "STEP" not in name and "D_N" not in name}


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {**BATCH, "SLURM_PROCID": "0"},  # sbatch's script itself: a world of one
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2"},  # salloc's shell
        {"PBS_JOBID": "1", "PBS_NODEFILE": "f", "PBS_NP": "2"},
        {"LSB_JOBID": "1", "LSB_HOSTS": "a b"},
        {"JOB_COMPLETION_INDEX": "1"},  # pods that have nothing to do with each other
        {"RANK": "1", "WORLD_SIZE": "2"},
        {"OMPI_COMM_WORLD_RANK": ""},
    ],
)
def test_what_is_no_rank(environ):
    assert find(environ) is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"OMPI_COMM_WORLD_RANK": "1"}, "rank of Open MPI (OMPI_COMM_WORLD_RANK=1), but OMPI_COMM"),
        ({**SLURM, "SLURM_PROCID": "x"}, "SLURM_PROCID='x': expected a whole number"),
        ({**SLURM, "SLURM_PROCID": "2"}, "SLURM_PROCID=2 and SLURM_STEP_NUM_TASKS=2: Slurm cannot"),
        ({**SLURM, "SLURM_STEP_NODELIST": "n[1-"}, "'n[1-' is no host list"),
        ({**SLURM, "KOLOVOD_STORE_PORT": "70000"}, "KOLOVOD_STORE_PORT='70000': expected a port"),
        ({**TORCHRUN, "WORLD_SIZE": "-2"}, "WORLD_SIZE='-2': expected a whole number"),
    ],
)
def test_a_wrong_environment_is_named(environ, message):
    with pytest.raises(InvalidArgumentError, match=re.escape(message)):
        find(environ)


def test_ranks_beyond_the_size_are_those_of_an_elastic_job():
    environ = {**KUBERNETES, "JOB_COMPLETION_INDEX": "3", "KOLOVOD_MAX_NP": "4"}
    elastic = {**environ, "KOLOVOD_MIN_NP": "1"}
    assert find(elastic).rank == 3
    with pytest.raises(InvalidArgumentError, match="the rank must be below the size"):
        find(environ)
    with pytest.raises(InvalidArgumentError, match="JOB_COMPLETION_INDEX=3 and KOLOVOD_MAX_NP=3: "):
        find({**elastic, "KOLOVOD_MAX_NP": "3"})


def test_several_starts_that_make_one_job_have_all_in_common_but_their_ranks():
    named = {"KOLOVOD_JOB_NAME": "a", "KOLOVOD_MIN_NP": "1", "KOLOVOD_MAX_NP": "6"}
    first = find({**SLURM, **named})
    joining = {**named, "KOLOVOD_FIRST_RANK": "4", "KOLOVOD_STORE_HOST": "n1"}
    others = [
        find({**SLURM, **joining, "KOLOVOD_SIZE": str(first.size), "SLURM_JOB_ID": "99"}),
        find({**TORCHRUN, **joining, "KOLOVOD_SIZE": str(first.size)}),
    ]
    for other in others:
        assert (other.identity, other.store_port) == (first.identity, first.store_port)
        assert (other.size, other.store_host) == (first.size, first.store_host)
        assert not other.is_one_host
        assert other.rank == 4 + 1
    assert find({**SLURM, **named, "KOLOVOD_JOB_NAME": "b"}).identity != first.identity
    for wrong, said in (
        (
            {"KOLOVOD_JOB_NAME": "a"},
            "KOLOVOD_JOB_NAME='a': it names an elastic job; set KOLOVOD_MIN_NP",
        ),
        (
            {"KOLOVOD_FIRST_RANK": "2"},
            "set KOLOVOD_JOB_NAME, KOLOVOD_SIZE, KOLOVOD_STORE_HOST, too",
        ),
        ({**named, "KOLOVOD_FIRST_RANK": "x"}, "KOLOVOD_FIRST_RANK='x': expected a whole number"),
    ):
        with pytest.raises(InvalidArgumentError, match=re.escape(said)):
            find({**SLURM, **wrong})


def test_where_each_rank_has_a_host_its_name_follows_from_that_of_rank_0():
    names = {"j-0.svc": "j-12.svc", "a-b-0-0.s": "a-b-0-12.s", "j-0": "j-12"}
    for store_host, name in names.items():
        found = find({**KUBERNETES, "KOLOVOD_STORE_HOST": store_host})
        assert (found.numbers_hosts, found.host_of(12)) == (True, name)
    for store_host in ("10.0.0.1", "zero.svc", "j-1.svc"):
        found = find({**KUBERNETES, "KOLOVOD_STORE_HOST": store_host})
        assert (found.numbers_hosts, found.host_of(12)) == (False, "")
    assert not find({**BY_HAND, "KOLOVOD_STORE_HOST": "j-0.svc"}).numbers_hosts


@pytest.mark.parametrize("step", ["4294967291", "4294967290", ""])
def test_a_batch_script_is_no_rank_of_slurm_and_hears_that_it_is_alone(step):
    environ = {**SLURM, "SLURM_STEP_ID": step}
    assert find(environ) is None
    assert "SLURM_NTASKS=4 is set, but srun has not started it" in why_alone(environ)
    assert not why_alone({**environ, "SLURM_NTASKS": "1"})
    assert find({**environ, **OPEN_MPI}).launcher.name == "Open MPI"
    assert not why_alone(SLURM)
    assert not why_alone({})


def test_who_waits_in_vain_hears_which_variables_may_be_left_over():
    assert find(OPEN_MPI).doubt == (
        "If Open MPI has not started this process, and the variables that say so are left over, "
        "unset OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE"
    )


def test_the_port_and_the_job_are_the_same_on_all_ranks_and_others_in_another_job():
    first, second = find(SLURM), find({**SLURM, "SLURM_PROCID": "0", "SLURMD_NODENAME": "n1"})
    assert (first.job, first.store_port) == (second.job, second.store_port)
    others = [find({**SLURM, name: "5"}) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    assert len({one.job for one in (first, *others)}) == 3
    assert len({one.store_port for one in (first, *others)}) == 3
    assert find({**SLURM, "KOLOVOD_STORE_PORT": "1234"}).store_port == 1234
    restarted = {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}
    assert find(TORCHRUN).job != find(restarted).job


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1 n2"),
        ("n[1-3,7],m-[01-03]", "n1 n2 n3 n7 m-01 m-02 m-03"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[098-101]x", "n098x n099x n100x n101x"),
        ("r[1-2]n[1-2]", "r1n1 r1n2 r2n1 r2n2"),
        ("a.b-c[5].d", "a.b-c5.d"),
        ("[1-2]", "1 2"),
    ],
)
def test_host_lists(text, names):
    assert expand_hosts(text) == names.split()


@pytest.mark.parametrize(
    "text",
    ["", "n[", "n]", "n[1-3", "n[3-1]", "n[]", "n[a]", "n[1,]", "n 1", "n[1-99999999]",
     "a[1-300]b[1-300]", "n[[1]]", "n[1-2-3]", "n[-1]"],
)  # fmt: skip
def test_what_is_no_host_list(text):
    with pytest.raises(InvalidArgumentError):
        expand_hosts(text)
