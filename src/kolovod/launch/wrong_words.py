"""Advice for command lines of ``kolovod`` that are none, above all those that others take.

It says which flag of ours has the meaning of one that torchrun, mpirun, srun, accelerate or
deepspeed has.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
from collections.abc import Collection, Sequence
from difflib import get_close_matches

__all__ = ["about_command", "about_flags"]

_ALIKE = 0.7  # difflib's ratio from which a word is taken for a misspelt one
_RANKS = "-np", "here it is -np N, the number of ranks on all hosts"
_HOSTS = "-H", "here it is -H HOST:SLOTS,..., or --hostfile FILE, which also give the ranks of each"
_START = "-H", "a job is started once, on one host, and the launcher starts ranks on those of -H"
_AGAIN = "--elastic", "here it is --elastic, with which another rank follows one that has failed"
_NOTHING = "-np", "it is not needed here: leave it out"
_OTHERS = {
    "--np": _RANKS,
    "--nproc": _RANKS,
    "--nproc-per-node": _RANKS,
    "--ntasks": _RANKS,
    "--num-processes": _RANKS,
    "--num-procs": _RANKS,
    "--num-gpus": _RANKS,
    "--world-size": _RANKS,
    "--host": _HOSTS,
    "--machinefile": _HOSTS,
    "--nnodes": _HOSTS,
    "--nodelist": _HOSTS,
    "--nodes": _HOSTS,
    "--num-machines": _HOSTS,
    "--num-nodes": _HOSTS,
    "--main-process-ip": _START,
    "--main-process-port": _START,
    "--machine-rank": _START,
    "--master-addr": _START,
    "--master-port": _START,
    "--node-rank": _START,
    "--rdzv-backend": _START,
    "--rdzv-endpoint": _START,
    "--rdzv-id": _START,
    "--standalone": _START,
    "--max-restarts": _AGAIN,
    "--allow-run-as-root": _NOTHING,
    "--oversubscribe": _NOTHING,
}
"""Flags of others: which flag of ours a command must have for the advice, and the advice."""


def about_command(given: Sequence[str], commands: Collection[str]) -> str:
    """Return what is wrong where ``given`` does not begin with one of ``commands``; "" if not."""
    if not given or given[0] in commands or given[0] in ("-h", "--help", "--version"):
        return ""
    first = given[0]
    if first.startswith("-") or first.endswith(".py") or os.path.exists(first):
        ranks = [] if first.startswith("-") else ["-np", "2"]
        line = shlex.join(["kolovod", "run", *ranks, *_in_our_words(given)])
        flag = first.partition("=")[0]
        other = _OTHERS.get(_spelt(flag), _RANKS)
        if other != _RANKS:
            return f"a command comes before {flag}: kolovod run; and there is no {flag}; {other[1]}"
        return f"a command comes before {first}: {line}"
    near = get_close_matches(first, commands, 1, _ALIKE)
    there = f"did you mean {near[0]}?" if near else f"there are {', '.join(commands)}"
    return f"there is no command {first!r}; {there}"


def _in_our_words(given: Sequence[str]) -> list[str]:
    """Return ``given`` with -np where another flag gives the ranks, and python before a script."""
    words: list[str] = []
    for at, word in enumerate(given):
        if word.endswith(".py"):
            return [*words, "python", *given[at:]]
        flag, equals, value = word.partition("=")
        if _OTHERS.get(_spelt(flag)) == _RANKS:
            words += ["-np", value] if equals else ["-np"]
        elif not flag.startswith("-") and shutil.which(word):
            return [*words, *given[at:]]  # the ranks' program: what follows is its own
        else:
            words.append(word)
    return words


def about_flags(unknown: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """Return what is wrong with the arguments that ``parser`` does not know, and what is meant."""
    flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
    if not flags:
        return f"unrecognized arguments: {shlex.join(unknown)}"
    flag = flags[0]
    spelt = _spelt(flag)
    known = set(re.findall(r"(?<![\w-])--?[a-z][a-z0-9-]*", parser.format_help(), re.IGNORECASE))
    needed, meant = _OTHERS.get(spelt, ("", ""))
    if needed in known:
        advice = meant
    else:
        near = get_close_matches(spelt, known, 1, _ALIKE)
        advice = f"did you mean {near[0]}?" if near else f"see {parser.prog} --help"
    return f"there is no {flag}; {advice}"


def _spelt(flag: str) -> str:
    return flag.replace("_", "-").lower()
