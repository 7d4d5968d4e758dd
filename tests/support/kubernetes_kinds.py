"""What KubeRay takes as a RayJob (ray.io/v1), and the MPI Operator as an MPIJob (v2beta1).

In our words, as far as the manifests use them: no package of the index has their schemas. Pod
templates are left to Kubernetes' own.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def _object(required: str, **properties: Schema) -> Schema:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required.split(),
        "properties": properties,
    }


_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": (1 << 31) - 1}
_TEMPLATE = _object("spec", metadata={"type": "object"}, spec={"type": "object"})
_START = {"type": "object", "additionalProperties": _TEXT}
_HEAD = _object(
    "template",
    rayStartParams=_START,
    serviceType=_TEXT,
    template=_TEMPLATE,
)
_WORKERS = _object(
    "groupName minReplicas maxReplicas template",
    groupName=_TEXT,
    replicas=_COUNT,
    minReplicas=_COUNT,
    maxReplicas=_COUNT,
    numOfHosts={**_COUNT, "minimum": 1},
    rayStartParams=_START,
    template=_TEMPLATE,
)
_CLUSTER = _object(
    "headGroupSpec",
    rayVersion=_TEXT,
    enableInTreeAutoscaling=_FLAG,
    headGroupSpec=_HEAD,
    workerGroupSpecs={"type": "array", "items": _WORKERS},
)
RAY_JOB = _object(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=_object("name", name=_TEXT, labels=_START),
    spec=_object(
        "rayClusterSpec",
        entrypoint=_TEXT,
        runtimeEnvYAML=_TEXT,
        shutdownAfterJobFinishes=_FLAG,
        ttlSecondsAfterFinished=_COUNT,
        backoffLimit=_COUNT,
        activeDeadlineSeconds=_COUNT,
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
        suspend=_FLAG,
        rayClusterSpec=_CLUSTER,
    ),
)
"""A JSON schema; what it does not name is refused."""

_REPLICAS = _object(
    "template",
    replicas=_COUNT,
    restartPolicy={"enum": ["Never", "OnFailure"]},
    template=_TEMPLATE,
)
MPI_JOB = _object(
    "apiVersion kind metadata spec",
    apiVersion={"const": "kubeflow.org/v2beta1"},
    kind={"const": "MPIJob"},
    metadata=_object("name", name=_TEXT, labels=_START),
    spec=_object(
        "mpiReplicaSpecs",
        slotsPerWorker=_COUNT,
        sshAuthMountPath=_TEXT,
        runLauncherAsWorker=_FLAG,
        launcherCreationPolicy={"enum": ["AtStartup", "WaitForWorkersReady"]},
        mpiImplementation={"enum": ["OpenMPI", "Intel", "MPICH"]},
        runPolicy=_object(
            "",
            cleanPodPolicy={"enum": ["None", "Running", "All"]},
            ttlSecondsAfterFinished=_COUNT,
            activeDeadlineSeconds=_COUNT,
            backoffLimit=_COUNT,
            suspend=_FLAG,
        ),
        mpiReplicaSpecs=_object("Launcher", Launcher=_REPLICAS, Worker=_REPLICAS),
    ),
)
