"""Ranks that have built different models are told which, by their numbers in the world."""

from __future__ import annotations

import pytest

from kolovod.errors import MismatchError
from kolovod.gradients.agreement import Agreement
from kolovod.testing.loopback import loopback


@pytest.mark.parametrize("members", [(0, 1, 2, 3), (1, 3)])
def test_culprits_are_named_by_their_ranks_in_the_world(members):
    with loopback(4) as world:
        group = world.process_set(members) if len(members) < 4 else None

        def work(kv):
            rank = kv.world().rank
            if rank not in members:
                return ""
            mine = [("weight", (2, 3) if rank == 3 else (2, 4))]
            with pytest.raises(MismatchError) as raised:
                Agreement(kv.world, group).extend(mine, "build the same")
            return str(raised.value)

        texts = world.run(work)
    wanted = f"rank {members[0]} has 'weight' (2, 4), rank 3 has 'weight' (2, 3); build the same"
    assert all(wanted in texts[rank] for rank in members)
