"""Things that are made anew in each world of an elastic job, beside engine and process sets.

A front end that has something of its own in a world, a communicator of its framework, say, has it
formed here when all ranks have met.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["then_in_each_world", "in_each_world"]

Form = Callable[[], object]

_forms: list[Form] = []


def in_each_world(form: Form) -> None:
    """Have ``form()`` called on all ranks when they have met in a world of an elastic job.

    It may run operations, the same on all ranks, and is called before any other one. If it raises
    CollectiveAbortedError, another world follows; JobOverError ends the process.
    """
    _forms.append(form)


def then_in_each_world(first: Form) -> Form:
    """Return a function that calls ``first``, and then all that ``in_each_world`` was given."""

    def form() -> None:
        first()
        for each in list(_forms):
            each()

    return form
