"""The codes of errors: what causes each kind, and what to do. ``kolovod explain`` prints them.

Each class of errors has one code (``kolovod.errors``). The documentation's page of errors is made
of this table and of the messages in the sources (``scripts/error_messages.py``), each of which must
have a code. A code is never used again for something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["EXPLANATIONS", "Explanation", "find"]


@dataclass(frozen=True)
class Explanation:
    """One kind of error."""

    code: str
    title: str
    classes: tuple[str, ...]
    """Its class, and by which other names it is looked for: its base's, or a subclass's."""
    cause: str
    cure: str
    page: str
    """The page of the documentation."""


EXPLANATIONS: Sequence[Explanation] = (
    Explanation(
        "K101",
        "a setting has a value that cannot work",
        ("SettingError", "InvalidArgumentError"),
        "An environment variable, a flag of kolovod run or an argument of init() has a value that "
        "is not of the expected kind, or that goes with no other setting; or what a launcher has "
        "told this process of its rank does not fit together.",
        "The message names the setting, the value received and what is expected. All settings are "
        "in the documentation; `kolovod run --help` lists the flags. Look for a variable "
        "KOLOVOD_... or HOROVOD_... that is left from another job: env | grep OVOD",
        "configuration.md",
    ),
    Explanation(
        "K102",
        "a command line cannot work",
        ("CommandArgumentError", "InvalidArgumentError"),
        "A flag or an argument of a command, or of kolovod.run and its relatives for clusters, has "
        "a value that cannot work, names what is not there, or excludes another one; or a file "
        "that was named is none that the command can read.",
        "The message says what was given and what is expected; `kolovod ACTION --help` lists the "
        "flags.",
        "reference/command-line.md",
    ),
    Explanation(
        "K103",
        "an argument of an operation cannot work",
        ("InvalidArgumentError",),
        "A tensor, name, root rank, process set, reduction or scale that was given to an operation "
        "of the ranks can never work: nothing was sent, and the other ranks know nothing of it.",
        "Correct the call as the message says; the world stays usable. If only one rank meets "
        "this, the others wait for it: let all ranks make the same call.",
        "reference/kolovod.md",
    ),
    Explanation(
        "K104",
        "a front end cannot do what is asked for",
        ("FrontEndArgumentError", "InvalidArgumentError"),
        "An argument of an optimizer, a compressor, a hook or a verb of PyTorch, TensorFlow, "
        "Keras, JAX or MXNet cannot work, or not together with another one, or with this version "
        "of the framework.",
        "The message names the argument and the way out. What each front end can do is on its "
        "page; how gradients can be exchanged is on the page named below.",
        "gradients.md",
    ),
    Explanation(
        "K105",
        "an elastic job is used in a way that cannot work",
        ("ElasticArgumentError", "InvalidArgumentError"),
        "The state, the sampler or the steps of an elastic job were given what they cannot keep "
        "or hand over, or were called where that makes no sense; or the job's limits contradict "
        "each other.",
        "The message names the argument or the call. The page below has whole examples of elastic "
        "scripts.",
        "elastic.md",
    ),
    Explanation(
        "K106",
        "a process group of torch.distributed cannot do this",
        ("GroupArgumentError", "InvalidArgumentError"),
        "torch.distributed, over the backend kolovod, was asked for an operation, an option or a "
        "kind of tensor that this backend does not have.",
        "The page below lists what it has. What it lacks may be had of another backend, in a group "
        "beside it: torch.distributed.new_group(backend='gloo').",
        "torch-distributed.md",
    ),
    Explanation(
        "K107",
        "a helper of training scripts was given what it cannot use",
        ("HelperArgumentError", "InvalidArgumentError"),
        "Data that cannot be divided among the ranks as asked for, metrics of a kind that cannot "
        "be combined, or ranks for a test that cannot be started so.",
        "The message names the argument, the value received and what is expected.",
        "reference/index.md",
    ),
    Explanation(
        "K108",
        "the name of an operation is still in use",
        ("DuplicateNameError",),
        "An operation of this name was submitted on this rank and is not complete yet: two tensors "
        "have one name, or an asynchronous operation was submitted again before it was waited for.",
        "Give each tensor a name of its own, or none, and call synchronize(handle) before the same "
        "name is submitted again.",
        "reference/kolovod.md",
    ),
    Explanation(
        "K109",
        "there is no world in this process",
        ("NotInitializedError",),
        "An operation was called before init(), after shutdown(), or in a process that was forked "
        "from one that had called init(), a data loader's worker for example.",
        "Call init() first, in the process that trains. Do not use Kolovod in data loaders: give "
        "them rank and size as arguments.",
        "getting-started.md",
    ),
    Explanation(
        "K201",
        "the ranks disagree",
        ("MismatchError",),
        "Under one name ranks have submitted different dtypes, shapes, operations, roots or "
        "scales, or have called with different arguments what all must call alike. Usually they "
        "take different ways through the script: if rank() == 0 around an operation, models or "
        "batches that differ, different versions of the script on the hosts.",
        "The message names the ranks and what each has submitted: make these equal. The world "
        "stays usable. For tensors whose first dimension differs use allgather.",
        "concepts.md",
    ),
    Explanation(
        "K202",
        "an operation was not complete in time",
        ("WaitTimeoutError",),
        "The time that was given for an operation is over, and other ranks have not submitted it "
        "yet, or data are on their way. It is still pending.",
        "Wait again, or call shutdown(). Find out which rank is late with `kolovod top` and "
        "`kolovod stacks`.",
        "debug-a-hang.md",
    ),
    Explanation(
        "K301",
        "a rank is lost",
        ("RankLostError",),
        "The process of a rank ended without leaving the world, or its host does not answer any "
        "more: it was killed (out of memory, kill -9, the scheduler), has crashed, or the network "
        "is gone. This error is an effect of that, on the ranks that are left.",
        "Look for the cause in the output of the rank that is named, or of its host: dmesg tells "
        "of processes that the system has killed for memory. To go on without it, or with another "
        "one in its place, use an elastic job: kolovod run --elastic.",
        "failures.md",
    ),
    Explanation(
        "K302",
        "a rank has left",
        ("RankLeftError",),
        "A rank has called shutdown(), or its script has come to its end, while others submit "
        "operations that need it: it made fewer steps, usually since it had less data.",
        "Give all ranks the same number of steps, or call join() at the end of the data.",
        "uneven-data.md",
    ),
    Explanation(
        "K303",
        "a rank kept the others waiting for too long",
        ("LateRankError",),
        "A rank is alive, but has not submitted what the others wait for within "
        "KOLOVOD_LATE_FAILURE_S seconds: it computes, reads data, writes a checkpoint or is in "
        "another operation.",
        "The message says where that rank is. Raise KOLOVOD_LATE_FAILURE_S if it may take so long.",
        "late-ranks.md",
    ),
    Explanation(
        "K304",
        "this rank was shut down before an operation was complete",
        ("ShutDownError",),
        "shutdown() was called, or the interpreter ends, while operations were pending.",
        "Wait for all handles before shutdown(), in threads of the script, too.",
        "failures.md",
    ),
    Explanation(
        "K305",
        "another rank gave up",
        ("InterruptedByRankError",),
        "A rank was interrupted (Ctrl-C), or its script has raised an exception that nobody has "
        "caught. The message has the first line of that.",
        "Correct what has failed on the rank that is named; its output has the traceback.",
        "failures.md",
    ),
    Explanation(
        "K306",
        "the world has ended in the middle of a step",
        ("CollectiveAbortedError", "StepInterruptedError"),
        "The ranks of an elastic job are about to form another world: one was lost, or wants to "
        "come or to leave. Operations that were pending have no result.",
        "kolovod.elastic.run catches it and goes on from the last commit: let it pass through. "
        "Without that, call shutdown(), then init() again.",
        "elastic.md",
    ),
    Explanation(
        "K307",
        "a step cannot be completed on all ranks",
        ("CollectiveError",),
        "In an elastic job the state that ranks have does not allow to go on: a step was completed "
        "by some only, or those who had the state are lost.",
        "The message says which. Let all ranks run the same operations, and start again from a "
        "checkpoint where the state is lost.",
        "elastic.md",
    ),
    Explanation(
        "K401",
        "hosts cannot be used",
        ("HostError", "BootstrapError"),
        "The launcher could not start its ranks on all hosts, or does not understand what answers "
        "there: ssh asks a question or is refused, Python or Kolovod is somewhere else, or of "
        "another version, or there are no places for the ranks.",
        "`ssh -o BatchMode=yes HOST true` must work from here without a question; --remote-python "
        "and --directory say where things are there. `kolovod doctor -H HOSTS` looks for what is "
        "missing.",
        "several-hosts.md",
    ),
    Explanation(
        "K402",
        "the ranks cannot meet",
        ("BootstrapError",),
        "The world was not formed: a rank does not reach the rendezvous server or another rank, "
        "by a firewall, a wrong interface or a name that does not resolve, a process set has "
        "other members elsewhere, or something else answers at the address.",
        "The message names who was not reached, and where. `kolovod doctor -H HOSTS` tries the "
        "links; --interface names the network to be used; all hosts need the same version.",
        "several-hosts.md",
    ),
    Explanation(
        "K403",
        "an elastic job cannot form a world, or go on",
        ("ElasticBootstrapError", "BootstrapError"),
        "A process does not reach the job's coordinator, is not one that it waits for, or there "
        "are not enough processes for a world.",
        "The message says which. Look at the launcher's output for what has become of the other "
        "processes; --min-np, --max-np and --elastic-timeout set what is enough, and how long to "
        "wait.",
        "elastic.md",
    ),
    Explanation(
        "K404",
        "a cluster has no places for the ranks",
        ("ClusterError", "BootstrapError", "NoPlacementError"),
        "Ray or Spark has not started as many actors or tasks as there are to be ranks, has ended "
        "them, or does not understand an answer.",
        "Compare what the message says was asked for with what the cluster has free; ask for less, "
        "or wait longer.",
        "ray.md",
    ),
    Explanation(
        "K405",
        "the data service of TensorFlow cannot be used",
        ("DataServiceError", "BootstrapError"),
        "What describes the service is not there in time or is something else, or the service does "
        "not answer.",
        "Start the service before the training, with the same file or address; look at its output.",
        "tensorflow.md",
    ),
    Explanation(
        "K406",
        "the other end does not know the job's secret",
        ("AuthenticationError",),
        "Who has connected, or was connected to, belongs to another job, is no process of Kolovod, "
        "or was started without the job's secret.",
        "Start all ranks by one launcher. With a launcher of your own, give all of them the same "
        "KOLOVOD_SECRET; two jobs must not share an address.",
        "security.md",
    ),
    Explanation(
        "K407",
        "not all ranks came in time",
        ("StartTimeoutError",),
        "Some ranks have not called init() within the start timeout: they still import or read "
        "data, have failed before init(), or do not reach the rendezvous server.",
        "The message names the missing ones: look at their output. Raise KOLOVOD_START_TIMEOUT_S "
        "where scripts take long before init().",
        "late-ranks.md",
    ),
    Explanation(
        "K501",
        "an elastic job is over for this process",
        ("JobOverError",),
        "The job has ended, could not go on (too few processes, --reset-limit), or goes on without "
        "this process.",
        "The message says why. End the process: the launcher decides whether another one comes.",
        "elastic.md",
    ),
    Explanation(
        "K502",
        "a rank of kolovod.run failed",
        ("RankFailed",),
        "The function has raised on a rank, or the rank's process has ended or was not done in "
        "time. The others were ended.",
        "The text has the rank's traceback, or its last lines; __cause__ is its exception.",
        "launching.md",
    ),
    Explanation(
        "K503",
        "a process does not say what it does",
        ("StacksUnavailableError", "PageUnavailableError"),
        "`kolovod stacks` or `kolovod top` look at a process that has not called init(), has "
        "ended, belongs to another user, or does not come to answer.",
        "Look again later; for another user's job be root, or that user.",
        "debug-a-hang.md",
    ),
    Explanation(
        "K901",
        "a defect of Kolovod",
        ("InternalError",),
        "Something that should never happen has happened, or a resource of the system that "
        "Kolovod cannot do without is exhausted: the message says which.",
        "If the message names a resource (descriptors, shared memory), raise its limit; `kolovod "
        "doctor` compares. Else please report it, with the whole output.",
        "failures.md",
    ),
)


def find(wanted: str) -> list[Explanation]:
    """Return the explanations of that code, or of errors of the class of that name."""
    return [
        each
        for each in EXPLANATIONS
        if wanted.upper() == each.code or wanted.rpartition(".")[2] in each.classes
    ]
