"""A router that discovers, and what its /workers says. Must not know which API server it asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from tests.e2e.stack import Gateway, wait_until

from .pool import MODEL

# Long waits are for machines under load; nothing here takes longer than a second or two on an idle one.
LIMIT_S = 60.0


class Router:
    """A router with `--service-discovery`; pods' workers speak HTTP at the pool's port."""

    def __init__(self, kubeconfig: Path, port: int, *flags: str, selector: str = "app=worker") -> None:
        base = ["--service-discovery", "--service-discovery-port", str(port), "--service-discovery-protocol", "http"]
        if selector:
            base += ["--selector", selector]
        self.gateway = Gateway(*base, *flags, workers=[], env={"KUBECONFIG": str(kubeconfig)})
        self.port = port
        wait_until(lambda: self._alive(), LIMIT_S, "the router's port is open")

    def _alive(self) -> bool:
        assert self.gateway.process.child.poll() is None, self.gateway.process.output
        try:
            return self.gateway.client.get("/liveness").status_code == 200
        except httpx.TransportError:
            return False

    def stop(self) -> None:
        self.gateway.stop()

    @property
    def output(self) -> str:
        return self.gateway.process.output

    def workers(self) -> dict[str, dict[str, Any]]:
        """What /workers shows, by IP address."""
        shown = self.gateway.client.get("/workers").json()["workers"]
        return {worker["url"].split("://")[-1].rsplit(":", 1)[0].strip("[]"): worker for worker in shown}

    def known(self) -> list[str]:
        """Addresses of the fleet."""
        return sorted(self.workers())

    def routable(self) -> list[str]:
        """Addresses that would get a request now."""
        return sorted(ip for ip, worker in self.workers().items() if worker["ready"] and not worker["draining"])

    def until_routable(self, *ips: str, limit_s: float = LIMIT_S) -> float:
        """Waits until exactly these get requests; seconds it took."""
        right = sorted(ips)
        return wait_until(lambda: self.routable() == right, limit_s, f"{right} routable\n{self.output[-3000:]}")

    def ask(self) -> int:
        """Status of one completion."""
        return self.gateway.client.post("/v1/completions", json={"model": MODEL, "prompt": "x"}).status_code

    def metric(self, line: str) -> float:
        """The value of a series, 0 if it is not there."""
        text = self.gateway.client.get("/metrics").text
        found = [row.rsplit(" ", 1)[1] for row in text.splitlines() if row.rsplit(" ", 1)[0] == line]
        return float(found[0]) if found else 0.0
