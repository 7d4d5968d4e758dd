"""The C interface of the module as a foreign program finds it: by ctypes, on two real ranks.

csrc/include/kolovod_test.c has the rest, in C.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading

import numpy as np
import pytest
from forked import run_ranks
from paths import ROOT

import kolovod
from kolovod import _native
from kolovod.errors import NotInitializedError

HEADER = ROOT / "csrc" / "include" / "kolovod.h"
CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)


class Tensor(ctypes.Structure):
    """A kolovod_tensor."""

    _fields_ = (
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    )


class Request(ctypes.Structure):
    """A kolovod_request."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("tensor_size", ctypes.c_size_t),
        ("verb", ctypes.c_int32),
        ("op", ctypes.c_int32),
        ("root", ctypes.c_int32),
        ("drive_us", ctypes.c_int32),
        ("prescale", ctypes.c_double),
        ("postscale", ctypes.c_double),
        ("name", ctypes.c_char_p),
        ("tensors", ctypes.POINTER(Tensor)),
        ("tensor_count", ctypes.c_size_t),
        ("splits", ctypes.POINTER(ctypes.c_int64)),
        ("split_count", ctypes.c_size_t),
    )


def library():
    """The module with the types that ctypes needs."""
    lib = ctypes.CDLL(_native.__file__)
    lib.kolovod_current.restype = ctypes.c_void_p
    lib.kolovod_error_message.restype = ctypes.c_char_p
    lib.kolovod_submit.argtypes = (
        ctypes.c_void_p,
        ctypes.POINTER(Request),
        CALLBACK,
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_uint64),
    )
    lib.kolovod_rank.argtypes = lib.kolovod_size.argtypes = (ctypes.c_void_p,)
    return lib


class Sums:
    """Sums of float32 arrays that nobody waits for; their callbacks are counted."""

    def __init__(self, lib):
        """``lib``: see ``library``."""
        self.lib = lib
        self.changed = threading.Condition()
        self.outcomes = []
        self.callback = CALLBACK(self._on_done)
        self.kept = []

    def submit(self, engine, name, array):
        """Start one in place; the code of the submission."""
        shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        address = array.ctypes.data
        dtype = _native.DTYPES["float32"]
        tensor = Tensor(address, address, shape, array.ndim, dtype)
        request = Request(
            struct_size=ctypes.sizeof(Request),
            tensor_size=ctypes.sizeof(Tensor),
            verb=_native.VERBS["allreduce"],
            op=_native.OPS["Sum"],
            prescale=1.0,
            postscale=1.0,
            name=name.encode(),
            tensors=ctypes.pointer(tensor),
            tensor_count=1,
        )
        self.kept.append(array)
        return self.lib.kolovod_submit(engine, request, self.callback, None, None)

    def _on_done(self, user_data, code, message):
        with self.changed:
            self.outcomes.append((code, message.decode()))
            self.changed.notify_all()

    def wait(self, count):
        """The outcomes, in the order of completion, once there are so many."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.outcomes) >= count, timeout=60)
            assert len(self.outcomes) == count
            return self.outcomes


def test_numbers_are_those_of_python():
    """Parsed from the header, whose enumerations are the engine's own (csrc/base)."""
    text = HEADER.read_text()

    def enumeration(name):
        body = re.search(rf"typedef enum kolovod_{name} {{(.*?)}} kolovod_{name};", text, re.S)[1]
        pairs = re.findall(r"KOLOVOD_(\w+) = (\d+)", body)
        return {label.lower(): int(number) for label, number in pairs}

    assert enumeration("verb") == _native.VERBS
    assert enumeration("dtype") == _native.DTYPES
    assert enumeration("op") == {name.lower(): number for name, number in _native.OPS.items()}
    assert enumeration("code") == _native.STATUS
    codecs = {"none": "no_codec", "int8": "int8_blocks", "int4": "int4_blocks"}
    assert enumeration("codec") == {codecs[name]: n for name, n in _native.CODECS.items()}
    version = int(re.search(r"#define KOLOVOD_ABI_VERSION (\d+)", text)[1])
    assert library().kolovod_abi_version() == version


def test_sums_by_callback_while_python_goes_on():
    def work(rank):
        lib = library()
        assert lib.kolovod_current(0) is None
        kolovod.init()
        engine = lib.kolovod_current(0)
        assert engine == kolovod.core.world.current().engine.c_handle()
        assert (lib.kolovod_rank(engine), lib.kolovod_size(engine)) == (rank, 2)
        sums = Sums(lib)
        arrays = [np.full(1 + 7000 * i, rank + i, np.float32) for i in range(20)]
        for i, array in enumerate(arrays):
            assert sums.submit(engine, f"sum{i}", array) == 0
            assert kolovod.allreduce(float(i), f"between{i}", kolovod.Sum) == 2 * i
        assert sums.wait(20) == [(0, "")] * 20
        for i, array in enumerate(arrays):
            assert (array == 1 + 2 * i).all()

        assert sums.submit(engine, "mismatch", np.zeros(3 + rank, np.float32)) == 0
        code, message = sums.wait(21)[-1]
        assert code == _native.STATUS["mismatch"]
        assert "rank 0 has (3,), rank 1 has (4,)" in message

        evens = kolovod.add_process_set([0])
        alone = lib.kolovod_current(evens.process_set_id)
        assert (alone is None) == (rank == 1)
        if rank == 0:
            assert lib.kolovod_size(alone) == 1
            assert sums.submit(alone, "alone", np.ones(3, np.float32)) == 0
            assert sums.wait(22)[-1] == (0, "")
        kolovod.remove_process_set(evens)
        assert lib.kolovod_current(1) is None
        assert b"process set 1 is not part of this world" in lib.kolovod_error_message()
        if rank == 0:
            code = sums.submit(alone, "gone", np.ones(3, np.float32))
            assert code == _native.STATUS["shut_down"]
        kolovod.barrier()
        kolovod.shutdown()
        assert lib.kolovod_current(0) is None
        assert b"call kolovod.init() first" in lib.kolovod_error_message()
        code = sums.submit(engine, "over", np.ones(3, np.float32))
        assert code == _native.STATUS["shut_down"]
        kolovod.init()
        assert lib.kolovod_current(0) not in (None, engine)
        assert sums.submit(engine, "still over", np.ones(3, np.float32)) != 0
        return len(sums.outcomes)

    assert run_ranks(2, work, timeout_s=60) == [22, 21]


def test_a_rank_that_shuts_down_completes_its_callbacks_and_tells_the_other():
    def work(rank):
        lib = library()
        kolovod.init()
        sums = Sums(lib)
        if rank == 1:
            kolovod.barrier("submitted")
            kolovod.shutdown()
            return None
        for i in range(5):
            code = sums.submit(lib.kolovod_current(0), f"lonely{i}", np.ones(10, np.float32))
            assert code == 0
        kolovod.barrier("submitted")
        return {code for code, _ in sums.wait(5)}

    assert run_ranks(2, work, timeout_s=60)[0] == {_native.STATUS["rank_left"]}


def test_a_forked_child_finds_no_world():
    def work(rank):
        lib = library()
        kolovod.init()
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                with pytest.raises(NotInitializedError):
                    kolovod.rank()
                os.write(writer, b"yes" if lib.kolovod_current(0) is None else b"no")
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            answer = pipe.read()
        os.waitpid(child, 0)
        return answer

    assert run_ranks(2, work, timeout_s=60) == [b"yes"] * 2
