"""``kolovod run`` on a bed of namespaces with an sshd each: what its tests share."""

from __future__ import annotations

import os
import sys

import pytest
from netbed import Bed

DEADLINE_S = 60
RUN = [sys.executable, "-m", "kolovod", "run"]
HELLO = """
import os, sys, kolovod, numpy
kolovod.init()
total = kolovod.allreduce(numpy.full(3, kolovod.rank() + 1.0), op=kolovod.Sum)
places = (kolovod.rank(), kolovod.size(), kolovod.local_rank(), kolovod.cross_rank(), total[0])
print("place", *places, os.environ["KOLOVOD_HOST"], os.uname().nodename, os.getcwd(), flush=True)
"""


@pytest.fixture(name="bed", scope="module")
def made_bed():
    with Bed(["login", "a", "b"]) as bed:
        yield bed


@pytest.fixture(name="script")
def written_script(tmp_path):
    def write(code):
        file = tmp_path / "script.py"
        file.write_text(code)
        return [sys.executable, str(file)]

    return write


def environment(**variables):
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**os.environ, "PYTHONPATH": path, **variables}


def run(bed, *arguments, **variables):
    """``kolovod run`` on the login host, to its end."""
    return bed.run("login", [*RUN, *arguments], timeout_s=DEADLINE_S, env=environment(**variables))
