"""Branchline's router in Python: start it, stop it, or run its command line.

The options are those of `branchline-router --help`, with underscores.
"""

from branchline_router._native import ConfigError, ForkError, RouterError, StartError, StateError
from branchline_router._options import PolicyType, RouterOptions
from branchline_router._router import Router

__all__ = [
    "ConfigError",
    "ForkError",
    "PolicyType",
    "Router",
    "RouterError",
    "RouterOptions",
    "StartError",
    "StateError",
]
