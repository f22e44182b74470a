"""Platforms: what a model can run on. Registers lazily; imports torch only when asked for its devices."""

from branchline import registry
from branchline.engine.platforms.base import Platform

__all__ = ["Platform"]

registry.platforms.register_lazy("cuda", "branchline.engine.platforms.cuda:Cuda", api_version=1)
registry.platforms.register_lazy("cpu", "branchline.engine.platforms.cpu:Cpu", api_version=1)
