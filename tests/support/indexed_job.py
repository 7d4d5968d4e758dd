"""An Indexed Job of Kubernetes, simulated on the test bed: what its controllers would do.

The manifest is read as a cluster would read it: how many pods there are, what each is told, who is
started again and what counts as a failure. A pod is a host of the bed with an address of its own,
which no other pod gets afterwards. Names are answered for by a server of ours, which learns late of
new addresses if a test wants that. Pods lie on nodes, which can vanish.

What is not simulated: images, volumes but the secret's, limits, and Kubernetes' own back-off times.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import name_server
from netbed import Bed
from reached_by_ssh import environment

DEADLINE_S = 90.0
SECRET = "0123456789abcdef0123456789abcdef"
_SEARCH = "default.svc.cluster.local"
_DNS = "dns"
_TOLD = ("KOLOVOD_", "HOROVOD_", "OMPI_", "PMI_", "SLURM_", "JOB_COMPLETION")


@dataclass(eq=False)
class Pod:
    """One, from when it runs."""

    index: int
    node: str
    host: str
    """Of the bed."""
    process: subprocess.Popen[str]
    log: Path
    kill_s: float | None = None
    """When it is killed: it was sent SIGTERM."""
    is_disrupted: bool = False
    """Whether Kubernetes itself ends it (DisruptionTarget)."""
    is_lost: bool = False
    """Whether its node has vanished: nobody hears of its end."""

    @property
    def text(self) -> str:
        """What it has written."""
        return self.log.read_text(errors="replace")


class Cluster:
    """Nodes with room for pods, and names for them; a context manager, with one Job at a time.

    ``nodes``: how many pods each has room for at a time. Every pod gets a fresh host, ``pods`` at
    most.
    """

    def __init__(self, folder: Path, nodes: dict[str, int], pods: int) -> None:
        self.nodes = dict(nodes)
        self.dns_late_s = 0.0
        """From a pod's start, or end, to when its name is answered accordingly."""
        self.held: set[int] = set()
        """Indices for whose pods no node has room."""
        self.pods: list[Pod] = []
        """That run."""
        self.ended: list[Pod] = []
        self.failures: dict[int, int] = {}
        """Counted, by index."""
        self.ignored: list[Pod] = []
        """Those whose end counts as no failure of their index."""
        self.succeeded: set[int] = set()
        self.failed: set[int] = set()
        """Indices that are given up."""
        self.is_complete = False
        self._folder = folder
        self._names_file, self._names = folder / "names.json", dict[str, list[str]]()
        self._due: list[tuple[float, str, str]] = []  # when a name gets an address; "": none
        self._fresh = [f"pod{number}" for number in range(pods)]
        self._bed = Bed([_DNS, *self._fresh], with_sshd=False)
        self._job: dict[str, Any] = {}

    def __enter__(self) -> Cluster:
        folder = self._folder
        folder.chmod(0o777)
        self._bed.__enter__()
        try:
            (folder / "secrets").mkdir()
            (folder / "secrets" / "secret").write_text(SECRET)
            (folder / "secrets" / "secret").chmod(0o440)
            self._write_names()
            (folder / "resolv.conf").write_text(
                f"nameserver {self._bed.address(_DNS)}\nsearch {_SEARCH}\noptions ndots:5\n"
            )
            command = [sys.executable, name_server.__file__, str(self._names_file)]
            self._server = self._bed.popen(_DNS, command, stdout=subprocess.PIPE, text=True)
            assert self._server.stdout is not None
            assert self._server.stdout.readline() == "up\n"
        except BaseException:
            self._bed.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(self, *exception: Any) -> None:
        for pod in [*self.pods, *self.ended]:
            code = pod.process.poll()
            pod.process.kill()
            pod.process.wait()
            print(f"-- index {pod.index} on {pod.host} ({code}):", pod.text[-2000:])
        self._server.kill()
        self._server.communicate()
        self._bed.__exit__(*exception)

    # --- what a user does ---

    def apply(self, objects: Sequence[dict[str, Any]]) -> None:
        """Begin the Job that is among them."""
        (self._job,) = (o["spec"] for o in objects if o["kind"] == "Job")
        (service,) = (o for o in objects if o["kind"] == "Service")
        (job,) = (o for o in objects if o["kind"] == "Job")
        self._name = job["metadata"]["name"]
        pod = self._job["template"]["spec"]
        assert self._job["completionMode"] == "Indexed"
        assert self._job["podReplacementPolicy"] == "Failed"
        assert pod["restartPolicy"] == "Never"
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["publishNotReadyAddresses"]
        assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": self._name}
        assert pod["subdomain"] == service["metadata"]["name"]
        self._subdomain = pod["subdomain"]

    def scale(self, size: int) -> None:
        """Change parallelism and completions together."""
        rules = self._job.get("successPolicy", {"rules": []})["rules"]
        assert all(rule["succeededCount"] <= size for rule in rules)
        self._job["completions"] = self._job["parallelism"] = size

    # --- what happens to pods ---

    def pod(self, index: int) -> Pod:
        """The one that runs for an index."""
        (pod,) = (pod for pod in self.pods if pod.index == index)
        return pod

    def evict(self, index: int) -> Pod:
        """As a drained node does: SIGTERM, and SIGKILL when the grace period is over."""
        pod = self.pod(index)
        pod.is_disrupted = True
        self._terminate(pod)
        return pod

    def kill(self, index: int) -> Pod:
        """As where a process needs too much memory."""
        pod = self.pod(index)
        pod.process.kill()
        return pod

    def vanish(self, node: str) -> list[Pod]:
        """It is off, and answers nothing; nobody knows yet whether its pods have ended."""
        del self.nodes[node]
        gone = [pod for pod in self.pods if pod.node == node]
        for pod in gone:
            pod.is_lost = True
            self._bed.kill_host(pod.host)
        return gone

    def give_up(self, pods: Sequence[Pod]) -> None:
        """Their node is known to be off for good: they have failed, by a disruption."""
        for pod in pods:
            pod.is_lost, pod.is_disrupted = False, True

    def _terminate(self, pod: Pod) -> None:
        if pod.kill_s is None:
            grace_s = self._job["template"]["spec"]["terminationGracePeriodSeconds"]
            pod.kill_s = time.monotonic() + grace_s
            pod.process.terminate()

    # --- what the controllers do ---

    def until(self, condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
        """Control until it is true; fails at the deadline."""
        deadline = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {deadline_s} s"
            self.control()
            time.sleep(0.02)

    def control(self) -> None:
        """One look at all that is, and what follows."""
        for pod in list(self.pods):
            if not pod.is_lost and pod.process.poll() is not None:
                self._end(pod)
            elif pod.kill_s is not None and time.monotonic() >= pod.kill_s:
                pod.process.kill()
            elif self.is_complete or pod.index >= self._job["completions"]:
                self._terminate(pod)
        enough = [rule["succeededCount"] for rule in self._job["successPolicy"]["rules"]]
        self.is_complete = self.is_complete or len(self.succeeded) >= min(enough)
        if not self.is_complete:
            self._start_missing()
        self._publish()

    def _start_missing(self) -> None:
        there = {pod.index for pod in self.pods} | self.succeeded | self.failed
        for index in sorted(set(range(self._job["completions"])) - there - self.held):
            used = [pod.node for pod in self.pods]
            room = [node for node, most in self.nodes.items() if used.count(node) < most]
            if room:
                self._start(index, min(room, key=used.count))

    def _start(self, index: int, node: str) -> None:
        host, template = self._fresh.pop(0), self._job["template"]["spec"]
        (container,) = template["containers"]
        for words in (
            ["mount", "--bind", str(self._folder / "resolv.conf"), "/etc/resolv.conf"],
            ["hostname", f"{self._name}-{index}"],
        ):
            assert self._bed.run(host, words).returncode == 0
        (secret,) = (m["mountPath"] for m in container["volumeMounts"] if m["name"] == "secret")
        told = {"JOB_COMPLETION_INDEX": str(index)}
        for variable in container["env"]:
            told[variable["name"]] = variable["value"].replace(secret, f"{self._folder}/secrets")
        inherited = {n: v for n, v in environment().items() if not n.startswith(_TOLD)}
        program, *arguments = container["command"]
        assert program == "python"
        log = self._folder / f"{index}-{host}.log"
        with log.open("w") as out:
            process = self._bed.popen(
                host, [sys.executable, *arguments], stdout=out, stderr=out, env=inherited | told
            )
        self.pods.append(Pod(index, node, host, process, log))
        self._name_soon(index, self._bed.address(host))

    def _end(self, pod: Pod) -> None:
        self.pods.remove(pod)
        self.ended.append(pod)
        if pod.host in self._bed.names and pod.node in self.nodes:
            self._bed.set_link(pod.host, up=False)  # nothing answers at its address any more
        if not any(other.index == pod.index for other in self.pods):
            self._name_soon(pod.index, "")
        code = pod.process.returncode
        code = 128 - code if code < 0 else code
        if code == 0:
            self.succeeded.add(pod.index)
        elif pod.index >= self._job["completions"] or self._is_ignored(pod, code):
            self.ignored.append(pod)
        else:
            self.failures[pod.index] = self.failures.get(pod.index, 0) + 1
            if self.failures[pod.index] > self._job["backoffLimitPerIndex"]:
                self.failed.add(pod.index)

    def _is_ignored(self, pod: Pod, code: int) -> bool:
        for rule in self._job["podFailurePolicy"]["rules"]:
            conditions = [c["type"] for c in rule.get("onPodConditions", ())]
            codes = rule.get("onExitCodes", {"values": []})["values"]
            if code in codes or (pod.is_disrupted and "DisruptionTarget" in conditions):
                return bool(rule["action"] == "Ignore")
        return False

    # --- names ---

    def _name_soon(self, index: int, address: str) -> None:
        name = f"{self._name}-{index}.{self._subdomain}.{_SEARCH}"
        self._due.append((time.monotonic() + self.dns_late_s, name, address))

    def _publish(self) -> None:
        now = time.monotonic()
        due = [entry for entry in self._due if entry[0] <= now]
        self._due = [entry for entry in self._due if entry[0] > now]
        for _, name, address in due:
            self._names.pop(name, None)
            if address:
                self._names[name] = [address]
        if due:
            self._write_names()

    def _write_names(self) -> None:
        new = self._names_file.with_suffix(".new")
        new.write_text(json.dumps(self._names))
        shutil.move(new, self._names_file)
