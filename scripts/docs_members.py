"""The reference's pages: which public names a module has, in sections, for mkdocstrings to fill in.

A page in docs/reference names its module in a line ``<!-- members of kolovod.torch -->``. All names
of the module's ``__all__`` come in its place, so none can be forgotten. What all front ends share
is described once, on the page of ``kolovod``, and linked from the others.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "src"
MARK = re.compile(r"^<!-- members of ([a-z_.]+) -->$", re.MULTILINE)
HOME = "kolovod"
SURFACE = "kolovod.surface."
INSIDE = "For front ends of your own"
# Each name is in the first section whose pattern it matches as a whole.
SECTIONS = (
    ("Start and end", r"init|shutdown|is_initialized|run|RankFailed|SshOptions"),
    ("Ranks", r"(local_|cross_)?(rank|size)|\w+_op"),
    (
        "Training",
        r"Distributed\w+|average_gradients|AccumulatedState|SyncBatch\w+|load_model"
        r"|allreduce_pytree|Kolovod",
    ),
    ("Start equal", r"broadcast_(?!async)\w+"),
    ("Collectives", r"(allreduce|broadcast)_?|allgather|alltoall|reducescatter|barrier|join"),
    ("Several tensors as one", r"grouped_\w+"),
    ("Asynchronous", r"\w+_async_?|poll|synchronize|Handle"),
    ("Point to point", r"i?(send|recv)"),
    ("Objects", r"allgather_object"),
    ("Metrics", r"average_metrics|gather_samples|Metrics"),
    ("Process sets", r"ProcessSet|\w+_process_set"),
    ("Operations and compression", r"Op|Compress(ion|or)"),
    ("Look inside", r"last_operations|span|\w+_timeline"),
    (INSIDE, r"collectives|\w+(Collectives|Frontend)|Array"),
)
REST = "Members"
OPS = ("Average", "Sum", "Min", "Max", "Product", "Adasum")
SHARED = re.compile(
    r"init|shutdown|is_initialized|(local_|cross_)?(rank|size)|Handle|Op|ProcessSet"
    r"|\w+_process_set|span|\w+_timeline"
)
LEFT_OUT = ("__version__", "errors", "callbacks", "conf")  # but the first: modules, with own texts


def filled(markdown: str) -> str:
    """Return the page with its module's names in the place of the mark."""
    return MARK.sub(lambda match: _members(match.group(1)), markdown)


def public_names(module: str) -> list[str]:
    """Return what a module exports: ``__all__``, and what it takes over from kolovod.surface.

    Without ``__all__``: its classes and functions that do not begin with an underscore.
    """
    tree = _tree(module)
    names = [name for surface in surfaces(module) for name in names_of(surface)]
    for node in body_of(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [*ast.literal_eval(node.value), *names]
    kinds = (ast.ClassDef, ast.FunctionDef)
    return [n.name for n in tree.body if isinstance(n, kinds) and not n.name.startswith("_")]


def body_of(tree: ast.Module) -> Iterator[ast.stmt]:
    """Return what a module begins with for type checkers: it may load that when it is asked for."""
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from node.body
        else:
            yield node


def surfaces(module: str) -> list[str]:
    """Return the modules of kolovod.surface of which this one imports all names."""
    return [
        node.module
        for node in body_of(_tree(module))
        if isinstance(node, ast.ImportFrom)
        and node.module
        and node.module.startswith(SURFACE)
        and node.names[0].name == "*"
    ]


def names_of(surface: str) -> list[str]:
    """Return what such a module brings: its ``__all__``, or what it has for type checkers only."""
    for node in _tree(surface).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
        if isinstance(node, ast.If):  # TYPE_CHECKING
            targets = [ast.unparse(n.targets[0]) for n in node.body if isinstance(n, ast.Assign)]
            return [name for name in targets if not name.startswith("_")]
    return []


@cache
def _tree(module: str) -> ast.Module:
    path = SOURCES.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def _members(module: str) -> str:
    names = sorted(public_names(module))
    is_front_end = set(OPS) <= set(names)
    names = [name for name in names if name not in (*OPS, *LEFT_OUT)]
    parts = []
    if is_front_end and module != HOME:
        shared = [name for name in names if SHARED.fullmatch(name)]
        names = [name for name in names if name not in shared]
        parts.append(_links(shared))
    sections: dict[str, list[str]] = {title: [] for title, _ in SECTIONS}
    for name in names:
        sections.setdefault(_section(name), []).append(name)
    for title, members in sections.items():
        if members:
            options = "    options: {members: false}\n" if title == INSIDE else ""
            entries = "\n".join(_entry(module, name) + options for name in members)
            parts.append(f"## {title}\n\n{entries}" if is_front_end else entries)
    return "\n\n".join(parts)


def _section(name: str) -> str:
    return next((title for title, names in SECTIONS if re.fullmatch(names, name)), REST)


def _links(shared: Sequence[str]) -> str:
    links = ", ".join(f"[`{name}`][{HOME}.{name}]" for name in shared)
    ops = ", ".join(f"`{op}`" for op in OPS)
    return (
        f"This module also has what all front ends share: {links}, and the operations {ops}, "
        f"which are the members of [`Op`][{HOME}.Op]."
    )


def _entry(module: str, name: str) -> str:
    """Return the line for mkdocstrings; what ``__getattr__`` imports is looked up where it is from.

    So is a function that has the name of the submodule it is from, which would be shown instead.
    """
    if SOURCES.joinpath(*module.split("."), f"{name}.py").exists():
        return f"::: {module}.{name}.{name}\n"
    for function in _tree(module).body:
        if isinstance(function, ast.FunctionDef) and function.name == "__getattr__":
            for node in ast.walk(function):
                if isinstance(node, ast.ImportFrom) and name in [a.name for a in node.names]:
                    return f"::: {node.module}.{name}\n"
    return f"::: {module}.{name}\n"
