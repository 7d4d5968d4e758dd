"""``kolovod manifest``: a job for Kubernetes, as text (manifest.py)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any

from kolovod.errors import CommandArgumentError
from kolovod.launch.elastic_flags import rank_count
from kolovod.launch.manifest import KINDS, Object, Wanted, objects

__all__ = ["add"]


def add(parser: argparse.ArgumentParser) -> None:
    """Give the command its arguments."""
    parser.usage = "kolovod manifest --name NAME --image IMAGE -np N [options] [--] COMMAND ..."
    parser.description = (
        "Write a manifest for `kubectl apply -f -`: one pod for each rank, which runs "
        "COMMAND in IMAGE. With --min-np the job is elastic: pods that are evicted or fail are "
        "started again and come back into it. See docs/kubernetes.md."
    )
    parser.set_defaults(act=_act)
    parser.add_argument("--kind", choices=KINDS, default="job", help="[job]")
    parser.add_argument("--name", required=True, metavar="NAME", help="the job's")
    parser.add_argument("--image", required=True, metavar="IMAGE")
    parser.add_argument(
        "-np", "--num-proc", dest="size", type=rank_count, required=True, metavar="N", help="ranks"
    )
    elastic = parser.add_argument_group("elastic jobs")
    elastic.add_argument(
        "--min-np",
        type=rank_count,
        metavar="N",
        help="ranks without which the job waits; makes it elastic",
    )
    elastic.add_argument("--max-np", type=rank_count, metavar="N", help="ranks at most [-np]")
    pods = parser.add_argument_group("each pod")
    _add_field(pods, "cpu", "CPUS", "CPUs")
    _add_field(pods, "memory", "SIZE", "memory")
    _add_field(pods, "shm", "SIZE", "of it, /dev/shm")
    _add_field(pods, "gpus", "N", "GPUs")
    _add_field(pods, "grace_s", "SECONDS", "from SIGTERM, by which a rank leaves, to SIGKILL")
    _add_field(pods, "retries", "N", "how often a rank may fail; evictions do not count")
    _add_field(pods, "start_timeout_s", "SECONDS", "for all pods to be there")
    _add_field(
        pods,
        "record_claim",
        "CLAIM",
        "a PersistentVolumeClaim for KOLOVOD_RECORD_DIR, which all pods may write at once",
    )
    parser.add_argument("--format", choices=("yaml", "json"), default="yaml", help="[yaml]")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")


def _add_field(group: Any, name: str, metavar: str, text: str) -> None:
    """Add the flag of a field of ``Wanted``."""
    (default,) = (field.default for field in fields(Wanted) if field.name == name)
    assert default is not MISSING
    group.add_argument(
        f"--{name.replace('_', '-')}",
        type=type(default),
        metavar=metavar,
        help=f"{text} [{default}]" if default else text,
    )


def _act(options: argparse.Namespace) -> int:
    command: list[str] = options.command
    given = {field.name: getattr(options, field.name) for field in fields(Wanted)}
    given["command"] = command[1:] if command[:1] == ["--"] else command
    wanted = Wanted(**{name: value for name, value in given.items() if value is not None})
    made = objects(options.kind, wanted)
    if options.format == "json":
        print(json.dumps({"apiVersion": "v1", "kind": "List", "items": made}, indent=2))
        return 0
    print(_yaml(made), end="")
    return 0


def _yaml(made: Sequence[Object]) -> str:
    try:
        from yaml import safe_dump_all
    except ImportError:
        raise CommandArgumentError(
            "writing YAML needs PyYAML: pip install 'kolovod[yaml]'; or give --format json, which "
            "kubectl takes as well"
        ) from None
    text: str = safe_dump_all(made, sort_keys=False)
    return text
