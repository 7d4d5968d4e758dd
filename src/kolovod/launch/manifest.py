"""The objects by which Kubernetes starts a job's ranks, and starts them again.

Pure: what a user wants in, Kubernetes' objects out. docs/kubernetes.md says what each part is for.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kolovod.errors import CommandArgumentError

__all__ = ["KINDS", "Wanted", "objects"]

Object = dict[str, Any]

_SECRET_PATH = "/etc/kolovod"
_RECORD_PATH = "/var/lib/kolovod"
_USER = 1000
_LEFT = 128 + 15
"""The exit code of a rank that leaves by SIGTERM (``Entry.leaving_code``)."""
_GROUP = "ranks"
"""What a JobSet calls its only Job, and a RayJob its workers."""
_NODE = "node"
"""What Kubeflow calls the Job of a TrainJob that trains, and the container in it."""
_MPI_PATH = "/etc/mpi"
"""The folder where an MPIJob's launcher finds its workers."""
_MAX_LABEL = 63
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]|[KMGTPE]i)?")


@dataclass(frozen=True)
class Wanted:
    """A job, as its user sees it. Raises InvalidArgumentError, which names the flag."""

    name: str
    image: str
    """With Kolovod, the framework and the script in it."""
    command: Sequence[str]
    """What each rank runs; of a RayJob, what its driver runs."""
    size: int
    """Ranks that it begins with: one in each pod."""
    min_np: int = 0
    """Ranks without which it waits; 0: the job is not elastic."""
    max_np: int = 0
    """Ranks that it may have; 0: ``size``."""
    cpu: str = "1"
    memory: str = "2Gi"
    """As Kubernetes writes quantities, for each rank."""
    shm: str = "1Gi"
    """The size of its /dev/shm; it counts as memory."""
    gpus: int = 0
    """For each rank."""
    grace_s: int = 60
    """From SIGTERM, by which a rank leaves, to SIGKILL."""
    retries: int = 5
    """How often a rank may fail, by itself, before it is given up."""
    start_timeout_s: int = 600
    """For all pods to be scheduled and to have their image."""
    record_claim: str = ""
    """A claim to a volume that all pods may write at once, for KOLOVOD_RECORD_DIR; "": none."""

    def __post_init__(self) -> None:
        longest = f"{self.name}-{_GROUP}-0-{max(self.size, self.max_np) - 1}"
        if not _NAME.fullmatch(self.name) or len(longest) > _MAX_LABEL:
            raise CommandArgumentError(
                f"--name {self.name!r}: expected small letters, digits and -, so short that "
                f"{longest!r} has at most {_MAX_LABEL} characters"
            )
        if not self.image or not self.command:
            raise CommandArgumentError("--image and a COMMAND are needed")
        if self.size < 1 or self.min_np > self.size or 0 < self.max_np < self.size:
            raise CommandArgumentError(
                f"--min-np {self.min_np}, -np {self.size}, --max-np {self.max_np}: they must not "
                "descend"
            )
        if self.max_np > self.size and not self.min_np:
            raise CommandArgumentError(
                f"--max-np {self.max_np}: only an elastic job grows; give --min-np, too"
            )
        for flag in ("cpu", "memory", "shm"):
            if not _QUANTITY.fullmatch(getattr(self, flag)):
                raise CommandArgumentError(
                    f"--{flag} {getattr(self, flag)!r}: expected a quantity, as 4, 500m or 8Gi"
                )
        for flag in ("gpus", "grace_s", "retries", "start_timeout_s"):
            if getattr(self, flag) < 0:
                text = flag.replace("_", "-")
                raise CommandArgumentError(f"--{text} {getattr(self, flag)}: below 0")

    @property
    def most(self) -> int:
        """The most ranks that it may have."""
        return self.max_np or self.size

    @property
    def secret_name(self) -> str:
        """The name of the Secret that the job's user makes."""
        return f"{self.name}-secret"


def objects(kind: str, wanted: Wanted) -> list[Object]:
    """Return the objects of a job, for ``kubectl apply``. ``kind``: a key of ``KINDS``."""
    return KINDS[kind](wanted)


def _job(wanted: Wanted) -> list[Object]:
    label = {"batch.kubernetes.io/job-name": wanted.name}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": wanted.name},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": label},
    }
    spec = _job_spec(wanted, f"{wanted.name}-0.{wanted.name}", label)
    spec["template"]["spec"] = {"subdomain": wanted.name, **spec["template"]["spec"]}
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": wanted.name},
        "spec": spec,
    }
    return [service, job]


def _jobset(wanted: Wanted) -> list[Object]:
    job_name = f"{wanted.name}-{_GROUP}-0"
    label = {"batch.kubernetes.io/job-name": job_name}
    spec = _job_spec(wanted, f"{job_name}-0.{wanted.name}", label)
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": wanted.name},
        "spec": _jobset_spec(wanted, _GROUP, {"spec": spec}),
    }
    return [jobset]


def _jobset_spec(wanted: Wanted, group: str, template: Object) -> Object:
    return {
        "network": {
            "enableDNSHostnames": True,
            "subdomain": wanted.name,
            "publishNotReadyAddresses": True,
        },
        "failurePolicy": {"maxRestarts": wanted.retries},
        "replicatedJobs": [{"name": group, "replicas": 1, "template": template}],
    }


def _trainjob(wanted: Wanted) -> list[Object]:
    """Return a runtime with all that pods need, and the TrainJob, whose JobSet has its name."""
    job_name = f"{wanted.name}-{_NODE}-0"
    label = {"batch.kubernetes.io/job-name": job_name}
    spec = _job_spec(wanted, f"{job_name}-0.{wanted.name}", label, _NODE)
    (container,) = spec["template"]["spec"]["containers"]
    of_job = {key: container.pop(key) for key in ("image", "command", "env")}
    step = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    template = {"metadata": {"labels": step}, "spec": spec}
    group, version = "trainer.kubeflow.org", "v1alpha1"
    runtime = {
        "apiVersion": f"{group}/{version}",
        "kind": "TrainingRuntime",
        "metadata": {"name": wanted.name},
        "spec": {
            "mlPolicy": {"numNodes": wanted.size},
            "template": {"spec": _jobset_spec(wanted, _NODE, template)},
        },
    }
    job = {
        "apiVersion": f"{group}/{version}",
        "kind": "TrainJob",
        "metadata": {"name": wanted.name},
        "spec": {
            "runtimeRef": {"apiGroup": group, "kind": runtime["kind"], "name": wanted.name},
            "trainer": {"numNodes": wanted.size, **of_job},
        },
    }
    return [runtime, job]


def _job_spec(
    wanted: Wanted, store_host: str, label: Mapping[str, str], container: str = "rank"
) -> Object:
    """Return a Job's spec.

    ``store_host``: rank 0's pod by name. ``label``: that of all pods. ``container``: its name.
    """
    return {
        "completionMode": "Indexed",
        "completions": wanted.size,
        "parallelism": wanted.size,
        **(_again(wanted, container) if wanted.min_np else {"backoffLimit": 0}),
        "template": {"spec": _rank_pod(wanted, _variables(wanted, store_host), label, container)},
    }


def _again(wanted: Wanted, container: str) -> Object:
    """Return the rules by which pods start again, and when that is a failure of their rank."""
    evicted = {"type": "DisruptionTarget", "status": "True"}
    left = {"containerName": container, "operator": "In", "values": [_LEFT]}
    return {
        "backoffLimitPerIndex": wanted.retries,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [evicted]},
                {"action": "Ignore", "onExitCodes": left},
            ]
        },
        "successPolicy": {"rules": [{"succeededCount": 1}]},
    }


def _variables(wanted: Wanted, store_host: str) -> dict[str, str]:
    told = {
        "KOLOVOD_SIZE": str(wanted.size),
        "KOLOVOD_STORE_HOST": store_host,
        "KOLOVOD_SECRET_FILE": f"{_SECRET_PATH}/secret",
        "KOLOVOD_START_TIMEOUT_S": str(wanted.start_timeout_s),
    }
    if wanted.min_np:
        told["KOLOVOD_MIN_NP"] = str(wanted.min_np)
        told["KOLOVOD_MAX_NP"] = str(wanted.most)
    if wanted.record_claim:
        told["KOLOVOD_RECORD_DIR"] = _RECORD_PATH
    return told


def _rank_pod(
    wanted: Wanted, variables: Mapping[str, str], label: Mapping[str, str], name: str
) -> Object:
    volumes: list[Object] = [
        {"name": "secret", "secret": {"secretName": wanted.secret_name, "defaultMode": 0o440}},
        _shared_memory(wanted),
    ]
    mounts: list[Object] = [
        {"name": "secret", "mountPath": _SECRET_PATH, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    if wanted.record_claim:
        claim = {"claimName": wanted.record_claim}
        volumes.append({"name": "records", "persistentVolumeClaim": claim})
        mounts.append({"name": "records", "mountPath": _RECORD_PATH})
    container = {
        "name": name,
        "image": wanted.image,
        "command": list(wanted.command),
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "resources": _resources(wanted),
        "volumeMounts": mounts,
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": wanted.grace_s,
        "securityContext": {"runAsUser": _USER, "runAsGroup": _USER, "fsGroup": _USER},
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": dict(label)},
            }
        ],
        "containers": [container],
        "volumes": volumes,
    }


def _mpijob(wanted: Wanted) -> list[Object]:
    """Return an MPIJob, whose launcher is ``kolovod run``, which reaches the workers by ssh."""
    _refuse_records(wanted, "ranks of kolovod run")
    run = ["kolovod", "run", "-np", str(wanted.size)]
    if wanted.min_np:
        run += ["--min-np", str(wanted.min_np), "--max-np", str(wanted.most)]
        run += ["--host-discovery-script", f"{_MPI_PATH}/discover_hosts.sh"]
    else:
        run += ["--hostfile", f"{_MPI_PATH}/hostfile"]
    run += ["--ssh-args=-o StrictHostKeyChecking=accept-new", "--", *wanted.command]
    start = {"name": "KOLOVOD_START_TIMEOUT_S", "value": str(wanted.start_timeout_s)}
    launcher = {"name": "launcher", "image": wanted.image, "command": run, "env": [start]}
    worker = {
        "name": "worker",
        "image": wanted.image,
        "command": ["/usr/sbin/sshd", "-De"],
        "resources": _resources(wanted),
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    workers = {
        "terminationGracePeriodSeconds": wanted.grace_s,
        "containers": [worker],
        "volumes": [_shared_memory(wanted)],
    }
    mpijob = {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": {"name": wanted.name},
        "spec": {
            "slotsPerWorker": 1,
            "launcherCreationPolicy": "WaitForWorkersReady",
            "runPolicy": {
                "cleanPodPolicy": "Running",
                "backoffLimit": wanted.retries if wanted.min_np else 0,
            },
            "mpiReplicaSpecs": {
                "Launcher": {
                    "replicas": 1,
                    "restartPolicy": "Never",
                    "template": {"spec": {"containers": [launcher]}},
                },
                "Worker": {
                    "replicas": wanted.size,
                    "restartPolicy": "OnFailure" if wanted.min_np else "Never",
                    "template": {"spec": workers},
                },
            },
        },
    }
    return [mpijob]


def _refuse_records(wanted: Wanted, ranks: str) -> None:
    if wanted.record_claim:
        raise CommandArgumentError(
            f"--record-claim {wanted.record_claim!r}: {ranks} keep no records there"
        )


def _shared_memory(wanted: Wanted) -> Object:
    return {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": wanted.shm}}


def _resources(wanted: Wanted) -> Object:
    limits = {"cpu": wanted.cpu, "memory": wanted.memory}
    if wanted.gpus:
        limits["nvidia.com/gpu"] = str(wanted.gpus)
    return {"limits": limits}


def _rayjob(wanted: Wanted) -> list[Object]:
    _refuse_records(wanted, "ranks that Ray starts")
    fewest = wanted.min_np or wanted.size
    head = {
        "name": "head",
        "image": wanted.image,
        "resources": {"limits": {"cpu": "2", "memory": "4Gi"}},
    }
    worker = {
        "name": "worker",
        "image": wanted.image,
        "resources": _resources(wanted),
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    workers = {
        "groupName": _GROUP,
        "replicas": wanted.size,
        "minReplicas": fewest,
        "maxReplicas": wanted.most,
        "rayStartParams": {},
        "template": {
            "spec": {
                "terminationGracePeriodSeconds": wanted.grace_s,
                "containers": [worker],
                "volumes": [_shared_memory(wanted)],
            }
        },
    }
    rayjob = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": wanted.name},
        "spec": {
            "entrypoint": shlex.join(wanted.command),
            "shutdownAfterJobFinishes": True,
            "rayClusterSpec": {
                "enableInTreeAutoscaling": fewest < wanted.most,
                "headGroupSpec": {
                    # No rank runs there: its end is that of the whole cluster.
                    "rayStartParams": {"num-cpus": "0"},
                    "template": {"spec": {"containers": [head]}},
                },
                "workerGroupSpecs": [workers],
            },
        },
    }
    return [rayjob]


KINDS: Mapping[str, Callable[[Wanted], list[Object]]] = {
    "job": _job,
    "jobset": _jobset,
    "trainjob": _trainjob,
    "mpijob": _mpijob,
    "rayjob": _rayjob,
}
"""By name."""
