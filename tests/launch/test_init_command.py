"""``kolovod init``: what it asks, what it writes, and what it leaves as it was."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from launched import DEADLINE_S, KOLOVOD, run

from kolovod.errors import InvalidArgumentError
from kolovod.migrate import files

SCRIPT = """\
import torch

model = torch.nn.Linear(8, 1)  # a comment
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    optimizer.zero_grad()
    model(torch.ones(8)).backward()
    optimizer.step()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script of PyTorch, in no repository."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def ask(script: Path, answer: bytes, *flags: str) -> str:
    """What the command says on a terminal where somebody answers so."""
    terminal, end = pty.openpty()
    try:
        with subprocess.Popen(
            [*KOLOVOD, "init", *flags, script.name],
            cwd=script.parent,
            stdin=end,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process:
            os.write(terminal, answer)
            said, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, said
        return said.decode()
    finally:
        os.close(terminal)
        os.close(end)


def others(script: Path) -> list[str]:
    """The names of all other files beside it."""
    return sorted(path.name for path in script.parent.iterdir() if path != script)


@pytest.mark.parametrize("answer", [b"n\n", b"\n", b"no\n", b"\x04"])
def test_without_a_yes_nothing_is_written(script: Path, answer: bytes) -> None:
    before = script.stat()
    said = ask(script, answer)
    assert "Write to train.py (a copy of it stays as train.py.orig)? [y/N]" in said
    assert "Nothing is written." in said
    assert script.read_bytes() == SCRIPT.encode()
    assert (script.stat().st_mtime_ns, script.stat().st_ino) == (before.st_mtime_ns, before.st_ino)
    assert others(script) == []


def test_a_yes_writes_and_a_second_run_finds_nothing(script: Path) -> None:
    script.chmod(0o750)
    said = ask(script, b"y\n")
    assert "+kv.init()" in said
    assert "Run it: kolovod run -np 2 -- python train.py" in said
    text = script.read_text()
    assert "import kolovod.torch as kv\n\nkv.init()\n" in text
    assert "# a comment" in text
    assert script.stat().st_mode & 0o7777 == 0o750
    assert others(script) == ["train.py.orig"]
    assert (script.parent / "train.py.orig").read_text() == SCRIPT
    again = run("init", "--write", str(script))
    assert again.returncode == 0
    assert "nothing is left to do" in again.stdout
    assert script.read_text() == text


def test_without_a_terminal_it_only_shows(script: Path) -> None:
    done = run("init", str(script))
    assert done.returncode == 0, done.stderr
    assert "Nothing is written (--write does that)." in done.stdout
    assert "\x1b" not in done.stdout
    assert script.read_text() == SCRIPT


def test_diff_does_not_ask_on_a_terminal(script: Path) -> None:
    assert "[y/N]" not in ask(script, b"y\n", "--diff")
    assert script.read_text() == SCRIPT


def test_patch_takes_the_diff(script: Path) -> None:
    said = run("init", "--diff", str(script)).stdout
    assert run("init", "--write", str(script)).returncode == 0
    written = script.read_text()
    script.write_text(SCRIPT)
    subprocess.run(
        ["git", "apply", "--unsafe-paths", "-p0", "--directory", str(script.parent), "-"],
        input=said.replace(str(script), script.name),
        text=True,
        check=True,
        cwd=script.parent,
        timeout=DEADLINE_S,
    )
    assert script.read_text() == written


def test_git_makes_a_copy_needless(script: Path) -> None:
    git = ["git", "-C", str(script.parent), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for command in (["init", "-q"], ["add", script.name], ["commit", "-q", "-m", "a script"]):
        subprocess.run([*git, *command], check=True, timeout=DEADLINE_S)
    assert files.is_in_git(script)
    done = run("init", "--write", str(script))
    assert "git has the former text" in done.stdout
    assert others(script) == [".git"]
    assert not files.is_in_git(script)  # it is changed now


def test_copies_do_not_overwrite_each_other(script: Path) -> None:
    older = script.with_name("train.py.orig")
    older.write_text("older")
    assert f"the former text is in {script}.orig.1" in run("init", "--write", str(script)).stdout
    assert older.read_text() == "older"
    assert script.with_name("train.py.orig.1").read_text() == SCRIPT


def test_a_link_stays_one(script: Path) -> None:
    link = script.with_name("link.py")
    link.symlink_to(script.name)
    assert run("init", "--write", str(link)).returncode == 0
    assert link.is_symlink()
    assert "kv.init()" in script.read_text()


def test_a_script_that_changes_meanwhile_is_not_overwritten(script: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="has changed meanwhile"):
        files.replace(script, b"another", b"new", keep_old=True)
    assert script.read_text() == SCRIPT
    assert others(script) == []


def test_a_failed_write_leaves_the_script(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(InvalidArgumentError, match="No space left on device; it is as before"):
        files.replace(script, SCRIPT.encode(), b"new", keep_old=False)
    assert script.read_text() == SCRIPT
    assert others(script) == []


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("import numpy\n", 1, "is not imported here"),
        ("import torch\nmodel = torch.nn.Linear(8, 1)\n", 1, "no call of backward()"),
        ("import torch\nfor x in:\n", 2, "line 2, is not valid Python"),
        ("import horovod.torch as hvd\nhvd.init()\n", 0, "runs with them as it is"),
    ],
)
def test_exit_codes(tmp_path: Path, text: str, code: int, said: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(text)
    done = run("init", "--write", str(path))
    assert done.returncode == code
    assert said in done.stdout + done.stderr
    assert path.read_text() == text
    assert others(path) == []


def test_no_such_script(tmp_path: Path) -> None:
    done = run("init", str(tmp_path / "none.py"))
    assert done.returncode == 2
    assert "none.py' cannot be read: No such file or directory" in done.stderr


def test_other_commands_do_not_import_it() -> None:
    code = "import sys; from kolovod.launch.cli import main\ntry:\n    main(['--help'])\n"
    code += "finally:\n    print('libcst' in sys.modules, 'torch' in sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert done.stderr.split() == ["False", "False"]
