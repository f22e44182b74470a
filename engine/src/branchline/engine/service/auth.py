"""Bearer-token check of every call but health, as a server interceptor. Must not log nor echo tokens."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

_OPEN = "/grpc.health.v1.Health/"
_REFUSAL = "the bearer token is missing or wrong: send metadata `authorization: Bearer TOKEN`"


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """Refuses calls without the token. Digests of fixed length are compared in constant time."""

    def __init__(self, token: str) -> None:
        self._digest = hashlib.sha256(token.encode()).digest()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Hand over to the method, or to one of the same shape that refuses."""
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or method.startswith(_OPEN) or self._admits(handler_call_details):
            return handler
        return _refusing(handler)

    def _admits(self, details: grpc.HandlerCallDetails) -> bool:
        given = ""
        for key, value in details.invocation_metadata or ():
            if key == "authorization":
                given = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
        scheme, _, token = given.partition(" ")
        same = hmac.compare_digest(hashlib.sha256(token.strip().encode()).digest(), self._digest)
        return same and scheme.lower() == "bearer"


def _refusing(handler: Any) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(_request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, _REFUSAL)

    async def refuse_stream(_request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, _REFUSAL)
        yield  # makes this an async generator, as a streaming method must be

    makers = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    make: Any = makers[(handler.request_streaming, handler.response_streaming)]
    return make(  # type: ignore[no-any-return]
        refuse_stream if handler.response_streaming else refuse,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
