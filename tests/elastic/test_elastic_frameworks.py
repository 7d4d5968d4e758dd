"""TensorFlow, Keras and JAX in jobs of ``kolovod run --elastic``.

Whole jobs, whose processes import a framework when they take the place of others, so all are slow.
Single steps of which a rank is killed: tests/frontends/*/test_*_exact.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from frameworks import is_installed
from jobs_with_deaths import SCRIPT, run, train
from slow import thorough_but

pytestmark = [pytest.mark.frameworks, pytest.mark.slow, pytest.mark.timeout(330)]
DEADLINE_S = 300.0
QUIET = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "CUDA_VISIBLE_DEVICES": "",
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_X64": "1",
    "OMP_NUM_THREADS": "1",
}
KINDS = {
    "keras on tensorflow": ("keras", "tensorflow"),
    "keras on jax": ("keras", "jax"),
    "keras on torch": ("keras", "torch"),
    "keras 2": ("tf_keras", "tensorflow"),
    "tensorflow": ("tensorflow", ""),
    "tensorflow v1": ("tensorflow_v1", ""),
    "jax": ("jax", ""),
}


def prepared(name: str) -> tuple[str, dict[str, str]]:
    """The kind of ``elastic_script.py``, and the environment. Skips what is not installed."""
    kind, backend = KINDS[name]
    for module in (kind.removesuffix("_v1"), backend, *["optax"] * (kind == "jax")):
        if module and not is_installed(module):
            pytest.skip(f"{module} is not installed")
    environment = {**QUIET, "KERAS_BACKEND": backend or "tensorflow"}
    return kind, {**environment, "TF_USE_LEGACY_KERAS": "1" if kind == "tf_keras" else "0"}


@pytest.mark.parametrize(
    "name",
    thorough_but(
        ["tensorflow"],
        ["keras on jax", "keras 2", "tensorflow", "tensorflow v1", "jax"],
    ),
)
def test_killed_ranks_are_replaced_and_no_step_is_lost(name: str, tmp_path: Path) -> None:
    kind, env = prepared(name)
    results = train(kind, 2, [1, 0], tmp_path, "-np", "2", deadline_s=DEADLINE_S, env=env)
    for result in results:  # every step counts once, with those who took part
        assert result["result"][0] == -sum(result["slots"])


GROWING = Path(SCRIPT).with_name("elastic_growing_script.py")


@pytest.mark.parametrize("name", thorough_but(["jax"], ["keras on tensorflow", "jax"]))
def test_jobs_that_grow_and_shrink(name: str, tmp_path: Path) -> None:
    """From one rank to two, to three, to one."""
    kind, env = prepared(name)
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:1\n")
    flags = ["-np", "1", "--max-np", "3", "--host-discovery-script", f"cat {hosts}"]
    script = str(GROWING), kind, str(hosts), "1,2,3,1"
    done = run(*flags, script=script, deadline_s=DEADLINE_S, env=env)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in re.findall(r"\{.*\}", done.stdout)]
    (result,) = results
    assert result["sizes"] in ([1, 2, 3, 1], [1, 2, 3, 2, 1])  # where one leaves first
    assert result["result"][0] == -sum(result["log"])
    assert "was lost" not in done.stderr
    assert "Traceback" not in done.stderr


FIT = Path(SCRIPT).with_name("elastic_fit_script.py")


@pytest.mark.parametrize(
    "name",
    thorough_but(
        ["keras on tensorflow"], ["keras on tensorflow", "keras on jax", "keras on torch"]
    ),
)
def test_fit_goes_on_in_the_batch_that_it_was_at(name: str) -> None:
    kind, env = prepared(name)
    epochs, steps, ends = 2, 6, "1:0:3,0:1:2"
    script = str(FIT), kind, str(epochs), str(steps), ends
    env["KOLOVOD_RANKS_OF_TEST"] = "3"
    done = run("-np", "3", script=script, deadline_s=DEADLINE_S, env=env)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in re.findall(r"\{.*\}", done.stdout)]
    assert sorted(result["slot"] for result in results) == [0, 1, 2], done.stderr
    log, told = results[0]["log"], results[0]["told"]
    for result in results:
        assert (result["log"], result["told"]) == (log, told)
        assert result["result"] == results[0]["result"]
        assert result["result"][0] == -sum(bits for _, bits in log)
    # No batch is lost or done twice, whoever was there.
    count = len(told)
    assert [epoch for epoch, _ in log] == [e for e in range(count) for _ in range(steps)]
    assert [epoch for epoch, *_ in told] == list(range(count))
    assert (log[0][1], log[-1][1]) == (7, 7)
    assert done.stderr.count("was killed by signal 9") == 4


SAMPLED = """
import json, os, signal, sys, threading
import keras, numpy as np
import kolovod.keras as kv
from kolovod import elastic
from kolovod.core.ops import Sum
kv.init()
keras.backend.set_floatx("float64")
SAMPLES, EPOCHS, FIRST = 40, 2, bool(os.environ["KOLOVOD_FIRST_HOSTS"])
count = keras.layers.EinsumDense("ab,bc->ac", 1, kernel_initializer="zeros")
model = keras.Sequential([keras.layers.Input((SAMPLES,)), count])
optimizer = kv.DistributedOptimizer(keras.optimizers.SGD(1.0), op=Sum)
model.compile(optimizer, lambda y, p: y[:, 0] * p[:, 0])
sampler = elastic.ElasticSampler(range(SAMPLES), 3)
state = elastic.State(model=model, sampler=sampler)

def batches():
    for rows in sampler.batches():
        yield np.eye(SAMPLES)[rows], np.full((len(rows), 1), float(len(rows)))

class Ends(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        place = int(os.environ["KOLOVOD_SLOT"]), sampler.epoch, sampler.steps_done
        if FIRST and place > (1, 0, 3):
            threading.Event().wait()  # it is about to be killed
        if FIRST and place == (1, 0, 3):
            threading.Timer(0.003, os.kill, (os.getpid(), signal.SIGKILL)).start()

@elastic.run
def train(state):
    for epoch in range(sampler.epoch, EPOCHS):
        sampler.set_epoch(epoch)
        while sampler.steps_left:
            callbacks = [Ends(), kv.callbacks.CommitCallback(state)]
            model.fit(batches(), callbacks=callbacks, verbose=0)

train(state)
print(json.dumps([-float(w) for w in np.asarray(count.get_weights()[0])[:, 0]]), flush=True)
"""


def test_samples_of_a_lost_rank_are_taken_by_others_in_fit() -> None:
    _, env = prepared("keras on torch")
    flags = ["-np", "2", "--min-np", "1"]
    done = run(*flags, script=("-c", SAMPLED), deadline_s=DEADLINE_S, env=env)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in re.findall(r"\[[\d., ]{50,}\]", done.stdout)]
    assert results, done.stderr
    for counts in results:  # how often each sample was used, in two epochs
        assert counts == results[0]
        assert min(counts) >= 2
        assert sum(counts) <= 2 * 40 + 4 * 6  # no more than what makes ranks equal
    assert "was killed by signal 9" in done.stderr
