"""When gradients are sent: kolovod.gradients.spec."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kolovod.config import load
from kolovod.gradients import spec


@pytest.mark.parametrize(
    ("elastic", "alone", "traced"), [("0", False, False), ("1", False, True), ("", False, False)]
)
def test_what_is_sent_in_a_world_of_one(monkeypatch, elastic, alone, traced):
    world = SimpleNamespace(size=1, settings=load({"KOLOVOD_ELASTIC": elastic}))
    asked = []
    monkeypatch.setattr(spec, "current", lambda: world)
    monkeypatch.setattr(spec, "place", lambda: asked.append(True))
    assert spec.sends(world, is_traced=False) is alone
    assert spec.sends(world, is_traced=True) is traced
    assert len(asked) == (1 if traced else 2)  # who leaves operations out is for this world only
    assert spec.sends(SimpleNamespace(size=2), is_traced=True)
    assert spec.sends(SimpleNamespace(size=2), is_traced=False)
