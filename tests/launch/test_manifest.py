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
import kubernetes_validate
import pytest
import ray_job
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
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


def check(made: Object) -> None:
    """Raises if some release of Kubernetes, or the kind's own controller, would refuse it."""
    if made["kind"] == "JobSet":
        checked = JobsetV1alpha2JobSet.from_dict(copy.deepcopy(made))
        assert checked is not None
        assert checked.to_dict() == made  # a field that it does not know would be gone
        for job in made["spec"]["replicatedJobs"]:
            check({"apiVersion": "batch/v1", "kind": "Job", **job["template"]})
    elif made["kind"] == "RayJob":
        jsonschema.validate(made, ray_job.SCHEMA)
        cluster = made["spec"]["rayClusterSpec"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            check({"apiVersion": "v1", "kind": "Pod", **group["template"]})
    else:
        for release in RELEASES:
            kubernetes_validate.validate(made, release, strict=True)


FLAGS = {
    "not elastic": "",
    "elastic": "--min-np 2 --max-np 8",
    "all": "--min-np 1 --cpu 500m --memory 1.5Gi --shm 64Mi --gpus 2 --grace-s 0 --retries 0 "
    "--start-timeout-s 5 --record-claim records",
}


@pytest.mark.parametrize("kind", ["job", "jobset"])
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


def test_what_is_wrong_is_found(manifest: Manifest) -> None:
    """The checks above can fail."""
    (_, job), (jobset,) = manifest(f"{BASE} --min-np 1"), manifest(f"--kind jobset {BASE}")
    (rayjob,) = manifest(f"--kind rayjob {BASE}")
    job["spec"]["podFailurePolicy"]["rules"][0]["when"] = "always"
    jobset["spec"]["network"]["subDomain"] = "x"
    rayjob["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["size"] = 3
    with pytest.raises(NotValid):
        check(job)
    with pytest.raises(AssertionError):
        check(jobset)
    with pytest.raises(jsonschema.ValidationError):
        check(rayjob)


@pytest.mark.parametrize("file", ["job", "elastic-job", "jobset", "rayjob"])
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
    ],
)
def test_a_rank_finds_in_it_what_it_needs(
    manifest: Manifest, kind: str, store_host: str, last: str
) -> None:
    made = manifest(f"--kind {kind} {BASE} --min-np 2 --max-np 8")[-1]["spec"]
    job = made["replicatedJobs"][0]["template"]["spec"] if kind == "jobset" else made
    pod = job["template"]["spec"]
    environ = {entry["name"]: entry["value"] for entry in pod["containers"][0]["env"]}
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
