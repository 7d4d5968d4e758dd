"""The bucket plan: a pure function of sizes, groups and order."""

from __future__ import annotations

import pytest

from kolovod.errors import InvalidArgumentError
from kolovod.gradients import plan
from kolovod.gradients.plan import Groups, cut

MIB = 1 << 20


@pytest.mark.parametrize(
    ("sizes", "buckets"),
    [
        ({}, []),
        ({0: 4}, [[0]]),
        ({2: 4, 1: 4, 0: 4}, [[2, 1, 0]]),
        ({0: MIB // 2, 1: MIB // 2, 2: 1}, [[0, 1], [2]]),  # exactly full
        ({0: 1, 1: 3 * MIB, 2: 1, 3: 1}, [[0], [1], [2, 3]]),  # a large one is alone
        ({1: 0, 0: 4}, [[1, 0]]),  # an empty one comes first
        ({0: MIB, 1: 0}, [[0, 1]]),
    ],
)
def test_neighbours_fill_a_bucket(sizes, buckets):
    assert cut(sizes) == buckets


def test_a_smaller_bucket(monkeypatch):
    monkeypatch.setattr(plan, "BUCKET_BYTES", 8)
    assert cut(dict.fromkeys(range(5), 4)) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(
    ("bits_per_s", "all_mib", "kib"),
    [
        (0, 100, 1024),  # one host
        (1e6, 100, 128),
        (100e6, 100, 128),
        (250e6, 100, 256),
        (1e9, 100, 1024),
        (3e9, 100, 4096),
        (100e9, 100, 4096),
        (100e9, 16, 2048),  # eight buckets
        (100e9, 1, 1024),
        (100e6, 0.01, 128),
    ],
)
def test_a_bucket_is_what_the_link_carries(bits_per_s, all_mib, kib):
    rate, whole = bits_per_s / 8e6, int(all_mib * MIB)
    assert plan.bucket_bytes(rate, whole) == kib << 10
    assert not plan.is_to_be_cut_anew(kib << 10, rate, whole)
    for factor in (0.9, 1.1):  # as estimates vary
        assert not plan.is_to_be_cut_anew(kib << 10, rate * factor, whole)
    for other in (kib // 4, kib * 4):
        assert plan.is_to_be_cut_anew(other << 10, rate, whole) == bool(bits_per_s)


@pytest.mark.parametrize(
    ("bits_per_s", "all_mib", "mib"),
    [
        (0, 100, 8),
        (0, 320, 16),
        (0, 4000, 32),
        (0, 32, 2),
        (0, 1, 1),
        (100e6, 100, 1),
        (5e9, 100, 8),
        (10e9, 1000, 16),
        (100e9, 1000, 32),
        (100e9, 100, 16),
    ],
)
def test_a_bucket_of_gradients_on_a_gpu(bits_per_s, all_mib, mib):
    rate, whole = bits_per_s / 8e6, all_mib * MIB
    assert plan.bucket_bytes(rate, whole, on_device=True) == mib * MIB
    assert not plan.is_to_be_cut_anew(mib * MIB, rate, whole, on_device=True)
    for other in (mib / 4, mib * 4):
        anew = plan.is_to_be_cut_anew(int(other * MIB), rate, whole, on_device=True)
        assert anew == bool(bits_per_s)


def test_groups_travel_whole_however_large_and_others_beside_them():
    sizes = dict.fromkeys(reversed(range(5)), MIB)
    assert cut(sizes, {4: 0, 1: 0, 3: 7}) == [[4, 1], [3], [2], [0]]


@pytest.mark.parametrize(
    ("count", "members", "numbers"),
    [
        (2, 5, [0, 0, 0, 1, 1]),
        (3, 3, [0, 1, 2]),
        (7, 2, [0, 1]),
        (2, 0, []),
    ],
)
def test_a_number_of_groups(count, members, numbers):
    groups = Groups(count, "parameters")
    assert groups
    assert groups.is_number
    found = groups.among({10 + i: object() for i in range(members)})
    assert found == {10 + i: number for i, number in enumerate(numbers)}


@pytest.mark.parametrize("given", [None, 0, [], ()])
def test_no_groups(given):
    groups = Groups(given, "parameters")
    assert not groups
    assert groups.among({0: "a"}) == {}


def test_lists_and_what_is_in_none():
    groups = Groups([["a", "b"], iter("c"), ()], "letters", str)
    assert groups.among({3: "c", 2: "x", 1: "a"}) == {3: 1, 1: 0}
    groups.check_known("abcx")
    with pytest.raises(
        InvalidArgumentError, match=r"groups\[1\] contains a str, which the optimizer does not"
    ):
        groups.check_known("abx")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (-1, "groups is -1: give a number of groups, 0 for none"),
        ("two", "groups is 'two': give a number, or lists of letters"),
        (True, "groups is True"),
        (1.0, "groups is 1.0"),
        ([1, 2], r"groups is \[1, 2\]"),
        ([["a"], ["b", "a"]], "a str is in groups 0 and 1: give it once"),
        ([["a"], [None]], r"groups\[1\] contains a NoneType"),
    ],
)
def test_what_cannot_be_groups(given, text):
    with pytest.raises(InvalidArgumentError, match=text):
        Groups(given, "letters", lambda member: member)
