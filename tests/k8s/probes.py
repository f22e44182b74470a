"""Probes as a kubelet makes them: one attempt, and the count of successes and failures that decides.

Owns the protocols. Must not know pods nor write statuses.
"""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

Attempt = Callable[[], bool]


def attempt(
    probe: dict[str, Any], address: str, ports: dict[str, int], execute: Callable[[list[str], float], int]
) -> Attempt:
    """One try of the probe at a pod's address; `execute(command, limit_s)` runs a command in the container."""
    limit = float(probe.get("timeoutSeconds", 1))

    def number(port: str | int) -> int:
        return ports[port] if isinstance(port, str) else port

    if "httpGet" in probe:
        how = probe["httpGet"]
        url = f"{how.get('scheme', 'HTTP').lower()}://{address}:{number(how['port'])}{how.get('path', '/')}"
        return lambda: http(url, limit)
    if "grpc" in probe:
        target, service = f"{address}:{probe['grpc']['port']}", probe["grpc"].get("service") or ""
        return lambda: health(target, service, limit)
    if "tcpSocket" in probe:
        port = number(probe["tcpSocket"]["port"])
        return lambda: connects(address, port, limit)
    command = probe["exec"]["command"]
    return lambda: execute(command, limit) == 0


def http(url: str, limit: float) -> bool:
    """Whether a GET is answered with 200 to 399; certificates are not looked at, as kubelets don't."""
    try:
        return 200 <= httpx.get(url, timeout=limit, verify=False, trust_env=False).status_code < 400
    except httpx.HTTPError:
        return False


def health(target: str, service: str, limit: float) -> bool:
    """Whether the standard gRPC health service says SERVING."""
    with grpc.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=limit)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def connects(address: str, port: int, limit: float) -> bool:
    """Whether a TCP connection can be made."""
    try:
        socket.create_connection((address, port), limit).close()
    except OSError:
        return False
    return True


def run(command: list[str], limit: float, **options: Any) -> int:
    """The exit status of a command; 124 past the limit."""
    try:
        return subprocess.run(command, timeout=limit, check=False, capture_output=True, **options).returncode
    except subprocess.TimeoutExpired:
        return 124


def repeat(probe: dict[str, Any], once: Attempt, tell: Callable[[bool], None], stop: threading.Event) -> None:
    """Probes until `stop`; `tell(well)` at each change of the verdict."""
    good, bad = probe.get("successThreshold", 1), probe.get("failureThreshold", 3)
    verdict: bool | None = None
    row, last = 0, None
    if stop.wait(probe.get("initialDelaySeconds", 0)):
        return
    while not stop.is_set():
        well = once()
        row = row + 1 if well is last else 1
        last = well
        if well is not verdict and row >= (good if well else bad):
            verdict = well
            tell(well)
        if stop.wait(probe.get("periodSeconds", 10)):
            return
