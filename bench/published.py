"""Published efficiencies, predicted by the model of ``kolovod plan``: ``bench/published.py``.

What was published (Horovod's docs/benchmarks.md of 2018): 128 hosts of 4 Pascal GPUs, links of 25
Gbit/s with RoCE, tf_cnn_benchmarks with 64 images a GPU: Inception V3 and ResNet-101 90 %, VGG-16
68 %. Earlier figures of such hosts are in Horovod's README of 2017 (pull request 44 of
github.com/horovod/horovod shows them): images a second of one GPU, and of 16 GPUs on 4 hosts by
RDMA; and in its README of early 2018: VGG-16 79 % on 128 GPUs.

What is taken for the model:

- layers, parameters and multiplications of Keras' models (``--models`` writes published.json again,
  with Keras); forward takes a third of a step, backward two thirds, in proportion to the
  multiplications of each layer; a gradient is there when its layer's backward is done;
- a ring of all GPUs by NCCL 2: 2 (N - 1) messages in a row, of 14 us between hosts and 5.7 us
  within one (hwLat in NCCL's src/graph/tuning.cc: ring, Simple, network and PCI);
- half a cycle of the Horovod of then, 5 ms (SetCycleTimeMs(5) in its operations.cc);
- how much GPUs differ from step to step: so much that Inception V3 on 16 GPUs is as published.

One parameter is fitted to the 512 GPUs, on VGG-16 alone: the share of the link that is reached.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial

import machine
from report import table

from kolovod.planning.costs import Cluster, Costs, Link, Load
from kolovod.planning.model import Request, Step, simulate

LAYERS = machine.BENCH / "published.json"
IMAGES_PER_S = {"Inception V3": 134.4, "ResNet-101": 119.4, "VGG-16": 130.9}  # of one GPU
ON_16 = {"Inception V3": 2022.6, "ResNet-101": 1746.2, "VGG-16": 1787.4}  # images/s
ON_128 = {"VGG-16": 0.79}
ON_512 = {"Inception V3": 0.90, "ResNet-101": 0.90, "VGG-16": 0.68}
FITTED = "VGG-16"
SPREAD_FROM = "Inception V3"
BATCH = 64
GPUS = 4  # of a host
LINK_BYTES_PER_S = 25e9 / 8
BETWEEN_S, WITHIN_S = 14e-6, 5.7e-6  # of a message
CYCLE_S = 5e-3
GOAL = 0.05


def ring(bytes_: float, dtype: str, codec: str, cluster: Cluster, costs: Costs) -> Load:
    """Return the load of NCCL's ring of all GPUs; a host's last GPU sends to another host."""
    count = cluster.ranks
    between = 2 * (cluster.hosts - 1)
    latency_s = between * BETWEEN_S + (2 * (count - 1) - between) * WITHIN_S
    sent = 2 * (count - 1) / count * bytes_
    return Load(costs.operation_s + latency_s, sent / cluster.link.bytes_per_s, 0.0)


@lru_cache
def step_of(model: str) -> Step:
    """Return what one GPU does; gradients come in the order of backward."""
    layers = json.loads(LAYERS.read_text())[model]
    compute_s = BATCH / IMAGES_PER_S[model]
    total = sum(multiplications for _, multiplications in layers)
    at_s = compute_s / 3
    requests = []
    for parameters, multiplications in reversed(layers):
        at_s += 2 / 3 * compute_s * multiplications / total
        requests.append(Request(min(at_s, compute_s), 4 * parameters))
    return Step(compute_s, tuple(requests), (compute_s,), cores=0.0)


def efficiency(model: str, hosts: int, share: float, jitter: float) -> float:
    """Return the efficiency of ``hosts`` with four GPUs each; ``share``: of the link reached."""
    step = replace(step_of(model), jitter=jitter)
    link = Link(share * LINK_BYTES_PER_S, 0.0)
    cluster = Cluster(hosts, GPUS, math.inf, link)
    costs = Costs(operation_s=CYCLE_S / 2)
    return step.compute_s / simulate(step, cluster, costs, load_of=ring).step_s


def _root(rising: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Return where a rising function has a value, by halving."""
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < wanted else (low, middle)
    return (low + high) / 2


@lru_cache
def fit() -> tuple[float, float]:
    """Return the share of the link, from VGG-16 on 512 GPUs, and the spread, from 16 GPUs."""
    share, jitter = 0.7, 0.0
    on_16 = ON_16[SPREAD_FROM] / (16 * IMAGES_PER_S[SPREAD_FROM])
    for _ in range(3):  # each hardly depends on the other
        by_jitter = partial(_falling, share)
        jitter = -_root(by_jitter, on_16, -0.1, 0.0)
        by_share = partial(_rising, jitter)
        share = _root(by_share, ON_512[FITTED], 0.2, 1.5)
    return share, jitter


def _falling(share: float, minus_jitter: float) -> float:
    return efficiency(SPREAD_FROM, 4, share, -minus_jitter)


def _rising(jitter: float, share: float) -> float:
    return efficiency(FITTED, 128, share, jitter)


def rows() -> list[dict[str, float | str | bool]]:
    """Return all published figures, and what is predicted of them."""
    share, jitter = fit()
    known = [(4, model, speed / (16 * IMAGES_PER_S[model])) for model, speed in ON_16.items()]
    known += [(32, model, value) for model, value in ON_128.items()]
    known += [(128, model, value) for model, value in ON_512.items()]
    return [
        {
            "gpus": GPUS * hosts,
            "model": model,
            "published": value,
            "predicted": efficiency(model, hosts, share, jitter),
            "is_fitted": (hosts, model) in ((4, SPREAD_FROM), (128, FITTED)),
        }
        for hosts, model, value in known
    ]


def page() -> str:
    """Return a part of plan.md."""
    share, jitter = fit()
    lines = []
    for row in rows():
        published, predicted = float(row["published"]), float(row["predicted"])
        off = predicted - published
        verdict = "yes" if abs(off) <= GOAL else "**no**"
        lines.append(
            [f"{row['gpus']} GPUs, {row['model']}", f"{published:.1%}", f"{predicted:.1%}",
             f"{100 * off:+.1f}", "fitted" if row["is_fitted"] else verdict]
        )  # fmt: skip
    head = ["published", "efficiency", "predicted", "points off", f"within {100 * GOAL:.0f}"]
    return (
        "## Horovod's published efficiencies\n\n"
        f"Where they are from and what is taken for them: the head of bench/published.py. Fitted: "
        f"{share:.0%} of the link is reached (on 512 GPUs with {FITTED}), GPUs differ by "
        f"{jitter:.1%} from step to step (on 16 with {SPREAD_FROM}).\n\n{table(head, lines)}"
    )


def write_models() -> None:
    """Write parameters and multiplications of each layer that has any, as in forward."""
    import keras

    made = {
        "Inception V3": (keras.applications.InceptionV3, 299),
        "ResNet-101": (keras.applications.ResNet101, 224),
        "VGG-16": (keras.applications.VGG16, 224),
    }
    found = {}
    for name, (model, side) in made.items():
        layers = []
        for layer in model(weights=None, input_shape=(side, side, 3)).layers:
            shapes = [tuple(weight.shape) for weight in layer.trainable_weights]
            kernels = [shape for shape in shapes if len(shape) >= 2]
            places = math.prod(layer.output.shape[1:-1]) if kernels else 0
            multiplications = math.prod(kernels[0]) * places if kernels else 0
            if shapes:
                layers.append([sum(map(math.prod, shapes)), multiplications])
        found[name] = layers
    lines = [f" {json.dumps(name)}: {json.dumps(layers)}" for name, layers in found.items()]
    LAYERS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> None:
    """Print what is predicted; with ``--models`` write published.json again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", action="store_true", help="write published.json, with Keras")
    if parser.parse_args().models:
        write_models()
    print(page())


if __name__ == "__main__":
    main()
