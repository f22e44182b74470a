"""What a program can raise. Owns the wording; imports nothing of the language."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any


class LangError(Exception):
    """Base of everything this language raises by itself. Crosses processes with its attributes and its cause."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.args, dict(self.__dict__), _portable(self.__cause__))


def _restore(
    kind: type[LangError], args: tuple[Any, ...], attributes: dict[str, Any], cause: BaseException | None
) -> LangError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    error.__cause__ = cause
    return error


def _portable(cause: BaseException | None) -> BaseException | None:
    """The cause, or its words where it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(cause))
    except Exception:  # whatever a foreign exception does when it is copied
        return LangError(f"{type(cause).__name__}: {cause}")
    return cause


class ArgumentError(LangError, ValueError):
    """An argument cannot mean anything; names it, its value and what to give instead."""


class UnknownVariable(LangError, KeyError):
    """No variable of this name was ever assigned in this branch."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else "unknown variable"


class UnsupportedError(LangError):
    """The backend cannot do what was asked; nothing was sent."""


class WouldBlock(LangError):
    """A blocking read inside a running event loop."""


class CancelledError(LangError):
    """The branch was cancelled: by its program, by a failing sibling or by leaving its scope."""


class DeadlineError(LangError, TimeoutError):
    """A block or a program ran past its deadline."""


class JoinError(LangError):
    """Branches cannot be joined, e.g. because a variable of theirs exists in the parent."""


class ParseError(LangError, ValueError):
    """A typed answer does not parse. `raw` is the text as it came."""

    def __init__(self, message: str, raw: str) -> None:
        super().__init__(message)
        self.raw = raw


class BackendError(LangError):
    """A backend refused or failed. `status` is its HTTP status, if it has one; `sent` whether output had begun."""

    def __init__(self, message: str, *, status: int | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Place:
    """A line of the user's program."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class ProgramError(LangError):
    """A block failed. Says which variable, in which branch, at which line of the program, and why (`__cause__`)."""

    def __init__(
        self, cause: BaseException, *, place: Place | None, branch: tuple[int, ...] = (), variable: str | None = None
    ) -> None:
        what = f"variable {variable!r}" if variable is not None else "a block"
        where = f" of branch {'.'.join(map(str, branch))}" if branch else ""
        line = f" ({place})" if place else ""
        super().__init__(f"{what}{where}{line} failed: {type(cause).__name__}: {cause}")
        self.place = place
        self.branch = branch
        self.variable = variable
        self.index: int | None = None  # set by run_batch: the item
        self.surfaced = False  # whether the program has seen it
        self.__cause__ = cause

    @property
    def cause(self) -> BaseException:
        """What went wrong."""
        assert self.__cause__ is not None
        return self.__cause__
