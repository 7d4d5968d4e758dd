"""How large the house is, and how far a step travels in it: ``python scripts/house.py``.

Prints a table of what the redesign is measured by: lines, words, imports, and the files that one
step of PyTorch's passes through in Python, in a plain job and in an elastic one (two ranks, the
tenth step of a small model, traced on rank 0 in its main thread).
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "kolovod"
LIMIT_S = 120
TRACED_STEP = 10
PRIVATE_WORDS = [
    "apart", "arrangement", "arrivals", "ballots", "cargo", "deputy", "door", "doors", "ends",
    "entries", "former", "forming", "going_on", "guard", "keeper", "keeping", "knock",
    "mates", "office", "pace", "parcel", "place", "seldom", "session", "steward",
    "succession", "table", "ticket", "witness",
]  # fmt: skip
"""Of ours, where the field has a word.

Not "exactly", since users call ``elastic.exactly``; not "promise", which is Paxos's own word.
"""
SUBJECTLESS = re.compile(r"(Of|Those|What|See|Who|Whether|Where|How|As|By|For|In|The same)\b")

SCRIPT = """
import sys; sys.path.insert(0, {scripts!r})
import torch
import house
import kolovod.torch as kv
from kolovod import elastic

kv.init()
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
optimizer = kv.DistributedOptimizer(optimizer, net.named_parameters())
state = elastic.State(model=net, optimizer=optimizer, step=0)
is_elastic = sys.argv[1] == "elastic"

def train(state):
    while state.step < house.TRACED_STEP:
        trip = house.Trip(state.step + 1 == house.TRACED_STEP and kv.rank() == 0, sys.argv[2])
        with trip:
            optimizer.zero_grad()
            net(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            state.step += 1
            if is_elastic:
                state.commit()

(elastic.run(train) if is_elastic else train)(state)
"""


class Trip:
    """Notes each call of a function of ours, if it is ``on``, and writes what it has come to."""

    def __init__(self, on: bool, path: str) -> None:
        self._on, self._path = on, path
        self._files: list[str] = []

    def __enter__(self) -> None:
        if self._on:
            sys.setprofile(self._note)

    def __exit__(self, *_: object) -> None:
        if not self._on:
            return
        sys.setprofile(None)
        changes = sum(a != b for a, b in zip(self._files, self._files[1:], strict=False))
        found = {"files": len(set(self._files)), "calls": len(self._files), "changes": changes}
        Path(self._path).write_text(json.dumps(found))

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and f"{os.sep}kolovod{os.sep}" in name and "site-packages" in name:
            self._files.append(name)


def trip(kind: str) -> str:
    """Count files and changes of file in a step of a job that is "plain" or "elastic"."""
    with tempfile.TemporaryDirectory() as folder:
        script, result = Path(folder, "train.py"), Path(folder, "result")
        script.write_text(SCRIPT.format(scripts=str(ROOT / "scripts")))
        flags = ["--elastic"] if kind == "elastic" else []
        command = [sys.executable, "-m", "kolovod", "run", "-q", *flags, "-np", "2", "--"]
        command += [sys.executable, str(script), kind, str(result)]
        subprocess.run(command, check=True, timeout=LIMIT_S, cwd=folder, capture_output=True)
        found: dict[str, int] = json.loads(result.read_text())
    return f"{found['files']} files, {found['changes']} changes, {found['calls']} calls"


def imports() -> str:
    """Return how many of our modules ``kolovod --version`` imports, and whether NumPy."""
    code = (
        "import sys; from kolovod.launch.cli import main\ntry: main(['--version'])\n"
        "except SystemExit: pass\n"
        "print(sum(m.split('.')[0] == 'kolovod' for m in sys.modules), 'numpy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=LIMIT_S, capture_output=True, text=True
    )
    count, has_numpy = done.stdout.split()[-2:]
    return f"{count}, NumPy: {'yes' if has_numpy == 'True' else 'no'}"


def lines(*patterns: str) -> int:
    """Count the lines of files of the repository that git knows."""
    listed = subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return sum(len((ROOT / name).read_bytes().splitlines()) for name in listed.stdout.split())


def modules() -> Iterator[tuple[Path, ast.Module]]:
    """Yield the modules of ours, parsed."""
    for path in sorted(SOURCE.rglob("*.py")):
        yield path, ast.parse(path.read_text())


def state_in_the_hot_path() -> str:
    """Return how often ``elastic.steps`` is asked, and by how many files beside its own."""
    asked: Counter[Path] = Counter()
    for path, tree in modules():
        asked[path] += sum(
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "transaction"
            for node in ast.walk(tree)
        )
    asked += Counter()
    return f"{asked.total()} times in {len(asked)} files"


def codes() -> str:
    """Return classes of errors whose code depends on where they are raised."""
    from kolovod.explanations import EXPLANATIONS

    rows = Counter(each.classes[0] for each in EXPLANATIONS)
    return ", ".join(sorted(name for name, count in rows.items() if count > 1)) or "none"


def docstrings() -> str:
    """Return how many docstrings open without a subject."""
    kinds = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module
    texts = [
        text
        for _, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, kinds) and (text := ast.get_docstring(node))
    ]
    count = sum(SUBJECTLESS.match(text) is not None for text in texts)
    return f"{count:,} of {len(texts):,}"


def words() -> str:
    """Return which private words name a module or a class, in whole or in part, or a function."""
    names, parts = set(), set()
    for path, tree in modules():
        names |= {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
        for name in [path.stem, *(n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef))]:
            names.add(name)
            parts |= {part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}
    left = [word for word in PRIVATE_WORDS if word in names | parts]
    return f"{len(left)} of {len(PRIVATE_WORDS)}: {', '.join(left)}"


def words_of_docs() -> int:
    """Count the words of all pages."""
    return sum(len(path.read_text().split()) for path in (ROOT / "docs").rglob("*.md"))


MEASURES: Mapping[str, tuple[Callable[[], object], str]] = {
    "lines of Python in src": (lambda: lines("src/*.py"), "50,000"),
    "one PyTorch step": (lambda: trip("plain"), "14 files, 50 changes"),
    "the same in an elastic job": (lambda: trip("elastic"), "18 files, 80 changes"),
    "modules of ours that `kolovod --version` imports": (imports, "15, NumPy: no"),
    "what asks for the transaction": (state_in_the_hot_path, "one the world has"),
    "errors whose code depends on where they are raised": (codes, "none"),
    "words in docs": (words_of_docs, "60,000"),
    "private words left": (words, "0"),
    "docstrings without a subject": (docstrings, "none"),
    "lines of data in bench/results": (lambda: lines("bench/results"), "5,000"),
}
"""What is measured, how, and what is wanted."""


def main() -> int:
    """Print the table."""
    print("| measure | now | wanted |\n|---|---|---|")
    for name, (measure, wanted) in MEASURES.items():
        found = measure()
        print(
            f"| {name} | {found:,} |" if isinstance(found, int) else f"| {name} | {found} |", end=""
        )
        print(f" {wanted} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
