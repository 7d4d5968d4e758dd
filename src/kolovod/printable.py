"""Text of other users, for a terminal: what would steer it is written out instead. PURE."""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str, keep: str = "") -> str:
    r"""Return ``text`` with every character that does not print as Python would escape it.

    ``keep``: characters that stay, such as "\n" where lines are expected. A terminal obeys control
    characters, and some that Unicode has for directions hide or reorder what is beside them.
    """
    if text.isprintable():
        return text
    return "".join(
        each
        if each.isprintable() or each in keep
        else each.encode("unicode_escape", "surrogatepass").decode()
        for each in text
    )
