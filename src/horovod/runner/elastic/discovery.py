"""Which hosts there are: a script prints them, or the user says."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from kolovod.launch.discovery import places_in, said_by

__all__ = ["FixedHosts", "HostDiscovery", "HostDiscoveryScript"]


class HostDiscovery(ABC):
    """The base class of discoveries."""

    @abstractmethod
    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """The hosts that there are now, each with the processes that it may have."""


class HostDiscoveryScript(HostDiscovery):
    """A command for a shell, which prints lines HOST or HOST:SLOTS."""

    def __init__(self, discovery_script: str, slots: int | None) -> None:
        """``slots``: of a host whose line has no number; None: one."""
        self._discovery_script = discovery_script
        self._default_slots = slots

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Run the script. Raises RuntimeError if it fails, ValueError for what is no host."""
        text = self._execute_discovery_script()
        return places_in(text, repr(self._discovery_script), self._default_slots or 1)

    def _execute_discovery_script(self) -> str:
        """Return what the script prints; subclasses and tests have their own."""
        return said_by(self._discovery_script)


class FixedHosts(HostDiscovery):
    """The hosts that were set last."""

    def __init__(self, host_slots: Mapping[str, int]) -> None:
        """``host_slots``: the processes of each host."""
        self.set(host_slots)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the hosts as they were set."""
        return dict(self._host_slots)

    def set(self, host_slots: Mapping[str, int]) -> None:
        """Replace the hosts."""
        self._host_slots = dict(host_slots)
