"""What a bucket takes: by hand, and as the engine chooses."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kolovod import _native
from kolovod.planning.costs import Cluster, Costs, Link, bucket_load, negotiation_s, wire_bytes

MIB = 1 << 20
LINK = Link(125e6, 1e-4)
FREE = Costs(0, 0, 0, 0, 0, 0, 0)


def cluster(hosts: int, ranks: int = 1, link: Link = LINK) -> Cluster:
    return Cluster(hosts, ranks, math.inf, link)


@pytest.mark.parametrize(("hosts", "share"), [(2, 1.0), (3, 4 / 3), (4, 1.5), (8, 1.75)])
def test_two_hosts_exchange_all_and_more_the_more_there_are(hosts: int, share: float) -> None:
    """2 (N - 1) / N of the bytes, whatever algorithm the engine chooses, to its cache lines."""
    load = bucket_load(8 * MIB, "float32", "", cluster(hosts), FREE)
    assert load.link_s == pytest.approx(share * 8 * MIB / 125e6, rel=1e-4)
    assert load.fixed_s in (1e-4, 2e-4)  # a round or two
    assert load.cpu_s == 0


def test_ranks_of_a_host_share_its_link() -> None:
    one, four = (bucket_load(8 * MIB, "float32", "", cluster(4, n), FREE) for n in (1, 4))
    assert four.link_s == pytest.approx(one.link_s, rel=1e-3)
    costs = Costs(1e-9, 0, 0, 0, 0, 0, 0)
    one, four = (bucket_load(8 * MIB, "float32", "", cluster(4, n), costs) for n in (1, 4))
    assert four.cpu_s == pytest.approx(one.cpu_s / 4, rel=1e-3)


@pytest.mark.parametrize(("codec", "times"), [("int8", 4 * 256 / 260), ("int4", 4 * 256 / 136)])
def test_codecs_send_less(codec: str, times: float) -> None:
    plain, coded = (wire_bytes(8 * MIB, "float32", name, cluster(4)) for name in ("", codec))
    assert plain / coded == pytest.approx(times, rel=1e-4)
    of_half = wire_bytes(4 * MIB, "bfloat16", codec, cluster(4))
    assert of_half == pytest.approx(coded)  # as many elements


def test_one_host_needs_no_link_and_one_rank_nothing() -> None:
    assert bucket_load(MIB, "float32", "", cluster(1), Costs()) == (0, 0, 0, 0)
    inside = bucket_load(MIB, "float32", "", cluster(1, 4), Costs())
    assert inside.link_s == 0
    assert inside.cpu_s == pytest.approx(MIB * Costs().local_s_per_byte)


def test_an_endless_link_takes_no_time() -> None:
    load = bucket_load(MIB, "float32", "", cluster(4, 1, Link(math.inf, 0.0)), FREE)
    assert load[:3] == (0, 0, 0)


def test_announcements_go_up_the_tree_and_down() -> None:
    levels = {2: 1, 5: 1, 6: 2, 21: 2, 22: 3, 512: 5}
    for hosts, count in levels.items():
        assert negotiation_s(cluster(hosts)) == pytest.approx(2 * count * 1e-4), hosts
        # The deepest host is so many steps from the root.
        depth, host = 0, hosts - 1
        while host:
            host, depth = _native.tree_neighbours(hosts, host)[0], depth + 1
        assert depth == count, hosts
    assert negotiation_s(cluster(1)) == 0


def test_the_engine_says_what_it_would_do() -> None:
    number = _native.DTYPES["float32"]
    algorithm, rounds, messages, sent = _native.allreduce_between_hosts(MIB, 4, number, 20, 125)
    assert (algorithm, rounds, sent) == ("pairwise", 2, 3 * MIB // 2)
    assert messages == 6 * (MIB // 4) // (16 << 10)  # what the link carries in an eighth of a ms
    many = _native.allreduce_between_hosts(8 * MIB, 512, number, 20, 125)
    assert many[:2] == ("halving", 18)  # there and back, log2 of the hosts
    for wrong in ((MIB, 0, number, 20, 125), (MIB, 2, 99, 20, 125), (MIB, 2, number, 20, 0)):
        with pytest.raises(ValueError, match="out of range"):
            _native.allreduce_between_hosts(*wrong)


def test_costs_are_scaled_together() -> None:
    assert Costs().times(0) == FREE
    assert replace(Costs().times(2), message_s=0).sent_s_per_byte == 2 * Costs().sent_s_per_byte
