"""Codes of errors: in tracebacks, by ``kolovod explain``, and on the documentation's page."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
from pathlib import Path

import error_messages
import pytest
from launched import run, run_code

from kolovod import errors
from kolovod.config import load
from kolovod.errors import RankLostError, text_with_code
from kolovod.explanations import EXPLANATIONS, find

pytestmark = pytest.mark.environments

ROOT = Path(__file__).parents[2]
NOTE = "[K201] cause and cure: kolovod explain K201"


def test_a_class_has_one_code_wherever_it_is_raised() -> None:
    with pytest.raises(errors.InvalidArgumentError) as caught:
        load({"KOLOVOD_FUSION_BYTES": "x"})
    assert caught.value.code == "K101"
    assert errors.from_engine(Exception(1, "text")).code == "K103"
    assert errors.from_engine(Exception(4, "text")).code == "K301"
    classes = [each for each in map(errors.__dict__.get, errors.__all__) if isinstance(each, type)]
    codes = {each: each("text").code for each in classes if each is not errors.KolovodError}
    assert len(set(codes.values())) == len(codes)
    for kind, code in codes.items():
        (explained,) = (each for each in EXPLANATIONS if each.code == code)
        own, *others = explained.classes
        assert own == kind.__name__
        assert all(issubclass(kind, getattr(errors, each, object)) for each in others)


def test_errors_of_other_libraries_have_none() -> None:
    assert text_with_code(errors.KolovodError("of a test")) == "of a test"
    assert not hasattr(errors.KolovodError("of a test"), "__notes__")
    assert text_with_code(ValueError("x")) == "x"


def test_the_text_stays_as_it_was_and_the_code_is_a_note() -> None:
    for status, rank, code in ((3, None, "K201"), (4, 3, "K301")):
        error = errors.from_engine(Exception(status, "rank 3 did it"))
        for each in (error, pickle.loads(pickle.dumps(error))):
            assert str(each) == "rank 3 did it"
            assert each.code == code
            assert each.__notes__ == [f"[{code}] cause and cure: kolovod explain {code}"]
            assert getattr(each, "rank", None) == rank
        assert text_with_code(error) == f"rank 3 did it (kolovod explain {code})"
    assert isinstance(error, RankLostError)


SCRIPT = """
import numpy
import kolovod

kolovod.init()
try:
    kolovod.allreduce(numpy.ones(2 + kolovod.rank(), dtype=numpy.float32), name="x")
except kolovod.errors.MismatchError as error:
    raise RuntimeError(f"outer: {error}") from error
"""


def test_a_ranks_traceback_names_it_once() -> None:
    ended = run_code(2, SCRIPT, "--keep-going")  # both ranks say it, however late they are
    assert ended.returncode == 1
    shown = [line for line in ended.stderr.splitlines() if line.startswith("[0]<stderr>:")]
    assert sum("kolovod explain K201" in line for line in shown) == (
        1 if sys.version_info >= (3, 11) else 0  # older ones show no notes
    )
    assert "outer: allreduce 'x': shape differs" in ended.stderr
    assert "kolovod: rank" in ended.stderr


def test_what_explain_prints() -> None:
    by_code, by_class = run("explain", "k201"), run("explain", "MismatchError")
    assert by_code.stdout == by_class.stdout
    assert by_code.stdout.startswith("K201: the ranks disagree (MismatchError)\nCause: Under")
    assert "\nCure: " in by_code.stdout
    assert max(map(len, by_code.stdout.splitlines())) <= 80
    assert run("explain", "kolovod.errors.BootstrapError").stdout.count("Cause: ") == 5
    listed = run("explain").stdout.splitlines()
    assert [line[:4] for line in listed] == [each.code for each in EXPLANATIONS]
    refused = run("explain", "K000")
    assert refused.returncode == 2
    assert "'K000' is no code of an error" in refused.stderr


def test_every_code_is_one_and_every_public_error_has_one() -> None:
    assert len({each.code for each in EXPLANATIONS}) == len(EXPLANATIONS)
    for each in EXPLANATIONS:
        assert (ROOT / "docs" / each.page).exists() or each.page == "reference/command-line.md"
    for name in errors.__all__:
        if isinstance(getattr(errors, name), type) and name != "KolovodError":
            assert find(name), name


@pytest.fixture(scope="module")
def found() -> list[error_messages.Message]:
    """Once: all sources are read for them."""
    return error_messages.messages()


def test_the_page_has_every_code(
    found: list[error_messages.Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each message has one: ``page`` exits where that is not so."""
    monkeypatch.setattr(error_messages, "messages", lambda: found)
    page = error_messages.page()
    for each in EXPLANATIONS:
        assert f"## {each.code}: {each.title} {{#{each.code.lower()}}}\n" in page


def test_messages_are_found_in_the_sources(found: list[error_messages.Message]) -> None:
    texts = {(each.kind, each.template) for each in found}
    engine = "{...} differs: rank {...} has {...}, rank {...} has {...}"
    assert ("MismatchError", engine) in texts
    said = "there is no world in this process: call init() first"
    assert ("NotInitializedError", said) in texts
    assert len(texts) > 600


def test_a_message_without_a_code_is_refused() -> None:
    message = error_messages.Message("KolovodError", "keras/x.py", "a text")
    with pytest.raises(SystemExit, match=r"keras/x.py: KolovodError\('a text'\) has no code"):
        error_messages.by_code([message])


def test_a_reader_that_stops_is_no_error() -> None:
    """As ``kolovod explain | head -1`` does."""
    command = [sys.executable, "-m", "kolovod", "explain"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        said = process.stderr.read().decode()
        assert process.wait(60) == 128 + signal.SIGPIPE, said
    assert said == ""
