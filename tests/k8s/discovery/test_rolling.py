"""A fleet of real engines behind two discovering gateways is replaced, one process after the other, under load.

Pods are made by hand: what a kubelet and a Service would do, the test does in the same order.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.stack import Engine, Gateway, free_port, wait_until
from tests.e2e.test_cases_logprobs_cache import ids_of
from tests.e2e.tiny import TinyModels
from tests.k8s.cluster import TOKEN

from .plane import Space

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ENGINES, CLIENTS, LIMIT_S = 3, 4, 120.0


class Fleet:
    """Engines that are pods, gateways that find them, clients that never stop."""

    def __init__(self, space: Space, folder: Path, model: str) -> None:
        self.space, self.model, self.port = space, model, free_port()
        self.config = space.kubeconfig(folder, TOKEN)
        self.engines: dict[str, Engine] = {}
        self.gateways: list[Gateway] = []
        self.front: list[str] = []  # what the Service's endpoints would be
        self.failures: list[str] = []
        self.answered = 0
        self._done = threading.Event()
        self._threads: list[threading.Thread] = []

    def start_engine(self, ip: str) -> None:
        """An engine and its pod, ready."""
        self.engines[ip] = Engine("--host", ip, model=self.model, port=self.port)
        self.space.run(f"engine-{ip.rsplit('.', 1)[1]}", ip)

    def start_gateway(self) -> Gateway:
        """A gateway that is ready."""
        gateway = Gateway(
            "--service-discovery", "--selector", "app=worker", "--service-discovery-namespace", self.space.name,
            "--service-discovery-port", str(self.port), "--drain-timeout", "60s",
            workers=[], env={"KUBECONFIG": str(self.config)},
        )  # fmt: skip
        gateway.wait_ready()
        self.gateways.append(gateway)
        self.front.append(gateway.url)
        return gateway

    def load(self) -> None:
        """Streams, one after the other in each client."""
        for number in range(CLIENTS):
            self._threads.append(threading.Thread(target=self._client, args=(number,)))
            self._threads[-1].start()
        self.served(4 * CLIENTS)

    def _client(self, number: int) -> None:
        turn = number
        while not self._done.is_set():
            turn += 1
            params = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
            body = {"input_ids": ids_of(turn % 40, 40), "sampling_params": params, "stream": True}
            try:
                front = list(self.front)
                # Each request has a connection of its own, as a Service balances connections.
                answer = httpx.post(f"{front[turn % len(front)]}/generate", json=body, timeout=120)
                if answer.status_code != 200 or not answer.text.endswith("data: [DONE]\n\n"):
                    self.failures.append(f"{answer.status_code}: {answer.text[-300:]}")
            except httpx.HTTPError as error:
                self.failures.append(repr(error))
            self.answered += 1

    def served(self, more: int) -> None:
        """Waits until so many further requests have been answered."""
        goal = self.answered + more
        wait_until(lambda: self.answered >= goal, LIMIT_S, f"{more} more answers")

    def roll_engine(self, ip: str) -> None:
        """Deletion is told, gateways take it out, the process drains and ends, another one takes its place."""
        name = f"engine-{ip.rsplit('.', 1)[1]}"
        self.space.delete(name, grace=60)
        for gateway in self.gateways:
            wait_until(lambda found=gateway: ip not in str(found.client.get("/list_workers").json()), LIMIT_S, "out")  # type: ignore[misc]
        assert self.engines.pop(ip).stop() == 0
        self.space.delete(name)
        self.start_engine(ip)
        for gateway in self.gateways:
            wait_until(lambda found=gateway: ip in str(ready(found)), LIMIT_S, f"{ip} is back")  # type: ignore[misc]

    def roll_gateway(self) -> None:
        """Its endpoint goes first, as before a preStop's end; then it drains."""
        old = self.gateways.pop(0)
        self.start_gateway()
        self.front.remove(old.url)
        self.served(2 * CLIENTS)
        assert old.stop() == 0

    def close(self) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join(150)
        for gateway in self.gateways:
            gateway.stop()
        for engine in self.engines.values():
            engine.stop()


def ready(gateway: Gateway) -> list[str]:
    """URLs of workers that are ready."""
    return [worker["url"] for worker in gateway.client.get("/workers").json()["workers"] if worker["ready"]]


@pytest.fixture
def fleet(space: Space, tmp_path: Path, tiny: TinyModels) -> Iterator[Fleet]:
    """Three engines, two gateways, load."""
    fleet = Fleet(space, tmp_path, str(tiny.llama("plain")))
    try:
        for at in range(ENGINES):
            fleet.start_engine(f"127.77.20.{at + 1}")
        for _ in range(2):
            fleet.start_gateway()
        for gateway in fleet.gateways:
            wait_until(lambda found=gateway: len(ready(found)) == ENGINES, LIMIT_S, "all engines are found")  # type: ignore[misc]
        fleet.load()
        yield fleet
    finally:
        fleet.close()


def test_rolling_restart_of_engines_and_gateways_fails_no_request(fleet: Fleet) -> None:
    for ip in list(fleet.engines):
        fleet.roll_engine(ip)
        fleet.served(CLIENTS)
    for _ in range(2):
        fleet.roll_gateway()
        fleet.served(CLIENTS)
    print(f"{fleet.answered} streams answered while {ENGINES} engines and 2 gateways were replaced")
    assert fleet.failures == []
