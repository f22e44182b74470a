"""The gRPC server around EngineServicer: port, credentials, health, reflection and draining.

Owns the listening port and the order of shutting down. Must not know how the loop or the model are made.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from branchline.engine.errors import LoadError
from branchline.engine.service.auth import TokenInterceptor
from branchline.engine.service.generated import engine_pb2, engine_pb2_grpc
from branchline.engine.service.limits import MAX_MESSAGE
from branchline.engine.service.servicer import EngineServicer

logger = logging.getLogger(__name__)

SERVICE = engine_pb2.DESCRIPTOR.services_by_name["Engine"].full_name
HEALTH_INTERVAL_S = 0.25
STEP_S = 10.0  # for the step that runs when the time to drain is over


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where and how to listen. Without `token` and `tls_client_ca` anyone who reaches the port is served."""

    host: str = "127.0.0.1"
    port: int = 0
    token: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    step_timeout_s: float = 60.0


class EngineServer:
    """A started server; `port` is the real one."""

    def __init__(self, servicer: EngineServicer, options: ServerOptions) -> None:
        self._servicer = servicer
        self._options = options
        self._health = health.aio.HealthServicer()
        self._watch: asyncio.Task[None] | None = None
        interceptors = [TokenInterceptor(options.token)] if options.token else []
        self._server = grpc.aio.server(interceptors=interceptors, options=_channel_options())
        engine_pb2_grpc.add_EngineServicer_to_server(servicer, self._server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        self.port = 0

    async def start(self) -> None:
        """Listen. Raises LoadError if the port is taken or a PEM file can't be read."""
        options = self._options
        host = f"[{options.host}]" if ":" in options.host else options.host
        address = f"{host}:{options.port}"
        try:
            if options.tls_cert:
                self.port = self._server.add_secure_port(address, _credentials(options))
            else:
                self.port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise LoadError(f"can't listen on {address}: {error}: free the port or choose another") from None
        await self._server.start()
        await self._report()
        self._watch = asyncio.create_task(self._watch_progress(), name="health")

    async def _watch_progress(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            await self._report()

    async def _report(self) -> None:
        serving = self.is_serving()
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE):
            await self._health.set(name, status)

    def is_serving(self) -> bool:
        """Whether the loop makes progress and requests are taken."""
        if self._servicer.draining:
            return False
        try:
            age_ms = self._servicer.loop.stats().step_age_ms
        except Exception:
            logger.exception("the loop's state can't be read")
            return False
        return age_ms <= self._options.step_timeout_s * 1000

    async def drain(self, timeout_s: float) -> bool:
        """Take no more requests, let live ones end within the timeout, abort the rest, then stop.

        False if a step did not end within STEP_S more: its requests have had their errors all the same.
        """
        self._servicer.draining = True
        await self._report()
        ended = await asyncio.to_thread(self._servicer.loop.close, timeout_s, STEP_S)
        self._servicer.end_streams()
        await self.stop(1.0)
        return ended

    async def stop(self, grace_s: float = 0.0) -> None:
        """Close the port and, after the grace, every stream. Idempotent."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
            self._watch = None
        await self._server.stop(grace_s)


def _channel_options() -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 0),  # a second worker on the same port must fail, not share it
        ("grpc.max_concurrent_streams", 4096),
        ("grpc.max_receive_message_length", MAX_MESSAGE),
        ("grpc.max_send_message_length", MAX_MESSAGE),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ]


def _credentials(options: ServerOptions) -> grpc.ServerCredentials:
    ca = read_pem(options.tls_client_ca) if options.tls_client_ca else None
    pair = (read_pem(options.tls_key), read_pem(options.tls_cert))
    return grpc.ssl_server_credentials([pair], root_certificates=ca, require_client_auth=ca is not None)


def read_pem(path: str) -> bytes:
    """A file of the operator's. Raises LoadError if it can't be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise LoadError(f"can't read {path!r}: {error.strerror}") from None
