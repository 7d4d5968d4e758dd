"""When gradients are sent: kolovod.gradients.spec."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kolovod.config import load
from kolovod.gradients import spec


@pytest.mark.parametrize(
    ("elastic", "coordinator", "traced"),
    [("0", "", False), ("1", "", True), ("", "", False), ("0", "127.0.0.1:1", True)],
)
def test_what_is_sent_in_a_world_of_one(monkeypatch, elastic, coordinator, traced):
    settings = load({"KOLOVOD_ELASTIC": elastic})
    environment = SimpleNamespace(coordinator=coordinator)
    world = SimpleNamespace(size=1, settings=settings, environment=environment)
    asked = []
    monkeypatch.setattr(spec, "current", lambda: world)
    monkeypatch.setattr(spec, "current_tracked", lambda: asked.append(True))
    assert not spec.sends(world, is_traced=False)
    assert spec.sends(world, is_traced=True) is traced
    assert len(asked) == (1 if traced else 2)  # who leaves operations out is for this world only
    assert spec.sends(SimpleNamespace(size=2), is_traced=True)
    assert spec.sends(SimpleNamespace(size=2), is_traced=False)
