"""send, recv, isend and irecv on NumPy arrays, over processes."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
from forked import run_ranks, run_torch_ranks
from launched import run_code
from paths import SUPPORT
from slow import slow_but

BEGIN = """
import numpy as np, kolovod as kv
from kolovod.errors import KolovodError
kv.init()
size = kv.size()
"""

PLACES = ["a:2", "a:3", "a:1,b:1", "a:2,b:1", "a:2,b:2"]
ENCRYPTED = [("a:1,b:1", "1"), ("a:2,b:1", "1")]


def execute(rank, code):
    """What the code prints."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(f"import os, time\n{code}", {"rank": rank})
    return said.getvalue()


def run(place, code, start=run_ranks, **variables):
    """The code on ranks that are forked: what all of them print."""
    parts = [part.split(":") for part in place.split(",")]
    hosts = [host for host, ranks in parts for _ in range(int(ranks))]
    return "".join(start(len(hosts), execute, BEGIN + code, env=variables, hosts=hosts))


@pytest.mark.parametrize(("place", "encrypt"), [*((place, "0") for place in PLACES), *ENCRYPTED])
def test_a_ring_of_all_dtypes_and_sizes(place, encrypt):
    code = """
after, before = (rank + 1) % size, (rank - 1) % size
for dtype in ("uint8", "int8", "int32", "int64", "float16", "float32", "float64", "bool"):
    for shape in ((), (0,), (3,), (5, 7), (1024,), (40_000,), (700, 900)):
        def of(r):
            return (np.arange(np.prod(shape, dtype=int)).reshape(shape) * 7 + r).astype(dtype)
        got = np.zeros(shape, dtype)
        handle = kv.isend(of(rank), after)
        assert kv.recv(got, before) == before
        np.testing.assert_array_equal(got, of(before))
        assert handle.wait() is None
kv.barrier()
"""
    run(place, code, KOLOVOD_ENCRYPT=encrypt)


@pytest.mark.parametrize("place", ["a:2", "a:1,b:1"])
@pytest.mark.parametrize("reads", ["1", "0"])
def test_large_ones_with_and_without_reading_the_others_memory(place, reads):
    """A container may forbid reading; then they are streamed."""
    code = """
data = np.random.default_rng(1).integers(0, 255, 9_999_999, np.uint8)
if rank == 0:
    kv.send(data, 1)
    kv.send(data[::3], 1, tag=1)  # not dense
else:
    got = np.empty_like(data)
    kv.recv(got, 0)
    np.testing.assert_array_equal(got, data)
    part = np.zeros(data.size * 2, np.uint8)[::2]
    np.testing.assert_array_equal(part, 0)
    kv.recv(part[: len(data[::3])], 0, tag=1)
    np.testing.assert_array_equal(part[: len(data[::3])], data[::3])
kv.barrier()
"""
    run(place, code, KOLOVOD_PEER_READ_BYTES="0" if reads == "0" else "16384")


@pytest.mark.parametrize("place", ["a:3", "a:2,b:1"])
def test_any_source_tags_and_process_sets(place):
    code = """
one = np.zeros(1)
if rank == 0:
    seen = []
    for _ in range(size - 1):
        seen.append((kv.recv(one, tag=1), one[0]))
    assert sorted(seen) == [(r, 10.0 * r) for r in range(1, size)], seen
    handles = [kv.irecv(np.zeros(1), tag=2) for _ in range(size - 1)]
    assert sorted(handle.wait() for handle in handles) == list(range(1, size))
else:
    kv.send(np.array([float(rank)]), 0, tag=2)
    kv.send(np.array([10.0 * rank]), 0, tag=1)
pair = kv.add_process_set([0, 2])
if rank in (0, 2):
    other = 2 - rank
    handle = kv.isend(np.full(3, rank), other, process_set=pair)
    kv.send(np.full(3, 100 + rank), other)  # the world's are apart from the set's
    got = np.zeros(3, int)
    assert kv.recv(got, process_set=pair) == other and got[0] == other
    assert kv.recv(got, other) == other and got[0] == 100 + other
    handle.wait()
kv.barrier()
"""
    run(place, code)


def test_what_cannot_work_is_said():
    code = """
def error(call):
    try:
        call()
    except KolovodError as error:
        print(f"{type(error).__name__}: {error}")
    else:
        print("no error")
x = np.ones(3)
if rank == 0:
    error(lambda: kv.send(x, 2))
    error(lambda: kv.send(x, -1))
    error(lambda: kv.send(x, "1"))
    error(lambda: kv.isend(x, "2"))
    error(lambda: kv.recv(x, "3"))
    error(lambda: kv.irecv(x, "4"))
    error(lambda: kv.send(x, 1 << 31))
    error(lambda: kv.send(x, 0))
    error(lambda: kv.recv(x, 0))
    error(lambda: kv.recv(x, 1, tag=-1))
    error(lambda: kv.recv(x, 1, tag=None))
    error(lambda: kv.send([1], 1))
    readonly = np.ones(3)
    readonly.flags.writeable = False
    error(lambda: kv.recv(readonly, 1))
    error(lambda: kv.isend(x, 0).wait(60))
    kv.irecv(np.zeros(3), 0).wait()
    error(lambda: kv.irecv(x, 1, tag=9).wait(0.2))
kv.barrier()
if rank == 0:
    kv.send(np.ones(4, np.float32), 1)
    error(lambda: kv.send(np.ones(9000, np.float32), 1))
else:
    error(lambda: kv.recv(np.ones(4, np.int32), 0))
    error(lambda: kv.recv(np.ones(3), 0))
    kv.send(x, 0, tag=9)
kv.barrier()
"""
    done = run_code(2, BEGIN + code)
    lines = [re.sub(r"^\[\d+\]<stdout>:", "", line) for line in done.stdout.splitlines()]
    text = done.stdout
    assert done.returncode == 0, text + done.stderr
    assert "InvalidArgumentError: send: rank 2 is not in 0..1" in lines
    assert "InvalidArgumentError: dst is -1: give the number of a rank" in lines
    for number, label in enumerate(("dst", "dst", "src", "src"), 1):
        wrong = f"InvalidArgumentError: {label} is '{number}': give the number of a rank"
        assert wrong in lines, text
    assert f"InvalidArgumentError: dst is {1 << 31}: there are not so many ranks" in lines
    assert any("send to rank 0, which is this one" in line for line in lines)
    assert any("recv from rank 0, which is this one" in line for line in lines)
    assert any("tag is -1" in line for line in lines)
    assert any("tag is None" in line for line in lines)
    assert text.count("InvalidArgumentError") >= 9, text
    # What is little has left already; what is not received is pending, and is received later.
    assert "no error" in lines
    assert any("WaitTimeoutError: recv 'rank 1, tag 9'" in line for line in lines), text
    what = (
        "rank 0 sent 9000 elements of float32 with tag 0, but rank 1 receives 3 elements of float64"
    )
    assert sum(what in line for line in lines) == 2, text
    assert any(
        "sent 4 elements of float32 with tag 0, but rank 1 receives 4 elements of int32" in x
        for x in lines
    )


@pytest.mark.parametrize("place", ["a:2", "a:1,b:1"])
def test_the_others_death_ends_a_wait(place):
    code = """
if rank == 1:
    kv.recv(np.zeros(3), 0)
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
try:
    kv.send(np.zeros(3), 1)  # by which it dies, maybe before this has returned
    kv.recv(np.zeros(3), 1)
except KolovodError as error:
    print(type(error).__name__, error, flush=True)
"""
    done = run_code(2, BEGIN + code, "--label-hosts", place)
    assert re.search(r"RankLostError .*rank 1 on host", done.stdout), done.stdout + done.stderr
    assert done.returncode == 128 + 9


@pytest.mark.parametrize("place", ["a:2", "a:1,b:1"])
def test_a_message_of_a_rank_that_has_left_is_received(place):
    code = """
if rank == 1:
    kv.send(np.arange(500.0), 0)
    kv.shutdown()
else:
    time.sleep(0.5)
    got = np.zeros(500)
    assert kv.recv(got) == 1
    np.testing.assert_array_equal(got, np.arange(500.0))
    try:
        kv.recv(got, 1)
    except KolovodError as error:
        print(type(error).__name__, error, flush=True)
"""
    out = run(place, code)
    assert re.search(r"RankLeftError rank 1 on host .*recv 'rank 1, tag 0' will not happen", out), (
        out
    )


@pytest.mark.slow
def test_who_has_not_sent_is_reported(tmp_path: Path):
    code = """
from kolovod.core.world import current
from waiting import Marks, until
marks = Marks(Path(os.environ["FOLDER"]))
kv.barrier()
if rank == 0:
    waiting = threading.Thread(target=kv.recv, args=(np.zeros(1), 1, 5))
    waiting.start()
    until(lambda: current().engine.stats()["late_reports"])
    marks.make("reported")
    waiting.join()
else:
    marks.wait_for("reported")
    kv.send(np.zeros(1), 0, tag=5)
"""
    begin = f"import threading\nfrom pathlib import Path\nsys.path.append({str(SUPPORT)!r})\n"
    done = run_code(2, begin + BEGIN + code, KOLOVOD_LATE_REPORT_S="1", FOLDER=str(tmp_path))
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    what = r"rank 1 on host \S+ \(pid \d+\) has not sent or received what is waited for by "
    assert re.search(what + r"'rank 1, tag 5' \(recv, [\d.]+ s\); rank 0 waits", text), text


@pytest.mark.parametrize(("place", "encrypt"), [("a:3", "0"), ("a:2,b:2", "0"), *ENCRYPTED])
def test_messages_while_operations_of_all_are_pending(place, encrypt):
    code = """
rng = np.random.default_rng(rank)
for step in range(30):
    big = np.full(200_000, rank + step, np.float32)
    pending = kv.allreduce_async(big, name=f"g{step}", op=kv.Sum)
    order = rng.permutation(size)
    received = [np.zeros(5000) for _ in range(size)]
    handles = []
    for r in order:
        handles.append(kv.irecv(received[r], int(r), tag=step))
        handles.append(kv.isend(np.full(5000, 100.0 * rank + step), int(r), tag=step))
    total = pending.wait()
    for handle in handles:
        handle.wait()
    assert total[0] == size * step + size * (size - 1) / 2
    for r in range(size):
        np.testing.assert_array_equal(received[r], 100.0 * r + step)
kv.barrier()
"""
    run(place, code, KOLOVOD_ENCRYPT=encrypt)


@pytest.mark.parametrize("place", slow_but(["a:1,b:1"], ["a:2", "a:1,b:1", "a:2,b:1"]))
def test_messages_beside_an_external_backend(place):
    """Gloo carries the operations of all, the engine itself what goes between two ranks."""
    pytest.importorskip("torch", reason="Gloo comes with PyTorch, which is not installed")
    code = """
after, before = (rank + 1) % size, (rank - 1) % size
for count in (1, 1000, 100_000, 3_000_000):
    got = np.zeros(count, np.float32)
    handle = kv.isend(np.arange(count, dtype=np.float32) + rank, after)
    total = kv.allreduce(np.full(count, float(rank), np.float32), op=kv.Sum)
    assert kv.recv(got, before) == before
    handle.wait()
    np.testing.assert_array_equal(got, np.arange(count, dtype=np.float32) + before)
    np.testing.assert_array_equal(total, sum(range(size)))
kv.barrier()
"""
    run(place, code, run_torch_ranks, KOLOVOD_BACKEND="gloo")
