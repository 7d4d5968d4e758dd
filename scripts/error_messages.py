"""Makes the documentation's page of all errors (errors.md) from their messages in the sources.

It fails where a message's class has no code in src/kolovod/explanations.py, and where a code has no
message. Texts that are passed on from elsewhere as they are, where they are found, too, are
left out, and those of the binding, which no script meets.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from kolovod.errors import _BY_STATUS
from kolovod.explanations import EXPLANATIONS, Explanation

ROOT = Path(__file__).parents[1]
PYTHONS_OWN = {
    "AttributeError",
    "FileNotFoundError",
    "HorovodVersionMismatchError",
    "ImportError",
    "ModuleNotFoundError",
    "NotImplementedError",
    "PermissionError",
    "RuntimeError",
    "TimeoutError",
    "ValueError",
}
"""That users may meet: Horovod's names raise what Horovod's do. Others are caught inside."""
_INTRODUCTION = """\
# Error messages

Every error of Kolovod has a code. A traceback ends with it (from Python 3.11 on), in a release also
with a link to this page, and `error.code` is it:

```
kolovod.errors.MismatchError: allreduce 'loss': rank 1 has dtype float64, and rank 0 has float32
[K201] cause and cure: kolovod explain K201
```

`kolovod explain K201` prints cause and cure, as they are below, `kolovod explain MismatchError`
does so for a class, and `kolovod explain` lists all codes. The classes are in the
[reference](reference/errors.md). In the messages, `{...}` stands for what an error tells of its
case.
"""
_OWN_TITLE = "Errors of Python's own classes"
_OWN_TEXT = """\
They have no code. Most are raised under Horovod's names, which raise what Horovod's do, and where
a library is missing.
"""
_ENGINE_CALL = re.compile(r"(?:Status|Revoke)\s*\(\s*Code::k(\w+),|\b(Invalid)\(")
_RETURN = re.compile(r"\breturn\b([^;]*);")
_RETURNED = {
    "csrc/control/negotiate.cc": "MismatchError",
    "csrc/control/stragglers.cc": "LateRankError",
}
"""Sources of the engine whose functions return texts of errors."""
_PASSED_ON = re.compile(r"\{[^{}]*\}")
_SHORT_CHARS = 15  # of a text that is no error's
_DEPTH = 2  # of texts that are made of other texts
_LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Message:
    """One place that raises an error."""

    kind: str
    place: str
    """The file."""
    template: str


def messages() -> list[Message]:
    """Return all messages of the sources."""
    found = [message for path, tree in _trees().items() for message in _of_module(path, tree)]
    return sorted([*found, *_of_engine()], key=lambda each: (each.place, each.template))


@lru_cache(maxsize=1)
def _trees() -> dict[Path, ast.Module]:
    paths = sorted((ROOT / "src").rglob("*.py"))
    return {path: ast.parse(path.read_text("utf-8")) for path in paths}


@lru_cache(maxsize=1)
def _classes() -> dict[str, tuple[str, ...]]:
    """Return each class of errors that sources define or that is listed above, with its bases."""
    bases: dict[str, list[str]] = {}
    for tree in _trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases.setdefault(node.name, []).extend(_name(base) for base in node.bases)
            elif isinstance(node, ast.alias) and node.asname:
                bases.setdefault(node.asname, []).append(node.name)
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
                for target in node.targets:
                    bases.setdefault(_name(target), []).append(node.value.id)

    def lineage(kind: str) -> tuple[str, ...]:
        line = [kind]
        for each in line:  # which grows meanwhile
            line += [base for base in bases.get(each, ()) if base not in line]
        return tuple(line)

    coded = {kind for each in EXPLANATIONS for kind in each.classes} | {"KolovodError"}
    all_of = {kind: lineage(kind) for kind in [*bases, *PYTHONS_OWN]}
    return {k: line for k, line in all_of.items() if coded & set(line) or k in PYTHONS_OWN}


@lru_cache(maxsize=1)
def _codes() -> dict[str, str]:
    """Return by class what its body says, or its first base's; for others what the table says."""
    known = {kind: each.code for each in EXPLANATIONS for kind in each.classes}
    for tree in _trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and (code := _code_in(node)):
                known[node.name] = code
    return {
        kind: next((known[each] for each in lineage if each in known), "")
        for kind, lineage in _classes().items()
    }


def _code_in(node: ast.ClassDef) -> str:
    """Return what the body gives as ``code = "K..."``; "": nothing."""
    for line in node.body:
        if isinstance(line, ast.Assign) and _name(line.targets[0]) == "code":
            return str(ast.literal_eval(line.value))
    return ""


def _of_module(path: Path, tree: ast.Module) -> Iterator[Message]:
    place = path.relative_to(ROOT / "src").as_posix()
    texts = _Texts(tree)
    for function, call in _calls(tree, tree):
        kind = _name(call.func)
        if kind in _classes() and call.args:
            for template in texts.of(call.args[0], function):
                if not _PASSED_ON.fullmatch(template):
                    yield Message(kind, place, template)


def _calls(node: ast.AST, function: ast.AST) -> Iterator[tuple[ast.AST, ast.Call]]:
    """Return every call, with the function that it is in."""
    for child in ast.iter_child_nodes(node):
        inner = child if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
        if isinstance(child, ast.Call):
            yield function, child
        yield from _calls(child, inner)


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


class _Texts:
    """What texts of a module can be, with {...} for what is known only then."""

    def __init__(self, tree: ast.Module) -> None:
        self._constants = {
            _name(node.targets[0]): str(node.value.value)
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        }
        self._functions = {
            node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
        }

    def of(self, value: ast.expr, function: ast.AST, depth: int = 0) -> list[str]:
        """``function``: where ``value`` is, and where names may have been given a text."""
        if isinstance(value, ast.JoinedStr):
            return ["".join(map(self._part, value.values))]
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
            right = self.of(value.right, function, depth)
            return [a + b for a in self.of(value.left, function, depth) for b in right]
        if isinstance(value, ast.IfExp):
            return [t for e in (value.body, value.orelse) for t in self.of(e, function, depth)]
        if isinstance(value, ast.BoolOp):
            return [t for each in value.values for t in self.of(each, function, depth)]
        given: list[ast.expr] = []
        if isinstance(value, ast.Name) and value.id not in self._constants:
            given = _assigned(value.id, function)
        elif isinstance(value, ast.Call) and _name(value.func) in self._functions:
            function = self._functions[_name(value.func)]
            given = [
                node.value
                for node in ast.walk(function)
                if isinstance(node, ast.Return) and node.value is not None
            ]
        elif isinstance(value, ast.Call) and len(value.args) == 1 and not value.keywords:
            given = [value.args[0]]  # str(text), for example
        if given and depth < _DEPTH:
            return [t for each in given for t in self.of(each, function, depth + 1)]
        return [self._part(value)]

    def _part(self, value: ast.expr) -> str:
        if isinstance(value, ast.FormattedValue):
            value = value.value
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            return value.value
        if isinstance(value, ast.Name) and value.id in self._constants:
            return self._constants[value.id]
        return f"{{{ast.unparse(value)}}}"


def _assigned(name: str, function: ast.AST) -> list[ast.expr]:
    return [
        node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and any(_name(target) == name for target in node.targets)
    ]


def _of_engine() -> Iterator[Message]:
    """Texts are put together of literals there; ... stands for the rest."""
    kinds = {_status_name(name): kind.__name__ for name, kind in _BY_STATUS.items()}
    for path in sorted((ROOT / "csrc").rglob("*")):
        if path.suffix not in (".cc", ".h") or path.stem.endswith(("_test", "_bench")):
            continue
        if "fuzz" in path.parts or "testing" in path.parts:
            continue
        source = path.read_text("utf-8")
        place = path.relative_to(ROOT).as_posix()
        for match in _ENGINE_CALL.finditer(source):
            text = _text_of(_arguments(source, match.end()))
            if text:
                yield Message(kinds[match.group(1) or "InvalidArgument"], place, text)
        for match in _RETURN.finditer(source) if place in _RETURNED else ():
            text = _text_of(match.group(1))
            if len(text) > _SHORT_CHARS:
                yield Message(_RETURNED[place], place, text)


def _status_name(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def _arguments(source: str, start: int) -> str:
    """Return the text from ``start`` to the parenthesis that closes the call."""
    depth, position = 1, start
    while depth:
        literal = _LITERAL.match(source, position)
        if literal is not None:
            position = literal.end()
            continue
        depth += {"(": 1, ")": -1}.get(source[position], 0)
        position += 1
    return source[start : position - 1]


def _text_of(expression: str) -> str:
    """Return a text of C++ that literals make; "" if there are none."""
    literals = [match.group(1) for match in _LITERAL.finditer(expression)]
    pieces = _LITERAL.sub("\0", expression).split("\0")
    text = ""
    for piece, literal in zip(pieces, [*literals, ""], strict=True):
        if re.search(r"\w", piece.replace("std::string", "")):
            text += "{...}"
        text += literal.replace('\\"', '"').replace("\\n", " ")
    return text if literals else ""


def by_code(found: list[Message]) -> tuple[Mapping[str, list[Message]], list[Message]]:
    """Return messages by code, and Python's own. Exits for a message or code without the other."""
    coded: defaultdict[str, list[Message]] = defaultdict(list)
    own, problems = [], []
    for message in found:
        code = _codes().get(message.kind, "")
        if code:
            coded[code].append(message)
        elif message.kind in PYTHONS_OWN:
            own.append(message)
        else:
            problems.append(f"{message.place}: {message.kind}({message.template!r}) has no code")
    problems += [f"{e.code} has no message" for e in EXPLANATIONS if e.code not in coded]
    if problems:
        raise SystemExit("\n".join([*problems, "see src/kolovod/explanations.py"]))
    return coded, own


def page() -> str:
    """Return the whole page. Exits where a message has no code, or a code no message."""
    coded, own = by_code(messages())
    parts = [_INTRODUCTION]
    parts += [_section(each, coded[each.code]) for each in EXPLANATIONS]
    parts.append(f"## {_OWN_TITLE}\n\n{_OWN_TEXT}\n{_listed(own)}\n")
    return "\n".join(parts)


def _section(each: Explanation, found: list[Message]) -> str:
    classes = ", ".join(f"`{kind}`" for kind in each.classes)
    lines = [
        f"## {each.code}: {each.title} {{#{each.code.lower()}}}",
        classes,
        f"**Cause.** {each.cause}",
        f"**Cure.** {each.cure}",
        f"More: [{each.page}]({each.page})",
        "Messages:",
        _listed(found),
    ]
    return "\n\n".join(lines) + "\n"


def _listed(found: list[Message]) -> str:
    """Return each text once, with the first place that has it."""
    places: dict[str, str] = {}
    for message in found:
        places.setdefault(" ".join(message.template.split()), message.place)
    return "\n".join(f"- {_code(text)} ({place})" for text, place in places.items())


def _code(text: str) -> str:
    """Return ``text`` as code in Markdown, whatever backticks it has."""
    ticks = "``" if "`" in text else "`"
    space = " " if "`" in text else ""
    return f"{ticks}{space}{text}{space}{ticks}"
