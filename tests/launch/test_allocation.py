"""kolovod.launch.allocation: what schedulers leave in a job script's environment."""

from __future__ import annotations

import pytest

from kolovod.errors import InvalidArgumentError
from kolovod.launch import cli, host_flags
from kolovod.launch.allocation import allocation
from kolovod.launch.hosts import assign

SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_TASKS_PER_NODE": "4(x2),1",
    "SLURM_JOB_CPUS_PER_NODE": "8(x3)",
    "SLURM_NTASKS": "9",
}


def as_text(hosts):
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ""),
        (SLURM, "n1:4,n2:4,n3:1"),
        ({**SLURM, "SLURM_NTASKS": ""}, "n1:8,n2:8,n3:8"),
        ({**SLURM, "SLURM_NTASKS": "", "SLURM_JOB_CPUS_PER_NODE": "2"}, "n1:2,n2:2,n3:2"),
        ({**SLURM, "SLURM_STEP_ID": "0"}, ""),  # of srun: a rank
        ({**SLURM, "SLURM_STEP_ID": "4294967291"}, "n1:4,n2:4,n3:1"),  # of the batch script
        ({"LSB_MCPU_HOSTS": "a 4 b 2", "LSB_HOSTS": "a a a a b b"}, "a:4,b:2"),
        ({"PBS_NODEFILE": "nodes"}, "x:2,y:1"),
    ],
)
def test_hosts_of_schedulers(variables, expected):
    assert as_text(allocation(variables, {"nodes": "x\nx\ny\n"}.__getitem__)) == expected


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({**SLURM, "SLURM_TASKS_PER_NODE": "4(x2)"}, "is about 2 hosts, but SLURM_JOB_NODELIST="),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "4x2"}, "expected numbers as in 4(x2),1"),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "4(x999999)"}, "expected numbers as in"),
        ({"LSB_MCPU_HOSTS": "a 4 b"}, "expected hosts, each with a number"),
    ],
)
def test_what_makes_no_sense(variables, said):
    with pytest.raises(InvalidArgumentError) as caught:
        allocation(variables)
    assert said in str(caught.value)


def placed(*arguments):
    line = ["run", *arguments, "true"]
    options = cli._parser(line).parse_args(line)
    places, ssh = host_flags.places(options)
    return assign(places, options.num_proc), ssh


def test_the_launcher_uses_the_allocation(monkeypatch, tmp_path):
    nodes = tmp_path / "nodes"
    nodes.write_text("a\na\nb\n")
    monkeypatch.setenv("PBS_NODEFILE", str(nodes))
    assert placed()[0] == ["a", "a", "b"]
    assert placed("-np", "1")[0] == ["a"]
    assert placed("-np", "2", "-H", "c:2")[0] == ["c", "c"]
    assert placed("-np", "2", "--label-hosts", "c:2") == (["c", "c"], None)
    with pytest.raises(InvalidArgumentError, match="4 ranks were asked for, but the hosts a:2,b:1"):
        placed("-np", "4")
    nodes.write_text("a\n")  # one host is this one: nothing to reach
    assert placed("-np", "2") == (["localhost"] * 2, None)
    monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "gone"))
    assert placed("-np", "2") == (["localhost"] * 2, None)
