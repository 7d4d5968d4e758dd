"""Network interfaces, for the libraries that let the environment choose theirs."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["interface_variables"]


def interface_variables(nics: Sequence[str]) -> dict[str, str]:
    """Return variables that name all interfaces to NCCL, and the first to Gloo, which takes one."""
    if not nics:
        return {}
    return {
        "NCCL_SOCKET_IFNAME": ",".join(nics),
        "HOROVOD_GLOO_IFACE": nics[0],
        "GLOO_SOCKET_IFNAME": nics[0],
    }
