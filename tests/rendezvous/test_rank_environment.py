"""kolovod.rendezvous.rank_environment: what the launcher writes, a rank reads."""

from __future__ import annotations

import re

import pytest

from kolovod.errors import InvalidArgumentError
from kolovod.rendezvous.rank_environment import (
    RankEnvironment,
    local_and_cross,
    read_rank_environment,
    thread_limits,
    without_mpi_variables,
)


def test_a_place_survives_the_environment() -> None:
    place = RankEnvironment(3, 8, 1, 2, 1, 4, "node", "127.0.0.1:5", "s3cret")
    assert read_rank_environment(place.variables()) == place
    assert read_rank_environment({}) is None
    assert read_rank_environment({"KOLOVOD_RANK": "0", "KOLOVOD_SIZE": "1"}) == RankEnvironment()


def test_what_is_told_as_open_mpi_would_is_not_handed_on_to_another_job() -> None:
    place = RankEnvironment(3, 8, 1, 2, 1, 4)
    told = {**place.variables(), **place.mpi_variables()}
    assert without_mpi_variables(told) == place.variables()
    by_mpirun = {**RankEnvironment(1, 2).mpi_variables(), "HOME": "/"}
    assert without_mpi_variables(by_mpirun) == by_mpirun
    others = {**told, "OMPI_COMM_WORLD_SIZE": "5"}  # the user's, who knows why
    assert without_mpi_variables(others) == {**place.variables(), "OMPI_COMM_WORLD_SIZE": "5"}


def test_what_others_set_is_no_place_yet() -> None:
    by_hand = {"KOLOVOD_RANK": "0", "KOLOVOD_SIZE": "2", "KOLOVOD_STORE_HOST": "a"}
    assert read_rank_environment(by_hand) is None
    assert read_rank_environment({"KOLOVOD_SIZE": "2", "JOB_COMPLETION_INDEX": "0"}) is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"KOLOVOD_SIZE": "2"}, "KOLOVOD_SIZE='2' is set, but KOLOVOD_RANK is not"),
        ({"KOLOVOD_RANK": "0"}, "KOLOVOD_SIZE=''"),
        ({"KOLOVOD_RANK": "x", "KOLOVOD_SIZE": "2"}, "KOLOVOD_RANK='x': expected a whole"),
        ({"KOLOVOD_RANK": "2", "KOLOVOD_SIZE": "2"}, "KOLOVOD_RANK=2 and KOLOVOD_SIZE=2"),
        ({"KOLOVOD_RANK": "0", "KOLOVOD_SIZE": "2"}, "KOLOVOD_STORE is not set"),
        (
            {"KOLOVOD_RANK": "0", "KOLOVOD_SIZE": "2", "KOLOVOD_STORE": "h:1"},
            "KOLOVOD_SECRET is not set",
        ),
    ],
)
def test_a_wrong_place_is_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape(message)):
        read_rank_environment(environ)


def test_local_and_cross_numbers() -> None:
    hosts = ["a", "a", "b", "b", "b", "c"]
    assert [local_and_cross(hosts, rank) for rank in range(6)] == [
        (0, 2, 0, 3),
        (1, 2, 0, 2),
        (0, 3, 1, 3),
        (1, 3, 1, 2),
        (2, 3, 0, 1),
        (0, 1, 2, 3),
    ]


def test_thread_limits() -> None:
    assert thread_limits({}, 4, 2)["OMP_NUM_THREADS"] == "1"
    assert thread_limits({"MKL_NUM_THREADS": "3"}, 2, 8) == {
        "OMP_NUM_THREADS": "4",
        "OPENBLAS_NUM_THREADS": "4",
    }
    assert thread_limits({"OMP_NUM_THREADS": "2"}, 2, 8) == {}
