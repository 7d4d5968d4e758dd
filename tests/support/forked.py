"""``run_ranks`` with ranks that are forked from a process that has imported what they need.

Importing PyTorch takes a rank two seconds of a core, and most tests need less for all
else. A server imports it once and forks each rank; the rank becomes a child of the launcher, which
watches and ends it like any other. It has the environment, folder, descriptors and session that it
would have as a new process. What forked ranks do not show is the start of an interpreter itself:
test_ranks.py, test_launch.py and all tests of scripts and launchers start new ones.

Run as a script, with a socket's descriptor and modules' names, this file is the server.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import IO, Any

from kolovod.launch import function
from kolovod.launch.local import PAYLOAD_FD, RESULT_FD

_PLAIN = ("numpy", "pytest", "kolovod.numpy", "kolovod.testing")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ANSWER_LIMIT_S = 300.0
_servers: dict[tuple[tuple[str, ...], frozenset[tuple[str, str]]], _Server] = {}
_lock = threading.Lock()


def ranks_after(*modules: str, **environment: str) -> Callable[..., list[Any]]:
    """``run_ranks`` for ranks that find these modules imported, besides NumPy's front end.

    ``environment``: what the modules look at while they are imported; the ranks have it, too.
    Of ``kolovod.testing.run_ranks``'s arguments it lacks ``executable`` and ``output_dir``.
    """
    key = modules, frozenset(environment.items())

    def run_ranks(
        n: int,
        fn: Callable[..., Any],
        *args: Any,
        timeout_s: float = 60.0,
        env: Mapping[str, str] | None = None,
        keep_going: bool = False,
        hosts: Sequence[str] = (),
    ) -> list[Any]:
        with _lock:
            if key not in _servers:
                _servers[key] = _Server(modules, environment)
        options = function.CallOptions(
            timeout_s=timeout_s,
            environment={**environment, **(env or {})},
            keep_going=keep_going,
            hosts=hosts,
            popen=_servers[key].popen,
        )
        return function.call_on_ranks(n, fn, args, options)

    return run_ranks


run_ranks = ranks_after()
run_torch_ranks = ranks_after("kolovod.torch", "horovod.torch")
run_tensorflow_ranks = ranks_after(
    "tensorflow",
    "kolovod.tensorflow",
    "horovod.tensorflow",
    TF_CPP_MIN_LOG_LEVEL="2",
    CUDA_VISIBLE_DEVICES="",
)
run_mxnet_ranks = ranks_after("mxnet", "kolovod.mxnet", "horovod.mxnet")


def _keras_2() -> str:
    try:
        return "keras" if metadata.version("keras").startswith("2.") else "tf_keras"
    except metadata.PackageNotFoundError:
        return "tf_keras"


KERAS_2 = _keras_2()
"""The module of Keras 2: Keras itself beside a TensorFlow before 2.16."""
_KERAS = "kolovod.keras.callbacks"
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
run_keras_ranks = ranks_after("tensorflow", "keras", _KERAS, KERAS_BACKEND="tensorflow", **_QUIET)
# Each way of having Keras.
KERAS_RUNNERS = {
    "tensorflow": run_keras_ranks,
    "torch": ranks_after("torch", "keras", _KERAS, KERAS_BACKEND="torch", **_QUIET),
    "jax": ranks_after(
        "jax", "keras", _KERAS, KERAS_BACKEND="jax", JAX_PLATFORMS="cpu", JAX_ENABLE_X64="1",
        **_QUIET,
    ),
    "tf_keras": ranks_after("tensorflow", KERAS_2, _KERAS, TF_USE_LEGACY_KERAS="1", **_QUIET),
}  # fmt: skip
# Tests compile many programs and run each a few times.
QUICKLY_COMPILED = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
run_jax_ranks = ranks_after(
    "jax", "kolovod.jax", JAX_PLATFORMS="cpu", JAX_ENABLE_X64="1", **QUICKLY_COMPILED
)


def servers() -> set[int]:
    """The servers' process ids: children that are left behind on purpose until the end."""
    return {server.pid for server in _servers.values()}


def stop() -> None:
    """End the servers."""
    while _servers:
        _servers.popitem()[1].close()


class _Rank:
    """What the launcher uses of a ``subprocess.Popen``."""

    def __init__(self, pid: int, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        self.pid, self.stdout, self.stderr = pid, stdout, stderr

    def wait(self) -> None:
        os.waitpid(self.pid, 0)


class _Server:
    def __init__(self, modules: tuple[str, ...], environment: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_ANSWER_LIMIT_S)
        command = [sys.executable, "-u", __file__, str(theirs.fileno()), *_PLAIN, *modules]
        # A thread of a library would not be in the forks.
        one = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        path = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **environment, **one, "PYTHONPATH": path},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self.pid = self._process.pid

    def popen(self, command: Sequence[str], env: Mapping[str, str], **options: Any) -> _Rank:
        """Fork a rank that calls the function, whatever the interpreter in ``command``."""
        assert command[-2:] == ["-c", function.CHILD], command
        assert options["start_new_session"]
        pipes = [os.pipe() for _ in ("stdout", "stderr")]
        order = {"env": dict(env), "parent": os.getpid(), "folder": os.getcwd()}
        given = [pipe[1] for pipe in pipes] + [int(env[PAYLOAD_FD]), int(env[RESULT_FD])]
        with _lock:
            _become_reaper(True)
            try:
                socket.send_fds(self._socket, [pickle.dumps(order)], given)
                answer = self._socket.recv(100)
            finally:
                _become_reaper(False)
        assert answer, "the server that forks ranks has ended; its standard error says why"
        for _, write_end in pipes:
            os.close(write_end)
        return _Rank(int(answer), *(open(read_end, "rb") for read_end, _ in pipes))

    def close(self) -> None:
        self._socket.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _become_reaper(on: bool) -> None:
    """Have a process below this one, whose parent ends, become a child of this one."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


# In the server ------------------------------------------------------------------------------------


def _serve(orders: socket.socket) -> int:
    """Fork a rank for each order until there are no more; in a rank: be it, and return its code."""
    while True:
        data, fds, _, _ = socket.recv_fds(orders, 1 << 20, 4)
        if not data:
            return _left(0)
        read_end, write_end = os.pipe()
        middle = os.fork()
        if middle == 0:
            pid = os.fork()
            if pid != 0:
                os.write(write_end, str(pid).encode())
                os._exit(0)  # so that the rank becomes the launcher's child
            orders.close()
            os.close(read_end)
            os.close(write_end)
            _become_rank(fds, **pickle.loads(data))
            return _left(function.main_of_rank())
        os.waitpid(middle, 0)
        orders.send(os.read(read_end, 100))
        for fd in (read_end, write_end, *fds):
            os.close(fd)


def _become_rank(fds: list[int], env: dict[str, str], parent: int, folder: str) -> None:
    stdout, stderr, payload, result = fds
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.close(stdout)
    os.close(stderr)
    os.setsid()
    while os.getppid() != parent:
        time.sleep(0.0005)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.environ.clear()
    os.environ.update(env)
    os.environ |= {PAYLOAD_FD: str(payload), RESULT_FD: str(result)}
    os.chdir(folder)
    sys.argv = ["-c"]
    random.seed()
    sys.modules["numpy"].random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))


def _left(code: int) -> int:
    """At the end of a process. Tearing a framework down takes a second: only exit hooks run."""
    if sys.modules.keys() & {"torch", "tensorflow", "jax", "mxnet"}:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def main() -> int:
    """The server, until the other end of its socket is closed."""
    orders = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    torch = sys.modules.get("torch")
    if torch is not None:  # the first optimizer of a process imports for a second of a core
        torch.optim.SGD([torch.zeros(1)], lr=1.0)
    return _serve(orders)


if __name__ == "__main__":
    raise SystemExit(main())
