"""A rank that dies while its world forms, where no launcher tells anybody: the others hear it.

The start timeout is longer than the tests: it is not by that.
"""

from __future__ import annotations

import pytest
from slow import slow_but
from test_external_meeting import CODE, run, slurm

COMMON = {
    "KOLOVOD_SECRET": "a secret of the user, which is long",
    "KOLOVOD_STORE_HOST": "localhost",
    "KOLOVOD_START_TIMEOUT_S": "300",
}
DYING = """
import os
from kolovod.rendezvous import {module}
if os.environ["SLURM_PROCID"] == "{rank}":
    {module}.{place} = lambda *_: os._exit(9)
"""


def die(rank: int, place: str) -> str:
    """A program whose ``rank`` ends without a word where it comes to ``place``."""
    module, _, name = place.partition(".")
    return DYING.format(rank=rank, module=module, place=name) + CODE


def survivors(done: list[tuple[int, str, str]], dead: int) -> list[str]:
    """The last line that each of the others has said, but for the note with the error's code."""
    assert done[dead][0] == 9, done
    said = [one for number, one in enumerate(done) if number != dead]
    assert all(code == 1 for code, _, _ in said), done
    lines = [error.strip().splitlines() for _, _, error in said]
    return [[line for line in of_one if not line.startswith("[K")][-1] for of_one in lines]


def test_before_all_have_come() -> None:
    ranks = [slurm(rank, 2, size=4, **COMMON) for rank in range(3)]  # rank 3 never comes
    for text in survivors(run(ranks, code=die(1, "client.parse_answer")), 1):
        assert "RankLostError: rank 1 on host n2 (pid " in text
        assert "ended while the world was forming" in text


@pytest.mark.parametrize("dead", slow_but((0,), (0, 1, 2)))
def test_a_leader_between_the_stores_answer_and_its_connections(dead: int) -> None:
    """Of hosts with a rank each; the first one's process has the rendezvous server in it."""
    ranks = [slurm(rank, 3, size=3, **COMMON) for rank in range(3)]
    for text in survivors(run(ranks, code=die(dead, "mesh.Links.connect_leaders")), dead):
        if dead:
            assert f"RankLostError: rank {dead} on host n{dead + 1} (pid " in text
        # a connection to it fails: another leader's, or the rendezvous server's if that
        # has not answered
        else:
            assert "rank 0 on host n1 (pid " in text or "rank 0's process, if that holds it" in text


def test_a_follower_before_it_has_met_its_leader() -> None:
    ranks = [slurm(rank, 2, size=4, **COMMON) for rank in range(4)]
    for text in survivors(run(ranks, code=die(3, "bootstrap.follow")), 3):
        assert "RankLostError: rank 3 on host n2 (pid " in text


def test_a_leader_before_it_has_met_its_followers() -> None:
    ranks = [slurm(rank, 2, size=4, **COMMON) for rank in range(4)]
    for text in survivors(run(ranks, code=die(1, "segment_handover.Leader.run")), 1):
        assert "RankLostError: rank 1 on host n2 (pid " in text
