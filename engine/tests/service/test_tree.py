"""GetCacheTree: what a piece of the tree tells, its bounds, and that tokens come only when asked for."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest
from branchline.engine.service.generated import engine_pb2 as pb
from served import PAGE, Served, contract_error, request, served

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


async def run(engine: Served, name: str, prompt: list[int], **fields: object) -> None:
    async for _ in engine.stub.Generate(request(name, prompt, max_tokens=1, **fields)):
        pass


async def test_a_node_tells_its_size_place_and_use_and_no_token() -> None:
    async with served() as engine:
        await run(engine, "a", PROMPT)
        await run(engine, "b", PROMPT)
        await run(engine, "c", [*PROMPT[:4], 50, 51, 52, 53, 54])
        tree = await engine.stub.GetCacheTree(pb.GetCacheTreeRequest())
        assert (tree.nodes_total, tree.namespaces_total, tree.next) == (3, 1, 0)
        stem = next(node for node in tree.nodes if node.depth_tokens == 0)
        assert (stem.pages, stem.tokens, stem.children, stem.parent, stem.hits) == (1, PAGE, 2, 0, 2)
        for leaf in (node for node in tree.nodes if node.depth_tokens == PAGE):
            assert leaf.parent == stem.node and leaf.namespace_hash == stem.namespace_hash
            assert (leaf.locks, leaf.leases, leaf.children, leaf.on_host) == (0, 0, 0, False)
        assert not any(node.token_ids for node in tree.nodes)
        assert tree.cache.pages_evictable == 3 and tree.cache.host_pages_total == 0
        asked = await engine.stub.GetCacheTree(pb.GetCacheTreeRequest(include_token_ids=True))
        assert sorted(list(node.token_ids) for node in asked.nodes) == [[1, 2, 3, 4], [5, 6, 7, 8], [50, 51, 52, 53]]


async def test_a_lease_shows_on_every_node_it_holds() -> None:
    async with served() as engine:
        lease = await engine.stub.AcquireLease(
            pb.AcquireLeaseRequest(request_id="l", token_ids=PROMPT, ttl_ms=60_000, tenant="t")
        )
        await run(engine, "c", [*PROMPT[:4], 50, 51, 52, 53, 54])
        tree = await engine.stub.GetCacheTree(pb.GetCacheTreeRequest())
        assert sorted((node.depth_tokens, node.locks, node.leases) for node in tree.nodes) == [
            (0, 1, 1),
            (4, 0, 0),
            (4, 1, 1),
        ]
        await engine.stub.ReleaseLease(pb.ReleaseLeaseRequest(lease_id=lease.grant.lease_id, tenant="t"))


async def test_pieces_are_bounded_and_together_are_the_tree() -> None:
    async with served() as engine:
        await asyncio.gather(*(run(engine, f"r{number}", [number] * 5) for number in range(9)))
        seen, cursor = [], 0
        while True:
            piece = await engine.stub.GetCacheTree(pb.GetCacheTreeRequest(limit=4, cursor=cursor))
            assert len(piece.nodes) <= 4 and piece.nodes_total == 9
            seen += [node.node for node in piece.nodes]
            cursor = piece.next
            if not cursor:
                break
        assert len(seen) == len(set(seen)) == 9 and seen == sorted(seen)


@pytest.mark.parametrize(
    ("fields", "words"), [({"limit": 10_001}, "limit is 10001"), ({"cursor": 2**40}, "cursor is 1099511627776")]
)
async def test_a_piece_out_of_range_is_refused_by_name(fields: dict[str, int], words: str) -> None:
    async with served() as engine:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await engine.stub.GetCacheTree(pb.GetCacheTreeRequest(**fields))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert words in contract_error(refused.value).message
        await engine.idle()
