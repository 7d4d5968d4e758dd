"""external.job_secret: the secret of a job that no launcher of ours has started."""

from __future__ import annotations

import os

import pytest

from kolovod.errors import BootstrapError, InvalidArgumentError
from kolovod.rendezvous.external.job_secret import job_secret, read_secret

ONE = "0123456789abcdef"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "secret"
    path.write_text("a random text in a file\n")
    path.chmod(0o600)
    return path


def test_a_job_has_its_own_secret_and_the_users_is_not_in_it():
    one = job_secret({"KOLOVOD_SECRET": ONE}, "job 1")
    assert one == job_secret({"KOLOVOD_SECRET": ONE}, "job 1")
    assert one != job_secret({"KOLOVOD_SECRET": ONE}, "job 2")
    assert one != job_secret({"KOLOVOD_SECRET": ONE[:-1] + "x"}, "job 1")
    assert ONE not in one
    assert len(one) == 64


def test_without_one():
    assert job_secret({}, "j") == ""
    assert job_secret({"KOLOVOD_INSECURE": "0"}, "j") == ""
    assert len(job_secret({"KOLOVOD_INSECURE": "1"}, "j")) == 64
    with pytest.raises(InvalidArgumentError, match="KOLOVOD_INSECURE='perhaps'"):
        job_secret({"KOLOVOD_INSECURE": "perhaps"}, "j")


def test_a_file(file):
    assert read_secret({"KOLOVOD_SECRET_FILE": str(file)}) == "a random text in a file"
    assert read_secret({"KOLOVOD_SECRET_FILE": str(file), "KOLOVOD_SECRET": ONE}) == ONE
    link = file.parent / "link"  # as Kubernetes mounts it
    link.symlink_to(file)
    assert read_secret({"KOLOVOD_SECRET_FILE": str(link)}) == "a random text in a file"


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o644, 0o666])
def test_a_file_that_others_can_read_or_write(file, mode):
    file.chmod(mode)
    with pytest.raises(BootstrapError, match=f"has mode {mode:o} .* chmod 600"):
        read_secret({"KOLOVOD_SECRET_FILE": str(file)})


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can give a file away")
def test_whose_file_it_is(file):
    file.chmod(0o440)  # mounted for a group: the superuser's
    assert read_secret({"KOLOVOD_SECRET_FILE": str(file)}) == "a random text in a file"
    file.chmod(0o600)
    os.chown(file, 65534, -1)
    with pytest.raises(BootstrapError, match="belongs to user 65534"):
        read_secret({"KOLOVOD_SECRET_FILE": str(file)})


def test_what_is_no_secret(file):
    with pytest.raises(BootstrapError, match="cannot be read: No such file"):
        read_secret({"KOLOVOD_SECRET_FILE": f"{file}x"})
    file.parent.chmod(0o700)
    with pytest.raises(BootstrapError, match="has mode 700"):
        read_secret({"KOLOVOD_SECRET_FILE": str(file.parent)})
    for text in ("", "\n", "x" * 5000):
        file.write_text(text)
        with pytest.raises(InvalidArgumentError, match=f"holds {len(text)} bytes"):
            read_secret({"KOLOVOD_SECRET_FILE": str(file)})


def test_a_short_one_is_refused(file):
    way_out = r"15 bytes, which can be guessed: at least 16 .*\$\(openssl rand -hex 32\)"
    with pytest.raises(InvalidArgumentError, match=f"^KOLOVOD_SECRET has {way_out}") as caught:
        job_secret({"KOLOVOD_SECRET": ONE[1:]}, "j")
    assert ONE[1:] not in str(caught.value)
    file.write_text(ONE[1:] + "\n")
    with pytest.raises(InvalidArgumentError, match=f"secret' holds {way_out}") as caught:
        read_secret({"KOLOVOD_SECRET_FILE": str(file)})
    assert ONE[1:] not in str(caught.value)
