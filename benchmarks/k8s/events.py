"""Event → routable: how long after a pod's status changed at a real API server its worker is in or out of rotation.

    .venv/bin/python -m benchmarks.k8s.events [PODS] [ROUNDS]

Needs `make k8s-tools`. The time runs from the API server's answer to the change until `GET /workers/{address}` says so.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.k8s.cluster import TOKEN
from tests.k8s.discovery.plane import Plane, Space
from tests.k8s.discovery.pool import Pool
from tests.k8s.discovery.router import Router


def is_ready(client: httpx.Client, address: str) -> bool:
    """Whether the worker gets requests."""
    answer = client.get(f"/workers/{address}")
    return answer.status_code == 200 and bool(answer.json()["ready"])


def flip(space: Space, client: httpx.Client, name: str, ip: str, port: int, ready: bool) -> float:
    """Changes a pod's readiness; milliseconds until the router follows."""
    space.status(name, ip, ready=ready)
    start = time.perf_counter()
    while is_ready(client, f"{ip}:{port}") != ready:
        if time.perf_counter() - start > 30:
            raise TimeoutError(f"{name} is not {'in' if ready else 'out of'} rotation after 30 s")
    return (time.perf_counter() - start) * 1e3


def summary(times: list[float]) -> dict[str, float]:
    """Milliseconds."""
    ordered = sorted(times)
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return {"p50": round(statistics.median(ordered), 1), "p99": round(p99, 1), "worst": round(ordered[-1], 1)}


def main(pods: int, rounds: int) -> None:
    """Prints one JSON object."""
    with tempfile.TemporaryDirectory() as folder:
        plane, pool = Plane(Path(folder)), Pool()
        space = plane.space()
        ips = {f"p{at}": f"127.77.{at // 200}.{1 + at % 200}" for at in range(pods)}
        try:
            with ThreadPoolExecutor(8) as threads:
                list(threads.map(lambda item: space.run(*item), ips.items()))
            scope = ("--service-discovery-namespace", space.name)
            router = Router(space.kubeconfig(Path(folder), TOKEN), pool.port, *scope)
            try:
                router.until_routable(*ips.values(), limit_s=300)
                times: dict[str, list[float]] = {"out": [], "in": [], "new": []}
                for at in range(rounds):
                    name = f"p{at % pods}"
                    for word, ready in (("out", False), ("in", True)):
                        client = router.gateway.client
                        times[word].append(flip(space, client, name, ips[name], pool.port, ready))
                    # A new pod's worker has to be reached, too.
                    space.create(f"n{at}")
                    ip = f"127.77.{60 + at // 200}.{1 + at % 200}"
                    times["new"].append(flip(space, router.gateway.client, f"n{at}", ip, pool.port, True))
                    space.delete(f"n{at}")
            finally:
                router.stop()
        finally:
            pool.close()
            plane.close()
    told = {word: summary(values) for word, values in times.items()}
    print(json.dumps({"pods": pods, "rounds": rounds, "milliseconds": told}))


if __name__ == "__main__":
    main(*(int(word) for word in (sys.argv[1:] + ["200", "200"][len(sys.argv) - 1 :])))
