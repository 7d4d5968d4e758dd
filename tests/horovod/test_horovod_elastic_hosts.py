"""Which hosts there are, by Horovod's names: who finds them, and how a state hears of a change."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from horovod.common.notifications import HostUpdateResult, WorkerNotificationManager, _kind
from horovod.runner.elastic.discovery import FixedHosts, HostDiscovery, HostDiscoveryScript
from kolovod.coordination.consensus import Ballot, Member
from kolovod.coordination.consensus import World as ElasticWorld
from kolovod.errors import BootstrapError

ADDED, REMOVED = HostUpdateResult.added, HostUpdateResult.removed


# --- who hears of changes ---


def world(*numbers):
    members = tuple(Member(number, number, "a") for number in numbers)
    return ElasticWorld(Ballot(0, -1), 1, members)


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [((0, 1), (0,), REMOVED), ((0,), (0, 5), ADDED), ((0, 1), (0, 5), HostUpdateResult.mixed),
     ((0, 1), (0, 1), HostUpdateResult.no_update)],
)  # fmt: skip
def test_what_has_changed(before, after, kind):
    assert _kind(world(*before), world(*after)) == kind


def test_listeners_are_told(monkeypatch):
    client = SimpleNamespace(change=None, others_come=False)
    monkeypatch.setattr("horovod.common.membership.join", lambda: client)
    manager = WorkerNotificationManager()
    manager.init()
    heard = []
    listener = SimpleNamespace(on_hosts_updated=lambda *message: heard.append(message))
    manager.register_listener(listener)
    assert heard == []
    client.change = world(0, 1), world(0)
    client.hears_of_change()  # as the client's thread does
    manager.look()
    assert [update for _, update in heard] == [REMOVED] * 2
    assert heard[0][0] < heard[1][0]
    manager.remove_listener(listener)
    manager.look()
    assert len(heard) == 2
    manager.register_listener(listener)  # who comes later hears of what waits
    assert len(heard) == 3
    client.change, client.others_come = None, True
    client.hears_of_change()  # of hosts whose processes are on their way
    assert heard[-1][1] == ADDED


# --- discovery ---


@pytest.mark.parametrize(
    ("said", "wanted"),
    [("", {}), ("\n", {}), ("a:2\nb\n", {"a": 2, "b": 4}), ("10.0.0.1:3", {"10.0.0.1": 3})],
)
def test_a_discovery_script(said, wanted):
    script = HostDiscoveryScript("unused", 4)
    script._execute_discovery_script = lambda: said
    assert script.find_available_hosts_and_slots() == wanted


def test_a_discovery_script_is_run_by_a_shell(tmp_path):
    (tmp_path / "hosts").write_text("a:2\n")
    script = HostDiscoveryScript(f"cat {tmp_path}/hosts | tr a b", None)
    assert script.find_available_hosts_and_slots() == {"b": 2}
    with pytest.raises(BootstrapError, match=r"'exit 3' ended with 3"):
        HostDiscoveryScript("exit 3", 1).find_available_hosts_and_slots()
    with pytest.raises(ValueError, match=r"'a b'.*not of the form"):
        HostDiscoveryScript("echo a b", 1).find_available_hosts_and_slots()


def test_fixed_hosts():
    fixed = FixedHosts({"a": 1})
    assert fixed.find_available_hosts_and_slots() == {"a": 1}
    fixed.set({"b": 2})
    assert fixed.find_available_hosts_and_slots() == {"b": 2}
    with pytest.raises(TypeError, match="abstract"):
        HostDiscovery()
