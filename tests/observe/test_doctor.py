"""kolovod doctor: what it makes of facts, and the command on this host."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kolovod.errors import KolovodError
from kolovod.launch import doctor as launching
from kolovod.observe.doctor import OK, PROBLEM, WARNING, Link, format_findings, judge
from kolovod.observe.examine import examine

WELL = {
    "kolovod": "1.0",
    "python": "3.11.7",
    "executable": "python",
    "found": {
        **dict.fromkeys(("tensorflow", "keras", "jax", "mxnet", "mpi4py", "nccl"), ""),
        "torch": "2.13.0",
    },
    "gpus": [],
    "mpirun": "",
    "shm_free_bytes": 1 << 34,
    "memfd": "",
    "open_files": 20000,
    "locked_bytes": -1,
    "cores": 8,
    "cores_present": 8,
    "core_quota": 0.0,
    "load": 0.5,
    "memory_free_bytes": 1 << 35,
    "threads": "",
    "libcrypto": "OpenSSL 3.0.19",
    "ciphers": 3,
    "ptrace_scope": "0",
    "matmul_s": 0.001,
    "copy_bytes_per_s": 1e10,
}
NOTHING_FOUND = dict.fromkeys(WELL["found"], "")
TORCH = {"torch": "2.13.0"}
NCCL = TORCH | {"nccl": "2.29"}


def said(findings, verdict):
    return {(f.host, f.check): f for f in findings if f.verdict == verdict}


def test_hosts_that_are_well():
    links = [Link("a", "b", 40.0, 1e9)]
    findings = judge({"a": WELL, "b": WELL}, {}, links, {"a": 0.0, "b": 0.2})
    assert {f.verdict for f in findings} == {OK}
    assert not any(f.advice for f in findings)
    assert "link to b   40 us, 8.00 Gbit/s" in format_findings(findings)


@pytest.mark.parametrize(
    ("change", "verdict", "check", "text"),
    [
        ({"found": NOTHING_FOUND}, WARNING, "frameworks", "none"),
        ({"gpus": ["H100"], "found": NOTHING_FOUND | TORCH}, WARNING, "NCCL", "no NCCL"),
        (
            {"gpus": ["H100"], "found": NOTHING_FOUND | NCCL, "locked_bytes": 1 << 16},
            *(WARNING, "locked memory", "64 KiB"),
        ),
        ({"ptrace_scope": "1"}, WARNING, "ptrace", "yama.ptrace_scope is 1"),
        ({"libcrypto": "", "ciphers": 0}, WARNING, "encryption", "no libcrypto"),
        ({"shm_free_bytes": 64 << 20}, WARNING, "/dev/shm", "64 MiB free"),
        ({"memfd": "refused", "shm_free_bytes": 1 << 20}, PROBLEM, "memory", "/dev/shm has 0.0"),
        ({"memory_free_bytes": 1 << 28}, WARNING, "memory", "0.2 GiB free"),
        ({"open_files": 256}, WARNING, "open files", "256"),
        ({"core_quota": 1.5}, WARNING, "cores", "a quota of 1.5"),
        ({"threads": "16"}, WARNING, "threads", "OMP_NUM_THREADS=16 on 8 cores"),
        ({"load": 20.0}, WARNING, "cores", "load 20.0"),
    ],
)
def test_what_is_wrong_with_a_host(change, verdict, check, text):
    findings = judge({"a": {**WELL, **change}}, {})
    assert [*said(findings, verdict)] == [("a", check)]
    [finding] = said(findings, verdict).values()
    assert text in finding.found
    assert finding.advice
    assert finding.advice in format_findings(findings)


def test_what_is_wrong_between_hosts():
    other = {**WELL, "kolovod": "1.1", "python": "3.12.1", "matmul_s": 0.002}
    other["found"] = {**WELL["found"], "torch": "2.9.0"}
    links = [Link("a", "b", 40, 1e9), Link("a", "c", 41, 1.1e9), Link("b", "c", 90, 1e8)]
    hosts = {"a": WELL, "b": WELL, "c": other}
    reason = "ssh to d ended with exit code 255: no route"
    findings = judge(hosts, {"d": reason, "e": "python: not found"}, links, {"a": 0.0, "c": -7.0})
    problems, warnings = said(findings, PROBLEM), said(findings, WARNING)
    assert [*problems] == [("d", "start"), ("e", "start"), ("all", "Kolovod versions")]
    assert "ssh -o BatchMode=yes d true" in problems["d", "start"].advice
    assert "--remote-python" in problems["e", "start"].advice
    assert [*warnings] == [
        ("all", "Python versions"),
        ("all", "torch versions"),
        ("c", "speed"),
        ("b", "link to c"),
        ("c", "clock"),
    ]
    assert "2.0 times as long" in warnings["c", "speed"].found
    assert "-7.0 s" in warnings["c", "clock"].found


def test_the_facts_of_this_host():
    facts = json.loads(json.dumps(examine()))
    assert facts.keys() == WELL.keys()
    assert facts["cores"] >= 1
    assert 0 < facts["matmul_s"] < 10
    assert all(type(facts[key]) is type(json.loads(json.dumps(WELL[key]))) for key in WELL)


def test_the_command_on_this_host():
    done = subprocess.run(
        [sys.executable, "-m", "kolovod", "doctor"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "localhost  versions" in done.stdout
    assert done.stdout.endswith("a job can start\n")


def test_a_world_that_cannot_form_is_a_problem(monkeypatch, capsys):
    def fail(hosts, ssh):
        raise OSError("nobody answers")

    monkeypatch.setattr(launching, "_measure", fail)
    monkeypatch.setattr(launching, "examine", lambda: WELL)
    assert launching.run_doctor(["localhost", "127.0.0.1"], None) == 1
    shown = capsys.readouterr().out
    assert "a world of one rank each  nobody answers" in shown
    assert shown.endswith("1 problem\n")


@pytest.mark.parametrize("error", [ValueError("no such file in /proc"), KolovodError("")])
def test_a_host_that_cannot_be_examined_is_a_problem(error, monkeypatch, capsys):
    def fail():
        raise error

    monkeypatch.setattr(launching, "examine", fail)
    assert launching.run_doctor(["localhost"], None) == 1
    printed = capsys.readouterr().out
    assert f"{error!r}" in printed
    assert "1 problem" in printed
    assert "a job can start" not in printed
