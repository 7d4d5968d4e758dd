"""Actors that stay: a world of them, in which one function is called after the other."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kolovod.launch.function import end_world_by
from kolovod.net.addresses import own_addresses
from kolovod.net.channel import new_secret
from kolovod.ray.places import actor_options, on_node
from kolovod.rendezvous.rank_environment import RankEnvironment, local_and_cross
from kolovod.rendezvous.server import RendezvousServer

__all__ = ["Meeting", "Worker", "end", "environments", "form", "new_meeting", "start"]

_START_S = 120.0


class Worker:
    """An actor that is a rank; for subclasses."""

    def __init__(self) -> None:
        self.subject: Any = None
        """What ``execute`` gives to its functions."""

    def where(self) -> tuple[str, str, list[str]]:
        """Return the node's id, its address, and the GPUs that are this actor's."""
        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        return context.get_node_id(), ray.util.get_node_ip_address(), [str(gpu) for gpu in gpus]

    def tell(self, variables: Mapping[str, str], paths: Sequence[str]) -> None:
        """Set ``variables``, and find modules at the caller's ``paths``, too."""
        os.environ.update(variables)
        sys.path += [path for path in paths if path not in sys.path]

    def make(self, cls: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Make the subject."""
        self.subject = cls(*args, **kwargs)

    def execute(self, fn: Callable[[Any], Any]) -> Any:
        """Return the result of ``fn(subject)``. If it raises, the other ranks hear of it."""
        try:
            return fn(self.subject)
        except Exception as error:
            end_world_by(error)
            raise


class Meeting:
    """An actor where the ranks of such a world meet."""

    def __init__(self, size: int) -> None:
        self._secret = new_secret()
        self._server = RendezvousServer(self._secret, size, *own_addresses())
        self._server.start()

    def told(self) -> tuple[str, str]:
        """Return its address, and the secret."""
        return self._server.address, self._secret


def new_meeting(size: int) -> Any:
    """Make such an actor, near the caller; it ends with it, or by ``ray.kill``."""
    here = ray.get_runtime_context().get_node_id()
    make = ray.remote(Meeting).options(num_cpus=0, scheduling_strategy=on_node(here))
    return make.remote(size)


def environments(hosts: Sequence[str], rendezvous: str, secret: str) -> list[RankEnvironment]:
    """Return the environment of each rank, from the host of each."""
    return [
        RankEnvironment(
            rank,
            len(hosts),
            *local_and_cross(hosts, rank),
            host=host,
            rendezvous=rendezvous,
            secret=secret,
        )
        for rank, host in enumerate(hosts)
    ]


def form(
    workers: Sequence[Any], meeting: Any, variables: Mapping[str, str]
) -> tuple[list[Any], list[RankEnvironment]]:
    """Tell these actors (``Worker``) who they are; return them, and their environments, by rank.

    Those on one node follow each other, and see each other's GPUs. ``variables``: for all.
    """
    where = ray.get([worker.where.remote() for worker in workers], timeout=_START_S)
    nodes = list(dict.fromkeys(node for node, _, _ in where))
    order = sorted(range(len(workers)), key=lambda at: nodes.index(where[at][0]))
    hosts = [f"{where[at][1]}-{where[at][0][:6]}" for at in order]
    address, secret = ray.get(meeting.told.remote(), timeout=_START_S)
    told = []
    made = environments(hosts, address, secret)
    for at, environment in zip(order, made, strict=True):
        gpus = sorted({gpu for node, _, own in where if node == where[at][0] for gpu in own})
        seen = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
        everything = {**seen, **variables, **environment.variables()}
        told.append(workers[at].tell.remote(everything, sys.path))
    ray.get(told, timeout=_START_S)
    return [workers[at] for at in order], made


def start(
    cls: type[Worker],
    group: PlacementGroup,
    bundles: Sequence[int],
    resources: Mapping[str, float],
    args: Sequence[Any] = (),
) -> list[Any]:
    """Start an actor of ``cls`` in each of these bundles of ``group``, with ``resources``."""
    make = ray.remote(cls)
    return [
        make.options(
            **actor_options(resources),
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=index
            ),
        ).remote(*args)
        for index in bundles
    ]


def end(actors: Sequence[Any]) -> None:
    """End these actors; those that have are passed over."""
    for actor in actors:
        with contextlib.suppress(Exception):
            ray.kill(actor)
