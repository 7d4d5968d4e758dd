"""A Ray cluster for the tests of one file: several nodes on this host."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

FREE_S = 30.0


@contextlib.contextmanager
def ray_cluster(folder: Path, *cpus: int) -> Iterator[object]:
    """Nodes with so many CPUs each, the first one the driver's; ended with the context."""
    # Ray makes a token for all clusters of this user, if it is not given one.
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
    os.environ["RAY_DEDUP_LOGS"] = "0"
    import ray
    from ray.cluster_utils import Cluster

    quick = {"health_check_period_ms": 300, "health_check_failure_threshold": 3}
    head = {"num_cpus": cpus[0], "include_dashboard": False, "_system_config": quick}
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
    """Whether nobody has a CPU of the cluster, or will have before a while is over."""
    import ray

    deadline = time.monotonic() + FREE_S
    while time.monotonic() < deadline:
        if ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"]:
            return True
        time.sleep(0.2)
    return False
