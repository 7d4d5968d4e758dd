"""Random numbers: all ranks make the same data of them, and each draws batches of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import libcst as cst

from kolovod.migrate.edits import Edits
from kolovod.migrate.loops import EnclosingLoop
from kolovod.migrate.script import Script, keyword

__all__ = ["draw_apart", "equal_data"]


class _Library(NamedTuple):
    """The functions by which a library draws random numbers and is seeded."""

    module: str
    draws: tuple[str, ...]
    """Functions; one that ends in a dot means all that begin so."""
    seeds: tuple[str, ...]
    number: str
    """A random number from 0 up, as an expression of the module {0}."""
    seed: str


_ALL = ("keras.utils.set_random_seed", "transformers.set_seed", "accelerate.utils.set_seed")
_LIBRARIES = (
    _Library(
        "numpy",
        tuple(f"numpy.random.{name}" for name in (
            "beta", "binomial", "choice", "exponential", "multivariate_normal", "normal",
            "permutation", "poisson", "rand", "randint", "randn", "random", "random_sample",
            "shuffle", "standard_normal", "uniform")),
        ("numpy.random.seed", *_ALL), "{0}.random.randint(2**31)", "{0}.random.seed({1})",
    ),
    _Library(
        "torch",
        tuple(f"torch.{name}" for name in (
            "bernoulli", "multinomial", "normal", "rand", "randint", "randn", "randperm",
            "utils.data.random_split")),
        ("torch.manual_seed", "torch.random.manual_seed", *_ALL),
        "{0}.initial_seed()", "{0}.manual_seed({1})",
    ),
    _Library(
        "random",
        tuple(f"random.{name}" for name in (
            "choice", "choices", "gauss", "randint", "random", "randrange", "sample", "shuffle",
            "uniform")),
        ("random.seed", *_ALL), "{0}.getrandbits(31)", "{0}.seed({1})",
    ),
    _Library(
        "tensorflow",
        tuple(f"tensorflow.random.{name}" for name in ("normal", "shuffle", "uniform")),
        ("tensorflow.random.set_seed", *_ALL),
        "int({0}.random.uniform((), maxval=2**31 - 1, dtype={0}.int32))",
        "{0}.random.set_seed({1})",
    ),
)  # fmt: skip
_GENERATORS = ("numpy.random.default_rng", "numpy.random.RandomState")
_BY_NUMPY = ("sklearn.datasets.make_", "sklearn.model_selection.train_test_split")
_OWN_SEED = ("generator", "random_state", "seed")


def equal_data(edits: Edits, ways: Sequence[list[EnclosingLoop]]) -> list[tuple[str, str]]:
    """Return statements, with reasons, after which all ranks draw the same: to come after init().

    There are none where the script seeds what it draws before it trains, or draws nothing.
    """
    script, kv = edits.script, edits.kv
    loops = [place.loop for way in ways for place in way]
    statements = []
    for library in _LIBRARIES:
        drawn = [
            call for call in _draws(script, library)
            if script.class_of(call) is None
            and not any(script.inside(call, loop) for loop in loops)
            and not any(keyword(call, each) for each in _OWN_SEED)
        ]  # fmt: skip
        if not drawn or script.calls_of(*library.seeds):
            continue
        module = script.module_name(library.module)
        lines = ", ".join(str(line) for line in dict.fromkeys(map(script.line, drawn)))
        reason = f"line {lines} draws random numbers without a seed: all ranks draw the same"
        if not module:  # sklearn draws NumPy's
            module = library.module
            statements.append((f"import {module}", reason))
        for call in drawn:
            edits.change(call, lambda new: new)  # so that init() comes before it
        number = library.number.format(module)
        text = library.seed.format(module, f"{kv}.broadcast_object({number}, root_rank=0)")
        statements.append((text, reason))
    for call in script.calls_of(*_GENERATORS):
        if (not call.args or script.code(call.args[0].value) == "None") and not any(
            script.inside(call, loop) for loop in loops
        ):
            edits.need(
                call,
                "this generator has no seed, so each rank would make other data: give it one",
            )
    return statements


def _draws(script: Script, library: _Library) -> list[cst.Call]:
    return [
        call for call in script.calls
        if (name := script.name(call)) in library.draws
        or (library.module == "numpy" and name.startswith(_BY_NUMPY))
    ]  # fmt: skip


def draw_apart(edits: Edits, way: list[EnclosingLoop]) -> bool:
    """Let each rank draw batches of its own at random; return False if none are drawn here.

    All ranks have drawn the same until the loop begins, and so have the same numbers still.
    """
    script, kv = edits.script, edits.kv
    if not way:
        return False
    outermost = way[-1].loop
    assert isinstance(outermost, cst.BaseStatement)
    inside = _called_from(script, outermost)
    done = False
    for library in _LIBRARIES:
        module = script.module_name(library.module)
        drawn = [call for call in _draws(script, library) if script.function_of(call) in inside
                 or script.inside(call, outermost)]  # fmt: skip
        if not drawn or not module:
            continue
        number = library.number.format(module)
        edits.before(outermost, library.seed.format(module, f"{number} + {kv}.rank()"))
        edits.why(drawn[0], "each rank draws batches of its own, from where training begins")
        done = True
    for call in script.calls_of(*_GENERATORS):
        target = script.target_of(call)
        if not isinstance(target, cst.Name) or script.inside(call, outermost):
            continue
        used = [
            each for each in script.nodes(script.module, cst.Attribute)
            if script.code(each.value) == target.value
            and (script.function_of(each) in inside or script.inside(each, outermost))
        ]  # fmt: skip
        if used and script.function_of(call) is script.function_of(outermost):
            draw = "integers" if script.name(call).endswith("default_rng") else "randint"
            made, name = script.code(call.func), target.value
            edits.before(outermost, f"{name} = {made}({name}.{draw}(2**31) + {kv}.rank())")
            edits.why(used[0], "each rank draws batches of its own, from where training begins")
            done = True
    return done


def _called_from(script: Script, loop: cst.CSTNode) -> set[cst.FunctionDef | None]:
    """Return the functions of the script that are called from within a loop."""
    found: set[cst.FunctionDef | None] = set()
    todo = script.nodes(loop, cst.Call)
    while todo:
        function = script.called(todo.pop())
        if function is not None and function not in found:
            found.add(function)
            todo += script.nodes(function, cst.Call)
    return found
