"""What coordinators and members tell each other comes back as it was, or is refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from kolovod.coordination import protocol
from kolovod.coordination.consensus import NOTHING, Ballot, Member, Proof, Record, World
from kolovod.coordination.coordinator_state import Facts, first_world
from kolovod.coordination.membership import Policy
from kolovod.coordination.protocol import Contact
from kolovod.errors import BootstrapError

FIRST = first_world([(0, "a"), (1, "b")])
NEXT = World(Ballot(3, 1), 4, (Member(1, 1, "b"), Member(7, 0, "a")), (FIRST,), frozenset({7}), 2)
RECORD = Record(Ballot(3, 1), FIRST, NEXT)
FACTS = Facts(
    NEXT,
    {
        0: Proof(0, "was killed", RECORD),
        5: Proof(5, "ended", None, has_finished=True),
        6: Proof(6, "ended", NOTHING),
    },
    {9: Member(9, 2, "c")},
    frozenset({1}),
    frozenset({7}),
)
CONTACT = Contact(3, "10.0.0.1:500,[fd00::1]:501", 17, "boot pid:[4026531836]", "/proc/17/fd/5")
POLICY = Policy(2, 8, math.inf, 0.5, 3.0, 1.0, 2.0, 0.0, 4.0, 7, True, True)


def sent(value: Any) -> Any:
    """As it arrives."""
    return json.loads(json.dumps(value))


def test_what_is_told_comes_back_as_it_was() -> None:
    assert protocol.facts_of(sent(protocol.encode_facts(FACTS))) == FACTS
    assert protocol.contact_of(sent(protocol.encode_contact(CONTACT))) == CONTACT
    assert protocol.policy_of(sent(protocol.encode_policy(POLICY))) == POLICY
    assert protocol.policy_of(sent(protocol.encode_policy(Policy()))) == Policy()
    for proof in FACTS.proofs.values():
        assert protocol.proof_of(sent(protocol.encode_proof(proof))) == proof


def without(value: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: item for key, item in value.items() if key != name}


@pytest.mark.parametrize(
    ("read", "value", "said"),
    [
        (protocol.proof_of, [1, "x", None], "a proof has number, cause, record, has_finished"),
        (protocol.proof_of, [1, "x\n", None, False], "cause is"),
        (protocol.proof_of, [-1, "x", None, False], "number is -1"),
        (protocol.proof_of, [1, "x", [], False], "expected an object"),
        (protocol.contact_of, [1, "a:1"], "a contact has number, addresses, pid, pid_space"),
        (protocol.contact_of, [1, "a:1", 0, "", ""], "pid is 0"),
        (protocol.contact_of, [1, "a" * 2000, 7, "", ""], "addresses is"),
        (protocol.facts_of, [], "expected an object"),
        (protocol.facts_of, without(protocol.encode_facts(FACTS), "leaving"), "'leaving'"),
        (protocol.facts_of, {**protocol.encode_facts(FACTS), "proofs": 3}, "proofs are a list"),
        (protocol.policy_of, {**protocol.encode_policy(POLICY), "silence_s": -1}, "silence_s is"),
        (protocol.policy_of, {**protocol.encode_policy(POLICY), "gather_s": "1"}, "gather_s is"),
        (
            protocol.policy_of,
            {**protocol.encode_policy(POLICY), "broken_s": math.nan},
            "broken_s is nan; expected seconds",
        ),
        (protocol.policy_of, {**protocol.encode_policy(POLICY), "min_np": 1.5}, "min_np is"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(
    read: Callable[[Any], Any], value: Any, said: str
) -> None:
    with pytest.raises(BootstrapError) as caught:
        read(value)
    assert said in str(caught.value)
