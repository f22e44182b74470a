"""Hooks: code of plugins that runs at named points of the engine. Imports nothing that serves."""

from branchline.engine.hooks.chain import Chain, Cost, Placed, assemble, faults
from branchline.engine.hooks.points import POINTS, Fault, Hook, Mode, Point

__all__ = ["POINTS", "Chain", "Cost", "Fault", "Hook", "Mode", "Placed", "Point", "assemble", "faults"]
