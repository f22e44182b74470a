"""A radix cache. Frozen: written for API version 1, never to be changed."""

from __future__ import annotations

import os

from branchline.engine.cache import CacheContext
from branchline.engine.cache.reference import ReferenceCache


def note() -> None:
    """Tells the test that the plugin is in use."""
    if "ACME_NOTES" in os.environ:
        with open(os.environ["ACME_NOTES"], "a", encoding="ascii") as notes:
            notes.write("radix_cache_backends\n")


class Plugin(ReferenceCache):
    """The plain one."""

    def __init__(self, context: CacheContext) -> None:
        note()
        super().__init__(context)
