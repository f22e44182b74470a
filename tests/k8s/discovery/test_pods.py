"""Discovery against a real API server: pods come, change and go as kubelets and people make them; the router follows.

Addresses are loopback ones at which HTTP workers really listen; every wait is for a condition.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.stack import BIN, Process, free_port, wait_until
from tests.k8s.cluster import TOKEN

from .plane import Door, Space
from .pool import MODEL, Pool
from .router import LIMIT_S, Router

Start = Callable[..., Router]
# The API server starts within the first test, and is killed and started in another.
pytestmark = [pytest.mark.usefixtures("discovering"), pytest.mark.timeout(400)]


@pytest.fixture
def start(space: Space, pool: Pool, tmp_path: Path) -> Iterator[Start]:
    """Starts routers that look into the test's namespace."""
    started: list[Router] = []

    def begin(*flags: str, server: str = "", token: str = TOKEN, selector: str = "app=worker") -> Router:
        config = space.kubeconfig(tmp_path, token, server)
        scope = ("--service-discovery-namespace", space.name)
        started.append(Router(config, pool.port, *scope, *flags, selector=selector))
        return started[-1]

    yield begin
    for router in started:
        router.stop()


def test_pod_is_routed_to_while_it_is_ready_and_drained_while_it_leaves(start: Start, space: Space, pool: Pool) -> None:
    router = start()
    space.create("a")
    space.status("a", "127.77.1.1", ready=False)
    space.run("b", "127.77.1.2")
    router.until_routable("127.77.1.2")
    space.status("a", "127.77.1.1")
    router.until_routable("127.77.1.1", "127.77.1.2")
    shown = router.workers()["127.77.1.1"]
    assert shown["source"]["kind"] == "kubernetes" and shown["source"]["pod"] == "a"
    assert (shown["source"]["namespace"], shown["labels"]["app"]) == (space.name, "worker")
    space.status("a", "127.77.1.1", ready=False)
    router.until_routable("127.77.1.2")
    held = router.workers()["127.77.1.1"]
    assert (held["id"], held["status"], held["reason"]) == (shown["id"], "NotReady", "its pod is not ready")
    space.status("a", "127.77.1.1")
    router.until_routable("127.77.1.1", "127.77.1.2")

    asked = {"model": MODEL, "prompt": "x", "stream": True}
    with httpx.Client(base_url=router.gateway.url, timeout=60) as client:
        before = pool.streaming["127.77.1.1"]
        space.status("b", "127.77.1.2", ready=False)
        router.until_routable("127.77.1.1")
        stream = client.send(client.build_request("POST", "/v1/completions", json=asked), stream=True)
        wait_until(lambda: pool.streaming["127.77.1.1"] > before, LIMIT_S, "the stream runs on the pod")
        space.status("b", "127.77.1.2")
        space.delete("a", grace=120)
        router.until_routable("127.77.1.2")
        assert router.known() == ["127.77.1.2"], "no new request for a pod that leaves"
        assert [router.ask() for _ in range(5)] == [200] * 5
        pool.open_gate()
        assert stream.read().decode().endswith("data: [DONE]\n\n"), "its stream goes on to its end"
    space.delete("a")
    assert router.metric('branchline_router_discovery_changes_total{change="leaving"}') == 1


def test_evicted_and_deleted_pods_leave_at_once(start: Start, space: Space) -> None:
    router = start()
    for at in (1, 2, 3):
        space.run(f"p{at}", f"127.77.2.{at}")
    router.until_routable("127.77.2.1", "127.77.2.2", "127.77.2.3")
    space.status("p1", "", ready=False, phase="Failed")
    router.until_routable("127.77.2.2", "127.77.2.3")
    space.delete("p2")
    router.until_routable("127.77.2.3")
    space.plane.api.call(
        "PATCH",
        f"{space.pods}/p3",
        {"metadata": {"labels": {"app": "other"}}},
        kind="application/merge-patch+json",
    )
    router.until_routable()
    assert router.ask() == 503


def test_killed_api_server_takes_nothing_away_and_what_went_meanwhile_is_gone_after_it(
    start: Start, space: Space, door: Door
) -> None:
    router = start(server=door.url)
    ips = {f"p{at}": f"127.77.3.{at}" for at in range(1, 9)}
    for name, ip in ips.items():
        space.run(name, ip)
    router.until_routable(*ips.values())
    door.shut()
    space.plane.restart()
    for name in ("p1", "p2", "p3"):
        space.delete(name)
    space.status("p4", ips["p4"], ready=False)
    space.run("p9", "127.77.3.9")
    assert router.routable() == sorted(ips.values()), "nothing changes while the server is away"
    assert [router.ask() for _ in range(8)] == [200] * 8
    door.open()
    took = router.until_routable(*[ips[f"p{at}"] for at in range(5, 9)], "127.77.3.9")
    print(f"right set {took:.2f} s after the API server is back")


def test_silent_watch_is_noticed_and_listed_again(start: Start, space: Space, door: Door) -> None:
    router = start("--service-discovery-stale-after", "3s", server=door.url)
    space.run("a", "127.77.4.1")
    router.until_routable("127.77.4.1")
    wait_until(lambda: door.silence() > 0, LIMIT_S, "the watch carries nothing any more")
    space.run("b", "127.77.4.2")
    space.delete("a")
    took = router.until_routable("127.77.4.2")
    print(f"right set {took:.2f} s after a watch fell silent, with a limit of 3 s")
    assert router.metric('branchline_router_discovery_lists_total{reason="stale"}') >= 1


def test_address_taken_by_another_pod_is_another_worker(start: Start, space: Space) -> None:
    router = start()
    first = space.run("a", "127.77.5.1")
    router.until_routable("127.77.5.1")
    old = router.workers()["127.77.5.1"]
    assert old["source"]["uid"] == first
    # Not deleted yet, only over, when the address is given away.
    space.status("a", "127.77.5.1", ready=False, phase="Failed")
    second = space.run("b", "127.77.5.1")
    wait_until(
        lambda: router.workers().get("127.77.5.1", old)["source"]["uid"] == second, LIMIT_S, "the second pod's worker"
    )
    assert router.workers()["127.77.5.1"]["id"] != old["id"], "a fresh worker: no cache entries, no breaker of the old"
    space.delete("a")
    router.until_routable("127.77.5.1")


def test_ipv6_pods_are_workers(start: Start, space: Space) -> None:
    router = start()
    space.run("six", "::1")
    router.until_routable("::1")
    assert router.ask() == 200


def test_two_selectors_make_two_halves_with_ports_and_models(start: Start, space: Space) -> None:
    router = start(
        "--prefill-selector", "role=prefill", "--decode-selector", "role=decode", "--model-id-from", "annotation:model",
        selector="",
    )  # fmt: skip
    space.run("p", "127.77.6.1", {"role": "prefill"}, {"sglang.ai/bootstrap-port": "8998", "model": "org/m"})
    space.run("d", "127.77.6.2", {"role": "decode"}, {"model": "org/m", "branchline.dev/priority": "7"})
    space.run("x", "127.77.6.3", {"role": "other"})
    router.until_routable("127.77.6.1", "127.77.6.2")
    prefill, decode = router.workers()["127.77.6.1"], router.workers()["127.77.6.2"]
    assert (prefill["worker_type"], decode["worker_type"]) == ("prefill", "decode")
    assert (prefill["models"], decode["models"], decode["priority"]) == (["org/m"], ["org/m"], 7)
    stats = router.gateway.client.get("/workers").json()["stats"]["by_type"]
    assert stats == {"regular": 0, "prefill": 1, "decode": 1}


def test_one_pod_with_several_ports_is_several_workers(start: Start, space: Space, pool: Pool) -> None:
    router = start()
    space.run("a", "127.77.7.1", annotations={"branchline.dev/worker-ports": f"{pool.port},{pool.port + 1}"})
    listed = [f"http://127.77.7.1:{port}" for port in (pool.port, pool.port + 1)]
    urls = router.gateway.client
    wait_until(lambda: sorted(urls.get("/list_workers").json()["urls"]) == listed, LIMIT_S, f"{listed}")


def test_missing_rule_is_said_once_and_discovery_starts_when_it_is_granted(start: Start, space: Space) -> None:
    space.run("a", "127.77.8.1")
    router = start(token=space.token())
    forbidden = 'branchline_router_discovery_failures_total{kind="forbidden"}'
    wait_until(lambda: router.metric(forbidden) >= 3, LIMIT_S, "refused three times")
    said = [line for line in router.output.splitlines() if "grant a Role" in line]
    assert len(said) == 1, said
    assert 'resources [\\"pods\\"]' in said[0] or 'resources ["pods"]' in said[0], said[0]
    assert router.ask() == 503
    space.grant("list", "watch")
    router.until_routable("127.77.8.1")


def test_worker_that_an_operator_takes_out_stays_out_until_its_pod_is_another(start: Start, space: Space) -> None:
    router = start()
    space.run("a", "127.77.9.1")
    space.run("b", "127.77.9.2")
    router.until_routable("127.77.9.1", "127.77.9.2")
    taken = router.workers()["127.77.9.1"]["id"]
    assert router.gateway.client.delete(f"/workers/{taken}").status_code == 200
    space.status("a", "127.77.9.1", ready=False)
    space.status("a", "127.77.9.1")
    space.run("c", "127.77.9.3")
    router.until_routable("127.77.9.2", "127.77.9.3")
    space.delete("a")
    space.run("a", "127.77.9.1")
    router.until_routable("127.77.9.1", "127.77.9.2", "127.77.9.3")


def test_fleet_of_five_hundred_pods_is_found_and_gone(start: Start, space: Space) -> None:
    ips = {f"p{at}": f"127.77.{100 + at // 200}.{1 + at % 200}" for at in range(500)}
    with ThreadPoolExecutor(8) as pool:
        assert len(list(pool.map(lambda item: space.run(*item), ips.items()))) == 500
    router = start()

    def is_fleet(right: list[str]) -> bool:
        return router.known() == sorted(right)

    wait_until(lambda: is_fleet([*ips.values()]), 150, "500 workers")
    # A page of the list holds 500: with one more there are two.
    space.run("last", "127.77.110.1")
    wait_until(lambda: is_fleet([*ips.values(), "127.77.110.1"]), LIMIT_S, "501 workers")
    second = start()
    wait_until(lambda: second.known() == router.known(), 150, "a second router finds the same by its list")
    space.plane.api.call("DELETE", space.pods, {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0})
    wait_until(lambda: is_fleet([]) and second.known() == [], 150, "all are gone")


def test_router_without_an_api_server_does_not_start(tmp_path: Path) -> None:
    flags = ["--service-discovery", "--selector", "a=b", "--port", str(free_port())]
    lost = {"KUBECONFIG": str(tmp_path / "none"), "HOME": str(tmp_path), "KUBERNETES_SERVICE_HOST": ""}
    process = Process([str(BIN / "branchline-router"), *flags], env=lost)
    process.wait_for_line("no Kubernetes API server can be used")
    assert process.stop(signal.SIGTERM) != 0
