"""kolovod.ray: parts of it that need no cluster."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from frameworks import is_installed

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.skipif(not is_installed("ray"), reason="Ray is not installed"),
]


def test_a_process_that_was_not_prepared_has_left_nothing():
    """An error would be taken for one of the node, and its monitor be killed with all its files."""
    from kolovod.ray.node_monitor import Kept, NodeMonitor

    monitor = NodeMonitor(None)
    assert monitor.bury(3, 1.0) == Kept(None, b"")
    monitor._port.close()


@pytest.mark.parametrize(
    ("taken", "count", "indices"),
    [
        ({}, 3, [0, 1, 2]),
        ({"CPU": 1.0}, 3, [0, 1, 2]),  # what is left of the first bundle is enough
        ({"CPU": 2.0}, 3, None),
        ({"CPU": 2.0}, 2, [1, 2]),
        ({}, 2, [1, 2]),
        ({}, 4, None),
    ],
)
def test_no_rank_waits_for_the_bundle_that_the_caller_takes(taken, count, indices, monkeypatch):
    from kolovod.ray import places

    group = SimpleNamespace(bundle_specs=[{"CPU": 2.0}, {"CPU": 1.0}, {"CPU": 1.0}])
    monkeypatch.setattr(places, "_taken_by_this_process", lambda: taken)
    found = places.Bundles.within(group, count, {"CPU": 1.0})
    assert (found and [bundle.index for bundle in found._bundles]) == indices
