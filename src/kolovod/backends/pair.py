"""Two engines that look like one: the native one, and one whose tensors are on GPUs.

The verbs see an EnginePair as the engine of their world. What is submitted with addresses of a GPU
(ON_DEVICE in its dtype) goes to the second engine, whose buckets a DeviceDriver carries; all else
to the native one.

Every operation on the device leaves a *marker* of the same name in the native engine, an allreduce
of nothing. So a name that is on a GPU here and in host memory elsewhere is a mismatch of the two,
and not two operations that wait for ever; and unnamed operations are matched in one order.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any

from kolovod import _native
from kolovod.backends.device_driver import DeviceDriver
from kolovod.core.frontend import DEVICE_SHIFT, ON_DEVICE
from kolovod.core.handles import keeper
from kolovod.core.ops import Op
from kolovod.core.verbs import ALLREDUCE, JOIN, RECV, SEND
from kolovod.errors import InvalidArgumentError

_ALLREDUCE, _JOIN = ALLREDUCE.number, JOIN.number
_MESSAGES = frozenset((SEND.number, RECV.number))
_MARKER = (_native.DTYPES["bool"], (0, 0, 0, 0, 0, 0, 0), 0, 0)
_FOREVER = -1.0
_EXPLANATION = (
    " A bool without elements stands for a tensor on a GPU: with the backend nccl, what all ranks "
    "submit under one name must be on a GPU everywhere, or nowhere"
)

Entry = tuple[int, tuple[int, ...], int, int]


class EnginePair:
    """See the module's text. Operations on the device have negative numbers."""

    def __init__(self, host: _native.Engine, device: _native.Engine, driver: DeviceDriver) -> None:
        """``driver`` has been started, and drives ``device``."""
        self.host = host
        self.device = device
        self.parts = {"": host, " on GPU": device}
        self._driver = driver
        self._lock = threading.Lock()
        self._markers: dict[int, int] = {}  # by number of the operation on the device
        self._unused: dict[str, int] = {}  # markers of what the device's engine has refused
        self._staged: dict[int, list[Any]] = {}  # by number in the native engine
        self._joins: dict[int, threading.Thread] = {}
        self._unnamed = 0  # as many as the native engine has counted

    def __getattr__(self, name: str) -> Any:
        """What is not said here is asked of the native engine."""
        return getattr(self.host, name)

    def submit(
        self,
        verb: int,
        name: str,
        tensors: Sequence[Entry],
        op: int,
        prescale: float,
        postscale: float,
        root: int,
        blocking: bool,
        splits: Sequence[int] = (),
        out_bytes: Sequence[int] = (),
    ) -> int:
        """See ``_native.Engine.submit``. Raises InvalidArgumentError for a group of both kinds."""
        rest = (op, prescale, postscale, root, blocking, splits, out_bytes)
        with self._lock:
            if verb == _JOIN:
                return self._join(name, rest)
            kinds = {entry[0] & ~(ON_DEVICE - 1) for entry in tensors}
            if kinds <= {0}:
                return self._submit_to_host(verb, name, tensors, rest)
            before = self._unnamed
            try:
                return self._submit_from_device(kinds, verb, name, tensors, rest)
            except Exception:
                if not name and self._unnamed == before:
                    self._skip_number()
                raise

    def _submit_to_host(
        self, verb: int, name: str, tensors: Sequence[Entry], rest: tuple[Any, ...]
    ) -> int:
        """Counts what has no name as the native engine does: before it refuses anything.

        Messages have no numbers: a rank may have sent more of them than another has received.
        """
        is_counted = not name and verb not in _MESSAGES
        try:
            number = self.host.submit(verb, name, tensors, *rest)
        except _native.EngineError:
            self._unnamed += is_counted
            raise
        self._unnamed += is_counted
        return number

    def _skip_number(self) -> None:
        """An operation without a name that is refused here has a number on the other ranks."""
        nobody = (int(Op.Sum), 1.0, 1.0, -1, False)  # a root that the native engine refuses
        with contextlib.suppress(_native.EngineError):
            self._submit_to_host(_ALLREDUCE, "", [_MARKER], nobody)

    def _submit_from_device(
        self,
        kinds: set[int],
        verb: int,
        name: str,
        tensors: Sequence[Entry],
        rest: tuple[Any, ...],
    ) -> int:
        if len(kinds) > 1:
            raise InvalidArgumentError(
                "the tensors of a group are on several devices: with the backend nccl, give "
                "those of one GPU, or those in host memory"
            )
        index = next(iter(kinds)) >> DEVICE_SHIFT
        plain = [(entry[0] % ON_DEVICE, *entry[1:]) for entry in tensors]
        if rest[0] == Op.Adasum:
            return self._stage(index, verb, name, plain, rest)
        return -self._submit_to_device(index, verb, name, plain, rest)

    def _submit_to_device(
        self, index: int, verb: int, name: str, plain: list[Entry], rest: tuple[Any, ...]
    ) -> int:
        """First the marker: if that is refused, nothing is queued that nobody waits for."""
        addresses = [address for entry in plain for address in entry[2:4]]
        with self._driver.expecting(index, addresses):
            marker = self._unused.pop(name, 0)
            if not marker:
                of_marker = (int(Op.Sum), 1.0, 1.0, 0, rest[4])
                marker = self._submit_to_host(_ALLREDUCE, name, [_MARKER], of_marker)
            device_name = name or f"kolovod.unnamed.{self._unnamed}"
            try:
                number = self.device.submit(verb, device_name, plain, *rest)
            except BaseException:
                # The other ranks have been told, so it stands for the next one of this name.
                if name:
                    self._unused[name] = marker
                else:
                    keeper.keep(self.host, marker, None)
                raise
        self._markers[number] = marker
        return number

    def _stage(
        self, index: int, verb: int, name: str, plain: list[Entry], rest: tuple[Any, ...]
    ) -> int:
        """Adasum's arithmetic is the native engine's, in host memory."""
        driver, entries, back = self._driver, [], []
        for dtype, shape, source, target in plain:
            host = driver.to_host(index, source, dtype, shape)
            entries.append((dtype, shape, host.data_ptr(), host.data_ptr()))
            back.append((index, host, target, dtype))
        number = self._submit_to_host(verb, name, entries, rest)
        self._staged[number] = back
        return number

    def _join(self, name: str, rest: tuple[Any, ...]) -> int:
        """Both engines join; while this rank waits in one, a thread lets it take part in both."""
        number = self.host.submit(_JOIN, name, [], *rest)
        other = self.device.submit(_JOIN, name, [], *rest)
        thread = threading.Thread(target=self._wait_quietly, args=(other,), daemon=True)
        self._joins[number] = thread
        thread.start()
        return number

    def _wait_quietly(self, number: int) -> None:
        try:
            self.device.wait(number, _FOREVER)
            self.device.release(number)
        except _native.EngineError:
            pass  # the world is over, which the native engine says as well

    def wait(self, number: int, timeout_s: float, drives: bool = False) -> None:
        """See ``_native.Engine.wait``."""
        if number > 0:
            self._wait_host(number, timeout_s, drives)
            for back in self._staged.pop(number, ()):
                self._driver.to_device(*back)
            if number in self._joins:
                self._joins.pop(number).join()
                self._unnamed = 0  # as the engines do: the ranks have numbered unequally many
            return
        number = -number
        started = time.monotonic()
        marker = self._markers.get(number)
        if marker is not None:
            self._wait_host(marker, timeout_s, drives)
            self.host.release(marker)
            self._markers.pop(number, None)
        if timeout_s >= 0:
            timeout_s = max(0.0, timeout_s - (time.monotonic() - started))
        self.device.wait(number, timeout_s, drives)

    def _wait_host(self, number: int, timeout_s: float, drives: bool) -> None:
        try:
            self.host.wait(number, timeout_s, drives)
        except _native.EngineError as error:
            code, message = error.args
            if code == _native.STATUS["mismatch"] and " has bool" in message:
                raise _native.EngineError(code, message + _EXPLANATION) from None
            raise

    def poll(self, number: int) -> bool:
        """See ``_native.Engine.poll``."""
        if number > 0:
            return self.host.poll(number)
        marker = self._markers.get(-number)
        if marker is not None:
            if not self.host.poll(marker):
                return False
            try:
                self.host.wait(marker, 0.0)
            except _native.EngineError:
                return True  # and `wait` raises
        return self.device.poll(-number)

    def release(self, number: int) -> bool:
        """See ``_native.Engine.release``."""
        if number > 0:
            if is_done := self.host.release(number):
                self._staged.pop(number, None)
            return is_done
        marker = self._markers.get(-number)
        if marker is not None:
            if not self.host.release(marker):
                return False
            self._markers.pop(-number, None)
        return self.device.release(-number)

    def output(self, number: int, index: int) -> Any:
        """See ``_native.Engine.output``; of an operation on the device, a tensor of bytes there.

        What the native engine has made is of the right size, and holds nothing: a ticket.
        """
        if number > 0:
            return self.host.output(number, index)
        return self._driver.made(self.device.output(-number, index))

    def rows(self, number: int, index: int) -> list[int]:
        """See ``_native.Engine.rows``."""
        engine, number = (self.host, number) if number > 0 else (self.device, -number)
        return engine.rows(number, index)

    def pending(self) -> int:
        """See ``_native.Engine.pending``."""
        return self.host.pending() + self.device.pending()

    def shutdown(self) -> None:
        """See ``_native.Engine.shutdown``; of both."""
        self.device.shutdown()
        self.host.shutdown()  # first, for the driver may be in it, to connect the ranks
        self._driver.stop()

    def forget(self) -> None:
        """See ``_native.Engine.forget``; of both."""
        self.device.forget()
        self.host.forget()
