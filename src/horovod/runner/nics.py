"""Network interfaces, for the libraries that let the environment choose theirs."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["interface_variables"]


def interface_variables(nics: Sequence[str]) -> dict[str, str]:
    """What tells NCCL of all of them, and Gloo, which takes one, of the first."""
    if not nics:
        return {}
    return {
        "NCCL_SOCKET_IFNAME": ",".join(nics),
        "HOROVOD_GLOO_IFACE": nics[0],
        "GLOO_SOCKET_IFNAME": nics[0],
    }
