"""horovodrun, horovod.run, and what of horovod.runner others import."""

import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import horovod
import horovod.torch as hvd
from horovod.common import util
from horovod.common.exceptions import HorovodVersionMismatchError
from horovod.runner.common.util.env import get_env_rank_and_size
from horovod.runner.common.util.hosts import parse_host_files, parse_hosts

HELLO = """
import os, horovod.torch as hvd
hvd.init()
names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME")
print(*(os.environ["HOROVOD_" + name] for name in names), hvd.size())
print("fusion", os.environ.get("HOROVOD_FUSION_THRESHOLD"), os.environ.get("HOROVOD_AUTOTUNE"))
"""


PLACE = """
import os
names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME")
names = [*("HOROVOD_" + name for name in names), "HOROVOD_CONTROLLER"]
names += ["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE"]
print(*(os.environ.get(name) for name in names))
"""


def horovodrun(*arguments, **variables):
    command = [sys.executable, "-c", "from horovod.runner.launch import main; main()", *arguments]
    env = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=env)


@pytest.fixture
def hello(tmp_path):
    file = tmp_path / "hello.py"
    file.write_text(HELLO)
    return [sys.executable, str(file)]


def test_ranks_find_their_place_and_the_flags(hello):
    done = horovodrun(
        "-np", "2", "-H", "localhost:4", "--fusion-threshold-mb", "32", "--no-autotune", *hello
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"[{rank}]<stdout>:{rank} 2 {rank} 2 0 1 localhost 2" in done.stdout
    assert done.stdout.count("fusion 33554432 0") == 2


MPI = """
import os, subprocess, sys
names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "NODE_RANK")
print("mpi", *(os.environ.get("OMPI_COMM_WORLD_" + name) for name in names))
if "child" in sys.argv:
    alone = {n: v for n, v in os.environ.items() if not n.startswith(("KOLOVOD_", "OMPI_"))}
    for name in ("RANK", "WORLD_SIZE"):
        alone.pop(name)
    code = "import kolovod; kolovod.init(); print('alone', kolovod.size(), kolovod.rank())"
    subprocess.run([sys.executable, "-c", code], env=alone, check=True)
    code = "import kolovod; kolovod.init(); print('ranks', kolovod.size(), kolovod.rank())"
    subprocess.run([sys.executable, "-c", code], check=True)
for job in sys.argv[1:] if os.environ["HOROVOD_RANK"] == "2" else []:
    subprocess.run([*job.split(), sys.executable, __file__], check=True)
"""


def test_mpiruns_variables_are_those_of_the_rank(tmp_path):
    file = tmp_path / "mpi.py"
    file.write_text(MPI)
    run = ["-np", "2", "-H", "localhost:2"]
    done = horovodrun(*run, sys.executable, str(file), "child", OMPI_COMM_WORLD_SIZE="7")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"[{rank}]<stdout>:mpi {rank} 2 {rank} 2 {rank}\n" in done.stdout
        assert f"[{rank}]<stdout>:alone 1 0" in done.stdout
        assert f"[{rank}]<stdout>:ranks 2 {rank}" in done.stdout  # by our own variables
    done = horovodrun("--gloo", *run, sys.executable, str(file))
    assert done.stdout.count("mpi None None None None None") == 2, done.stderr


def test_mpiruns_variables_count_by_hosts_and_are_of_one_job_only(tmp_path):
    file = tmp_path / "mpi.py"
    file.write_text(MPI)
    code = "from horovod.runner.launch import main; main()"
    launcher = tmp_path / "horovodrun"
    launcher.write_text(f"#!{sys.executable}\n{code}\n")
    launcher.chmod(0o755)
    script = tmp_path / "discover"
    script.write_text("#!/bin/sh\necho localhost:1\n")
    script.chmod(0o755)
    jobs = [
        f"{sys.executable} -m kolovod run -np 1 --",
        f"{launcher} --gloo -np 1",
        f"{launcher} -np 1 --min-np 1 --max-np 1 --host-discovery-script {script}",
        f"{launcher} -np 1",
    ]
    hosts = ["-np", "3", "-H", "localhost:1,127.0.0.1:2"]
    done = horovodrun(*hosts, sys.executable, str(file), *jobs)
    assert done.returncode == 0, done.stderr
    for rank, numbers in enumerate(("0 3 0 1 0", "1 3 0 2 0", "2 3 1 2 1")):
        assert f"[{rank}]<stdout>:mpi {numbers}\n" in done.stdout
    within = re.findall(r"\[2\]<stdout>:\[0\]<stdout>:mpi (.*)", done.stdout)
    assert within == [*["None None None None None"] * 3, "0 1 0 1 0"], done.stdout + done.stderr


def test_the_users_own_come_first(tmp_path):
    file = tmp_path / "mpi.py"
    file.write_text(MPI)
    command = ["run", "-np", "1", "--mpi-variables", "-x", "OMPI_COMM_WORLD_SIZE=5"]
    done = subprocess.run(
        [sys.executable, "-m", "kolovod", *command, "--", sys.executable, str(file)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "mpi 0 5 0 1 0" in done.stdout, done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "kolovod", *command, "--elastic", "--", "true"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 2
    assert "--mpi-variables beside --elastic" in done.stderr


@pytest.mark.slow
def test_a_host_file_says_how_many(hello, tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# this host\nlocalhost slots=3\n")
    done = horovodrun("-hostfile", str(file), "--verbose", *hello)
    assert done.stdout.count(" 3 ") >= 3, done.stderr
    assert "kolovod run -np 3" in done.stderr


def test_a_failing_rank():
    done = horovodrun("-np", "2", sys.executable, "-c", "raise SystemExit(7)")
    assert done.returncode == 1
    assert "Horovod detected that one or more processes exited with non-zero status" in done.stderr
    assert "exit code 7" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-np", "4", "-H", "localhost:2"], "Requested more processes (4) than there are"),
        (["-np", "2", "-H", "localhost"], "Invalid host input 'localhost'"),
        ([], "-np N, --hosts or --hostfile"),
        (["-np", "0"], "at least one rank"),
        (["-np", "2", "-hostfile", "missing"], "host file missing cannot be read"),
        (["-np", "2", "--fusion-threshold-mb", "-4"], "'-4': must be >= 0"),
        (["-np", "2", "--log-level", "LOUD"], "TRACE, DEBUG"),
        (["-np", "2", "--autotune-gaussian-process-noise", "7"], "<= 1"),
        (["-np", "2", "--thread-affinity", "0"], "1 core(s) for the 2 ranks"),
        (["-np", "2", "--min-np", "1"], "at least two hosts in --hosts"),
        (["-np", "2", "--min-np", "3", "-H", "a:2,b:2"], "min-np 3, np 2, max-np 1024: they must"),
        (["-np", "5", "--min-np", "1", "-H", "a:2,b:2"], "Requested more processes (5) than"),
        (["-np", "2", "--reset-limit", "3"], "--reset-limit is of elastic jobs: give --min-np"),
        (["-np", "2", "--max-np", "3"], "--max-np is of elastic jobs"),
        (["--min-np", "1", "-H", "a:2,b:2", "--reset-limit", "-1"], "reset-limit -1: give 0"),
        (["--min-np", "1", "--mpi", "-H", "a:1,b:1"], "an elastic job with MPI"),
        (
            ["--min-np", "1", "-H", "a:1,b:1", "--blacklist-cooldown-range", "0", "5"],
            "blacklist cooldown range 0 5: give two numbers",
        ),
        (["-np", "2", "--mpi", "--output-filename", "d"], "--output-filename with MPI"),
        (["-np", "2", "--gloo", "--mpi"], "not allowed with"),
    ],
)
def test_what_cannot_be_started_is_said(arguments, text):
    done = horovodrun(*arguments, "true")
    assert done.returncode == 2
    assert text in done.stderr
    assert done.stderr.startswith("usage: horovodrun -np N")


def test_without_a_command():
    done = horovodrun("-np", "2")
    assert done.returncode == 2
    assert "horovodrun: error: no COMMAND to run" in done.stderr


def test_two_names_of_this_host_are_two_hosts(tmp_path):
    done = horovodrun(
        "-np", "3", "--hosts", "localhost:1,127.0.0.1:4", "-prefix-timestamp",
        "--output-filename", str(tmp_path), "--network-interfaces", "lo,eth0",
        sys.executable, "-c", PLACE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    wanted = ("0 3 0 1 0 2 localhost", "1 3 0 2 1 2 127.0.0.1", "2 3 1 2 0 1 127.0.0.1")
    for rank, place in enumerate(wanted):
        line = f"{place} gloo lo,eth0 lo lo"
        pattern = rf"^\d{{4}}-\d\d-\d\dT\S+ \[{rank}\]<stdout>:{re.escape(line)}$"
        assert re.search(pattern, done.stdout, re.MULTILINE), done.stdout
        assert line in (tmp_path / f"rank.{rank}" / "stdout").read_text()


def test_it_is_a_module_too():
    command = [sys.executable, "-m", "horovod.runner.launch", "-np", "1", "--"]
    done = subprocess.run(
        [*command, sys.executable, "-c", PLACE], capture_output=True, text=True, timeout=100
    )
    assert "0 1 0 1 0 1 localhost gloo None" in done.stdout
    assert done.stderr == ""


LATE = """
import time, torch, horovod.torch as hvd
hvd.init()
if hvd.rank() == 1:
    time.sleep(60)
try:
    hvd.allreduce(torch.ones(1), name="weight")
except hvd.HorovodInternalError as error:
    raise SystemExit(f"caught: {error}")
"""


@pytest.mark.slow
def test_late_ranks_are_reported_and_end_the_job():
    limits = ["--stall-check-warning-time-seconds", "1"]
    limits += ["--stall-check-shutdown-time-seconds", "2"]
    done = horovodrun("-np", "2", *limits, sys.executable, "-c", LATE)
    assert done.returncode == 1
    report, _, error = done.stderr.partition("caught: ")
    assert "rank 1 on host localhost" in report
    assert "has not submitted 'allreduce.weight'" in report
    assert "its main thread" in report
    assert "the limit is 2 s" in error


def test_version_and_build():
    assert horovodrun("--version").stdout.strip() == horovod.__version__
    out = horovodrun("--check-build").stdout
    assert "[X] PyTorch" in out
    assert "[X] Gloo" in out


@pytest.mark.slow
def test_a_function_on_every_rank(tmp_path):
    def work(base, plus):
        import horovod.torch as hvd

        hvd.init()
        return base + plus + hvd.rank()

    def place():
        names = ("CALLED_AS", "HOROVOD_HOSTNAME", "NCCL_SOCKET_IFNAME")
        return [os.environ.get(name) for name in names]

    assert horovod.run(work, (10,), {"plus": 5}, num_proc=2) == [15, 16]
    other_python = tmp_path / "python"
    other_python.write_text(f'#!/bin/sh\nCALLED_AS=$0 exec {sys.executable} "$@"\n')
    other_python.chmod(0o700)
    places = horovod.run(
        place, num_proc=2, hosts="localhost:1,127.0.0.1:1", network_interfaces=["lo"],
        executable=str(other_python), output_filename=str(tmp_path / "out"),
    )  # fmt: skip
    assert places == [[str(other_python), host, "lo"] for host in ("localhost", "127.0.0.1")]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["rank.0", "rank.1"]
    with pytest.warns(DeprecationWarning, match="np is deprecated, use num_proc"):
        assert horovod.run(lambda: 1, np=1) == [1]
    with pytest.raises(RuntimeError, match=r"(?s)Horovod detected .*rank 0 raised.*concatenate"):
        horovod.run(work, ("text",), {"plus": 5}, num_proc=1)
    for arguments, text in (
        ({"hosts": "a:1", "hostfile": "f"}, "hosts and hostfile"),
        ({"use_mpi": True, "use_gloo": True}, "exclude each other"),
        ({"hosts": "localhost:1", "num_proc": 2}, "num_proc is 2"),
        ({"min_num_proc": 1}, "at least two hosts"),
        ({"reset_limit": 1}, "reset_limit is of elastic jobs"),
        ({"hostfile": "missing"}, "cannot be read"),
    ):
        with pytest.raises(ValueError, match=text):
            horovod.run(work, **arguments)
    with pytest.raises(RuntimeError, match=r"ssh to no-such-host\.invalid ended"):
        horovod.run(work, hosts="no-such-host.invalid:1")


def test_hosts(tmp_path):
    assert [(h.hostname, h.slots) for h in parse_hosts("a:2,b-1.c:10")] == [("a", 2), ("b-1.c", 10)]
    file = tmp_path / "hosts"
    file.write_text("a slots=2\nb\n")
    assert parse_host_files(str(file)) == "a:2,b:1"
    file.write_text("a has 2\n")
    with pytest.raises(ValueError, match="a has 2"):
        parse_host_files(str(file))


def test_rank_and_size_from_the_environment(monkeypatch):
    for name in ("HOROVOD", "OMPI_COMM_WORLD", "PMI"):
        monkeypatch.delenv(f"{name}_RANK", raising=False)
        monkeypatch.delenv(f"{name}_SIZE", raising=False)
    assert get_env_rank_and_size() == (0, 1)
    monkeypatch.setenv("PMI_RANK", "1")
    with pytest.raises(RuntimeError, match="PMI_SIZE"):
        get_env_rank_and_size()
    monkeypatch.setenv("PMI_SIZE", "3")
    assert get_env_rank_and_size() == (1, 3)
    monkeypatch.setenv("HOROVOD_RANK", "4")
    monkeypatch.setenv("HOROVOD_SIZE", "5")
    assert get_env_rank_and_size() == (4, 5)


def test_small_things(monkeypatch):
    assert util.split_list([1, 2, 3, 4, 5], 3) == [[1, 2], [3, 4], [5]]
    assert [n for n in range(9) if util.num_rank_is_power_2(n)] == [1, 2, 4, 8]
    assert util.is_version_greater_equal_than("2.13.0+cpu", "2.9.1")
    assert not util.is_version_greater_equal_than("1.9rc1", "1.10.0")
    with pytest.raises(ValueError, match="three numbers"):
        util.is_version_greater_equal_than("1.0", "1.0")
    with util.env(KOLOVOD_TEST_A="1", HOME=None):
        assert os.environ["KOLOVOD_TEST_A"] == "1"
        assert "HOME" in os.environ
    assert "KOLOVOD_TEST_A" not in os.environ
    assert util.extension_available("torch")
    util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__)
    with pytest.raises(ImportError, match="nothing is not installed"):
        util.check_extension("horovod.nothing", "X", __file__)
    with pytest.raises(HorovodVersionMismatchError, match=r"but 0\.1 was expected"):
        util.check_installed_version("numpy", "0.1")
    util.check_installed_version("nothing-of-this-name", "0.1")
    convert = util.get_average_backwards_compatibility_fun(hvd)
    assert (convert(None, None), convert(hvd.Max, None)) == (hvd.Average, hvd.Max)
    with pytest.warns(DeprecationWarning, match="use op"):
        assert [convert(None, average) for average in (True, False)] == [hvd.Average, hvd.Sum]
    with pytest.raises(ValueError, match="op only"):
        convert(hvd.Sum, True)
    assert util.is_iterable([])
    assert not util.is_iterable(1)
