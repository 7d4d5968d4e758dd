"""A Ray cluster for the tests of one file: several nodes on this host."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from frameworks import is_installed

NEEDS_RAY = [
    pytest.mark.frameworks,
    pytest.mark.skipif(not is_installed("ray"), reason="Ray is not installed"),
    pytest.mark.timeout(200),
]
FREE_S = 30.0
_OURS = (
    "RankActor",
    "NodeMonitor",
    "Launcher",
    "Meeting",
    "ElasticMeeting",
    "BaseHorovodWorker",
    "RayTrainWorker",
)


@contextlib.contextmanager
def ray_cluster(folder: Path, *cpus: int, gpus: int = 0) -> Iterator[object]:
    """Nodes with so many CPUs each, the first one the driver's; ended with the context.

    ``gpus``: what Ray is told that the first one has.
    """
    # Ray makes a token for all clusters of this user, if it is not given one.
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
    os.environ["RAY_DEDUP_LOGS"] = "0"
    import ray
    from ray.cluster_utils import Cluster

    # Ray's workers are at niceness 15 by default: what else runs beside them starves them.
    quick = {
        "health_check_period_ms": 1000,
        "health_check_failure_threshold": 8,
        "worker_niceness": 0,
    }
    head = {
        "num_cpus": cpus[0],
        "num_gpus": gpus,
        "include_dashboard": False,
        "_system_config": quick,
    }
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        ray.init(address=cluster.address)
        for count in cpus[1:]:
            cluster.add_node(num_cpus=count)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def is_free_again() -> bool:
    """Whether nobody has a CPU of the cluster, or one of our actors, before a while is over."""
    import ray

    deadline = time.monotonic() + FREE_S
    while time.monotonic() < deadline:
        is_free = ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"]
        if is_free and not _our_actors():
            return True
        time.sleep(0.2)
    return False


def _our_actors() -> set[int]:
    """The processes of actors of this cluster that are Kolovod's, whoever owns them now."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if " ".join(process.cmdline()).startswith(tuple(f"ray::{name}" for name in _OURS)):
                found.add(process.pid)
    return found
