"""Helpers for tests of programs that use Kolovod.

``run_ranks`` calls a function in real processes; ``loopback`` makes ranks of this process's
threads, and injects faults.
"""

from kolovod.testing.loopback import loopback
from kolovod.testing.ranks import RankFailed, run_ranks

__all__ = ["RankFailed", "loopback", "run_ranks"]
