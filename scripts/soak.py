"""Random operations for minutes, verified by NumPy, and their memory: `make soak-short`.

usage: python scripts/soak.py [--seconds S] [--np N] [--seed SEED] [--folder FOLDER] [--slack-s S]

Starts N ranks of tests/support/soaking.py by `kolovod run`: every verb, random dtypes, shapes, ops
and process sets, several operations at once in another order on each rank. Prints how many were
done and verified, and the resident memory of each rank over time. A seed repeats the operations.
Exits with 1 if a result is wrong, if something hangs, or if a rank's own memory (RssAnon) still
grows after the first half: the median of the last quarter may be above that of the second by 20 %
and 32 MiB.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

RANK = Path(__file__).resolve().parent.parent / "tests" / "support" / "soaking.py"
GROWTH, GROWTH_KIB = 1.2, 32 << 10
_KINDS = ("RssAnon", "RssShmem", "RssFile")

Sample = Mapping[str, float]
"""``s`` since the beginning, operations ``started`` and ``verified``, KiB of each kind."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--np", type=int, default=3, help="ranks")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--folder", type=Path, help="keeps the samples there")
    parser.add_argument(
        "--slack-s", type=float, default=120.0, help="to start the ranks, and for the last round"
    )
    options = parser.parse_args()
    print(f"seed {options.seed}, {options.np} ranks, {options.seconds:g} s", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        code = soak(folder, options.np, options.seed, options.seconds, options.slack_s)
        if code != 0:
            print(f"failed with {code}; repeat with --seed {options.seed} --np {options.np}")
            return 1
        by_rank = [samples(folder / str(rank)) for rank in range(options.np)]
    print("\n".join(table(by_rank)))
    grown = [growth(rank, of) for rank, of in enumerate(by_rank)]
    print("\n".join(text for _, text in grown))
    return int(any(too_much for too_much, _ in grown))


def soak(folder: Path, size: int, seed: int, seconds: float, slack_s: float) -> int:
    """Run the ranks; return their exit code, or 124 if they did not end in time."""
    command = [sys.executable, "-m", "kolovod", "run", "-np", str(size), "--"]
    command += [sys.executable, str(RANK), str(folder), str(seed), str(seconds)]
    launcher = subprocess.Popen(command, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        return launcher.wait(seconds + slack_s)
    except subprocess.TimeoutExpired:
        print(f"hangs: not over {slack_s:g} s after its {seconds:g} s", flush=True)
        return 124
    finally:
        end(launcher)


def end(launcher: subprocess.Popen[bytes]) -> None:
    """End it with its ranks, whatever they do."""
    if launcher.poll() is None:
        launcher.send_signal(signal.SIGTERM)
        try:
            launcher.wait(20)
        except subprocess.TimeoutExpired:
            launcher.kill()
            launcher.wait()


def samples(path: Path) -> list[Sample]:
    """Return the samples of a rank."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def table(by_rank: Sequence[Sequence[Sample]], lines: int = 10) -> list[str]:
    """Return operations done and resident memory over time, by rank."""
    kinds = " + ".join(_KINDS)
    found = [f"    s  operations verified, and {kinds} in MiB, of each rank"]
    count = min(map(len, by_rank))
    for place in sorted({round(i * (count - 1) / (lines - 1)) for i in range(lines)}):
        cells = []
        for of in by_rank:
            memory = "+".join(f"{of[place][kind] / 1024:.0f}" for kind in _KINDS)
            cells.append(f"{of[place]['verified']:,.0f} {memory}")
        found.append(f"{by_rank[0][place]['s']:5.0f}  " + "   ".join(cells))
    started, verified = (sum(of[-1][key] for of in by_rank) for key in ("started", "verified"))
    return [
        *found,
        f"{started:,.0f} operations started, {verified:,.0f} verified, all ranks together",
    ]


def growth(rank: int, of: Sequence[Sample]) -> tuple[bool, str]:
    """Return whether a rank's own memory grew too much after the first half, and by how much."""
    whole = of[-1]["s"]
    quarters = [
        [sample["RssAnon"] for sample in of if low * whole <= sample["s"] <= (low + 0.25) * whole]
        for low in (0.25, 0.75)
    ]
    if not all(quarters):
        return True, f"rank {rank}: {len(of)} samples in {whole:.0f} s are too few to tell"
    before, after = map(statistics.median, quarters)
    too_much = after > before * GROWTH + GROWTH_KIB
    verdict = "grows" if too_much else "does not grow"
    return too_much, (
        f"rank {rank}: RssAnon {verdict}: {before / 1024:.0f} MiB in the second quarter, "
        f"{after / 1024:.0f} MiB in the last (median)"
    )


if __name__ == "__main__":
    raise SystemExit(main())
