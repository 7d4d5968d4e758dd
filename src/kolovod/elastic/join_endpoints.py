"""The search for an elastic job at all its join endpoints, where each rank has its own host.

On Kubernetes a pod that comes again has another address, and the others learn late which one its
name stands for. So there every member holds a join endpoint, not only who is on rank 0's host.
Whoever comes asks the others, whose names have been known for long; nobody has to find the new
address.
"""

from __future__ import annotations

import math
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from kolovod.elastic.join_endpoint import Facts, JoinEndpoint
from kolovod.errors import BootstrapError
from kolovod.rendezvous.external.address_exchange import RefusedError

__all__ = ["JoinEndpoints"]

_AT_ONCE = 16
_FEW = 4
"""So many of all others are asked at a time by each of those that come: all of them asking all
would be a burden to whoever answers for names."""
_ANSWER_S = 1.0
_ROUND_S = 3.0
"""To connect, and to hear the answer."""


class JoinEndpoints:
    """The join endpoints of all hosts of a job, for the process of one rank."""

    def __init__(
        self, endpoint: JoinEndpoint, host_of: Callable[[int], str], rank: int, host: str
    ) -> None:
        """``endpoint``: rank 0's join endpoint. ``host_of(rank)``: its host's name.

        ``rank``, ``host``: this process's, which it says at the join endpoints.
        """
        self._endpoint, self._host_of = endpoint, host_of
        self._rank, self._host = rank, host
        self._others = [other for other in range(endpoint.most) if other != rank]
        self._lock = threading.Lock()
        self._asked: set[int] = set()  # right now; what answers for names may take long

    def look_at_all(self) -> Facts | None:
        """Return what one of the job's members says; None: no member of it answers.

        Raises RefusedError if they have no place for this rank.
        """
        return self._look(self._others)

    def look_at_some(self, *, first: bool) -> Facts | None:
        """Look at a few join endpoints, drawn at random, as ``look_at_all`` does.

        ``first``: rank 0's is among them.
        """
        others = [other for other in self._others if other != 0]
        some = random.sample(others, min(_FEW, len(others)))
        return self._look([0, *some] if first and self._rank != 0 else some)

    def _look(self, ranks: Sequence[int]) -> Facts | None:
        with self._lock:
            waiting = [rank for rank in ranks if rank not in self._asked]
        answers: queue.SimpleQueue[Facts | BootstrapError] = queue.SimpleQueue()
        is_over = threading.Event()
        left = len(waiting)
        by = time.monotonic() + _ROUND_S * math.ceil(left / _AT_ONCE)

        def ask() -> None:
            while not is_over.is_set():
                with self._lock:
                    if not waiting:
                        return
                    rank = waiting.pop()
                    self._asked.add(rank)
                answer = self._ask(rank)
                with self._lock:
                    self._asked.discard(rank)
                answers.put(answer)

        for number in range(min(_AT_ONCE, left)):
            name = f"kolovod looks for its job {number}"
            threading.Thread(target=ask, name=name, daemon=True).start()
        try:
            while left:
                answer = answers.get(timeout=max(0.0, by - time.monotonic()))
                left -= 1
                if isinstance(answer, RefusedError):
                    raise answer
                if isinstance(answer, Facts):
                    return answer
        except queue.Empty:
            pass
        finally:
            is_over.set()
        return None

    def _ask(self, rank: int) -> Facts | BootstrapError:
        try:
            endpoint = replace(self._endpoint, host=self._host_of(rank))
            return endpoint.discover(self._rank, self._host, time.monotonic() + _ANSWER_S)
        except BootstrapError as error:  # of another job, too, which has got an old address
            return error
