"""Changes to a script, collected first and applied at once, and remarks for its user."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import libcst as cst

from kolovod.migrate.script import Script

__all__ = ["Edits", "Remark", "with_argument", "wrapped"]

Change = Callable[[Any], Any]

_LINE_CHARACTERS = 99  # of a new line; longer calls get several


@dataclass(frozen=True, order=True)
class Remark:
    """Something about a line of the script as it was."""

    line: int
    text: str


@dataclass
class Edits:
    """The changes to one script."""

    script: Script
    reasons: list[Remark] = field(default_factory=list)
    """One for each thing that is changed."""
    needs: list[Remark] = field(default_factory=list)
    """Changes that the user must make, without which the ranks do not train one model together."""
    looks: list[Remark] = field(default_factory=list)
    """Places that a person should look at."""
    kv: str = "kv"
    """The name by which the script will call Kolovod."""
    _changes: dict[cst.CSTNode, list[Change]] = field(default_factory=dict)
    _before: dict[cst.CSTNode, list[cst.BaseStatement]] = field(default_factory=dict)
    _after: dict[cst.CSTNode, list[cst.BaseStatement]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Return whether anything changes."""
        return bool(self._changes or self._before or self._after)

    @property
    def places(self) -> list[cst.CSTNode]:
        """Nodes that change, or beside which something new comes."""
        return [*self._changes, *self._before, *self._after]

    def why(self, node: cst.CSTNode, text: str) -> None:
        """Give the reason for a change at ``node``."""
        self._remark(self.reasons, node, text)

    def need(self, node: cst.CSTNode | None, text: str) -> None:
        """Say what the user must change; None: it has no one place."""
        self._remark(self.needs, node, text)

    def look(self, node: cst.CSTNode | None, text: str) -> None:
        """Leave something to the user; None: it has no one place."""
        self._remark(self.looks, node, text)

    def give_up(self, text: str) -> None:
        """Change nothing, and say why."""
        for each in (self._changes, self._before, self._after, self.reasons):
            each.clear()
        self.need(None, f"{text}. Nothing is changed")

    def _remark(self, remarks: list[Remark], node: cst.CSTNode | None, text: str) -> None:
        remark = Remark(self.script.line(node) if node is not None else 0, text)
        if remark not in remarks:
            remarks.append(remark)

    def change(self, node: cst.CSTNode, change: Change) -> None:
        """Put ``change(node)`` in its place, after what changes within it."""
        self._changes.setdefault(node, []).append(change)

    def replace(self, node: cst.CSTNode, text: str) -> None:
        """Put another expression in its place."""
        new = self.expression(text)
        self.change(node, lambda _: new)

    def before(self, statement: cst.BaseStatement, text: str, *, apart: bool = False) -> None:
        """Add a statement; ``apart``: with an empty line before it."""
        self._before.setdefault(statement, []).append(self._new(statement, text, apart))

    def after(self, statement: cst.BaseStatement, text: str, *, apart: bool = False) -> None:
        """Add a statement; ``apart``: with an empty line before it."""
        self._after.setdefault(statement, []).append(self._new(statement, text, apart))

    def expression(self, text: str) -> cst.BaseExpression:
        """Parse an expression from its text."""
        return cst.parse_expression(text, self.script.module.config_for_parsing)

    def _new(self, beside: cst.BaseStatement, text: str, apart: bool) -> cst.BaseStatement:
        module = self.script.module
        long = self.script.column(beside) + len(text) > _LINE_CHARACTERS
        if long and "\n" not in text and text.endswith(")"):
            call, _, arguments = text.partition("(")
            text = f"{call}(\n{module.default_indent}{arguments[:-1]}\n)"
        text = text.replace("\n", module.default_newline)
        new = cst.parse_statement(text, module.config_for_parsing)
        assert isinstance(new, cst.SimpleStatementLine | cst.BaseCompoundStatement)
        return new.with_changes(leading_lines=[cst.EmptyLine(indent=False)]) if apart else new

    def only_on_rank_0(self, statements: Sequence[cst.SimpleStatementLine]) -> None:
        """Let neighbours run on rank 0 only."""
        first, *others = statements

        def make(new: cst.SimpleStatementLine) -> cst.If:
            body = [new.with_changes(leading_lines=[]), *others]
            return cst.If(
                self.expression(f"{self.kv}.rank() == 0"),
                cst.IndentedBlock(body),
                leading_lines=new.leading_lines,
            )

        self.change(first, make)
        for each in others:
            self.change(each, lambda new: cst.RemoveFromParent())

    def applied(self) -> cst.Module:
        """Return the script with all changes."""
        new = self.script.module.visit(_Applier(self._changes, self._before, self._after))
        assert isinstance(new, cst.Module)
        return new


class _Applier(cst.CSTTransformer):
    def __init__(
        self,
        changes: dict[cst.CSTNode, list[Change]],
        before: dict[cst.CSTNode, list[cst.BaseStatement]],
        after: dict[cst.CSTNode, list[cst.BaseStatement]],
    ) -> None:
        super().__init__()
        self._changes, self._before, self._after = changes, before, after

    def on_leave(self, original: Any, updated: Any) -> Any:
        for change in self._changes.get(original, ()):
            updated = change(updated)
        before, after = self._before.get(original, []), self._after.get(original, [])
        if not before and not after:
            return updated
        return cst.FlattenSentinel([*before, updated, *after])


def wrapped(edits: Edits, node: cst.CSTNode, function: str, *more: str) -> None:
    """Make ``function(node, more...)`` of an expression."""
    arguments = [edits.expression(f"f({each})") for each in more]
    extra = [call.args[0] for call in arguments if isinstance(call, cst.Call)]
    called = edits.expression(function)

    def change(updated: cst.BaseExpression) -> cst.Call:
        return cst.Call(called, [cst.Arg(updated), *extra])

    edits.change(node, change)


def with_argument(call: cst.Call, name: str, value: cst.BaseExpression) -> cst.Call:
    """Return the call with one more argument, laid out as those that it has."""
    new = cst.Arg(
        value,
        cst.Name(name),
        cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")),
    )
    if not call.args:
        return call.with_changes(args=[new])
    last = call.args[-1]
    between: cst.Comma | None = None
    if len(call.args) > 1 and isinstance(call.args[-2].comma, cst.Comma):
        between = call.args[-2].comma
    elif isinstance(call.whitespace_before_args, cst.ParenthesizedWhitespace):
        between = cst.Comma(whitespace_after=call.whitespace_before_args)
    comma = between or cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    new = new.with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
    last = last.with_changes(comma=comma, whitespace_after_arg=cst.SimpleWhitespace(""))
    return call.with_changes(args=[*call.args[:-1], last, new])
