"""A job of elastic membership, played by hand: its state, its records, and who can be reached."""

from __future__ import annotations

from kolovod.coordination.consensus import NOTHING, Ballot, Proof, Record, World
from kolovod.coordination.coordinator_state import FIRST_LAUNCHER, CoordinatorState, first_world
from kolovod.coordination.membership import (
    Ask,
    Formed,
    Policy,
    Prepare,
    Propose,
    Stop,
    Wait,
    decide,
)

LAUNCHER = FIRST_LAUNCHER
POLICY = Policy(gather_s=1.0, silence_s=2.0, elastic_timeout_s=30.0)


class Job:
    """A launcher, and members that answer it at once, unless they are cut off."""

    def __init__(self, hosts: str, policy: Policy = POLICY) -> None:
        """``hosts``: one letter for each member."""
        self.world = first_world(enumerate(hosts))
        self.state = CoordinatorState(self.world)
        self.policy = policy
        self.records = {n: NOTHING.told(self.world) for n in self.world.numbers}
        self.cut_off: set[int] = set()
        self.slow: set[int] = set()
        """Members that do not come to an end with preparing."""
        self.unable: set[int] = set()
        """Members that cannot prepare."""
        self.now_s = 0.0

    def decide(self, coordinator: int = LAUNCHER):
        return decide(self.state, coordinator, self.policy, self.now_s)

    def lose(self, number: int, record: Record | None = None, read: bool = True) -> None:
        """It is proven dead."""
        left = (record or self.records[number]) if read else None
        self.state.prove(Proof(number, "killed by SIGKILL", left), self.now_s)
        self.cut_off.add(number)

    def leave(self, number: int) -> None:
        """It has been told to, and nobody else is."""
        self.state.leave(number, self.now_s - 1.0)

    def enter(self, slot: int, host: str) -> int:
        member = self.state.enter(slot, host, self.now_s)
        assert member is not None
        self.records[member.number] = NOTHING
        return member.number

    def step(self, coordinator: int = LAUNCHER):
        """One decision, and what those who can be reached answer."""
        decision = self.decide(coordinator)
        if isinstance(decision, Ask):
            self.state.stand(decision.ballot)
            for n in set(decision.numbers) - self.cut_off:
                self.records[n] = self.records[n].promise(decision.ballot) or self.records[n]
                self.state.promised(n, self.records[n])
        elif isinstance(decision, Prepare):
            self.state.prepare(decision.world, self.now_s)
            for n in set(decision.numbers) - self.cut_off - self.slow:
                self.state.prepared(n, decision.world.stamp, n not in self.unable)
        elif isinstance(decision, Propose):
            self.state.propose(decision.world, decision.numbers, decision.urgent, decision.reason)
            for n in set(decision.numbers) - self.cut_off:
                self.records[n] = self.records[n].agree(decision.world) or self.records[n]
                self.state.agreed(n, decision.world.stamp, self.records[n])
        elif isinstance(decision, Formed):
            self.state.declare(decision.world, self.now_s)
            self.world = decision.world
            for n in decision.world.numbers - self.cut_off:
                self.records[n] = self.records[n].told(decision.world)
        return decision

    def settle(self, coordinator: int = LAUNCHER):
        """Until there is nothing to do. Returns all decisions."""
        made = []
        for _ in range(12):
            made.append(self.step(coordinator))
            if isinstance(made[-1], Wait | Stop):
                return made
        raise AssertionError(made)

    def hosts(self) -> str:
        return "".join(member.host for member in self.world.members)


def world(hosts: str, epoch: int = 1) -> World:
    members = first_world(enumerate(hosts)).members
    return World(Ballot(epoch, LAUNCHER), epoch, members)


def newer_world(job: Job, numbers: set[int]) -> World:
    """What a side has formed while the launcher was cut off from it."""
    members = tuple(member for member in job.world.members if member.number in numbers)
    return World(Ballot(7, 1), 5, members, (job.world.without_basis(),), resets=1)
