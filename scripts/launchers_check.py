"""Starts the example by every launcher that can be had on one machine, and keeps a log.

    python scripts/launchers_check.py                       writes bench/results/launchers.md
    python scripts/launchers_check.py --only srun --only torchrun --output /dev/stdout

Needs the superuser, and of Debian: slurm-wlm munge openmpi-bin mpich iproute2; of Python what the
extras examples and mpi bring. What is absent is reported as not run, and counts as a failure. Hosts
are namespaces of this machine (two_hosts.py). Some minutes.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from two_hosts import TwoHosts, missing_for_slurm

import kolovod

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 150
SECRET = "KOLOVOD_SECRET=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \\n')"
DONE = "processes: accuracy"

COMMUNICATOR = """
import os, numpy, horovod.torch as hvd, kolovod
from mpi4py import MPI
rank = MPI.COMM_WORLD.Get_rank()
half = MPI.COMM_WORLD.Split(rank % 2, rank)  # each has a rank on both hosts
hvd.init(comm=half)
total = kolovod.allreduce(numpy.array([rank]), op=kolovod.Sum).item()
assert (hvd.size(), hvd.rank(), total) == (2, half.Get_rank(), 2 + 2 * (rank % 2)), total
hvd.shutdown()
MPI.COMM_WORLD.Barrier()
os.write(1, f"rank {rank}: the half with sum {total}\\n".encode())
"""

ELASTIC = """
import os, signal, numpy, kolovod.numpy as kv
from kolovod import elastic
kv.init()
state = elastic.State(step=0)

@elastic.run
def train(state):
    first = kv.rank()
    while state.step < 200:
        if state.step == 50 and first == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        size = elastic.exactly(lambda: kv.allreduce(numpy.ones(1), "one", op=kv.Sum)).item()
        state.step += 1
        state.commit()
    return size

size = train(state)
os.write(1, f"{size:g} ranks are left after {state.step} steps\\n".encode())
"""

# checkpointed.py FOLDER UNTIL: it trains until something has happened, and 50 steps more. Each step
# takes 20 ms at least.
CHECKPOINTED = """
import os, pathlib, signal, sys, time, numpy, kolovod.numpy as kv
from kolovod import elastic
folder, until = pathlib.Path(sys.argv[1]), sys.argv[2]
checkpoint = folder / "checkpoint"
begun = int(checkpoint.read_text()) if checkpoint.exists() else 0
kv.init()
state = elastic.State(step=begun, begun=begun, sizes=[], since=0)
happened = {
    "restarted": lambda: state.begun > 0,
    "smaller": lambda: state.sizes[-1] < max(state.sizes),
    "larger": lambda: state.sizes[-1] > state.sizes[0],
    "back": lambda: state.sizes[-1] == max(state.sizes) > min(state.sizes) > 1,
}

@state.on_leave
def save(rank):
    if rank == 0:
        checkpoint.with_suffix(".new").write_text(str(state.step))
        checkpoint.with_suffix(".new").rename(checkpoint)

@elastic.run
def train(state):
    while not state.since or state.step < state.since + 50:
        size = elastic.exactly(lambda: kv.allreduce(numpy.ones(1), "one", op=kv.Sum)).item()
        state.step += 1
        state.sizes.append(int(size))
        if state.step >= state.begun + 50 and not state.since and happened[until]():
            state.since = state.step
        state.commit()
        (folder / f"step.{kv.rank()}").write_text(f"{state.step} {size} {os.getpid()}")
        time.sleep(0.02)

train(state)
if kv.rank() == 0:
    if state.begun:
        print("it went on from a checkpoint,", end=" ")
    print(f"{until}: {state.sizes[-1]} ranks at the end", flush=True)
"""


class Case(NamedTuple):
    """One way to start the example."""

    name: str
    command: str
    """For the shell, on host n1; {python}, {example}, {agent} and {folder} are filled in."""
    wanted: str
    """What the output must contain."""
    fails: bool = False
    """Whether it must end with an error."""


RSH = "--mca plm rsh --mca plm_rsh_agent {agent} -H n1:1,n2:1 -np 2"
RSH_4 = "--mca plm rsh --mca plm_rsh_agent {agent} -H n1:2,n2:2 -np 4"
HYDRA = "-launcher rsh -launcher-exec {agent} -hosts n1:1,n2:1 -np 2"
# To UCX namespaces of one kernel are one host, whose memory it would share.
LIBMPICH = "MPI4PY_MPIABI=mpich LD_LIBRARY_PATH={folder}/lib UCX_TLS=tcp,self"
CHECKPOINTED_SCRIPT = "{folder}/checkpointed.py {folder}"
CHECKPOINTED_RUN = f"{{python}} {CHECKPOINTED_SCRIPT}"
FRESH = "rm -f {folder}/checkpoint {folder}/step.*"
TRAINS = "until test -s {folder}/step.1; do sleep 0.2; done"  # two ranks at least
TORCHRUN = "{python} -m torch.distributed.run --nproc-per-node=2"
KOLOVOD_RUN = "{python} -m kolovod run"  # without -H
HOSTS = "--nnodes=2 --master-addr=n1 --master-port=29400"
ELASTIC_HOSTS = (
    "--nnodes=1:2 --max-restarts=3 --rdzv-backend=c10d --rdzv-endpoint=n1:29400 --rdzv-id=check "
    "--rdzv-conf=last_call_timeout=2"
)

CASES = (
    Case("srun, one node", "srun -N1 -n2 {python} {example}", f"2 {DONE}"),
    Case("srun, two nodes", f"export {SECRET}; srun -N2 -n4 {{python}} {{example}}", f"4 {DONE}"),
    Case("srun, two nodes, --mpi=pmi2",
         f"export {SECRET}; srun -N2 -n2 --mpi=pmi2 {{python}} {{example}}", f"2 {DONE}"),
    Case("srun, two nodes, elastic, rank 0 is killed",
         f"export {SECRET} KOLOVOD_MIN_NP=1; "
         "srun -N2 -n4 --no-kill --kill-on-bad-exit=0 {python} {folder}/elastic.py",
         "3 ranks are left after 200 steps", fails=True),
    Case("srun, two nodes, no secret", "srun -N2 -n2 {python} {example}",
         "export KOLOVOD_SECRET=$(openssl rand -hex 32)", fails=True),
    Case("sbatch with srun",
         f"export {SECRET}; sbatch -W -N2 -n2 -o {{folder}}/out "
         "--wrap 'srun {python} {example}'; cat {folder}/out", f"2 {DONE}"),
    Case("sbatch without srun: a world of one",
         "sbatch -W -N2 -n2 -o {folder}/out1 --wrap '{python} {example}'; cat {folder}/out1",
         "1 process: accuracy"),
    Case("sbatch --requeue, told to leave by SIGUSR1 before its time limit",
         f"export {SECRET} KOLOVOD_MIN_NP=1; {FRESH}; sbatch -N2 -n2 -t2 --signal=USR1@30 "
         "--requeue --no-kill --open-mode=append -o {folder}/out4 "
         f"--wrap 'srun --kill-on-bad-exit=0 {CHECKPOINTED_RUN} restarted; "
         "test $? -ne 143 || scontrol requeue $SLURM_JOB_ID'; "
         "while squeue -h | grep -q .; do sleep 1; done; cat {folder}/out4",
         "it went on from a checkpoint, restarted: 2 ranks at the end"),
    Case("sbatch --no-kill, a node goes down",
         f"export {SECRET} KOLOVOD_MIN_NP=1; {FRESH}; sbatch -W -N2 -n2 --no-kill "
         "-o {folder}/out5 --wrap "
         f"'srun --no-kill --kill-on-bad-exit=0 {CHECKPOINTED_RUN} smaller' & "
         f"{TRAINS}; scontrol update NodeName=n2 State=DOWN Reason=check; wait; "
         "scontrol update NodeName=n2 State=RESUME; cat {folder}/out5",
         "smaller: 1 ranks at the end"),
    Case("sbatch, a second job joins the first by address and secret",
         f"export {SECRET} KOLOVOD_JOB_NAME=check KOLOVOD_STORE_HOST=n1 KOLOVOD_MIN_NP=1 "
         f"KOLOVOD_MAX_NP=4; {FRESH}; "
         f"sbatch -w n1 -n2 -o {{folder}}/out6 --wrap 'srun {CHECKPOINTED_RUN} larger'; "
         f"{TRAINS}; KOLOVOD_FIRST_RANK=2 KOLOVOD_SIZE=2 "
         f"sbatch -W -w n2 -n2 -o {{folder}}/out7 --wrap 'srun {CHECKPOINTED_RUN} larger'; "
         "while squeue -h | grep -q .; do sleep 1; done; cat {folder}/out6",
         "larger: 4 ranks at the end"),
    Case("salloc with srun", f"export {SECRET}; salloc -N2 -n2 srun {{python}} {{example}}",
         f"2 {DONE}"),
    Case("salloc with kolovod run, which takes the hosts of the allocation",
         f"PATH={{folder}}/bin:$PATH salloc -N2 -n4 {KOLOVOD_RUN} {{python}} {{example}}",
         f"4 {DONE}"),
    Case("sbatch with kolovod run",
         f"PATH={{folder}}/bin:$PATH sbatch -W -N2 -n2 -o {{folder}}/out2 "
         f"--wrap '{KOLOVOD_RUN} {{python}} {{example}}'; cat {{folder}}/out2", f"2 {DONE}"),
    Case("sbatch with kolovod run, a slot for each CPU",
         f"PATH={{folder}}/bin:$PATH sbatch -W -N2 -o {{folder}}/out3 "
         f"--wrap '{KOLOVOD_RUN} hostname'; cat {{folder}}/out3", "[7]<stdout>:n2"),
    Case("salloc with mpirun of Open MPI",
         "salloc -N2 -n2 mpirun.openmpi {python} {example}", f"2 {DONE}"),
    Case("Open MPI, one host", "mpirun.openmpi --oversubscribe -np 2 {python} {example}",
         f"2 {DONE}"),
    Case("Open MPI, one host, elastic, rank 0 is killed",
         "KOLOVOD_MIN_NP=1 mpirun.openmpi --oversubscribe --enable-recovery -np 3 "
         "{python} {folder}/elastic.py", "2 ranks are left after 200 steps"),
    Case("Open MPI, two hosts, mpi4py", f"mpirun.openmpi {RSH} {{python}} {{example}}",
         f"2 {DONE}"),
    Case("Open MPI, two hosts, no mpi4py",
         f"export {SECRET} KOLOVOD_STORE_HOST=n1 PYTHONPATH={{folder}}/no:$PYTHONPATH; "
         f"mpirun.openmpi {RSH} -x KOLOVOD_SECRET -x KOLOVOD_STORE_HOST -x PYTHONPATH "
         "{python} {example}", f"2 {DONE}"),
    Case("Open MPI, two hosts, neither mpi4py nor a secret",
         f"export PYTHONPATH={{folder}}/no:$PYTHONPATH; "
         f"mpirun.openmpi {RSH} -x PYTHONPATH {{python}} {{example}}",
         "nothing tells where rank 0 is. MPI could carry all that, but mpi4py cannot", fails=True),
    Case("Open MPI, two hosts, hvd.init(comm=a communicator)",
         f"mpirun.openmpi {RSH_4} {{python}} {{folder}}/communicator.py", "the half with sum 4"),
    Case("MPICH, one host", "mpirun.mpich -np 2 {python} {example}", f"2 {DONE}"),
    Case("MPICH, one host, elastic, rank 0 is killed",
         # It ends all when a process of its own is killed, whatever -disable-auto-cleanup says.
         "KOLOVOD_MIN_NP=1 mpirun.mpich -np 3 sh -c '{python} {folder}/elastic.py; true'",
         "2 ranks are left after 200 steps"),
    Case("MPICH, two hosts, mpi4py", f"{LIBMPICH} mpirun.mpich {HYDRA} {{python}} {{example}}",
         f"2 {DONE}"),
    Case("MPICH, two hosts, no mpi4py",
         f"export {SECRET} KOLOVOD_STORE_HOST=n1 PYTHONPATH={{folder}}/no:$PYTHONPATH; "
         f"mpirun.mpich {HYDRA} {{python}} {{example}}", f"2 {DONE}"),
    Case("torchrun, one host", f"{TORCHRUN} --standalone {{example}}", f"2 {DONE}"),
    Case("torchrun, two hosts",
         f"export {SECRET}; {{agent}} n2 {TORCHRUN} {HOSTS} --node-rank=1 {{example}} & "
         f"{TORCHRUN} {HOSTS} --node-rank=0 {{example}} && wait $!", f"4 {DONE}"),
    Case("torchrun --nnodes=1:2, elastic, a second host comes",
         # Else the agent that comes waits for an address that the first one does not tell again.
         "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1; "
         f"export {SECRET} KOLOVOD_MIN_NP=1; {FRESH}; "
         f"{TORCHRUN} {ELASTIC_HOSTS} {CHECKPOINTED_SCRIPT} restarted & {TRAINS}; "
         f"{{agent}} n2 {TORCHRUN} {ELASTIC_HOSTS} {CHECKPOINTED_SCRIPT} restarted; wait $!",
         "it went on from a checkpoint, restarted: 4 ranks at the end"),
    Case("torchrun on each of two hosts, elastic, its restarts come in as joins",
         f"export {SECRET} KOLOVOD_JOB_NAME=check KOLOVOD_STORE_HOST=n1 KOLOVOD_MIN_NP=1 "
         f"KOLOVOD_MAX_NP=4; {FRESH}; {TORCHRUN} --max-restarts=3 {CHECKPOINTED_SCRIPT} back & "
         "export KOLOVOD_FIRST_RANK=2 KOLOVOD_SIZE=2; "
         f"{{agent}} n2 {TORCHRUN} --max-restarts=3 {CHECKPOINTED_SCRIPT} back & "
         "until grep -q ' 4.0' {folder}/step.3; do sleep 0.2; done; "
         "kill -9 $(cut -d' ' -f3 {folder}/step.1); wait",
         "back: 4 ranks at the end"),
    Case("torchrun in srun",
         f"export {SECRET}; srun -N2 -n2 "
         f"sh -c '{TORCHRUN} {HOSTS} --node-rank=$SLURM_NODEID {{example}}'", f"4 {DONE}"),
)  # fmt: skip


class Result(NamedTuple):
    """What became of a case."""

    case: Case
    verdict: str
    seconds: float
    line: str
    """Of its output: the one that was wanted, or else the last one."""


def main() -> int:
    """Run the cases; 0 if all are as they should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", action="append", default=[], help="cases whose names begin so; several times"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "bench/results/launchers.md")
    arguments = parser.parse_args()
    prefixes = tuple(arguments.only or [""])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through what cleans up
    with tempfile.TemporaryDirectory(prefix="kolovod-launchers-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        prepare(folder)
        results = run_cases([c for c in CASES if c.name.startswith(prefixes)], folder)
    arguments.output.write_text(report(results))
    return int(any(result.verdict != "passed" for result in results))


def prepare(folder: Path) -> None:
    """Write what the cases find in the folder."""
    (folder / "communicator.py").write_text(COMMUNICATOR)
    (folder / "elastic.py").write_text(ELASTIC)
    (folder / "checkpointed.py").write_text(CHECKPOINTED)
    (folder / "no").mkdir()  # on the search path: an mpi4py that cannot be imported
    (folder / "no" / "mpi4py.py").write_text("raise ImportError('hidden for this check')\n")
    (folder / "lib").mkdir()  # mpi4py looks for MPICH's library by its usual name
    for path in Path("/usr/lib").glob("*/libmpich.so.12"):
        (folder / "lib" / "libmpi.so.12").symlink_to(path)


def run_cases(cases: list[Case], folder: Path) -> list[Result]:
    """Run each in turn, on the two hosts."""
    root = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    source = str(Path(kolovod.__file__).parents[1])
    environ = {
        **os.environ,
        **dict.fromkeys(root, "1"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": source,
    }
    missing = missing_for_slurm()
    results = []
    with TwoHosts(folder) as hosts:
        if not missing:
            environ |= hosts.start_slurm()
        for case in cases:
            result = run_case(case, folder, environ, missing)
            results.append(result)
            print(f"{result.verdict:8} {result.seconds:5.1f} s  {case.name}", flush=True)
            if result.verdict == "failed":
                print(f"    {result.line}", flush=True)
    return results


def run_case(case: Case, folder: Path, environ: dict[str, str], missing: str) -> Result:
    """Run one of the cases."""
    tools = [name for name in ("mpirun.openmpi", "mpirun.mpich") if name in case.command]
    absent = [name for name in tools if not shutil.which(name)]
    if missing and any(name in case.command for name in ("srun", "sbatch", "salloc")):
        absent.append(missing)
    if absent:
        return Result(case, "not run", 0.0, f"not installed: {', '.join(absent)}")
    command = fill(
        case.command, folder, sys.executable, f"{ROOT}/examples/torch_digits.py --epochs 3"
    )
    started = time.monotonic()
    with subprocess.Popen(
        [folder / "enter", "n1", "sh", "-c", command],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, env=environ,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()  # ends all of host n1
            output = f"{process.communicate()[0]}\nstill at work after {TIMEOUT_S} s"
    lines = output.strip().splitlines() or [""]
    found = [line for line in lines if case.wanted in line]
    is_good = bool(found) and (process.returncode != 0) == case.fails
    line = found[0] if found else " / ".join(lines[-3:])
    seconds = time.monotonic() - started
    return Result(case, "passed" if is_good else "failed", seconds, line)


def fill(command: str, folder: Path | str, python: str, example: str) -> str:
    """Return the command with its places filled in."""
    return command.format(folder=folder, agent=f"{folder}/agent", python=python, example=example)


def report(results: list[Result]) -> str:
    """Return the log, in Markdown."""
    lines = [
        "# The launchers, run",
        "",
        f"By `scripts/launchers_check.py` on {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC: "
        "`examples/torch_digits.py --epochs 3`, unmodified,",
        "on hosts n1 and n2 that are namespaces of one machine (`scripts/two_hosts.py`).",
        "A case that must fail passes when it ends with an error and the message shown.",
        f"Load average at the end: {os.getloadavg()[2]:.0f}, on {os.cpu_count()} cores.",
        "",
        f"Versions: {versions()}.",
        "",
        "| case | verdict | seconds | what it printed |",
        "|---|---|---|---|",
    ]
    for result in results:
        line = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", result.line).replace("|", "\\|").strip()
        lines.append(
            f"| {result.case.name} | {result.verdict} | {result.seconds:.0f} | {line[:300]} |"
        )
    lines += ["", "## The commands, on n1", "", "```sh"]
    for result in results:
        command = fill(result.case.command, "$FOLDER", "python", "torch_digits.py")
        lines += [f"# {result.case.name}", command]
    return "\n".join([*lines, "```", ""])


def versions() -> str:
    """Return the versions of what took part."""
    linux = ".".join(platform.release().split(".")[:2])
    ours = re.findall(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)[0]
    found = [
        f"Kolovod {ours}",
        f"Python {platform.python_version()}",
        f"Linux {linux}",
    ]
    for name in ("torch", "mpi4py"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} (not installed)")
    programs = {"Slurm": "slurmd -V", "Open MPI": "mpirun.openmpi --version"}
    for name, command in {**programs, "MPICH": "mpirun.mpich --version"}.items():
        if shutil.which(command.split()[0]):
            done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=30)
            numbers = [word for word in done.stdout.split() if word[:1].isdigit()]
            found.append(f"{name} {numbers[0] if numbers else '(unknown)'}")
    return ", ".join(found)


if __name__ == "__main__":
    sys.exit(main())
