"""What slow links cost a training, and what codecs and DiLoCo save: ``bench/slow_links.py``.

The hosts are network namespaces of this machine (scripts/netbed), so this needs root; each has one
rank with one compute thread, and all share the machine's cores. Three parts, each by ``--parts``:

- ``losses``: 4 ranks train a transformer of 0.25 M parameters on the standard library's text
  (bench/text_model.py; AdamW), 500 steps, and examples/torch_digits.py, 15 epochs, with gradients
  in float32, int8 and int4, from the same seeds. One rank alone does the text, too.
- ``time``: the same text over 100 Mbit/s until the validation loss is what float32 came to in
  ``--goal-steps`` steps, for Kolovod's codecs and for DDP over gloo: plain, with its fp16 hook,
  with PowerSGD of several ranks. Time is that of the training steps (the slowest rank's), without
  the evaluation after each tenth step. Every rank has the same parameters, bit for bit, at the end.
- ``diloco``: 4 ranks over 100 Mbit/s, 50 ms one way: 100 steps with averaged gradients, then DiLoCo
  with 20 local steps; what was sent is applied 9 steps later, and a fifth of a rank's own
  parameters remains. Utilization is the share of the time that is not spent in DiLoCo's hooks:
  sending, waiting, the outer step; beside it stands the time of a step without any communication,
  all ranks working, over that of a step with DiLoCo. Bytes are those of the hosts' interfaces, with
  all headers, in a round of all ranks; beside torchft's DiLoCo (``--torchft PYTHON``;
  bench/elastic.py says how to make its environment) with the same model, rounds and fragments.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import machine
import report
import slow_links_report
from slow_links_rank import LOCAL_STEPS, Plan, digits, diloco, torchft, train

sys.path.insert(0, str(machine.ROOT / "scripts"))
sys.path.insert(0, str(machine.BENCH))

import netbed

PARTS = ("losses", "time", "diloco")
CODECS = ("none", "int8", "int4")
SLOW, ONE_WAY_S = 100e6, 0.05
POWER_RANKS = (1, 2, 4, 8)
WARM_UP = 100
LIGHTHOUSE_PORT = 29510
TIMEOUT_S = 900.0


def on_hosts(
    count: int, fn: Callable[..., Any], *arguments: Any, bits_per_s: float = 0, delay_s: float = 0
) -> list[Any]:
    """Return what each rank returned, one on each host."""
    names = [f"host{index}" for index in range(count)]
    # A delay is that of two links: from a host to the switch, from there to the other.
    with netbed.Bed(names, delay_s=delay_s / 2, with_sshd=False) as bed:
        for name in names:
            bed.limit(name, bits_per_s)
        with netbed.World(bed, names, fn, *arguments) as world:
            ranks = world.results(TIMEOUT_S)
    if wrong := [each for each in ranks if isinstance(each, netbed.Ended)]:
        raise SystemExit(str(wrong[0].text))
    return ranks


def trained(count: int, plan: Plan, bits_per_s: float = 0) -> dict[str, Any]:
    """Return steps, seconds, loss and bytes of a training; raises SystemExit where ranks differ."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = on_hosts(count, train, plan, f"{folder}/store", bits_per_s=bits_per_s)
    if len({each["digest"] for each in ranks}) != 1:
        raise SystemExit(f"{plan.way}: ranks have different parameters")
    last = [each["seen"][-1] for each in ranks]
    found = {
        "steps": last[0][0], "seconds": max(each[1] for each in last), "loss": last[0][2],
        "sent_mb": sum(each["sent"] for each in ranks) / 1e6,
    }  # fmt: skip
    print(plan, count, found, flush=True)
    return found


def losses(options: argparse.Namespace) -> dict[str, Any]:
    """Return, by seed and codec, validation losses, accuracies of digits, and one rank's loss."""
    text: dict[str, list[float]] = {codec: [] for codec in (*CODECS, "alone")}
    accuracy: dict[str, list[float]] = {codec: [] for codec in CODECS}
    for seed in range(options.seeds):
        plan = Plan("alone", seed, options.steps, options.texts, options.steps)
        text["alone"].append(trained(1, plan)["loss"])
        for codec in CODECS:
            text[codec].append(trained(4, replace(plan, way=f"kolovod {codec}"))["loss"])
            reached = on_hosts(4, digits, codec, seed)
            accuracy[codec].append(reached[0])
            print("digits", seed, codec, reached[0], flush=True)
    return {"text": text, "digits": accuracy}


def times_to_loss(options: argparse.Namespace) -> dict[str, Any]:
    """Return, by number of hosts and way, what each turn took, and whether it got there."""
    ways = [f"kolovod {codec}" for codec in (*CODECS, "auto:int8")]
    ways += ["ddp", "ddp fp16", *(f"ddp powersgd {rank}" for rank in POWER_RANKS)]
    found: dict[str, Any] = {}
    for count in options.hosts:
        took: dict[str, list[Any]] = {way: [] for way in ways}
        for seed in range(options.turns):
            plan = Plan("kolovod none", seed, options.goal_steps, options.texts, 10)
            goal = trained(count, plan)["loss"]  # over links without a limit
            plan = replace(plan, until=goal, steps=2 * options.goal_steps)
            for place in range(len(ways)):
                way = ways[(place + seed) % len(ways)]
                one = trained(count, replace(plan, way=way), SLOW)
                took[way].append({**one, "reached": one["loss"] <= goal, "goal": goal})
        found[str(count)] = took
    return found


def seldom(options: argparse.Namespace) -> dict[str, Any]:
    """Return, by kind, what DiLoCo came to, one dict a seed; and torchft's bytes."""
    ours: dict[str, Any] = {}
    for codec, fragments in (("int4", 1), ("int4", 2), ("none", 1)):
        turns = []
        for seed in range(options.seeds):
            plan = Plan(codec, seed, options.steps, options.texts, 0)
            arguments = (plan, WARM_UP, fragments)
            ranks = on_hosts(4, diloco, *arguments, bits_per_s=SLOW, delay_s=ONE_WAY_S)
            if len({each["digest"] for each in ranks}) != 1:
                raise SystemExit(f"DiLoCo, {codec}: ranks have different parameters")
            one = {
                "loss": ranks[0]["loss"],
                "utilization": statistics.mean(each["utilization"] for each in ranks),
                "alone": statistics.mean(each["alone_s"] / each["step_s"] for each in ranks),
                "round_mb": sum(each["sent"] for each in ranks) / ranks[0]["rounds"] / 1e6,
            }
            turns.append(one)
            print("diloco", codec, fragments, seed, one, flush=True)
        name = f"{codec}, {fragments} fragment{'s' if fragments > 1 else ''}"
        ours[name] = {"codec": codec, "fragments": fragments, "turns": turns}
    theirs = {}
    if options.torchft:
        theirs = {str(count): torchft_bytes(options, count) for count in (1, 2)}
    return {"ours": ours, "torchft": theirs}


def torchft_bytes(options: argparse.Namespace, fragments: int) -> float:
    """Return MB that the four hosts send in a round of torchft's DiLoCo."""
    names = [f"host{index}" for index in range(4)]
    plan = Plan("torchft", 0, 3 * LOCAL_STEPS, options.texts, 0)
    with netbed.Bed(names, delay_s=ONE_WAY_S / 2, with_sshd=False) as bed:
        for name in names:
            bed.limit(name, SLOW)
        lighthouse = str(Path(options.torchft).with_name("torchft_lighthouse"))
        bind = ["--min_replicas", "4", "--bind", f"0.0.0.0:{LIGHTHOUSE_PORT}"]
        quiet = subprocess.DEVNULL
        with bed.popen("host0", [lighthouse, *bind], stdout=quiet, stderr=quiet) as server:
            try:
                time.sleep(1.0)  # until it listens; ranks try again if it does not
                address = f"http://{bed.address('host0')}:{LIGHTHOUSE_PORT}"
                arguments = (plan, str(options.torchft), address, fragments)
                with netbed.World(bed, names, torchft, *arguments) as world:
                    ranks = world.results(TIMEOUT_S)
            finally:
                server.kill()
    if wrong := [each for each in ranks if isinstance(each, netbed.Ended)]:
        raise SystemExit(str(wrong[0].text))
    found: float = sum(each["sent"] for each in ranks) / ranks[0]["rounds"] / 1e6
    print("torchft", fragments, found, flush=True)
    return found


def main() -> None:
    """Measure, and write slow_links.md and slow_links.json; parts that it leaves out stay."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--hosts", type=int, nargs="*", default=[2, 4], help="of part time")
    parser.add_argument("--seeds", type=int, default=3, help="of parts losses and diloco")
    parser.add_argument("--turns", type=int, default=1, help="seeds of part time")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--goal-steps", type=int, default=500)
    parser.add_argument("--texts", type=int, default=8, help="of 64 characters, in a rank's batch")
    parser.add_argument("--torchft", help="the Python of an environment with torchft")
    parser.add_argument("--output", type=Path, default=report.RESULTS, metavar="FOLDER")
    options = parser.parse_args()
    path = options.output / "slow_links.json"
    result = json.loads(path.read_text()) if path.exists() else {}  # parts of other runs stay
    for part, measure in zip(PARTS, (losses, times_to_loss, seldom), strict=True):
        if part in options.parts:
            before = machine.load()["loadavg"]
            found = measure(options)
            result[part] = {
                "command": slow_links_report.command(),
                "machine": machine.facts(),
                "load": [before, machine.load()["loadavg"]],
                "found": found,
            }
            report.write("slow_links", result, slow_links_report.page(result), options.output)


if __name__ == "__main__":
    main()
