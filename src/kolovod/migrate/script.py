"""A script as a tree: which imported thing a name means, where it stands, where a value is from.

Nothing of the script is run. Names are resolved by the script's imports, so aliases are seen
through; what is not certain has no name here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import libcst as cst
from libcst import metadata

from kolovod.errors import CommandArgumentError

__all__ = ["Assignment", "Function", "Loop", "Script", "argument", "attribute_call", "keyword"]

Function = cst.FunctionDef | None
"""None: the module itself."""
Loop = cst.For | cst.While
Assignment = cst.Assign | cst.AnnAssign
N = TypeVar("N", bound=cst.CSTNode)

_DEPTH = 6  # of calls through which a value is followed
_SAME_PLACES = (
    ("tensorflow.keras.", "keras."),
    ("tensorflow.compat.v2.keras.", "keras."),
    ("tf_keras.", "keras."),
    ("torch.utils.data.dataloader.", "torch.utils.data."),
    ("torch.utils.data.distributed.", "torch.utils.data."),
    ("torch.nn.parallel.distributed.", "torch.nn.parallel."),
    ("torch.distributed.distributed_c10d.", "torch.distributed."),
    ("tensorflow.data.experimental.", "tensorflow.data."),
)


class Script:
    """A script that was read, with what its names mean."""

    def __init__(self, content: bytes, path: str) -> None:
        """Raises InvalidArgumentError for what is no Python."""
        try:
            wrapper = metadata.MetadataWrapper(cst.parse_module(content))
        except cst.ParserSyntaxError as error:
            raise CommandArgumentError(
                f"{path}, line {error.raw_line}, is not valid Python: {error.message}"
            ) from None
        except (UnicodeDecodeError, LookupError, SyntaxError) as error:
            raise CommandArgumentError(f"{path} is not a text of Python: {error}") from None
        self.module = wrapper.module
        self._positions = wrapper.resolve(metadata.PositionProvider)
        self._qualified = wrapper.resolve(metadata.QualifiedNameProvider)
        self._names: dict[cst.CSTNode, str] = {}  # that were asked for
        self._parents = wrapper.resolve(metadata.ParentNodeProvider)
        self._order = _Order()
        self.module.visit(self._order)
        self.calls = self.nodes(self.module, cst.Call)
        self.functions = self.nodes(self.module, cst.FunctionDef)
        self._by_name: dict[tuple[str, bool], list[cst.FunctionDef]] = {}
        for function in self.functions:
            key = function.name.value, self._parent_class(function) is not None
            self._by_name.setdefault(key, []).append(function)
        self._sites: dict[cst.FunctionDef, list[cst.Call]] = {}
        for call in self.calls:
            if (called := self.called(call)) is not None:
                self._sites.setdefault(called, []).append(call)
        self.identifiers = {name.value for name in self.nodes(self.module, cst.Name)}

    def nodes(self, tree: cst.CSTNode, kind: type[N]) -> list[N]:
        """Return all of a kind within ``tree``, which counts too, in the order of the text."""
        begin, end = self._order.spans[tree]
        return [each for each in self._order.nodes[begin:end] if isinstance(each, kind)]

    # What stands where ----------------------------------------------------------------------------

    def line(self, node: cst.CSTNode) -> int:
        """Return the line where the node begins, from 1."""
        return int(self._positions[node].start.line)

    def column(self, node: cst.CSTNode) -> int:
        """Return the column where the node begins in its line, from 0."""
        return int(self._positions[node].start.column)

    def code(self, node: cst.CSTNode) -> str:
        """Return a node's text."""
        return str(self.module.code_for_node(node)).strip()

    def ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the nodes around it, from its parent to the module."""
        while (parent := self._parents.get(node)) is not None:
            yield parent
            node = parent

    def parent(self, node: cst.CSTNode) -> cst.CSTNode:
        """Return the parent of a node other than the module."""
        return self._parents[node]

    def function_of(self, node: cst.CSTNode) -> Function:
        """Return the function in whose body the node is."""
        found = (each for each in self.ancestors(node) if isinstance(each, cst.FunctionDef))
        return next(found, None)

    def class_of(self, node: cst.CSTNode) -> cst.ClassDef | None:
        """Return the class in which the node is."""
        found = (each for each in self.ancestors(node) if isinstance(each, cst.ClassDef))
        return next(found, None)

    def statement_of(self, node: cst.CSTNode) -> cst.BaseStatement | None:
        """Return the node's statement in a block; None where it shares a line."""
        child = node
        for parent in self.ancestors(node):
            if isinstance(parent, cst.SimpleStatementSuite):
                return None
            if isinstance(parent, cst.IndentedBlock | cst.Module):
                if isinstance(child, cst.SimpleStatementLine) and len(child.body) > 1:
                    return None
                return child if isinstance(child, cst.BaseStatement) else None
            child = parent
        return None

    def top_of(self, node: cst.CSTNode) -> cst.CSTNode:
        """Return the statement of the module that it is in."""
        child = node
        for parent in self.ancestors(node):
            if isinstance(parent, cst.Module):
                break
            child = parent
        return child

    def block_of(self, statement: cst.BaseStatement) -> Sequence[cst.CSTNode]:
        """Return the statements of its block, itself included."""
        parent = self.parent(statement)
        assert isinstance(parent, cst.IndentedBlock | cst.Module)
        return parent.body

    def inside(self, node: cst.CSTNode, outer: cst.CSTNode) -> bool:
        """Return whether the node is a part of ``outer``."""
        return any(each is outer for each in self.ancestors(node))

    def loops_around(self, node: cst.CSTNode) -> list[Loop]:
        """Return the loops around the node in the same function, from inside to outside."""
        found: list[Loop] = []
        child = node
        for each in self.ancestors(node):
            if isinstance(each, cst.FunctionDef | cst.ClassDef | cst.Lambda):
                break
            if isinstance(each, cst.For | cst.While) and child is each.body:
                found.append(each)
            child = each
        return found

    # What names mean ------------------------------------------------------------------------------

    def name(self, node: cst.CSTNode) -> str:
        """Return the imported or built-in thing that it is, or calls: "torch.optim.SGD"; or "".

        It is "" if that is unclear, and one name for what a framework has in several places.
        """
        if node not in self._names:
            self._names[node] = self._resolved(node)
        return self._names[node]

    def _resolved(self, node: cst.CSTNode) -> str:
        found = self._qualified.get(node, frozenset())
        found = frozenset(found() if callable(found) else found)
        known = {
            _one_place(each.name) for each in found
            if each.source is not metadata.QualifiedNameSource.LOCAL
        }  # fmt: skip
        return known.pop() if len(known) == 1 and _imported(found) else ""

    def calls_of(self, *names: str) -> list[cst.Call]:
        """Return the calls of these names, in the order of the text.

        A name that ends in a dot means all that begin so.
        """
        return [call for call in self.calls if _is_one_of(self.name(call), names)]

    def imports(self, *roots: str) -> list[tuple[cst.Import | cst.ImportFrom, str]]:
        """Return statements that import from these packages, and what: "torch.utils.data"."""
        found: list[tuple[cst.Import | cst.ImportFrom, str]] = []
        for node in self.nodes(self.module, cst.Import):
            found += [(node, _dotted(alias.name)) for alias in node.names]
        for each in self.nodes(self.module, cst.ImportFrom):
            if each.module is not None and not each.relative:
                found.append((each, _dotted(each.module)))
        return [(node, name) for node, name in found if name.split(".")[0] in roots]

    def module_name(self, name: str) -> str:
        """Return the script's expression for a module, "tf.keras" for "keras" say; "" if none."""
        for node in self.nodes(self.module, cst.Import):
            for alias in node.names:
                dotted = _dotted(alias.name)
                if alias.asname is None and dotted.split(".")[0] == name:
                    return name
                if alias.asname is not None and _one_place(dotted + ".")[:-1] == name:
                    return _dotted(alias.asname.name)
        for each in self.nodes(self.module, cst.ImportFrom):
            if each.module is None or each.relative or isinstance(each.names, cst.ImportStar):
                continue
            for alias in each.names:
                dotted = f"{_dotted(each.module)}.{_dotted(alias.name)}"
                if _one_place(dotted + ".")[:-1] == name:
                    return _dotted(alias.asname.name if alias.asname else alias.name)
        if name == "keras" and (tensorflow := self.module_name("tensorflow")):
            return f"{tensorflow}.keras"
        return ""

    def unused(self, *wishes: str) -> str:
        """Return the first of these names that the script does not use, or one made of the last."""
        for wish in wishes:
            if wish not in self.identifiers:
                self.identifiers.add(wish)
                return wish
        return self.unused(f"{wishes[-1]}_of_rank", f"{wishes[-1]}_")

    # Where values are from ------------------------------------------------------------------------

    def called(self, call: cst.Call) -> cst.FunctionDef | None:
        """Return the function of this script that it calls; None: none, or that is unclear."""
        if isinstance(call.func, cst.Name):
            return self._function_named(call.func.value, in_class=False)
        if isinstance(call.func, cst.Attribute) and not self.name(call):
            return self._function_named(call.func.attr.value, in_class=True)
        return None

    def call_sites(self, function: cst.FunctionDef) -> list[cst.Call]:
        """Return the calls of a function in this script."""
        return self._sites.get(function, [])

    def _function_named(self, name: str, *, in_class: bool) -> cst.FunctionDef | None:
        found = self._by_name.get((name, in_class), [])
        return found[0] if len(found) == 1 else None

    def _parent_class(self, function: cst.FunctionDef) -> cst.ClassDef | None:
        parent = self.parent(function)
        above = None if parent is self.module else self.parent(parent)
        return above if isinstance(above, cst.ClassDef) else None

    def given(
        self, call: cst.Call, function: cst.FunctionDef, name: str
    ) -> cst.BaseExpression | None:
        """Return what ``call`` passes for a parameter; None if that cannot be seen."""
        names = [each.name.value for each in function.params.params]
        if self._parent_class(function) is not None:
            names = names[1:]
        index = names.index(name) if name in names else len(call.args)
        found = argument(call, name, index)
        return found.value if found is not None else None

    def target_of(self, value: cst.BaseExpression) -> cst.BaseExpression | None:
        """Return the name or attribute to which just this value is assigned; None: no such."""
        assign = self.parent(value)
        if isinstance(assign, cst.Assign | cst.AnnAssign):
            targets = _targets(assign)
            if len(targets) == 1 and isinstance(targets[0], cst.Name | cst.Attribute):
                return targets[0]
        return None

    def assignments(
        self, target: str, function: Function
    ) -> list[tuple[Assignment, cst.BaseExpression, int]]:
        """Return the assignments to a name of ``function`` or an attribute: node, value, place.

        The place is that in a tuple, -1 if the whole value is meant.
        """
        found: list[tuple[Assignment, cst.BaseExpression, int]] = []
        scope = function or self.module
        made: list[Assignment] = [*self.nodes(scope, cst.Assign)]
        made += self.nodes(scope, cst.AnnAssign)
        for node in made:
            if node.value is None or ("." not in target and self.function_of(node) is not function):
                continue
            for each in _targets(node):
                if isinstance(each, cst.Tuple | cst.List):
                    names = [self.code(element.value) for element in each.elements]
                    places = [index for index, name in enumerate(names) if name == target]
                    found += [(node, node.value, index) for index in places]
                elif self.code(each) == target:
                    found.append((node, node.value, -1))
        return found

    def origins(self, value: cst.BaseExpression, depth: int = _DEPTH) -> list[cst.BaseExpression]:
        """Return expressions that a value may be from, through names, parameters, returns."""
        if depth == 0:
            return []
        if isinstance(value, cst.Call):
            inner = [each for arg in self._iterated(value) for each in self.origins(arg, depth - 1)]
            function = self.called(value)
            returned = self._returned(function, -1, depth) if function is not None else []
            return inner or returned or [value]
        if isinstance(value, cst.Attribute):
            return self._assigned(self.code(value), None, depth) or [value]
        if isinstance(value, cst.Subscript):
            return self._items(value, depth) or [value]
        if not isinstance(value, cst.Name):
            return [value]
        function_here = self.function_of(value)
        while True:
            if function_here is not None and value.value in _parameters(function_here):
                found: list[cst.BaseExpression] = []
                for call in self.call_sites(function_here):
                    given = self.given(call, function_here, value.value)
                    found += self.origins(given, depth - 1) if given is not None else []
                return found
            if assigned := self._assigned(value.value, function_here, depth):
                return assigned
            if function_here is None:
                return [value]
            function_here = self.function_of(function_here)

    def _items(self, value: cst.Subscript, depth: int) -> list[cst.BaseExpression]:
        """Return what a dictionary has at a key that is a text: loaders["train"]."""
        index = value.slice[0].slice
        if not isinstance(index, cst.Index) or not isinstance(index.value, cst.SimpleString):
            return []
        found: list[cst.BaseExpression] = []
        for origin in self.origins(value.value, depth - 1):
            for each in origin.elements if isinstance(origin, cst.Dict) else []:
                if isinstance(each, cst.DictElement) and self.code(each.key) == self.code(index):
                    found += self.origins(each.value, depth - 1)
        return found or self._assigned(self.code(value), self.function_of(value), depth)

    def _assigned(self, target: str, function: Function, depth: int) -> list[cst.BaseExpression]:
        found: list[cst.BaseExpression] = []
        for _, value, index in self.assignments(target, function):
            if index < 0:
                found += self.origins(value, depth - 1)
            elif isinstance(value, cst.Tuple) and index < len(value.elements):
                found += self.origins(value.elements[index].value, depth - 1)
            elif isinstance(value, cst.Call) and (called := self.called(value)):
                found += self._returned(called, index, depth)
        return found

    def _returned(
        self, function: cst.FunctionDef, index: int, depth: int
    ) -> list[cst.BaseExpression]:
        found: list[cst.BaseExpression] = []
        for node in self.nodes(function, cst.Return):
            value = node.value
            if self.function_of(node) is not function or value is None:
                continue
            if index < 0:
                found += self.origins(value, depth - 1)
            elif isinstance(value, cst.Tuple) and index < len(value.elements):
                found += self.origins(value.elements[index].value, depth - 1)
        return found

    def _iterated(self, call: cst.Call) -> list[cst.BaseExpression]:
        """Return the arguments that a call only passes on, as enumerate() does."""
        name = self.name(call)
        if name in ("builtins.enumerate", "builtins.iter", "itertools.islice", "itertools.cycle"):
            return [each.value for each in call.args[:1]]
        if name == "builtins.zip":
            return [each.value for each in call.args]
        if name.startswith(("tqdm.", "rich.progress.track")):
            return [each.value for each in call.args[:1]]
        return []

    def iterated(self, value: cst.BaseExpression, depth: int = _DEPTH) -> list[cst.BaseExpression]:
        """Return the names that a loop goes through, behind enumerate(), zip() and tqdm()."""
        if isinstance(value, cst.Call) and depth:
            return [
                each for arg in self._iterated(value) for each in self.iterated(arg, depth - 1)
            ]  # fmt: skip
        if isinstance(value, cst.Name) and depth:
            for _, given, index in self.assignments(value.value, self.function_of(value)):
                if index < 0 and isinstance(given, cst.Call) and self._iterated(given):
                    return self.iterated(given, depth - 1)
        return [value] if isinstance(value, cst.Name | cst.Attribute | cst.Subscript) else []


# Of trees ----------------------------------------------------------------------------------------


class _Order(cst.CSTVisitor):
    """All nodes in the order of the text, and where those within each begin and end."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[cst.CSTNode] = []
        self.spans: dict[cst.CSTNode, tuple[int, int]] = {}

    def on_visit(self, node: cst.CSTNode) -> bool:
        self.spans[node] = len(self.nodes), 0
        self.nodes.append(node)
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        self.spans[original_node] = self.spans[original_node][0], len(self.nodes)


def keyword(call: cst.Call, name: str) -> cst.Arg | None:
    """Return the argument of that name; None: there is none."""
    found = (each for each in call.args if each.keyword and each.keyword.value == name)
    return next(found, None)


def argument(call: cst.Call, name: str, index: int) -> cst.Arg | None:
    """Return the argument of that name, or at that place; None: there is none."""
    if (found := keyword(call, name)) is not None:
        return found
    ahead = call.args[: index + 1]
    if len(ahead) <= index or any(each.star or each.keyword for each in ahead):
        return None
    return call.args[index]


def attribute_call(call: cst.Call, *names: str) -> cst.BaseExpression | None:
    """Return X, if the call is X.name(...); None: it is not."""
    if isinstance(call.func, cst.Attribute) and call.func.attr.value in names:
        return call.func.value
    return None


def _targets(assign: Assignment) -> list[cst.BaseExpression]:
    if isinstance(assign, cst.AnnAssign):
        return [assign.target]
    return [each.target for each in assign.targets]


def _parameters(function: cst.FunctionDef) -> set[str]:
    params = function.params
    return {each.name.value for each in (*params.params, *params.kwonly_params)}


def _dotted(node: cst.CSTNode) -> str:
    if isinstance(node, cst.Attribute):
        return f"{_dotted(node.value)}.{node.attr.value}"
    return node.value if isinstance(node, cst.Name) else ""


def _one_place(name: str) -> str:
    for place, same in _SAME_PLACES:
        if name.startswith(place):
            return same + name[len(place) :]
    return name


def _imported(found: Iterable[metadata.QualifiedName]) -> bool:
    return all(each.source is not metadata.QualifiedNameSource.LOCAL for each in found)


def _is_one_of(name: str, names: Sequence[str]) -> bool:
    return bool(name) and any(
        name.startswith(each) if each.endswith(".") else name == each for each in names
    )
