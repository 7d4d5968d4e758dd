"""kolovod.errors: the tree, and the way from the engine's codes into it."""

from __future__ import annotations

import pickle

import pytest

from kolovod import _native, errors

FUNCTIONS = ("from_engine", "text_with_code", "unreached_rank")
CLASSES = [name for name in errors.__all__ if name not in FUNCTIONS]


def test_every_public_error_is_a_kolovod_error() -> None:
    assert len(CLASSES) == len(errors.__all__) - len(FUNCTIONS)
    assert all(issubclass(getattr(errors, name), errors.KolovodError) for name in CLASSES)


@pytest.mark.parametrize("name", CLASSES)
def test_the_tree_in_the_docstring_is_the_real_one(name: str) -> None:
    lines = (errors.__doc__ or "").splitlines()
    drawn = {}
    path: list[str] = []
    for line in lines:
        words = line.lstrip(" │├└─").split()
        if not words or not words[0].endswith("Error"):
            continue
        depth = (len(line) - len(line.lstrip(" │├└─")) - 4) // 4
        path[depth:] = [words[0]]
        drawn[words[0]] = path[depth - 1] if depth else "RuntimeError"
    assert drawn[name] == getattr(errors, name).__mro__[1].__name__


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("invalid_argument", errors.InvalidArgumentError),
        ("duplicate_name", errors.DuplicateNameError),
        ("mismatch", errors.MismatchError),
        ("rank_lost", errors.RankLostError),
        ("rank_left", errors.RankLeftError),
        ("shut_down", errors.ShutDownError),
        ("timeout", errors.WaitTimeoutError),
        ("interrupted", errors.InterruptedByRankError),
        ("internal", errors.InternalError),
        ("late", errors.LateRankError),
    ],
)
def test_from_engine_maps_every_status(status: str, kind: type[errors.KolovodError]) -> None:
    error = errors.from_engine(_native.EngineError(_native.STATUS[status], "rank 3 did it"))
    assert type(error) is kind
    assert str(error) == "rank 3 did it"


def test_every_status_of_the_engine_is_mapped() -> None:
    for name, code in _native.STATUS.items():
        if name != "ok":
            error = errors.from_engine(_native.EngineError(code, "text"))
            assert "unknown code" not in str(error), name


@pytest.mark.parametrize("args", [(99, "text"), ("text",), ("rank_lost", "text"), ()])
def test_an_unknown_failure_is_an_internal_error(args: tuple[object, ...]) -> None:
    assert type(errors.from_engine(_native.EngineError(*args))) is errors.InternalError


@pytest.mark.parametrize(
    ("message", "rank"),
    [
        ("rank 12 on host a (pid 3) was lost", 12),
        ("rank 0: gone", 0),
        ("the rank 4", None),
        ("rank x", None),
        ("rank 1st", None),
    ],
)
def test_the_lost_rank_is_read_from_the_message(message: str, rank: int | None) -> None:
    assert errors.RankLostError(message).rank == rank


def test_an_explicit_rank_wins_and_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(errors.RankLostError("rank 1 is gone", rank=7)))
    assert type(error) is errors.RankLostError
    assert (error.rank, str(error)) == (7, "rank 1 is gone")


def test_builtin_kinds() -> None:
    assert issubclass(errors.NotInitializedError, ValueError)
    assert issubclass(errors.InvalidArgumentError, ValueError)
    assert issubclass(errors.WaitTimeoutError, TimeoutError)
    assert not issubclass(errors.StartTimeoutError, errors.CollectiveAbortedError)


@pytest.mark.parametrize(
    ("error", "rank"),
    [
        (errors.RankLostError("rank 2 on host a was lost"), 2),
        (errors.LateRankError("rank 1 is late", 1), 1),
        (errors.BootstrapError("rank 3 on host b cannot be reached from rank 0"), 3),
        (errors.BootstrapError("not all ranks came"), None),
        (errors.RankLeftError("rank 2 has left"), None),  # to form the next world, as all do
        (ValueError("rank 2 on host a was lost"), None),
    ],
)
def test_the_rank_that_could_not_be_reached(error: Exception, rank: int | None) -> None:
    assert errors.unreached_rank(error) == rank
