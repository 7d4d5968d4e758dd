"""Teaches the reference's generator (griffe) two habits of this code; loaded by mkdocs.yml.

A front end's verbs are methods of its ``collectives``. It takes over those that kolovod.surface
names, and binds others by hand, ``allreduce_pytree = _pytrees.allreduce_pytree``: the reference
shows all of them as the functions that they are, with the method's signature and docstring, and
with that of the base class where the method's own says "See Collectives.allreduce". And a docstring
marks a literal block with ``::``, where Markdown has a plain colon.
"""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).resolve().parent))

import docs_members

TRANSFERS = "core.transfers.Transfers"  # below the package
REFERS = re.compile(r"See Collectives\.(\w+)(?:\.|, and \w+\.)")


class BoundVerbs(griffe.Extension):
    """Replaces ``name = instance.method`` in modules by the method, as a function."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Add verbs after a whole package was read: base classes are known then."""
        if pkg.name != docs_members.HOME:
            return
        for module in _modules(pkg):
            _plain_colons(module)
            for name, member in list(module.members.items()):
                if isinstance(member, griffe.Alias) or not member.is_attribute:
                    continue
                method = _method(module, str(member.value))
                if method is not None:
                    module.set_member(name, _as_function(method, name, module))
        for name in ("", "numpy", "torch", "tensorflow", "jax", "mxnet"):
            _take_over(pkg, pkg[name] if name else pkg)


def _take_over(pkg: griffe.Module, module: griffe.Module) -> None:
    """Give a front end the verbs that kolovod.surface names for it."""
    owner = module if "collectives" in module.members else pkg["numpy"]
    for surface in docs_members.surfaces(module.path):
        for name in docs_members.names_of(surface):
            if surface.endswith(".transfers"):
                found = _itself(pkg[TRANSFERS].all_members[name])
            elif not surface.endswith(".world"):
                found = _method(owner, f"collectives.{name}")
            else:  # imported like anything else
                continue
            if not isinstance(found, griffe.Function):
                raise SystemExit(f"{module.path}.{name}: no method of that name was found")
            module.set_member(name, _as_function(found, name, module))


def _modules(module: griffe.Module) -> list[griffe.Module]:
    found = [module]
    for member in module.members.values():
        if isinstance(member, griffe.Module):
            found += _modules(member)
    return found


def _method(module: griffe.Module, value: str) -> griffe.Function | None:
    """Return the method, if the value is ``instance.method`` of an instance that the module has."""
    instance, dot, method = value.partition(".")
    if not dot or not method.isidentifier() or instance not in module.members:
        return None
    try:
        made: Any = _itself(module[instance])
        call = getattr(made, "value", None)
        if not isinstance(call, griffe.ExprCall):
            return None
        owner = _itself(made.modules_collection[call.function.canonical_path])
        found = _itself(owner.all_members[method]) if owner.is_class else None
    except (griffe.AliasResolutionError, KeyError):  # of another package
        return None
    return found if isinstance(found, griffe.Function) else None


def _itself(found: Any) -> Any:
    return found.final_target if found.is_alias else found


def _as_function(method: griffe.Function, name: str, module: griffe.Module) -> griffe.Function:
    function = copy.copy(method)
    function.name, function.parent = name, module
    function.parameters = griffe.Parameters(*list(method.parameters)[1:])
    text = _whole_text(method)
    function.docstring = griffe.Docstring(text, parent=function) if text else None
    return function


def _whole_text(method: griffe.Function) -> str:
    """Return the docstring; where it only refers to that of a base class, that one comes first."""
    own = method.docstring.value if method.docstring else ""
    found = REFERS.match(own)
    if found is None or not isinstance(method.parent, griffe.Class):
        return own
    for base in method.parent.mro():
        text = base.members[found[1]].docstring if found[1] in base.members else None
        if text is not None and not REFERS.match(text.value):
            return f"{text.value}\n\n{own[found.end() :].strip()}".strip()
    return own


def _plain_colons(thing: griffe.Object) -> None:
    if thing.docstring is not None:
        text = thing.docstring.value.replace("::\n", ":\n")
        thing.docstring.value = text.removeprefix(":\n").lstrip("\n")
    for member in thing.members.values():
        if isinstance(member, griffe.Object) and not member.is_module:
            _plain_colons(member)
