"""One container as a local process: start, hooks, probes, stop with SIGTERM and SIGKILL.

Owns the process and its probes' threads. Must not talk to the API server; its pod is told of changes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from . import probes
from .volumes import Layout, expand


@dataclass(slots=True)
class Ending:
    """How a container ended: exit code, whether SIGKILL was needed, seconds from its stop's begin."""

    code: int
    killed: bool
    seconds: float


@dataclass(slots=True)
class Container:
    """A container of a pod at `address`. `changed()` is called when started, ready or alive change."""

    spec: dict[str, Any]
    address: str
    environment: dict[str, str]
    made: Layout
    log: Path
    changed: Callable[[], None]
    ready: bool = False
    started: bool = False
    restarts: int = 0
    stopping: bool = False
    process: subprocess.Popen[bytes] | None = None
    _stop: threading.Event = field(default_factory=threading.Event)

    @property
    def command(self) -> list[str]:
        words = self.spec.get("command", []) + self.spec.get("args", [])
        assert words, f"container {self.spec['name']}: an image's own entry point is not known here; give a command"
        return [self.made.rewrite(expand(word, self.environment)) for word in words]

    def start(self) -> None:
        """Starts the process, runs postStart, then the probes."""
        self._stop = threading.Event()
        self.ready = self.started = False
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                self.command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        if hook := self.spec.get("lifecycle", {}).get("postStart"):
            if not self._hook(hook, 120):
                self.process.kill()
                return
        threading.Thread(target=self._probe, args=(self._stop,), daemon=True).start()

    def execute(self, command: list[str], limit: float) -> int:
        """Runs a command as if in the container; its exit status."""
        words = [self.made.rewrite(expand(word, self.environment)) for word in command]
        with self.log.open("ab") as out:
            try:
                return subprocess.run(
                    words,
                    env=self.environment,
                    timeout=limit,
                    check=False,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                ).returncode
            except subprocess.TimeoutExpired:
                return 124

    def _hook(self, hook: dict[str, Any], limit: float) -> bool:
        if "sleep" in hook:
            time.sleep(min(hook["sleep"]["seconds"], limit))
            return True
        if "exec" in hook:
            return self.execute(hook["exec"]["command"], limit) == 0
        how = hook["httpGet"]
        port = self._ports()[how["port"]] if isinstance(how["port"], str) else how["port"]
        try:
            httpx.get(f"http://{self.address}:{port}{how.get('path', '/')}", timeout=limit, trust_env=False)
        except httpx.HTTPError:
            return False
        return True

    def _ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.spec.get("ports", []) if "name" in port}

    def _probe(self, stop: threading.Event) -> None:
        if "startupProbe" in self.spec and not self._starts_up(stop):
            return
        self.started = True
        self.changed()
        if "livenessProbe" in self.spec:
            threading.Thread(target=self._run_probe, args=("livenessProbe", self._say_alive, stop), daemon=True).start()
        if "readinessProbe" in self.spec:
            self._run_probe("readinessProbe", self._say_ready, stop)
        else:
            self._say_ready(True)

    def _run_probe(self, kind: str, tell: Callable[[bool], None], stop: threading.Event) -> None:
        probe = self.spec[kind]
        probes.repeat(probe, probes.attempt(probe, self.address, self._ports(), self.execute), tell, stop)

    def _starts_up(self, stop: threading.Event) -> bool:
        """Probes until the first success; past the threshold of failures the container is ended."""
        probe = self.spec["startupProbe"]
        once = probes.attempt(probe, self.address, self._ports(), self.execute)
        for _ in range(probe.get("failureThreshold", 3)):
            if once():
                return not stop.is_set()
            if stop.wait(probe.get("periodSeconds", 10)):
                return False
        self.terminate(1)
        return False

    def _say_alive(self, well: bool) -> None:
        # A stop under way has its own deadline.
        if not well and not self.stopping:
            self.terminate(30)

    def _say_ready(self, well: bool) -> None:
        if self.ready != well:
            self.ready = well
            self.changed()

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def terminate(self, limit: float) -> bool:
        """SIGTERM, then SIGKILL past the limit; whether that was needed."""
        assert self.process is not None
        if self.alive():
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(limit)
            return False
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            return True

    def stop(self, grace: float) -> Ending:
        """The whole stop: preStop and SIGTERM within the grace, SIGKILL after it. Readiness is probed to the end."""
        begun = time.monotonic()
        self.stopping = True
        if self.process is None:
            return Ending(0, False, 0.0)
        if self.alive() and (hook := self.spec.get("lifecycle", {}).get("preStop")):
            self._hook(hook, grace)
        killed = self.terminate(max(grace - (time.monotonic() - begun), 0.1))
        self._stop.set()
        self.ready = False
        return Ending(self.process.returncode, killed, time.monotonic() - begun)

    def ended(self) -> None:
        """To be called when the process has ended by itself: probes stop, nothing is ready."""
        self._stop.set()
        self.ready = self.started = False
