"""The lease methods of the service: a prefix is planted as a request with no output, then held.

Pure glue between messages and the loop; the rules are in cache/leases.py.
"""

from __future__ import annotations

import asyncio

from branchline.engine.cache.leases import Lease
from branchline.engine.errors import InternalError
from branchline.engine.service import attach
from branchline.engine.service.generated import engine_pb2 as pb
from branchline.engine.service.validate import check_tenant, check_ttl


async def acquire(host: attach.Host, request: pb.AcquireLeaseRequest, peer: str) -> pb.AcquireLeaseResponse:
    """Plant and hold. Raises what Generate raises."""
    check_ttl(request.ttl_ms, "ttl_ms")
    message = pb.GenerateRequest(
        request_id=request.request_id,
        token_ids=request.token_ids,
        sampling=pb.SamplingParams(max_tokens=0),
        lease=pb.Lease(acquire_ttl_ms=request.ttl_ms, tenant=request.tenant),
    )
    if request.HasField("cache_namespace"):
        message.cache_namespace.CopyFrom(request.cache_namespace)
    if request.HasField("deadline_ms"):
        message.deadline_ms = request.deadline_ms
    answer = pb.AcquireLeaseResponse()
    async for part in attach.generate(host, message, peer):
        for delta in part.deltas:
            if delta.HasField("prompt"):
                answer.prompt.CopyFrom(delta.prompt)
            if delta.HasField("lease"):
                answer.grant.CopyFrom(delta.lease.grant)
            if delta.HasField("finish") and delta.finish.reason == pb.FINISH_REASON_ABORT:
                raise attach.RequestFailed(
                    pb.Error(code=pb.ERROR_CODE_CANCELLED, message=delta.finish.message or "the request was aborted")
                )
    if not answer.HasField("grant"):
        raise InternalError("the prefix was planted but no lease was granted")
    return answer


async def renew(host: attach.Host, request: pb.RenewLeaseRequest) -> pb.RenewLeaseResponse:
    """Raises NotFound if the lease does not live."""
    ttl_ms = check_ttl(request.ttl_ms, "ttl_ms")
    tenant = check_tenant(request.tenant, "tenant")
    lease = await asyncio.to_thread(host.loop.renew_lease, request.lease_id, tenant, ttl_ms)
    return pb.RenewLeaseResponse(grant=_grant(lease, ttl_ms, host.engine_id))


async def release(host: attach.Host, request: pb.ReleaseLeaseRequest) -> pb.ReleaseLeaseResponse:
    """Whether it was alive."""
    tenant = check_tenant(request.tenant, "tenant")
    released = await asyncio.to_thread(host.loop.release_lease, request.lease_id, tenant)
    return pb.ReleaseLeaseResponse(released=released)


def _grant(lease: Lease, ttl_ms: int, engine_id: str) -> pb.LeaseGrant:
    return pb.LeaseGrant(
        lease_id=lease.lease_id,
        engine_id=engine_id,
        tokens=len(lease.token_ids),
        pages=len(lease.pages),
        ttl_ms=ttl_ms,
    )
