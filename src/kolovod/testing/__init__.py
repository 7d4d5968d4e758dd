"""Helpers for tests of programs that use Kolovod.

``run_ranks`` calls a function in real processes; ``loopback`` makes ranks of this process's
threads, and injects faults; ``replay`` computes again what an elastic job has computed.
"""

from kolovod.testing.loopback import loopback
from kolovod.testing.ranks import RankFailed, run_ranks
from kolovod.testing.replay import ReplayDiffers, replay

__all__ = ["RankFailed", "ReplayDiffers", "loopback", "replay", "run_ranks"]
