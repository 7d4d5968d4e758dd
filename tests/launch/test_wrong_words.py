"""Command lines of ``kolovod`` that are none, and what they are answered."""

from __future__ import annotations

import pytest

from kolovod.launch import cli


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("-np 2 python a.py", "a command comes before -np: kolovod run -np 2 python a.py"),
        ("--np 2 a.py --np 3", "before --np: kolovod run -np 2 python a.py --np 3"),
        ("--gloo --nproc_per_node=2 a.py", "--gloo: kolovod run --gloo -np 2 python a.py"),
        ("--np 2 python -m a --np 3", "before --np: kolovod run -np 2 python -m a --np 3"),
        (
            "--nnodes=2 a.py",
            "before --nnodes: kolovod run; and there is no --nnodes; here it is -H",
        ),
        ("a.py --epochs 3", "before a.py: kolovod run -np 2 python a.py --epochs 3"),
        ("runn -np 2 true", "there is no command 'runn'; did you mean run?"),
        ("launch true", "there is no command 'launch'; there are run, check,"),
        ("run --np 2 true", "there is no --np; here it is -np N, the number of ranks"),
        ("run --nproc_per_node=2 true", "there is no --nproc_per_node; here it is -np N"),
        ("run --nnodes 2 true", "there is no --nnodes; here it is -H HOST:SLOTS"),
        ("run --node-rank 0 true", "there is no --node-rank; a job is started once"),
        ("run --max_restarts=3 true", "here it is --elastic"),
        ("run -np 2 --oversubscribe true", "it is not needed here"),
        ("run -np 2 --output_dir out true", "did you mean --output-dir?"),
        ("run -np 2 --timestamp true", "did you mean --timestamps?"),
        ("run --no-such-thing true", "there is no --no-such-thing; see kolovod run --help"),
        ("ps --np 2", "there is no --np; see kolovod ps --help"),
        ("ps job", "unrecognized arguments: job"),
    ],
)
def test_what_is_meant_is_said(line: str, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(line.split())
    assert ended.value.code == 2
    assert answer in capsys.readouterr().err


def test_a_commands_own_flags_are_nobody_elses(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "-np", "1", "echo", "--np", "--nnodes"]) == 0
    assert "--np --nnodes" in capfd.readouterr().out
