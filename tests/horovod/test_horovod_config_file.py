"""horovodrun --config-file."""

import builtins
import re
import textwrap

import pytest
from paths import ROOT

from horovod.runner.config_file import SECTIONS, apply_config_file
from horovod.runner.flags import parse_args, variables_of

EVERYTHING = """
controller: mpi
params:
  fusion_threshold_mb: 32
  cycle_time_ms: 10
  cache_capacity: 2048
  hierarchical_allreduce: true
  hierarchical_allgather: false
  torus_allreduce: 1
autotune:
  enabled: true
  log_file: tune.csv
  warmup_samples: 5
  steps_per_sample: 20
  bayes_opt_max_samples: 50
  gaussian_process_noise: 0.9
timeline:
  filename: t.json
  mark_cycles: true
stall_check:
  enabled: false
  warning_time_seconds: 120
  shutdown_time_seconds: 240
library_options:
  mpi_threads_disable: true
  num_nccl_streams: 2
  thread_affinity: [0, 1]
  gloo_timeout_seconds: 60
logging:
  level: info
  with_timestamp: false
"""


def apply(tmp_path, text, *flags):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    options = parse_args(["-np", "2", *flags, "true"])
    apply_config_file(options, str(file))
    return options


@pytest.fixture(autouse=True)
def _yaml(request):
    if "without_yaml" not in request.node.name:
        pytest.importorskip("yaml", reason="PyYAML is not installed: the extra yaml")


def test_every_key(tmp_path):
    options = apply(tmp_path, EVERYTHING)
    found = variables_of(options)
    for wanted in (
        "CONTROLLER=mpi", "FUSION_THRESHOLD=33554432", "CYCLE_TIME=10.0", "CACHE_CAPACITY=2048",
        "HIERARCHICAL_ALLREDUCE=1", "HIERARCHICAL_ALLGATHER=0", "TORUS_ALLREDUCE=1", "AUTOTUNE=1",
        "AUTOTUNE_LOG=tune.csv", "AUTOTUNE_WARMUP_SAMPLES=5", "AUTOTUNE_STEPS_PER_SAMPLE=20",
        "AUTOTUNE_BAYES_OPT_MAX_SAMPLES=50", "AUTOTUNE_GAUSSIAN_PROCESS_NOISE=0.9",
        "TIMELINE=t.json", "TIMELINE_MARK_CYCLES=1", "STALL_CHECK_DISABLE=1",
        "STALL_CHECK_TIME_SECONDS=120", "STALL_SHUTDOWN_TIME_SECONDS=240", "MPI_THREADS_DISABLE=1",
        "NUM_NCCL_STREAMS=2", "THREAD_AFFINITY=0,1", "GLOO_TIMEOUT_SECONDS=60", "LOG_LEVEL=INFO",
        "LOG_HIDE_TIME=1",
    ):  # fmt: skip
        name, _, value = wanted.partition("=")
        assert found[f"HOROVOD_{name}"] == value
    for section in SECTIONS.values():
        assert all(getattr(options, dest) is not None for dest in section.values())


def test_the_page_shows_every_key(tmp_path):
    page = ROOT / "docs" / "from-horovod.md"
    (shown,) = re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)
    options = apply(tmp_path, textwrap.dedent(shown))
    assert options.use_gloo
    for section in SECTIONS.values():
        assert all(getattr(options, dest) is not None for dest in section.values())


def test_the_command_line_wins(tmp_path):
    flags = ("--fusion-threshold-mb", "1", "--stall-check", "--no-autotune", "--gloo")
    found = variables_of(apply(tmp_path, EVERYTHING, *flags))
    assert found["HOROVOD_FUSION_THRESHOLD"] == "1048576"
    assert found["HOROVOD_STALL_CHECK_DISABLE"] == "0"
    assert found["HOROVOD_AUTOTUNE"] == "0"
    assert found["HOROVOD_CONTROLLER"] == "gloo"
    assert found["HOROVOD_CYCLE_TIME"] == "10.0"


def test_empty_files_and_sections(tmp_path):
    for text in ("", "params:\n", "params:\n  cycle_time_ms:\n"):
        assert "HOROVOD_CYCLE_TIME" not in variables_of(apply(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("controller: jsrun", "No such controller supported: 'jsrun'"),
        ("params: {fusion_threshold_mb: -1}", "params: fusion_threshold_mb=-1: must be >= 0"),
        ("params: {cache_capacity: 1.5}", "cache_capacity=1.5: expected a whole number"),
        ("params: {cache_capacity: true}", "cache_capacity=True: expected a whole number"),
        ("params: {torus_allreduce: maybe}", "torus_allreduce='maybe': expected true or false"),
        ("autotune: {gaussian_process_noise: 1.1}", "noise=1.1: must be >= 0 and <= 1"),
        ("logging: {level: loud}", "level='loud': expected one of TRACE"),
        ("params: 3", "params: expected lines of the form key: value, not 3"),
        ("- 1", "expected lines of the form key: value"),
        ("params: {", "cannot be read"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, reason):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is looked at
        apply(tmp_path, text)
    assert reason in str(caught.value)
    assert "config.yaml" in str(caught.value)


def test_without_yaml_it_says_what_to_install(tmp_path, monkeypatch):
    real = builtins.__import__

    def lacking(name, *args):
        if name == "yaml":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", lacking)
    with pytest.raises(ValueError, match=r"pip install 'kolovod\[yaml\]'"):
        apply(tmp_path, "")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("parameters: {}", "unknown: parameters; known: controller, params, autotune"),
        ("logging: {hide_timestamp: true}", "logging: left out, since unknown: hide_timestamp;"),
        ("params: {fusion_treshold_mb: 3}", "torus_allreduce; did you mean fusion_threshold_mb?"),
        ("1: {a: b}", "unknown: 1; known"),
    ],
)
def test_what_is_unknown_is_left_out_and_told(tmp_path, capsys, text, said):
    options = apply(tmp_path, f"{text}\nstall_check: {{warning_time_seconds: 5}}")
    assert options.stall_check_warning_time_seconds == 5
    assert said in capsys.readouterr().err


def test_one_core_is_a_number(tmp_path):
    assert apply(tmp_path, "library_options: {thread_affinity: 1}").thread_affinity == 1
    assert apply(tmp_path, "library_options: {thread_affinity: [0, 1]}").thread_affinity == "0,1"
    assert parse_args(["--thread-affinity", "1", "true"]).thread_affinity == 1
    found = variables_of(apply(tmp_path, "library_options: {thread_affinity: 1}"))
    assert found["HOROVOD_THREAD_AFFINITY"] == "1"
