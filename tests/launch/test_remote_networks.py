"""Which addresses ranks on other hosts are reached at: the rendezvous server's, and their own."""

from __future__ import annotations

import re

import pytest
from netbed import Bed, unavailable
from reached_by_ssh import (  # noqa: F401
    HELLO,
    made_bed,
    run,
    written_script,
)

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())


@pytest.mark.slow
def test_the_store_where_the_user_says_that_others_reach_it(bed, script):
    """As behind NAT: at an address that the launcher's host does not know as its own."""
    code = HELLO + "print('met at', os.environ['KOLOVOD_STORE'], flush=True)"
    place = {"KOLOVOD_STORE_HOST": "login-v6", "KOLOVOD_STORE_PORT": "23457"}
    done = run(bed, "-H", "a,login", *script(code), **place)
    assert done.returncode == 0, done.stderr
    told = re.findall(r"\[(\d)\]<stdout>:met at (.*)", done.stdout)
    assert dict(told)["0"] == "login-v6:23457"
    assert dict(told)["1"].startswith(f"{bed.address('login')}:23457,[")
    done = run(bed, "-H", "a", *script(HELLO), KOLOVOD_STORE_HOST="login")
    assert done.returncode == 2
    assert "KOLOVOD_STORE_HOST=login, where other hosts reach this one, needs" in done.stderr


@pytest.mark.slow
def test_a_store_that_others_do_not_reach(bed, script):
    place = {"KOLOVOD_STORE_HOST": bed.address("b"), "KOLOVOD_STORE_PORT": "23457"}
    done = run(bed, "-H", "a:2", *script(HELLO), **place)
    assert done.returncode == 1
    assert f"cannot reach the job's rendezvous server at {bed.address('b')}:23457" in done.stderr
    assert "set KOLOVOD_STORE_HOST and KOLOVOD_STORE_PORT for the launcher to" in done.stderr


def peers_of(text):
    """By rank, the addresses at which others listen for it, as it was told."""
    return {int(rank): found.split() for rank, found in re.findall(r"listens (\d+) (.*)", text)}


LISTENS = """
import os, kolovod, numpy
from kolovod.rendezvous import bootstrap
original = bootstrap.addresses_beside
def told(*arguments):
    found = original(*arguments)
    print("listens", os.environ["KOLOVOD_RANK"], *found, flush=True)
    return found
bootstrap.addresses_beside = told
kolovod.init()
total = kolovod.allreduce(numpy.full(100_000, 1.0), op=kolovod.Sum)
assert total[0] == kolovod.size()
"""


@pytest.mark.slow
def test_which_network_two_hosts_share_is_found_by_asking(script):
    """The first network of one host is down: the names of interfaces tell nothing of that."""
    with Bed(["login", "a", "b"], networks=2) as bed:
        firsts = {name: bed.addresses(name) for name in bed.names}
        bed.set_link("b", up=False, network=0)
        done = run(bed, "-H", "a:1,b-1:1", *script(LISTENS))
        assert done.returncode == 0, done.stderr
        heard = peers_of(done.stdout)
        assert {a.ipv4 for a in firsts["a"]} <= set(heard[0])
        bed.set_link("b", up=True, network=0)
        flags = ["--interface", "eth1,eth0"]
        done = run(bed, *flags, "-H", "a:2,b:2", *script(LISTENS))
        assert done.returncode == 0, done.stderr
        heard = peers_of(done.stdout)
        # Ranks of a host take turns at the interfaces.
        assert heard[0][0] == heard[1][-2] == firsts["a"][1].ipv4
        assert heard[1][0] != heard[0][0]
        done = run(bed, "--interface", "eth7", "-H", "a:1,b:1", *script(LISTENS))
        assert done.returncode != 0
        assert "interface 'eth7' is not on login; there: " in done.stderr
