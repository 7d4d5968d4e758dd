"""Several hosts on one machine, for tests and benchmarks: namespaces, links, sshd (bed.py).

Needs root and the packages in ``namespaces.TOOLS``; ``unavailable()`` says what is missing. The
ranks of a world are started on it by hand (world.py).
"""

from __future__ import annotations

from netbed.bed import Bed, unavailable
from netbed.namespaces import BedUnavailable, Process
from netbed.network import Address
from netbed.world import Ended, Job, World

__all__ = ["Address", "Bed", "BedUnavailable", "Ended", "Job", "Process", "World", "unavailable"]
