"""horovodrun's flags: all of Horovod's are there, and set the variables that Horovod's set."""

import pytest

from horovod.runner import launch
from horovod.runner.flags import FLAGS, SWITCHES, WITHOUT_EFFECT, parse_args, variables_of
from kolovod.config import KNOBS

SETTING = {
    "--start-timeout 20": ("HOROVOD_START_TIMEOUT", "20"),
    "--fusion-threshold-mb 32": ("HOROVOD_FUSION_THRESHOLD", "33554432"),
    "--cycle-time-ms 3.5": ("HOROVOD_CYCLE_TIME", "3.5"),
    "--cache-capacity 0": ("HOROVOD_CACHE_CAPACITY", "0"),
    "--hierarchical-allreduce": ("HOROVOD_HIERARCHICAL_ALLREDUCE", "1"),
    "--no-hierarchical-allreduce": ("HOROVOD_HIERARCHICAL_ALLREDUCE", "0"),
    "--hierarchical-allgather": ("HOROVOD_HIERARCHICAL_ALLGATHER", "1"),
    "--no-hierarchical-allgather": ("HOROVOD_HIERARCHICAL_ALLGATHER", "0"),
    "--torus-allreduce": ("HOROVOD_TORUS_ALLREDUCE", "1"),
    "--no-torus-allreduce": ("HOROVOD_TORUS_ALLREDUCE", "0"),
    "--autotune": ("HOROVOD_AUTOTUNE", "1"),
    "--no-autotune": ("HOROVOD_AUTOTUNE", "0"),
    "--autotune-log-file f.csv": ("HOROVOD_AUTOTUNE_LOG", "f.csv"),
    "--autotune-warmup-samples 4": ("HOROVOD_AUTOTUNE_WARMUP_SAMPLES", "4"),
    "--autotune-steps-per-sample 5": ("HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", "5"),
    "--autotune-bayes-opt-max-samples 6": ("HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "6"),
    "--autotune-gaussian-process-noise 0.7": ("HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "0.7"),
    "--no-stall-check": ("HOROVOD_STALL_CHECK_DISABLE", "1"),
    "--stall-check": ("HOROVOD_STALL_CHECK_DISABLE", "0"),
    "--stall-check-warning-time-seconds 7": ("HOROVOD_STALL_CHECK_TIME_SECONDS", "7"),
    "--stall-check-shutdown-time-seconds 8": ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "8"),
    "--mpi-threads-disable": ("HOROVOD_MPI_THREADS_DISABLE", "1"),
    "--no-mpi-threads-disable": ("HOROVOD_MPI_THREADS_DISABLE", "0"),
    "--tcp": ("NCCL_IB_DISABLE", "1"),
    "--num-nccl-streams 2": ("HOROVOD_NUM_NCCL_STREAMS", "2"),
    "--thread-affinity 3": ("HOROVOD_THREAD_AFFINITY", "3"),
    "--gloo-timeout-seconds 9": ("HOROVOD_GLOO_TIMEOUT_SECONDS", "9"),
    "--log-level debug": ("HOROVOD_LOG_LEVEL", "DEBUG"),
    "--log-without-timestamp": ("HOROVOD_LOG_HIDE_TIME", "1"),
    "--log-with-timestamp": ("HOROVOD_LOG_HIDE_TIME", "0"),
    "--network-interface lo --network-interface e0,e1": ("NCCL_SOCKET_IFNAME", "lo,e0,e1"),
    "--mpi": ("HOROVOD_CONTROLLER", "mpi"),
    "--gloo": ("HOROVOD_CPU_OPERATIONS", "gloo"),
}
NO_VARIABLE = (
    "-p 22", "--ssh-port 22", "-i key", "--ssh-identity-file key", "--disable-cache", "--verbose",
    "--jsrun", "-H localhost:2", "--hosts localhost:2", "-hostfile f", "--hostfile f",
    "-prefix-timestamp", "--prefix-output-with-timestamp", "--output-filename d",
    "--slots-per-host 2", "--elastic-timeout 3", "--reset-limit 4",
    "--blacklist-cooldown-range 1 2", "--config-file f", "--mpi-args=--x", "--binding-args=--y",
)  # fmt: skip


def parsed(text):
    return parse_args(["-np", "2", *text.split(), "train.py", "--epochs", "3"])


@pytest.mark.parametrize("text", SETTING)
def test_a_flag_sets_its_variable(text):
    variable, value = SETTING[text]
    options = parsed(text)
    assert variables_of(options)[variable] == value
    assert options.command == ["train.py", "--epochs", "3"]


@pytest.mark.parametrize("text", NO_VARIABLE)
def test_other_flags_are_known(text):
    options = parsed(text)
    assert set(variables_of(options)) == {"HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS"}
    assert options.command == ["train.py", "--epochs", "3"]


def test_names_in_the_result_are_horovods():
    options = parsed("--fusion-threshold-mb 8 --no-hierarchical-allreduce --log-without-timestamp")
    assert (options.num_proc, options.fusion_threshold_mb, options.cycle_time_ms) == (2, 8, None)
    assert (options.hierarchical_allreduce, options.torus_allreduce) == (False, None)
    assert (options.log_with_timestamp, options.no_stall_check) == (False, None)


@pytest.mark.parametrize(("old", "value"), [("--log-hide-timestamp", "1"),
                                            ("--no-log-hide-timestamp", "0")])  # fmt: skip
def test_old_names_warn(old, value):
    with pytest.warns(DeprecationWarning, match=f"{old} is deprecated, use --log-with"):
        options = parsed(old)
    assert variables_of(options)["HOROVOD_LOG_HIDE_TIME"] == value


@pytest.mark.parametrize("text", [
    "--autotune --no-autotune", "--no-stall-check --stall-check", "--gloo --mpi", "--mpi --jsrun",
    "-H localhost:1 --hostfile f", "--cycle-time-ms x", "--cache-capacity 1.5",
])  # fmt: skip
def test_wrong_command_lines(text, capsys):
    with pytest.raises(SystemExit) as caught:
        parsed(text)
    assert caught.value.code == 2
    assert "horovodrun: error: argument" in capsys.readouterr().err


def test_what_has_no_effect_says_so_and_nothing_else_does(capsys):
    with pytest.raises(SystemExit):
        parse_args(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    told = [name for names, _ in WITHOUT_EFFECT for name in names]
    assert len(told) == len(set(told))
    heeded = {alias for knob in KNOBS for alias in (*knob.aliases, knob.off)}
    assert not heeded & set(told)
    for names, reason in WITHOUT_EFFECT:
        assert f"{', '.join(names)} {reason}" in shown
    for part in (*FLAGS, *SWITCHES):
        is_told = part.variable in told
        assert is_told == (not part.text), part
        assert is_told or part.variable in heeded | {"HOROVOD_TIMELINE"}, part


def test_hosts_are_not_dropped_where_mpirun_starts_the_ranks(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "kolovod", lambda arguments: pytest.fail(f"called: {arguments}"))
    monkeypatch.delenv("KOLOVOD_BACKEND", raising=False)
    (tmp_path / "hosts").write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    for flag in ("-H localhost:1,127.0.0.1:1", f"--hostfile {tmp_path / 'hosts'}"):
        with pytest.raises(SystemExit) as caught:
            launch.run_commandline([*flag.split(), "--mpi", "train.py"])
        assert caught.value.code == 2
        assert "with MPI names localhost, 127.0.0.1" in capsys.readouterr().err


def test_what_kolovod_is_called_with(monkeypatch):
    calls = []
    monkeypatch.setattr(launch, "kolovod", lambda arguments: calls.append(arguments) or 0)
    monkeypatch.delenv("KOLOVOD_BACKEND", raising=False)

    def call(text):
        assert launch.run_commandline([*text.split(), "train.py"]) == 0
        return " ".join(part for part in calls.pop() if part != "-x" and "HOROVOD_C" not in part)

    assert call("-np 3") == "run -np 3 --progress off --mpi-variables -- train.py"
    assert call("--gloo -np 3") == "run -np 3 --progress off -- train.py"
    assert call("-H localhost:2,127.0.0.1:0,127.0.0.1:2") == (
        "run -np 4 --progress off --mpi-variables --hosts localhost:2,127.0.0.1:2 -- train.py"
    )
    assert call("--gloo -np 1 -H localhost:2 --output-filename d --tcp") == (
        "run -np 1 --progress off --output-dir d --hosts localhost:1 NCCL_IB_DISABLE=1 -- train.py"
    )
    assert call("-np 2 --mpi -H localhost:2 --mpi-args=--quiet --binding-args=--bind-to=core") == (
        "run -np 2 --backend mpi --mpi-args=--bind-to=core --quiet -- train.py"
    )
