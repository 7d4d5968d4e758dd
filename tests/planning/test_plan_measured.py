"""What is read from timelines: made ones, by hand, and of real ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import planned
import pytest
from forked import run_torch_ranks

import kolovod as kv
from kolovod.core.spans import WAIT_FOR_GRADIENTS
from kolovod.errors import InvalidArgumentError
from kolovod.observe.reading import read
from kolovod.observe.whereabouts import Whereabouts, parse_whereabouts, whereabouts
from kolovod.planning.costs import Costs
from kolovod.planning.measured import measured

MIB = 1 << 20


def test_a_step_by_hand() -> None:
    """Gradients after 20 and 40 of 40 ms, 1 MiB each in 10 ms: the second is waited for."""
    seen = measured(planned.events())
    assert seen.step_s == pytest.approx(0.05, rel=1e-3)
    assert len(seen.steps_s) == 8  # of ten, without the first two
    step = seen.step
    assert step.compute_s == pytest.approx(0.04, rel=1e-3)
    assert step.cores == pytest.approx(1.0, rel=0.05)
    assert [r.at_s for r in step.requests] == pytest.approx([0.02, 0.04], rel=1e-3)
    assert {(r.bytes, r.tensors, r.dtype, r.codec) for r in step.requests} == {
        (MIB, 1, "float32", "")
    }
    assert step.waits_s == pytest.approx((0.04,), rel=1e-3)
    assert (step.jitter, step.skew) == pytest.approx((0.0, 1.0), abs=1e-3)
    cluster = seen.cluster
    assert (cluster.hosts, cluster.ranks_per_host, cluster.cores) == (2, 1, 4.0)
    assert cluster.hosts_per_machine == 2
    assert seen.knows_cores
    assert seen.knows_link
    # Two hosts exchange as much as there is, after a message's time.
    assert cluster.link.bytes_per_s == pytest.approx(MIB / (0.010 - 1e-4), rel=0.01)
    assert cluster.link.latency_s == 1e-4
    assert seen.modelled_s == pytest.approx(0.05, rel=0.02)


def test_operations_without_a_name_share_a_row() -> None:
    """Two of another size in each step are two requests, and both are on the link."""
    events = planned.events()
    rows = {event["tid"] for event in events if event["args"].get("name") == "allreduce.g0"}
    others = {event["tid"] for event in events if event["args"].get("name") == "allreduce.g1"}
    for event in events:
        if event["ph"] == "X" and event["tid"] in others and "bucket" in event.get("args", {}):
            event["tid"] = min(rows)
            if "bytes" in event["args"]:
                event["args"]["bytes"] = 2 * MIB
    step = measured(events).step
    assert sorted(r.bytes for r in step.requests) == [MIB, 2 * MIB]
    assert step.requests[1].at_s == pytest.approx(0.04, rel=1e-3)


def test_codecs_are_seen() -> None:
    seen = measured(planned.events(dtype="float32 as int8"))
    assert {r.codec for r in seen.step.requests} == {"int8"}
    assert seen.cluster.link.bytes_per_s == pytest.approx(MIB / (4 * 256 / 260) / 0.0098, rel=0.01)


def test_hosts_of_their_own_and_cores_that_are_bound() -> None:
    events = planned.events(("a", "b"), machines=("m", "n"))
    assert measured(events).cluster.hosts_per_machine == 1
    ours = [
        event["args"] for event in events if event["name"] == "process_name" and event["pid"] > 0
    ]
    for facts, mask in zip(ours, ("3", "c"), strict=True):  # two cores each, of one machine
        facts.update(machine="m", mask=mask, cores=2.0)
    assert measured(events).cluster.cores == 4.0
    for facts in ours:  # a quota of a core and a half for each host
        facts.update(mask="f", cores=1.5)
    assert measured(events).cluster.cores == 3.0


def test_a_timeline_that_does_not_know_cores() -> None:
    seen = measured(planned.events(at=None, link=None))
    assert not seen.knows_cores
    assert seen.cluster.cores == float("inf")
    assert seen.knows_link


def test_one_host_has_no_link() -> None:
    seen = measured(planned.events(("a", "a"), link=None))
    assert not seen.knows_link
    assert (seen.cluster.hosts, seen.cluster.ranks_per_host) == (1, 2)


def test_a_rank_that_is_always_slower() -> None:
    seen = measured(planned.events(("a", "b", "c"), slower_ms=(0, 0, 8)))
    assert seen.step.skew == pytest.approx(48 / 40, rel=0.02)
    assert seen.slowest == "rank 2 on c"


def test_ranks_without_cores_are_freed() -> None:
    """Four ranks on two cores that compute 40 ms of wall time, half of it in a queue."""
    hosts = ("a", "b", "c", "d")
    seen = measured(planned.events(hosts, cpu_share=0.5, at=Whereabouts("m", 2.0, "3")))
    assert seen.step.compute_s == pytest.approx(0.02, rel=0.05)
    assert seen.step.requests[0].at_s == pytest.approx(0.01, rel=0.05)
    assert seen.step.cores == pytest.approx(1.0, rel=0.05)
    # With cores to spare it is what they wait for that takes the time, not cores.
    idle = measured(planned.events(hosts, cpu_share=0.5, at=Whereabouts("m", 16.0, "ffff")))
    assert idle.step.compute_s == pytest.approx(0.04, rel=0.05)
    assert idle.step.cores == pytest.approx(0.5, rel=0.1)


def test_what_gpus_carry_costs_no_cores() -> None:
    seen = measured(planned.events(carrier=" on GPU"))
    assert seen.costs == replace(Costs().times(0), operation_s=Costs().operation_s)
    assert seen.step.bytes == 2 * MIB
    with pytest.raises(InvalidArgumentError, match="no allreduce of a gradient"):
        measured(planned.events(carrier=" in set 1"))


def test_too_little() -> None:
    with pytest.raises(InvalidArgumentError, match=r"4 optimizer steps, .*record ten steps"):
        measured(planned.events(steps=4))
    with pytest.raises(InvalidArgumentError, match="no allreduce of a gradient"):
        measured(planned.events(at_ms=()))
    blind = [event for event in planned.events() if event["name"] != WAIT_FOR_GRADIENTS]
    with pytest.raises(InvalidArgumentError, match="does not show when the script waits"):
        measured(blind)
    with pytest.raises(InvalidArgumentError, match="shows no rank"):
        measured([])
    measured(planned.events(steps=5))


def test_where_a_rank_says_it_is() -> None:
    here = whereabouts()
    assert parse_whereabouts(list(here)) == here
    assert 0 < here.cores <= bin(int(here.mask, 16)).count("1")
    for wrong in (["m", 0, "3"], ["m", float("nan"), "3"], ["m", 2, "x"], ["m"], None, ["m", 1, 3]):
        with pytest.raises((TypeError, ValueError)):
            parse_whereabouts(wrong)


# Real ranks -------------------------------------------------------------------------------------


def train(rank: int, compression: str) -> dict[str, Any]:
    import torch

    import kolovod.torch as kvt

    kvt.init()
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(3)))
    optimizer = kvt.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3),
        named_parameters=model.named_parameters(),
        compression=getattr(kvt.Compression, compression),
    )
    for _ in range(8):
        model(torch.ones(4, 128)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    records = kv.last_operations()
    kvt.shutdown()
    return {"codecs": {record["codec"] for record in records if record["verb"] == "allreduce"}}


@pytest.mark.parametrize(
    ("hosts", "compression"), [(("a", "b"), "int8"), (("a", "a"), "none"), (("a", "b"), "bf16")]
)
def test_a_short_run_of_two_ranks(hosts: tuple[str, ...], compression: str, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    ranks = run_torch_ranks(2, train, compression, env={"KOLOVOD_TIMELINE": str(path)}, hosts=hosts)
    seen = measured(read(path))
    gradients = [r for r in seen.step.requests if r.dtype != "uint8"]  # what ranks agree upon
    of_element = 2 if compression == "bf16" else 4
    assert sum(r.bytes for r in gradients) == 3 * (128 * 128 + 128) * of_element
    assert {r.dtype for r in gradients} == {"bfloat16" if compression == "bf16" else "float32"}
    codecs = {r.codec for r in gradients}
    assert codecs >= {"int8"} if compression == "int8" else codecs == {""}
    assert ("int8" in ranks[0]["codecs"]) == (compression == "int8")
    assert 0 < seen.step.compute_s < seen.step_s * 1.5
    assert all(0 <= r.at_s <= seen.step.compute_s for r in seen.step.requests)
    assert seen.step.waits_s
    assert seen.knows_cores
    assert seen.cluster.cores >= 1
    is_two = len(set(hosts)) == 2
    assert seen.knows_link == is_two
    assert seen.cluster.hosts_per_machine == (2 if is_two else 1)
    if is_two:
        assert 1e6 < seen.cluster.link.bytes_per_s < 1e12
        assert seen.cluster.link.latency_s > 0
