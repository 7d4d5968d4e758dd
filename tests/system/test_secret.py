"""The job's secret: in the environment of its processes, and nowhere else."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kolovod.config import Settings
from kolovod.errors import BootstrapError
from kolovod.net.channel import new_secret
from kolovod.rendezvous.client import join
from kolovod.rendezvous.protocol import Member
from kolovod.rendezvous.rank_environment import RankEnvironment
from kolovod.rendezvous.server import RendezvousServer

SECRET = new_secret()

SCRIPT = """
    import contextlib, os, sys
    from pathlib import Path
    import numpy as np
    import kolovod as kv
    from kolovod.core.world import current

    kv.init()
    found = Path(sys.argv[1])
    secret = os.environ["KOLOVOD_SECRET"]
    if kv.rank() == 0:
        (found / "secret").write_text(secret)
        lines = b""
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                lines += path.read_bytes() + b"\\n"
        (found / "cmdlines").write_bytes(lines)
        (found / "sockets").write_text(Path("/proc/net/unix").read_text())
        world = current()
        told = world.environment
        (found / "reprs").write_text(repr([world, told, world.settings, str(told)]))
    kv.allreduce(np.ones(3), name="a")
    print("the script's own output", flush=True)
    try:
        kv.barrier()
        if kv.rank() == 0:
            current().engine.abort("the script's own reason")
        kv.allreduce(np.ones(3), name="b")
    except kv.errors.CollectiveAbortedError as error:
        print(error, flush=True)
    if kv.rank() == 1:
        os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["kolovod", "horovodrun"])
def test_the_secret_is_nowhere_to_be_read(launcher: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    records = tmp_path / "records"
    shared = ["--output-dir", str(tmp_path / "out")]
    if launcher == "kolovod":
        command = ["-m", "kolovod", "run", "-np", "2", *shared, "--timeline", str(tmp_path / "t")]
    else:
        shared = ["--output-filename", str(tmp_path / "out"), "--verbose"]
        shared += ["--timeline-filename", str(tmp_path / "t")]
        command = ["-m", "horovod.runner.launch", "-np", "2", *shared]
    result = subprocess.run(
        [sys.executable, *command, sys.executable, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "KOLOVOD_LAST_OPERATIONS_DIR": str(records)},
        check=False,
    )
    secret = (tmp_path / "secret").read_text()
    assert len(secret) == 64
    (tmp_path / "secret").unlink()
    assert result.returncode != 0
    assert "the script's own output" in result.stdout
    assert "the script's own reason" in result.stdout
    assert "was killed by signal 9" in result.stdout + result.stderr
    assert secret not in result.stdout + result.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"cmdlines", "sockets", "reprs", "script.py", "t"} <= {path.name for path in files}
    assert any(path.parent == records for path in files)
    for path in files:
        assert secret.encode() not in path.read_bytes(), path
    for path in records.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_shows_objects_shows_no_secret() -> None:
    with contextlib.closing(RendezvousServer(SECRET, 1)) as server:
        for shown in (
            repr(RankEnvironment(secret=SECRET)),
            repr(Settings()),
            repr(connect_refused()),
            repr(server.__dict__["_servers"]),
        ):
            assert SECRET not in shown


def connect_refused() -> BaseException:
    with pytest.raises(BootstrapError) as caught:
        join("127.0.0.1:1", SECRET, [0], Member(0, "a", 1, "", "", 0), 1)
    return caught.value
