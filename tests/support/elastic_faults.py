"""What may happen to the processes, hosts and links of a schedule (elastic_schedules)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kolovod.coordination.consensus import Proof, World
from kolovod.coordination.coordinator_state import CoordinatorState

if TYPE_CHECKING:
    from elastic_schedules import Schedule


def kill(play: Schedule) -> None:
    process = play.one()
    if process is not None:
        play.counts["deaths"] += 1
        play.end(process, "killed")


def kill_launcher(play: Schedule) -> None:
    for process in play.processes:
        if process.alive and process.number is not None and process.number < 0:
            play.counts["launchers killed"] += 1
            play.end(process, "launcher killed")


def attach_launcher(play: Schedule) -> None:
    launchers = [p for p in play.processes if p.number is not None and p.number < 0]
    member = play.one()
    if member is None or member.coordinator_state is None or any(p.alive for p in launchers):
        return
    play.counts["launchers attached"] += 1
    state = CoordinatorState(member.coordinator_state.formed)
    state.merge(member.coordinator_state.facts(), play.now_s)
    play.launch(-1 - len(launchers), state)
    play.at(play.now_s, ("tick", play.processes[-1]))


def lose_host(play: Schedule) -> None:
    hosts = [h for h in play.hosts if play.network.host_alive[h]]
    if len(hosts) < 2:
        return
    host = play.rng.choice(hosts)
    play.counts["hosts lost"] += 1
    play.say("host lost", host)
    play.network.host_alive[host] = False
    heard = play.rng.random() < 0.3  # a scheduler tells
    for process in play.processes:
        if process.host == host and process.alive:
            process.alive = False
            if heard and process.number is not None and process.number >= 0:
                play.report(Proof(process.number, "host lost"), None, 0.5)


def partition(play: Schedule) -> None:
    if len(play.hosts) > 1:
        play.counts["partitions"] += 1
        for host in play.hosts:
            play.network.side[host] = play.rng.randrange(2)
        play.say("sides", play.network.side)


def cut_links(play: Schedule) -> None:
    """Two hosts that do not hear each other, but others hear both."""
    if len(play.hosts) > 2:
        play.counts["links cut"] += 1
        for _ in range(play.rng.choice((1, 1, 2))):
            play.network.cut.add(frozenset(play.rng.sample(play.hosts, 2)))
        play.say("cut", [sorted(pair) for pair in play.network.cut])


def tragedy(play: Schedule) -> None:
    """A side goes on alone for a while and dies; the other one hears of that."""
    if len(play.hosts) > 1:
        play.counts["sides lost"] += 1
        away = play.rng.randrange(len(play.hosts))
        for i, host in enumerate(play.hosts):
            play.network.side[host] = int(i == away)
        play.say("sides", play.network.side)
        lost = play.hosts[away]
        side = [lost] if play.rng.random() < 0.5 else [h for h in play.hosts if h != lost]
        if play.rng.random() < 0.5:
            play.doomed = True
            return
        play.at(play.now_s + play.rng.choice((0.7, 1.5, 2.5)), ("fault", ruin, side))


def ruin(play: Schedule, hosts: list[str]) -> None:
    unread = play.rng.random() < 0.5
    play.network.side = dict.fromkeys(play.hosts, 0)
    for process in play.processes:
        if process.host in hosts and process.alive and process.slot >= 0:
            process.alive = False
            play.say(f"dies with its side: {process.number}, record {not unread}")
            if process.number is not None:
                record = None if unread else process.record
                play.report(Proof(process.number, "side lost", record), None, 0.1)


def duel(play: Schedule) -> None:
    """Several take themselves for the coordinator, and see different members."""
    for process in play.rng.sample(play.processes, min(3, len(play.processes))):
        process.believes_until_s = play.now_s + 1.5
        if play.rng.random() < 0.5:
            process.deaf_until_s = play.now_s + play.rng.choice((0.4, 1.5))
    play.counts["duels"] += 1


def heal(play: Schedule) -> None:
    play.network.cut = set()
    play.network.side = dict.fromkeys(play.hosts, 0)
    play.say("healed")


def start_others(play: Schedule) -> None:
    for _ in range(play.rng.choice((1, 1, 2))):
        play.slots += play.replica_size
        play.add(play.slots - 1)


def return_slot(play: Schedule) -> None:
    dead = [p for p in play.processes if not p.alive and p.slot >= 0]
    if dead:
        play.add(play.rng.choice(dead).slot)


def end_replicas(play: Schedule) -> None:
    """Whoever starts processes ends those whose replica has lost one, again and again."""
    lost = {process.replica for process in play.processes if not process.alive}
    for process in play.living():
        if process.replica in lost:
            play.counts["ended with their replica"] += 1
            play.end(process, "ended with its replica")
    play.at(play.now_s + play.rng.choice((0.05, 0.5)), ("fault", end_replicas))


def tell_to_leave(play: Schedule) -> None:
    process = play.one()
    if process is not None and process.number is not None and process.coordinator_state is not None:
        play.counts["leaves"] += 1
        play.say(f"{process.number} is told to leave")
        process.coordinator_state.leave(process.number, play.now_s)


def stop_process(play: Schedule) -> None:
    process = play.rng.choice(play.processes)
    process.stopped_until_s = play.now_s + play.rng.choice((0.3, 1.0, 3.0))
    play.say(f"{process.number} is stopped until {process.stopped_until_s:.2f}")
    play.counts["stopped processes"] += 1


def deafen(play: Schedule) -> None:
    process = play.rng.choice(play.processes)
    process.deaf_until_s = play.now_s + play.rng.choice((0.5, 1.5, 3.0))
    play.say(f"{process.number} hears nobody until {process.deaf_until_s:.2f}")
    play.counts["deaf"] += 1


def believe(play: Schedule) -> None:
    for process in play.living():
        if play.rng.random() < 0.6:
            process.believes_until_s = play.now_s + play.rng.choice((0.5, 2.0))
    play.counts["several coordinators"] += 1


def avoid_host(play: Schedule) -> None:
    if len(play.hosts) > 1:
        play.unwanted = frozenset([play.rng.choice(play.hosts)])
        play.say("unwanted", set(play.unwanted))
        play.counts["hosts unwanted"] += 1


def lose_messages(play: Schedule) -> None:
    play.network.loss = 0.5


def die_at_once(play: Schedule, world: World) -> None:
    """Before members of a world that a side has formed have heard of it, they die."""
    play.doomed = False
    play.counts["died before they heard"] += 1
    play.network.side = dict.fromkeys(play.hosts, 0)
    for number in world.numbers:
        if play.rng.random() < 0.85:
            play.say(f"dies before it hears: {number}")
            process = play.by_number[number]
            process.alive = False
            play.report(Proof(number, "killed", process.record), None, 0.1)


def cease(play: Schedule) -> None:
    """No more faults, and what can be known is."""
    play.say("no more faults")
    heal(play)
    play.network.loss = play.network.slow = 0.0
    for process in play.processes:
        process.stopped_until_s = process.believes_until_s = process.deaf_until_s = play.now_s
    told = {proof.number for _, _, proof in play.reports}
    for number, process in play.by_number.items():
        if number >= 0 and not process.alive and number not in told:
            play.report(Proof(number, "host lost"), None, 0.0)
    play.reports = [
        (play.now_s, host if host and play.network.host_alive[host] else None, proof)
        for _, host, proof in play.reports
    ]


WEIGHTS: dict[Callable[[Schedule], None], int] = {
    kill: 5,
    lose_host: 1,
    partition: 3,
    heal: 2,
    start_others: 3,
    return_slot: 2,
    tell_to_leave: 2,
    stop_process: 3,
    cut_links: 4,
    tragedy: 3,
    duel: 3,
    deafen: 3,
    kill_launcher: 2,
    attach_launcher: 1,
    avoid_host: 1,
    lose_messages: 1,
    believe: 2,
}
"""How often each fault is drawn."""
