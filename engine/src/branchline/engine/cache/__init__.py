"""The radix cache seam: protocol, build context, and the built-in backends and eviction policies by name.

Importing this package registers `native`, `reference` and `none`, and `lru`, `lfu`, `slru` and `priority`; none of
them is imported before it is asked for. Imports neither torch nor the scheduler.
"""

from __future__ import annotations

from branchline import registry
from branchline.engine.cache.base import CacheContext, CacheEvent, NodeView, RadixCacheBackend, StoredEvent, TreeView

__all__ = ["CacheContext", "CacheEvent", "NodeView", "RadixCacheBackend", "StoredEvent", "TreeView", "build_cache"]

registry.radix_cache_backends.register_lazy("native", "branchline.engine.cache.native:NativeCache", api_version=1)
registry.radix_cache_backends.register_lazy(
    "reference", "branchline.engine.cache.reference:ReferenceCache", api_version=1
)
registry.radix_cache_backends.register_lazy("none", "branchline.engine.cache.private:PrivateCache", api_version=1)
for _name in ("Lru", "Lfu", "Slru", "Priority"):
    registry.eviction_policies.register_lazy(_name.lower(), f"branchline.engine.cache.eviction:{_name}", api_version=1)


def build_cache(name: str, context: CacheContext) -> RadixCacheBackend:
    """Build the backend registered under `name`. Raises RegistryError if it is unknown or does not conform."""
    factory = registry.radix_cache_backends.get(name)
    cache = factory(context)
    registry.radix_cache_backends.verify(name, cache)
    return cache  # type: ignore[return-value]
