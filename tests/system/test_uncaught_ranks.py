"""An exception on one of several ranks: what the others hear, and that nobody hangs at its end."""

from __future__ import annotations

import re

import pytest
from launched import run_code

WORK = '''
import threading
import numpy as np, kolovod as kv
def told(name, **options):
    try:
        kv.allreduce(np.ones(4), name=name, **options)
    except kv.errors.KolovodError as error:
        print('told', type(error).__name__, error.rank, error, flush=True)
def go_on():
    """When all are through with what they have begun: one that ends before keeps others from it.

    The others hear of rank 1's end however late: SIGTERM, half a second after that, is ignored.
    """
    if rank != 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(f"{os.environ['READY']}/{rank}", "w").close()
    while len(os.listdir(os.environ['READY'])) < kv.size():
        time.sleep(0.01)
kv.init()
kv.allreduce(np.ones(4), name='first')
'''
TOLD = r"\[{}\]<stdout>:told InterruptedByRankError 1 rank 1 on host \w+ \(pid \d+\) aborted: {}"


@pytest.fixture
def work(tmp_path, monkeypatch):
    """The beginning of a script whose ranks have done something together."""
    monkeypatch.setenv("READY", str(tmp_path))
    return WORK


def check_told(done, text, ranks=(0,)):
    for rank in ranks:
        assert re.search(TOLD.format(rank, re.escape(text)), done.stdout), done.stdout
    assert re.search(r"the first to fail was rank 1 (on host \w+ )?\(pid \d+\)", done.stderr)


@pytest.mark.parametrize("hosts", ["a:3", "a:2,b:1", "a:1,b:2"])
def test_all_others_hear_the_first_line_of_an_exception(hosts, work):
    """Whatever they wait for: an operation of all, of a set, or none until later."""
    code = f"""{work}
pair = kv.add_process_set([0, 2])
go_on()
if rank == 1:
    raise ValueError('loss is nan\\nat step 17')
heard = os.environ['READY'] + '/rank 0 has heard'
if rank == 0:
    told('x')
    open(heard, 'w').close()
else:
    while not os.path.exists(heard):  # so it hears of it later, and in another engine
        time.sleep(0.01)
    told('y', process_set=pair)
told('z')
sys.exit(4)
"""
    done = run_code(3, code, "--label-hosts", hosts)
    assert done.returncode == 1
    check_told(done, "ValueError: loss is nan; ", ranks=(0, 2))
    assert len(re.findall(TOLD.format(r"\d", "ValueError: loss is nan"), done.stdout)) == 4
    assert "[1]<stderr>:at step 17" in done.stderr
    assert "[1]<stderr>:Traceback (most recent call last):" in done.stderr
    assert done.stderr.rstrip().endswith("at step 17")  # the launcher's own last lines


@pytest.mark.parametrize(
    ("raises", "text"),
    [
        ("raise ValueError('\\x1b[2J' + 'x' * 100_000)", "ValueError: \\x1b[2Jxxx"),
        ("raise ValueError(b'\\xff\\xfe'.decode(errors='surrogateescape'))", "\\udcff\\udcfe"),
        ("raise ValueError('ne valja: žica')", "ValueError: ne valja: žica"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("import json; json.loads('{')", "json.decoder.JSONDecodeError: Expecting property"),
    ],
)
def test_the_text_of_an_exception_does_not_break_the_others_message(raises, text, work):
    code = f"{work}\ngo_on()\nif rank == 1:\n    {raises}\n"
    code += "told('x')"
    done = run_code(2, code)
    assert done.returncode == (130 if "Keyboard" in raises else 1)
    (line,) = (line for line in done.stdout.splitlines() if "told" in line)
    assert text in line
    assert "\x1b" not in line
    assert len(line) < 1000


def test_an_exception_that_is_caught_is_nobodys_business(work):
    code = f"""{work}
go_on()
if rank == 1:
    try:
        raise ValueError('caught')
    except ValueError:
        pass
    threading.Thread(target=lambda: 1 / 0).start()
    def work():
        raise ValueError('in a thread')
    thread = threading.Thread(target=work); thread.start(); thread.join()
told('x')
"""
    done = run_code(2, code)
    assert (done.returncode, done.stdout) == (0, "")


HOOKS = {
    "chained": "before = sys.excepthook; sys.excepthook = lambda *a: (print('mine'), before(*a))",
    "replaced": "sys.excepthook = lambda *a: print('mine', flush=True)",
    "before": "",
}


@pytest.mark.parametrize("how", HOOKS)
def test_hooks_of_others(how, work):
    early = "import sys; sys.excepthook = lambda *a: print('mine', flush=True)"
    code = f"{early if how == 'before' else ''}\n{work}\ngo_on()\n{HOOKS[how]}\n"
    code += "if rank == 1:\n    raise ValueError('x')\n"
    code += "told('x')"
    done = run_code(2, code)
    assert done.returncode == 1
    assert "[1]<stdout>:mine" in done.stdout
    assert ("ValueError: x" in done.stderr) == (how == "chained")
    check_told(done, "ValueError: x")


def test_a_message_of_sys_exit_is_the_ranks_last_line_and_it_has_left(work):
    code = f"{work}\ngo_on()\nif rank == 1:\n    sys.exit('no more data')\n"
    code += "told('x')\nsys.exit(4)"
    done = run_code(2, code)
    assert done.returncode == 1
    assert re.search(r"told RankLeftError 1 rank 1 .* has left the world", done.stdout)
    assert done.stderr.rstrip().endswith("its stderr:\n  no more data")


# --- the end of the interpreter ---

HOW = {
    "raises": ("raise ValueError('loss is nan')", 1, "InterruptedByRankError 1"),
    "exits": ("sys.exit(7)", 7, "RankLeftError 1"),
    "ends": ("", 0, "RankLeftError 1"),
}
WAITS = {
    "blocking": "kv.allreduce(np.ones(4), name='t')",
    "asynchronous": "kv.allreduce_async(np.ones(4), name='t').wait()",
    "limited": "kv.allreduce_async(np.ones(4), name='t').wait(100)",
    "polling": "h = kv.allreduce_async(np.ones(4), name='t')\n    while not h.poll(): pass",
}


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("how", HOW)
def test_threads_in_an_operation_do_not_keep_a_rank_from_ending(how, wait, work):
    """One that comes back from it when the interpreter is gone would abort the process."""
    line, exit_code, error = HOW[how]
    code = f"""{work}
go_on()
def work():
    {WAITS[wait]}
if rank == 1:
    threading.Thread(target=work, daemon=True).start()
    while not kv.last_operations()[-1]['name'] == 't':
        time.sleep(0.001)
    pending = [kv.allreduce_async(np.ones(4), name=str(n)) for n in range(5)]
    {line}
else:
    told('x')
"""
    done = run_code(2, code, "--keep-going")
    assert f"told {error}" in done.stdout
    assert "terminate called" not in done.stderr
    said = re.findall(r"rank 1 \(pid \d+\) (.*); the others go on", done.stderr)
    assert said == ([f"ended with exit code {exit_code}"] if exit_code else [])


def test_an_exception_ends_a_rank_whose_other_thread_waits(work):
    """The interpreter waits for a thread, which waits for the other ranks."""
    code = f"""{work}
go_on()
if rank == 1:
    threading.Thread(target=told, args=['t']).start()
    while not kv.last_operations()[-1]['name'] == 't':
        time.sleep(0.001)
    raise ValueError('loss is nan')
told('x')
"""
    done = run_code(2, code)
    assert done.returncode == 1
    check_told(done, "ValueError: loss is nan", ranks=(0, 1))


def test_a_thread_that_dies_and_leaves_operations_is_named_at_the_end(work):
    code = f"""{work}
go_on()
def work():
    global handle
    handle = kv.allreduce_async(np.ones(4), name='t')
    raise ValueError('in the middle')
if rank == 1:
    thread = threading.Thread(target=work, name='trainer'); thread.start(); thread.join()
else:
    told('x')
"""
    done = run_code(2, code, "--keep-going")
    assert done.returncode == 0  # both end well by themselves
    text = "ValueError: in the middle in its thread 'trainer'"
    assert re.search(TOLD.format(0, re.escape(text)), done.stdout)
