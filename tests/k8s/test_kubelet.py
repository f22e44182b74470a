"""The tests' own kubelet, part by part: paths, variables, probes, hooks, stops, the balancer. No cluster is needed."""

from __future__ import annotations

import socket
import sys
import threading
from pathlib import Path
from typing import Any

from tests.e2e.stack import wait_until

from . import probes
from .balancer import Balancer
from .container import Container
from .volumes import Layout, expand, layout

SLEEPER = (
    "import signal,sys,time\nsignal.signal(signal.SIGTERM, lambda *_: {end})\nprint('up', flush=True)\ntime.sleep(600)"
)


def container(tmp_path: Path, spec: dict[str, Any], made: Layout | None = None) -> Container:
    told = {"name": "c", "image": "i", **spec}
    return Container(
        told, "127.0.0.1", {"PATH": "/usr/bin:/bin", "WHO": "me"}, made or Layout(), tmp_path / "log", lambda: None
    )


def python(text: str, *words: str) -> dict[str, Any]:
    return {"command": [sys.executable, "-c"], "args": [text, *words]}


def log(one: Container) -> str:
    return one.log.read_text() if one.log.exists() else ""


def test_mount_paths_are_rewritten_whole_and_longest_first(tmp_path: Path) -> None:
    made = Layout({"/etc/a": tmp_path / "a", "/etc/a/b": tmp_path / "b", "/tmp": tmp_path / "t"})
    assert made.rewrite("--config=/etc/a/b/x.toml") == f"--config={tmp_path}/b/x.toml"
    assert made.rewrite("/etc/a") == str(tmp_path / "a")
    assert made.rewrite("/etc/ab /var/tmp/x /tmp/y") == f"/etc/ab /var/tmp/x {tmp_path}/t/y"
    assert Layout().rewrite("/tmp") == "/tmp"
    spec = {"volumes": [{"name": "v"}]}
    assert layout(spec, {"name": "c", "volumeMounts": [{"name": "v", "mountPath": "/m/"}]}, tmp_path).folders == {
        "/m": tmp_path / "volumes" / "v"
    }


def test_variables_are_expanded_in_commands_and_unknown_ones_stay(tmp_path: Path) -> None:
    assert expand("$(A)-$(B)", {"A": "x"}) == "x-$(B)"
    made = Layout({"/data": tmp_path})
    assert container(tmp_path, {"command": ["$(WHO)"], "args": ["/data/f"]}, made).command == ["me", f"{tmp_path}/f"]


def test_a_stop_runs_pre_stop_first_and_waits_for_the_process(tmp_path: Path) -> None:
    marker = tmp_path / "pre"
    hook = {"preStop": {"exec": {"command": ["sh", "-c", f"echo $(WHO) > {marker}"]}}}
    text = SLEEPER.format(end=f"sys.exit(7 if open('{marker}').read() == 'me\\n' else 1)")
    one = container(tmp_path, {**python(text), "lifecycle": hook})
    one.start()
    wait_until(lambda: "up" in log(one), 60, "the process has begun")
    ending = one.stop(60)
    assert (ending.code, ending.killed) == (7, False)


def test_what_does_not_end_within_its_grace_is_killed(tmp_path: Path) -> None:
    one = container(tmp_path, python(SLEEPER.format(end="None")))
    one.start()
    wait_until(lambda: "up" in log(one), 60, "the process has begun")
    ending = one.stop(0.5)
    assert (ending.code, ending.killed) == (-9, True)


def test_a_failed_post_start_ends_the_container(tmp_path: Path) -> None:
    one = container(
        tmp_path, {**python(SLEEPER.format(end="None")), "lifecycle": {"postStart": {"exec": {"command": ["false"]}}}}
    )
    one.start()
    wait_until(lambda: not one.alive(), 60, "the process has been ended")
    assert not one.ready


def test_readiness_follows_its_probe_and_liveness_ends_the_process(tmp_path: Path) -> None:
    ready, alive = tmp_path / "ready", tmp_path / "alive"
    alive.touch()

    def probe(file: Path) -> dict[str, Any]:
        return {
            "exec": {"command": ["test", "-e", str(file)]},
            "periodSeconds": 0.05,
            "failureThreshold": 2,
            "timeoutSeconds": 30,
        }

    spec = {"readinessProbe": probe(ready), "livenessProbe": probe(alive), "startupProbe": probe(alive)}
    one = container(tmp_path, {**python(SLEEPER.format(end="sys.exit(0)")), **spec})
    one.start()
    wait_until(lambda: one.started, 60, "the start-up probe succeeds")
    assert not one.ready
    ready.touch()
    wait_until(lambda: one.ready, 60, "ready")
    ready.unlink()
    wait_until(lambda: not one.ready, 60, "not ready")
    assert one.alive(), "readiness ends nothing"
    alive.unlink()
    wait_until(lambda: not one.alive(), 60, "ended by the liveness probe")
    one.ended()


def test_probes_tell_only_changes_and_only_past_their_thresholds() -> None:
    answers = iter([False, True, False, False, True, True])
    told: list[bool] = []
    stop = threading.Event()

    def once() -> bool:
        try:
            return next(answers)
        except StopIteration:
            stop.set()
            return True

    probes.repeat({"periodSeconds": 0, "failureThreshold": 2}, once, told.append, stop)
    assert told == [True, False, True]


def test_a_probe_of_a_port_nobody_listens_on_fails() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        for probe in ({"httpGet": {"port": port}}, {"grpc": {"port": port}}, {"tcpSocket": {"port": "p"}}):
            assert not probes.attempt({**probe, "timeoutSeconds": 5}, "127.0.0.1", {"p": port}, lambda *_: 0)()
        bound.listen()
        assert probes.attempt({"tcpSocket": {"port": port}, "timeoutSeconds": 5}, "127.0.0.1", {}, lambda *_: 0)()


def test_the_balancer_takes_turns_and_refuses_when_nobody_is_ready() -> None:
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ready: list[tuple[str, int]] = []
    balancer = Balancer(lambda: ready)

    def ask() -> bytes:
        with socket.create_connection(("127.0.0.1", balancer.port), 30) as client:
            client.shutdown(socket.SHUT_WR)
            return client.recv(10)

    def serve(server: socket.socket, name: bytes) -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            with client:
                client.sendall(name)

    for server, name in zip(servers, (b"a", b"b"), strict=True):
        threading.Thread(target=serve, args=(server, name), daemon=True).start()
    try:
        assert ask() == b""
        assert balancer.refused == 1
        ready.extend(server.getsockname() for server in servers)
        assert {ask(), ask()} == {b"a", b"b"}
        ready.pop()
        assert {ask(), ask()} == {b"a"}
    finally:
        balancer.close()
        for server in servers:
            server.close()
