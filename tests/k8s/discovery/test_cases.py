"""The cases of area discovery: a fake API server plays their scripts to a real router before real HTTP workers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import pytest

from tests.cases.loader import case
from tests.e2e.stack import wait_until

from .fake import Fake, Watch
from .pool import MODEL, Pool
from .router import LIMIT_S, Router

Object = dict[str, Any]


pytestmark = pytest.mark.usefixtures("discovering")


def here(ip: str) -> str:
    """Where the worker of a case's address listens."""
    return ip.replace("10.0.", "127.77.")


def pod(told: Object, labels: Object) -> Object:
    """The pod that a case tells of in short."""
    ip = told.get("podIP")
    status: Object = {"phase": told.get("phase", "Running"), "podIP": here(ip) if ip else None}
    if "ready" in told:
        status["conditions"] = [{"type": "Ready", "status": str(told["ready"])}]
    meta = {"name": told["name"], "namespace": "default", "labels": told.get("labels", labels)}
    meta |= {"uid": told.get("uid", f"uid-{told['name']}"), "resourceVersion": told["resourceVersion"]}
    return {"metadata": meta, "status": status}


class Played:
    """A case's script: its lists and watches are given at once, events of the last watch one by one."""

    def __init__(self, case_id: str, pool: Pool, folder: Path) -> None:
        given = case(case_id)["given"]
        self.labels: Object = given["selector"]
        lists, watches = [], []
        self.events: list[tuple[str, Object]] = []
        for step in given["script"]:
            if "LIST" in step:
                items = [pod(told, self.labels) for told in step["LIST"]["items"]]
                lists.append({"metadata": {"resourceVersion": step["LIST"]["resourceVersion"]}, "items": items})
            elif "410" in step["WATCH"]:
                gone = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": step["WATCH"]}}
                watches.append(Watch(events=[gone], ends=True))
            elif "504" in step["WATCH"]:
                watches.append(Watch(refusal=504))
            else:
                self.events += [(kind, pod(told, self.labels)) for one in step["WATCH"] for kind, told in one.items()]
                watches.append(Watch(ends="ends" in step.get("then", "")))
        self.fake = Fake(lists, watches)
        selector = ",".join(f"{key}={value}" for key, value in self.labels.items())
        self.router = Router(self.fake.kubeconfig(folder / "kubeconfig"), pool.port, selector=selector)

    def play(self) -> None:
        """The next event."""
        self.fake.send(*self.events.pop(0))

    def set_is(self, ips: list[str]) -> None:
        """Waits until the fleet consists of these."""
        right = sorted(map(here, ips))
        wait_until(lambda: self.router.known() == right, LIMIT_S, f"{right}\n{self.router.output[-3000:]}")

    def close(self) -> None:
        self.router.stop()
        self.fake.close()


@pytest.fixture
def play(pool: Pool, tmp_path: Path) -> Iterator[Any]:
    """Starts a case."""
    started: list[Played] = []

    def start(case_id: str) -> Played:
        started.append(Played(case_id, pool, tmp_path))
        return started[-1]

    yield start
    for one in started:
        one.close()


def test_discovery_forced_delete(play: Any) -> None:
    right = case("discovery-forced-delete")["right"]["worker_sets"]
    played = play("discovery-forced-delete")
    played.set_is([])
    for expected in right:
        played.play()
        played.set_is(expected)


def test_discovery_delete_during_reconnect(play: Any, pool: Pool) -> None:
    right = case("discovery-delete-during-reconnect")["right"]
    played = play("discovery-delete-during-reconnect")
    played.set_is(right["worker_set_after"])
    gone = next(ip for ip in right["worker_set_before"] if ip not in right["worker_set_after"])
    before = pool.served[here(gone)]
    played.router.until_routable(*map(here, right["worker_set_after"]))
    assert [played.router.ask() for _ in range(10)] == [200] * 10
    assert pool.served[here(gone)] == before


def test_discovery_ready_false(play: Any, pool: Pool) -> None:
    right = case("discovery-ready-false")["right"]
    played = play("discovery-ready-false")
    played.router.until_routable(here("10.0.0.1"), here("10.0.0.2"))
    done, failed = Event(), list[int]()

    def load() -> None:
        with httpx.Client(base_url=played.router.gateway.url, timeout=30) as client:
            while not done.wait(0.02):
                status = client.post("/v1/completions", json={"model": MODEL, "prompt": "x"}).status_code
                failed.extend([status] if status != 200 else [])

    loading = Thread(target=load)
    loading.start()
    try:
        with httpx.Client(base_url=played.router.gateway.url, timeout=60) as client:
            asked = {"model": MODEL, "prompt": "x", "stream": True}
            streams = [
                client.send(client.build_request("POST", "/v1/completions", json=asked), stream=True) for _ in range(4)
            ]
            wait_until(lambda: sum(pool.streaming.values()) == 4, LIMIT_S, "all streams run")
            for expected in right["routable_within_1s_of_each"]:
                played.play()
                played.router.until_routable(*map(here, expected))
            pool.open_gate()
            texts = [stream.read().decode() for stream in streams]
    finally:
        done.set()
        loading.join(60)
    assert all(text.endswith("data: [DONE]\n\n") for text in texts), "streams in flight are not cut"
    assert len(failed) == right["failed_requests"], failed


def test_discovery_pod_changes_address(play: Any) -> None:
    right = case("discovery-pod-changes-address")["right"]
    played = play("discovery-pod-changes-address")
    played.router.until_routable(here("10.0.0.1"))
    assert played.router.ask() == 200
    played.play()
    played.set_is(right["worker_set_after"])
    played.router.until_routable(*map(here, right["worker_set_after"]))
    (new,) = played.router.workers().values()
    assert (new["breaker"], new["source"]["pod"]) == ("closed", "p1")
    client = played.router.gateway.client
    wait_until(
        lambda: here("10.0.0.1") not in client.get("/metrics").text, LIMIT_S, "nothing is kept of the old address"
    )


def test_discovery_evicted_pod(play: Any) -> None:
    right = case("discovery-evicted-pod")["right"]
    played = play("discovery-evicted-pod")
    played.router.until_routable(here("10.0.0.1"))
    played.play()
    played.set_is(right["worker_set_within_1s"])
    assert played.router.ask() == right["next_request"]


def test_discovery_expired_version(play: Any) -> None:
    right = case("discovery-expired-version")["right"]
    played = play("discovery-expired-version")
    start = time.monotonic()
    played.set_is(right["worker_set_after"])
    wait_until(lambda: len(watches(played)) == int(right["watches"]), LIMIT_S, "the last watch is open")
    # A client that asks in a circle would have done so by now.
    wait_until(lambda: time.monotonic() - start > 10, 30, "10 s have passed")
    calls, took = list(played.fake.calls), time.monotonic() - start
    lists = sum(not call.watch for call in calls)
    assert str(lists) in right["lists"]
    for version, expected in zip(watches(played), right["watch_started_from"], strict=True):
        assert version in expected
    assert len(calls) / took <= 2


def watches(played: Played) -> list[str]:
    """Versions that watches started from."""
    return [call.version for call in played.fake.calls if call.watch]
