"""``kolovod manifest``: what Kubernetes would say of it, and the examples, which are the same."""

from __future__ import annotations

import copy
import json
import re
import shlex
import sys
from collections.abc import Callable
from typing import Any

import jsonschema
import kubernetes_kinds
import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob
from kubeflow_trainer_api.models.trainer_v1alpha1_training_runtime import (
    TrainerV1alpha1TrainingRuntime,
)
from kubernetes_validate.utils import ValidationError as NotValid
from paths import EXAMPLES

from kolovod.launch import cli
from kolovod.rendezvous.external.launchers import find

RELEASES = ("1.31", "1.33", kubernetes_validate.latest_version())
"""Of Kubernetes: the first one that has all that an elastic job uses, and later ones."""
BASE = "--name digits --image i -np 4"
Object = dict[str, Any]
Manifest = Callable[[str], list[Object]]


@pytest.fixture(name="manifest")
def made_manifest(capsys: pytest.CaptureFixture[str]) -> Manifest:
    def manifest(flags: str) -> list[Object]:
        assert cli.main(["manifest", *shlex.split(flags), "--", "python", "train.py", "-x"]) == 0
        return list(yaml.safe_load_all(capsys.readouterr().out))

    return manifest


MODELS = {
    "JobSet": JobsetV1alpha2JobSet,
    "TrainJob": TrainerV1alpha1TrainJob,
    "TrainingRuntime": TrainerV1alpha1TrainingRuntime,
}
"""By kind, what its project has made of its schema."""


def check(made: Object) -> None:
    """Raises if some release of Kubernetes, or the kind's own controller, would refuse it."""
    if (model := MODELS.get(made["kind"])) is not None:
        checked = model.from_dict(copy.deepcopy(made))
        assert checked is not None
        assert checked.to_dict() == made  # a field that it does not know would be gone
        template = made["spec"].get("template", made)  # a runtime has one
        for job in template["spec"].get("replicatedJobs", []):
            check({"apiVersion": "batch/v1", "kind": "Job", **job["template"]})
    elif made["kind"] == "RayJob":
        jsonschema.validate(made, kubernetes_kinds.RAY_JOB)
        cluster = made["spec"]["rayClusterSpec"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            check({"apiVersion": "v1", "kind": "Pod", **group["template"]})
    elif made["kind"] == "MPIJob":
        jsonschema.validate(made, kubernetes_kinds.MPI_JOB)
        for each in made["spec"]["mpiReplicaSpecs"].values():
            check({"apiVersion": "v1", "kind": "Pod", **each["template"]})
    else:
        for release in RELEASES:
            kubernetes_validate.validate(made, release, strict=True)


FLAGS = {
    "not elastic": "",
    "elastic": "--min-np 2 --max-np 8",
    "all": "--min-np 1 --cpu 500m --memory 1.5Gi --shm 64Mi --gpus 2 --grace-s 0 --retries 0 "
    "--start-timeout-s 5 --record-claim records",
}


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
@pytest.mark.parametrize("flags", FLAGS)
def test_kubernetes_takes_it(manifest: Manifest, kind: str, flags: str) -> None:
    for made in manifest(f"--kind {kind} {BASE} {FLAGS[flags]}"):
        check(made)


def test_kuberay_takes_it(manifest: Manifest) -> None:
    for flags in ("", "--min-np 2 --max-np 8 --gpus 1"):
        (made,) = manifest(f"--kind rayjob {BASE} {flags}")
        check(made)
        assert made["spec"]["entrypoint"] == "python train.py -x"
    workers = made["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    sizes = [workers[name] for name in ("minReplicas", "replicas", "maxReplicas")]
    assert sizes == [2, 4, 8]


@pytest.mark.parametrize("flags", ["", "--min-np 2 --max-np 8 --gpus 1"])
def test_the_mpi_operator_takes_it(manifest: Manifest, flags: str) -> None:
    (made,) = manifest(f"--kind mpijob {BASE} {flags}")
    check(made)
    launcher, worker = (made["spec"]["mpiReplicaSpecs"][name] for name in ("Launcher", "Worker"))
    assert worker["replicas"] == 4
    (pod,) = launcher["template"]["spec"]["containers"]
    program, *given = pod["command"]
    assert program == "kolovod"
    options = cli._parser(given).parse_args(given)  # flags that there are
    assert (options.action, options.num_proc) == ("run", 4)
    assert options.command == ["--", "python", "train.py", "-x"]
    if flags:
        assert options.host_discovery_script == "/etc/mpi/discover_hosts.sh"
        assert (options.min_np, options.max_np) == (2, 8)
    else:
        assert str(options.hostfile) == "/etc/mpi/hostfile"


def test_what_is_wrong_is_found(manifest: Manifest) -> None:
    """The checks above can fail."""
    (_, job), (jobset,) = manifest(f"{BASE} --min-np 1"), manifest(f"--kind jobset {BASE}")
    (rayjob,) = manifest(f"--kind rayjob {BASE}")
    runtime, trainjob = manifest(f"--kind trainjob {BASE}")
    runtime["spec"]["mlPolicy"]["nodes"] = 4
    trainjob["spec"]["trainer"]["replicas"] = 4
    job["spec"]["podFailurePolicy"]["rules"][0]["when"] = "always"
    jobset["spec"]["network"]["subDomain"] = "x"
    rayjob["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["size"] = 3
    with pytest.raises(NotValid):
        check(job)
    for each in (jobset, runtime, trainjob):
        with pytest.raises(AssertionError):
            check(each)
    (mpijob,) = manifest(f"--kind mpijob {BASE}")
    mpijob["spec"]["cleanPodPolicy"] = "Running"  # as versions before v2beta1 had it
    for each in (rayjob, mpijob):
        with pytest.raises(jsonschema.ValidationError):
            check(each)


@pytest.mark.parametrize("file", ["job", "elastic-job", "jobset", "trainjob", "mpijob", "rayjob"])
def test_the_example_is_what_the_command_in_it_writes(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (EXAMPLES / "kubernetes" / f"{file}.yaml").read_text()
    (command,) = re.findall(r"^# +kolovod (manifest .*)$", text, re.M)
    assert cli.main(shlex.split(command)) == 0
    made = list(yaml.safe_load_all(capsys.readouterr().out))
    assert made == list(yaml.safe_load_all(text))
    for each in made:
        check(each)


@pytest.mark.parametrize(
    ("kind", "store_host", "last"),
    [
        ("job", "digits-0.digits", "digits-7.digits"),
        ("jobset", "digits-ranks-0-0.digits", "digits-ranks-0-7.digits"),
        ("trainjob", "digits-node-0-0.digits", "digits-node-0-7.digits"),
    ],
)
def test_a_rank_finds_in_it_what_it_needs(
    manifest: Manifest, kind: str, store_host: str, last: str
) -> None:
    objects = manifest(f"--kind {kind} {BASE} --min-np 2 --max-np 8")
    job = objects[-1]["spec"]
    if kind == "trainjob":
        job = objects[0]["spec"]["template"]["spec"]
    if kind != "job":
        job = job["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    own = pod["containers"][0]
    if kind == "trainjob":  # its controller puts these into the container of this name
        assert own["name"] == "node"
        own = own | objects[1]["spec"]["trainer"]
        assert own["numNodes"] == job["completions"]
    assert (own["image"], own["command"]) == ("i", ["python", "train.py", "-x"])
    environ = {entry["name"]: entry["value"] for entry in own["env"]}
    found = find({**environ, "JOB_COMPLETION_INDEX": "7"})
    assert found is not None
    assert (found.launcher.name, found.rank, found.size) == ("Kubernetes", 7, 4)
    assert found.store_host == store_host
    assert found.numbers_hosts
    assert found.host_of(7) == last
    # The secret's file, as it is mounted, passes read_secret: the group of the user may read it.
    (secret,) = [volume["secret"] for volume in pod["volumes"] if "secret" in volume]
    assert secret["defaultMode"] == 0o440
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--name Digits --image i -np 4", "--name 'Digits': expected small letters"),
        (f"--name {'d' * 54} --image i -np 4", "has at most 63 characters"),
        ("--name d --image i -np 2 --min-np 3", "--min-np 3, -np 2, --max-np 0: they must not"),
        ("--name d --image i -np 2 --min-np 1 --max-np 1", "they must not descend"),
        ("--name d --image i -np 2 --max-np 3", "only an elastic job grows; give --min-np, too"),
        ("--name d --image i -np 2 --memory 4GB", "--memory '4GB': expected a quantity"),
        ("--name d --image i -np 2 --gpus -1", "--gpus -1: below 0"),
        ("--name d --image i -np 2 --kind rayjob --record-claim c", "keep no records"),
        ("--name d --image i -np 2 --kind mpijob --record-claim c", "keep no records"),
    ],
)
def test_what_cannot_be_is_refused(
    flags: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["manifest", *shlex.split(flags), "python", "train.py"])
    assert exit_.value.code == 2
    assert said in capsys.readouterr().err


def test_without_pyyaml_there_is_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, manifest: Manifest
) -> None:
    wanted = manifest(BASE)
    monkeypatch.setitem(sys.modules, "yaml", None)
    given = ["manifest", *BASE.split(), "python", "train.py", "-x"]
    with pytest.raises(SystemExit):
        cli.main(given)
    assert "pip install 'kolovod[yaml]'; or give --format json" in capsys.readouterr().err
    assert cli.main([*given[:1], "--format", "json", *given[1:]]) == 0
    assert json.loads(capsys.readouterr().out)["items"] == wanted
