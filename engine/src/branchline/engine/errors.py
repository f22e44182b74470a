"""The engine's exceptions.

EngineError                 has a closed `code`, a message and a dotted `field`
├── InvalidArgument         the request is wrong; retrying it is pointless
├── NotFound                a named thing does not exist
├── ResourceExhausted       a queue, pool or budget is full; may carry retry_after_ms
├── Unavailable             starting or draining
├── DeadlineExceeded        the request's own deadline passed
├── Unimplemented           a field or feature that this engine does not implement
├── Cancelled               aborted by its owner
├── InternalError           a fault of ours
└── LoadError               a model can't be loaded: missing, truncated or unsupported files
"""

from __future__ import annotations

from enum import StrEnum


class ErrorCode(StrEnum):
    """The closed code set of engine.proto, without the zero value."""

    INVALID_ARGUMENT = "invalid_argument"
    NOT_FOUND = "not_found"
    UNAUTHENTICATED = "unauthenticated"
    RESOURCE_EXHAUSTED = "resource_exhausted"
    UNAVAILABLE = "unavailable"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    UNIMPLEMENTED = "unimplemented"
    INTERNAL = "internal"
    CANCELLED = "cancelled"


class EngineError(Exception):
    """Base of the family. `field` is a dotted path such as `sampling.temperature`, or empty."""

    code = ErrorCode.INTERNAL

    def __init__(self, message: str, *, field: str = "", retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_ms = retry_after_ms


class InvalidArgument(EngineError):
    """The request is wrong; the same request will fail again."""

    code = ErrorCode.INVALID_ARGUMENT


class NotFound(EngineError):
    """A named thing does not exist."""

    code = ErrorCode.NOT_FOUND


class Unauthenticated(EngineError):
    """Credentials are missing or wrong."""

    code = ErrorCode.UNAUTHENTICATED


class ResourceExhausted(EngineError):
    """A queue, pool or budget is full."""

    code = ErrorCode.RESOURCE_EXHAUSTED


class Unavailable(EngineError):
    """Starting or draining."""

    code = ErrorCode.UNAVAILABLE


class DeadlineExceeded(EngineError):
    """The request's own deadline passed."""

    code = ErrorCode.DEADLINE_EXCEEDED


class Unimplemented(EngineError):
    """A field or feature that this engine does not implement."""

    code = ErrorCode.UNIMPLEMENTED


class Cancelled(EngineError):
    """Aborted by its owner."""

    code = ErrorCode.CANCELLED


class InternalError(EngineError):
    """A fault of ours."""

    code = ErrorCode.INTERNAL


class LoadError(EngineError):
    """A model can't be loaded: missing, truncated or unsupported files."""

    code = ErrorCode.INVALID_ARGUMENT
