"""Branchline's router in Python: start it, send it requests without a socket, or run its command line.

The options are those of `branchline-router --help`, with underscores. `registry` takes parsers of your own.
"""

from branchline_router._metrics import Sample
from branchline_router._native import ConfigError, ForkError, RouterError, StartError, StateError
from branchline_router._options import PolicyType, RouterOptions
from branchline_router._requests import (
    BadRequestError,
    DeadlineError,
    NotFoundError,
    OverloadedError,
    RequestError,
    WorkerError,
)
from branchline_router._router import Router

__all__ = [
    "BadRequestError",
    "ConfigError",
    "DeadlineError",
    "ForkError",
    "NotFoundError",
    "OverloadedError",
    "PolicyType",
    "RequestError",
    "Router",
    "RouterError",
    "RouterOptions",
    "Sample",
    "StartError",
    "StateError",
    "WorkerError",
]
