"""The folder of a user, which others may try to be first to make: docs/security.md."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from strangers import NOBODY, needs_root

from kolovod.core import runtime_folder as folders
from kolovod.core.runtime_folder import adopt, existing, is_ours, made, runtime_folder
from kolovod.errors import BootstrapError


@pytest.fixture
def tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is used as /tmp; no other folder is given."""
    place = tmp_path / "tmp"
    place.mkdir()
    place.chmod(0o1777)
    monkeypatch.setattr(folders, "_FIXED", place)
    monkeypatch.setattr(folders, "_LOGINS", tmp_path / "run")
    monkeypatch.setattr(folders, "_LINGERING", tmp_path / "linger")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    return place


@pytest.fixture
def given(tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What XDG_RUNTIME_DIR names."""
    place = tmp.parent / "given"
    place.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    return place


@pytest.fixture(params=[0o000, 0o002, 0o022, 0o277], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def fixed(tmp: Path) -> Path:
    return tmp / f"kolovod-{os.geteuid()}"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_each_level_is_for_this_user_only(tmp: Path, umask: int) -> None:
    """With umask 002 a member of the group took the agent's place, and got the secret."""
    path = made("agents", "a")
    assert path == fixed(tmp) / "agents" / "a"
    assert [mode(each) for each in (path, path.parent, path.parent.parent)] == [0o700] * 3
    assert made("agents", "a") == path
    assert existing() == [fixed(tmp)]


def test_a_folder_that_was_given(given: Path, tmp: Path) -> None:
    assert made() == given / "kolovod"
    assert made("jobs") == given / "kolovod" / "jobs"
    assert mode(given / "kolovod") == 0o700
    assert existing() == [given / "kolovod"]
    assert list(tmp.iterdir()) == []


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o1777])
def test_one_that_others_may_write_to_is_not_used(given: Path, tmp: Path, mode: int) -> None:
    given.chmod(mode)
    assert runtime_folder() == fixed(tmp)


def test_one_that_others_may_look_into_is_used(given: Path) -> None:
    """What is ours in it they may not enter."""
    given.chmod(0o755)
    assert made() == given / "kolovod"
    assert mode(given / "kolovod") == 0o700


@needs_root
def test_a_folder_in_one_of_another_user_is_not_used(given: Path, tmp: Path) -> None:
    """Whoever owns the folder above can put another one in the place of ours, whatever its mode."""
    os.chown(given.parent, NOBODY, NOBODY)
    try:
        assert runtime_folder() == fixed(tmp)
        assert not is_ours(given)
    finally:
        os.chown(given.parent, 0, 0)


def test_one_that_is_no_folder_is_not_used(
    given: Path, tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp.parent / "link"
    link.symlink_to(given)
    file = tmp.parent / "file"
    file.touch(mode=0o600)
    for path in (link, file, tmp.parent / "missing", "relative", "."):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
        assert runtime_folder() == fixed(tmp)


def test_one_that_others_could_move_is_not_used(
    given: Path, tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp.parent / "shared"
    (shared / "mine").mkdir(parents=True, mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(shared / "mine"))
    assert runtime_folder() == shared / "mine" / "kolovod"
    shared.chmod(0o777)
    assert runtime_folder() == fixed(tmp)
    shared.chmod(0o1777)
    assert runtime_folder() == shared / "mine" / "kolovod"


@needs_root
def test_one_of_another_user_is_not_used(given: Path, tmp: Path) -> None:
    os.chown(given, NOBODY, NOBODY)
    assert runtime_folder() == fixed(tmp)


def test_one_that_goes_with_the_login_is_not_used(
    tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs outlive it; where a user lingers it stays."""
    login = tmp.parent / "run" / str(os.geteuid())
    login.mkdir(parents=True, mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(login))
    assert runtime_folder() == fixed(tmp)
    import pwd

    linger = tmp.parent / "linger"
    linger.mkdir()
    (linger / pwd.getpwuid(os.geteuid()).pw_name).touch()
    assert made() == login / "kolovod"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert existing() == [login / "kolovod"]  # by cron, which has no such variable


def test_a_full_tmp_and_its_variable_change_nothing(
    tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one of Python moves, and then nobody finds what is in the one before."""
    monkeypatch.setenv("TMPDIR", str(tmp.parent))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp.parent / "elsewhere"))
    assert made() == fixed(tmp)


@pytest.mark.parametrize("kind", ["link", "file", "fifo", "group's", "everybody's"])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_what_others_could_have_put_there_is_refused(tmp: Path, level: int, kind: str) -> None:
    path = (fixed(tmp), fixed(tmp) / "agents", fixed(tmp) / "agents" / "a")[level]
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    elsewhere = tmp.parent / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if kind == "link":
        path.symlink_to(elsewhere)
    elif kind == "file":
        path.touch()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
        path.chmod(0o770 if kind == "group's" else 0o1777)
    with pytest.raises(BootstrapError, match=f"{path} cannot be the folder.*XDG_RUNTIME_DIR"):
        made("agents", "a")
    assert not is_ours(path)
    assert list(elsewhere.iterdir()) == []
    if not level:
        assert existing() == []


@needs_root
@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_folder_that_another_user_has_made_is_refused(tmp: Path, level: int) -> None:
    path = (fixed(tmp), fixed(tmp) / "agents", fixed(tmp) / "agents" / "a")[level]
    path.mkdir(parents=True, mode=0o700)
    for each in (fixed(tmp), path):
        each.chmod(0o700)
    os.chown(path, NOBODY, NOBODY)
    with pytest.raises(BootstrapError, match=f"it belongs to user {NOBODY}"):
        made("agents", "a")


def test_a_tmp_where_anybody_may_move_everything_is_refused(tmp: Path) -> None:
    tmp.chmod(0o777)
    with pytest.raises(BootstrapError, match="others may put there what they like"):
        made()
    assert not is_ours(fixed(tmp))


def test_what_an_earlier_version_has_left_is_closed_to_others(tmp: Path) -> None:
    (fixed(tmp) / "jobs").mkdir(parents=True)
    fixed(tmp).chmod(0o755)
    (fixed(tmp) / "jobs").chmod(0o755)
    made("jobs")
    assert mode(fixed(tmp)) == mode(fixed(tmp) / "jobs") == 0o700


def test_another_daemon_uses_the_folder_of_the_first(
    given: Path, tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever attaches may have another XDG_RUNTIME_DIR, or none."""
    path = made()
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert runtime_folder() == fixed(tmp)
    adopt(path)
    assert runtime_folder() == path
    adopt(fixed(tmp))
    assert runtime_folder() == fixed(tmp)
    given.chmod(0o777)
    with pytest.raises(BootstrapError, match="another user's"):
        adopt(path)
