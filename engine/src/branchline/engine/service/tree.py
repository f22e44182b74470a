"""GetCacheTree: a bounded piece of the cache's radix tree as messages, taken between two steps.

Shows no token unless it was asked for; who may ask is the gateway's to decide. Owns nothing.
"""

from __future__ import annotations

import asyncio

from branchline.engine.cache import NodeView
from branchline.engine.errors import InvalidArgument
from branchline.engine.loop import EngineLoop
from branchline.engine.service import wire
from branchline.engine.service.generated import engine_pb2 as pb

USUAL_NODES = 1000
MAX_NODES = 10_000
MAX_TOKENS = 4096  # of one node
MAX_CURSOR = 2**32 - 1


async def piece(loop: EngineLoop, request: pb.GetCacheTreeRequest) -> pb.GetCacheTreeResponse:
    """The nodes asked for. Raises InvalidArgument for a limit or a cursor out of range."""
    limit = request.limit or USUAL_NODES
    if limit > MAX_NODES:
        raise InvalidArgument(f"limit is {limit}: give at most {MAX_NODES} nodes", field="limit")
    if request.cursor > MAX_CURSOR:
        raise InvalidArgument(f"cursor is {request.cursor}: give 0, or `next` of the answer before", field="cursor")
    tokens = MAX_TOKENS if request.include_token_ids else 0
    view = await asyncio.to_thread(loop.cache_tree, request.cursor, limit, tokens)  # waits for the end of a step
    stats = loop.stats()
    return pb.GetCacheTreeResponse(
        nodes=[_node(node, stats.page_size) for node in view.nodes],
        next=view.next,
        nodes_total=view.nodes_total,
        namespaces_total=view.namespaces_total,
        cache=wire.to_cache_stats(stats),
    )


def _node(node: NodeView, page_size: int) -> pb.CacheTreeNode:
    return pb.CacheTreeNode(
        node=node.node,
        parent=node.parent,
        namespace_hash=node.namespace_hash,
        pages=node.pages,
        tokens=node.pages * page_size,
        depth_tokens=node.depth_tokens,
        locks=node.locks,
        leases=node.leases,
        hits=node.uses,
        age_ms=node.age_ms,
        children=node.children,
        on_host=node.on_host,
        token_ids=node.token_ids,
    )
