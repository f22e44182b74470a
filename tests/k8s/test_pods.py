"""Pods as the chart renders them, run by the tests' kubelet: real gateways and engines, their probes, keys and stops.

A change of gateways and engines under load is made by hand here, in the order in which a Deployment makes it.
"""

from __future__ import annotations

import base64
import json
import random
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.stack import wait_until
from tests.e2e.tiny import TinyModels, tiny  # noqa: F401  (a fixture)

from .api import Api, Object
from .balancer import Balancer
from .fakeapi import FakeApi
from .helm import ROOT, Helm, pick
from .kubelet import Kubelet

KEY = "a-key-of-the-test"
LIMIT_S = 400.0


class Site:
    """The chart's pods by hand: no controllers, one kubelet, a balancer over gateways."""

    def __init__(self, helm: Helm, model: Path, folder: Path) -> None:
        self.api, self.folder = FakeApi(), folder
        # Below no mount of the gateway's, so that the path is the same inside.
        self._outside = tempfile.TemporaryDirectory(dir="/var/tmp")
        self.workers = Path(self._outside.name) / "workers.txt"
        self.workers.write_text("")
        models = folder / "pods" / "claims" / "models"
        models.mkdir(parents=True)
        (models / model.name).symlink_to(model)
        pool = {
            "name": "tiny",
            "model": f"/models/{model.name}",
            "drainSeconds": 60,
            "preStopSeconds": 2,
            "bindAddress": "$(POD_IP)",
            "cache": {"kind": "existingClaim", "claim": "models"},
            "options": {"device": "cpu", "threads": 1, "max_total_tokens": 16384},
        }
        gateway = {"drainSeconds": 60, "preStopSeconds": 2, "bindAddress": "$(POD_IP)"}
        options = {"worker-file": str(self.workers), "worker-refresh": "200ms"}
        values = {
            "gateway": {**gateway, "options": options},
            "pools": [pool],
            "discovery": {"kind": "none"},
            "auth": {"existingSecret": "keys"},
            "workerToken": {"existingSecret": "token"},
        }
        file = folder / "values.json"
        file.write_text(json.dumps(values))
        self.objects = helm.objects("-f", file)
        for one in self.objects:
            if one["kind"] == "ConfigMap":
                self.api.put("gw", "configmaps", one)
        self.api.put("gw", "secrets", secret("keys", keys=f"admin {KEY}\n"))
        self.api.put("gw", "secrets", secret("token", token="t" * 20))
        self.client = Api(self.api.url, "none")
        environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.kubelet = Kubelet(
            self.client, folder / "pods", random.randrange(2, 250), [ROOT / ".venv/bin"], environment
        )
        self.balancer = Balancer(lambda: [(one, 8080) for one in self.ready("gateway")])
        self._stop = threading.Event()
        threading.Thread(target=self._follow, daemon=True).start()

    def ready(self, component: str) -> list[str]:
        return self.kubelet.ready(**{"app.kubernetes.io/component": component})

    def _follow(self) -> None:
        """Keeps the file of workers, as a headless Service keeps its name."""
        while not self._stop.wait(0.1):
            text = "".join(f"grpc://{one}:9000\n" for one in self.ready("engine"))
            if text != self.workers.read_text():
                self.workers.write_text(text)

    def add(self, name: str, workload: str) -> str:
        return self.api.pod("gw", name, pick(self.objects, "Deployment", workload)["spec"]["template"])

    def wait_ready(self, component: str, count: int) -> None:
        def told() -> str:
            logs = [one.log.read_text()[-1500:] for pod in self.kubelet.pods.values() for one in pod.containers]
            return "\n".join([*self.kubelet.lines, *logs])

        try:
            wait_until(lambda: len(self.ready(component)) == count, LIMIT_S, f"{count} of {component} ready")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{told()}") from None

    def remove(self, path: str) -> None:
        """Deletes a pod and waits until it is gone."""
        self.api.delete(path)
        wait_until(lambda: path not in self.api.objects, LIMIT_S, f"{path} is gone\n" + "\n".join(self.kubelet.lines))

    def close(self) -> None:
        self._stop.set()
        self.balancer.close()
        self.kubelet.close()
        self.client.close()
        self.api.close()
        self._outside.cleanup()


def secret(name: str, **entries: str) -> Object:
    data = {key: base64.b64encode(value.encode()).decode() for key, value in entries.items()}
    return {"metadata": {"name": name}, "data": data}


@pytest.fixture
def site(helm: Helm, tiny: TinyModels, tmp_path: Path) -> Iterator[Site]:  # noqa: F811
    made = Site(helm, tiny.llama("kubernetes"), tmp_path)
    yield made
    made.close()


class Load:
    """Clients that ask one thing after the other, each over a new connection; every second answer is a stream."""

    def __init__(self, port: int, clients: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.served, self.faults = 0, list[str]()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,), daemon=True) for number in range(clients)]
        for one in self._threads:
            one.start()

    def _ask(self, number: int) -> None:
        turn = 0
        while not self._stop.is_set():
            turn += 1
            body: dict[str, Any] = {
                "text": f"client {number} asks for the {turn}th time",
                "sampling_params": {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True},
                "stream": turn % 2 == 0,
            }
            headers = {"authorization": f"Bearer {KEY}", "connection": "close"}
            try:
                answer = httpx.post(f"{self.url}/generate", json=body, headers=headers, timeout=120, trust_env=False)
            except httpx.HTTPError as error:
                self.faults.append(f"{number}.{turn}: {error!r}")
                continue
            whole = answer.text.endswith("data: [DONE]\n\n") if body["stream"] else "meta_info" in answer.text
            if answer.status_code != 200 or not whole or '"error"' in answer.text:
                self.faults.append(f"{number}.{turn}: {answer.status_code} {answer.text[-300:]}")
            self.served += 1

    def more(self, count: int) -> None:
        """Waits for so many further answers."""
        goal = self.served + count
        wait_until(lambda: self.served >= goal or bool(self.faults), LIMIT_S, f"{count} more answers")

    def stop(self) -> None:
        self._stop.set()
        for one in self._threads:
            one.join(LIMIT_S)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_gateways_and_engines_are_replaced_under_load_without_a_failed_request(site: Site) -> None:
    engine, gateway = site.add("engine-1", "-tiny"), site.add("gateway-1", "-gateway")
    site.wait_ready("engine", 1)
    site.wait_ready("gateway", 1)
    load = Load(site.balancer.port, 4)
    load.more(8)
    for workload, component, old in (("-gateway", "gateway", gateway), ("-tiny", "engine", engine)):
        site.add(f"{component}-2", workload)
        site.wait_ready(component, 2)
        load.more(8)
        site.remove(old)
        assert len(site.ready(component)) == 1
        load.more(8)
    load.stop()
    assert load.faults == [] and load.served >= 40 and site.balancer.refused == 0
    ended = {name: ending for name, ending in site.kubelet.endings}
    assert set(ended) == {"gateway-1", "engine-1"}
    for name, ending in ended.items():
        assert ending.code == 0 and not ending.killed and ending.seconds >= 2, f"{name}: {ending}"
