"""Why a constraint is not served, as errors that name keyword and JSON pointer.

A constraint is enforced exactly or refused; nothing here ever weakens one.
"""

from __future__ import annotations

from branchline.engine.errors import InvalidArgument


class GrammarInvalid(InvalidArgument):
    """The constraint itself is wrong: no JSON, a keyword of the wrong type, a bad pattern, or no value fits."""

    def __init__(self, message: str, *, pointer: str | None = None, field: str = "grammar") -> None:
        self.pointer = pointer
        super().__init__(message + where(pointer), field=field)


class GrammarUnsupported(InvalidArgument):
    """The constraint is well formed and can't be enforced exactly. `keyword` names what is to blame."""

    def __init__(
        self, keyword: str, reason: str, *, pointer: str | None = None, backend: str = "", field: str = "grammar"
    ) -> None:
        self.keyword = keyword
        self.pointer = pointer
        self.backend = backend
        who = f"grammar backend {backend!r}" if backend else "no grammar backend"
        verb = "can't enforce" if backend else "can enforce"
        super().__init__(f"{who} {verb} {keyword!r} exactly{where(pointer)}: {reason}", field=field)


def where(pointer: str | None) -> str:
    """The place in words; the root is `#`."""
    return "" if pointer is None else f" at {pointer or '#'}"
