"""Decides who computes what in each step and turns results into news: queue, budget, pages, sharing, ends.

Pure Python on one thread: no torch, no gRPC, no clock of its own. Called by branchline.engine.loop.
"""

from __future__ import annotations

from branchline.engine.scheduler.options import SchedulerOptions
from branchline.engine.scheduler.scheduler import Scheduler
from branchline.engine.scheduler.sequence import Group, Sequence, Sink

__all__ = ["Group", "Scheduler", "SchedulerOptions", "Sequence", "Sink"]
