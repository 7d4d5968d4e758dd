"""Jobs of ``kolovod run --elastic`` that read streams; processes are killed and replaced."""

from __future__ import annotations

import importlib.util
import json
import re

import elastic_stream_script
import pytest
from jobs_with_deaths import killed, run

loader = pytest.param(
    "loader",
    "3",
    marks=[
        pytest.mark.slow,
        pytest.mark.frameworks,
        pytest.mark.skipif(
            importlib.util.find_spec("torchdata") is None, reason="torchdata is not installed"
        ),
    ],
)


@pytest.mark.parametrize(
    ("kind", "fewest"),
    [
        ("files", "3"),
        pytest.param("recomputed", "3", marks=pytest.mark.slow),
        pytest.param("files", "1", marks=pytest.mark.slow),
        loader,
    ],
)
def test_every_sample_counts_once_in_an_epoch(kind: str, fewest: str) -> None:
    """A process dies, another one takes its place; then the first rank does.

    With fewer ranks needed the others go on meanwhile.
    """
    script = (elastic_stream_script.__file__, kind, "3", "1:0:2,0:1:4")
    done = run("-np", "3", "--min-np", fewest, script=script)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in re.findall(r"\{.*\}", done.stdout)]
    assert len(results) == 3 if fewest == "3" else results, done.stderr
    for result in results:
        assert result["used"] == [[1.0] * elastic_stream_script.SAMPLES] * 3
    assert killed(done.stderr) == 2
