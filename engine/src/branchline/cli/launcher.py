"""Runs and supervises the processes of `branchline serve`.

Owns children: starts engines, then the gateway; restarts an engine that dies, with back-off, on its port; stops
the gateway first and the engines after it. A second signal kills. Leaves no orphan: children die with it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from branchline.cli.backends.base import Ask, answers
from branchline.cli.backends.choose import Chosen
from branchline.cli.children import Child, describe
from branchline.engine.errors import LoadError

READY_POLL_S = 0.05
STOP_GRACE_S = 45.0
BACKOFF_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
STABLE_S = 60.0  # a run of this length starts the back-off anew


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything to start. `env` is what children inherit, without the variables already resolved.

    `gateway_env` is for the gateway beyond that.
    """

    model: str
    workers: int
    host: str
    port: int
    backend: Chosen
    name: str  # what requests call the model, for a backend that does not tell
    given: Mapping[str, object]  # engine options that the user gave
    arguments: tuple[str, ...]  # of the backend
    router_path: str
    router_arguments: tuple[str, ...]
    token: str
    threads: int
    env: Mapping[str, str]
    gateway_env: Mapping[str, str] = field(default_factory=dict)
    roles: tuple[str, ...] = ()  # of each engine; empty if they have none

    @property
    def asks_for_keys(self) -> bool:
        """Whether clients need a key, as far as flags and environment say."""
        return self.is_said("--api-key", "BRANCHLINE_ROUTER_API_KEY")

    def is_said(self, *beginnings: str) -> bool:
        """Whether a flag of the gateway or a variable begins so."""
        words = (*self.router_arguments, *(name for name, value in self.env.items() if value))
        return any(word.startswith(beginnings) for word in words)

    @property
    def url(self) -> str:
        """Where clients reach the gateway from this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(
            self.host, f"[{self.host}]" if ":" in self.host else self.host
        )
        secure = self.is_said("--tls-cert-path", "BRANCHLINE_ROUTER_TLS_CERT_PATH")
        return f"{'https' if secure else 'http'}://{host}:{self.port}"


class Failed(Exception):
    """Serving can't begin or go on; the message says why."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class Launcher:
    """One `branchline serve`."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._engines: list[Child] = []
        self._router: Child | None = None
        self._stopping = False
        self._start = time.monotonic()

    async def run(self) -> int:
        """Start all, serve, stop all; the exit code."""
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, stop)
        serving = asyncio.create_task(self._serve())
        stopped = asyncio.create_task(stop.wait())
        code = 0
        try:
            await asyncio.wait((serving, stopped), return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
        except Failed as failure:
            self._say(f"error: {failure}")
            code = failure.code
        finally:
            for task in (serving, stopped):
                task.cancel()
            await asyncio.gather(serving, stopped, return_exceptions=True)
            await self._stop()
        return code

    def _on_signal(self, stop: asyncio.Event) -> None:
        if stop.is_set():
            self._say("second signal: killing all")
            for child in self._children():
                child.signal(signal.SIGKILL)
            return
        self._stopping = True
        stop.set()

    # ---- starting ---------------------------------------------------------------------------

    async def _serve(self) -> None:
        plan = self._plan
        self._say(f"backend {plan.backend.name}: {plan.backend.why}")
        self._say(f"starting {plan.workers} {self._noun}{'s' if plan.workers > 1 else ''} for {plan.model}")
        ports = [0 if plan.backend.backend.announces else free_port() for _ in range(plan.workers)]
        self._engines = [self._engine(number, port) for number, port in enumerate(ports)]
        await asyncio.gather(*(engine.start() for engine in self._engines))
        addresses = await asyncio.gather(*map(self._first_ready, self._engines, ports))
        models = {self._model_of(engine) for engine in self._engines}
        self._say("starting the gateway")
        self._router = self._gateway(addresses)
        await self._router.start()
        await self._until_ready(self._router)
        self._announce(sorted(models)[0])
        watchers = [asyncio.ensure_future(self._watch_gateway(self._router))]
        watchers += [asyncio.ensure_future(self._supervise(number, each)) for number, each in enumerate(addresses)]
        try:
            await asyncio.gather(*watchers)
        finally:
            for watcher in watchers:  # an engine that is being stopped has not died
                watcher.cancel()

    @property
    def _noun(self) -> str:
        return "engine" if self._plan.backend.backend.announces else self._plan.backend.name

    def _model_of(self, engine: Child) -> str:
        return str(engine.ready.result()["model"]) if self._plan.backend.backend.announces else self._plan.name

    def _engine(self, number: int, port: int) -> Child:
        plan = self._plan
        shared = max(1, len(os.sched_getaffinity(0)) // plan.workers) if plan.workers > 1 else 0
        own = plan.backend.backend.announces
        ask = Ask(
            model=plan.model, name=plan.name, host="127.0.0.1", port=port, given=plan.given, arguments=plan.arguments,
            threads=shared if own and not plan.threads else 0 if own else plan.threads or shared,
        )  # fmt: skip
        try:
            command = plan.backend.backend.launch(ask)
        except LoadError as error:
            raise Failed(error.message) from None
        words = [*command.words, f"--parent-pid={os.getpid()}"] if own else command.words
        name = self._noun if plan.workers == 1 else f"{self._noun} {number + 1}"
        if plan.roles:
            words = [*words, f"--role={plan.roles[number]}"]
            name = f"{plan.roles[number]} {number + 1}"
        env = {**plan.env, **command.env, **({"BRANCHLINE_TOKEN": plan.token} if plan.token else {})}
        return Child(name, words, env)

    def _gateway(self, addresses: list[str]) -> Child:
        plan = self._plan
        command = [plan.router_path, *plan.router_arguments, "--host", plan.host, "--port", str(plan.port)]
        for address in addresses:
            command += ["--worker-urls", f"{plan.backend.backend.scheme}://{address}"]
        env = {**plan.env, **plan.gateway_env, **({"BRANCHLINE_ROUTER_WORKER_TOKEN": plan.token} if plan.token else {})}
        return Child("gateway", command, env)

    async def _first_ready(self, engine: Child, port: int) -> str:
        """Its address. An engine that ends before it is ready ends the launch."""
        ended = asyncio.create_task(engine.wait())
        if not self._plan.backend.backend.announces:
            return await self._first_well(engine, ended, f"127.0.0.1:{port}")
        await asyncio.wait((engine.ready, ended), return_when=asyncio.FIRST_COMPLETED)
        if engine.ready.done() and not engine.ready.cancelled():
            return str(engine.ready.result()["address"])
        raise self._ended(engine, await ended)

    async def _first_well(self, engine: Child, ended: asyncio.Task[int], address: str) -> str:
        """The address, once the backend finds it well."""
        chosen = self._plan.backend
        while not await asyncio.to_thread(chosen.backend.health, f"{chosen.backend.scheme}://{address}"):
            if ended.done():
                raise self._ended(engine, ended.result())
            await asyncio.sleep(READY_POLL_S)
        return address

    @staticmethod
    def _ended(engine: Child, code: int) -> Failed:
        return Failed(
            f"{engine.name} could not start ({describe(code)}): its message is above", code if code > 0 else 1
        )

    async def _until_ready(self, gateway: Child) -> None:
        """Wait until the gateway has a worker to send requests to."""
        ended = asyncio.create_task(gateway.wait())
        while not await asyncio.to_thread(answers, f"{self._plan.url}/readiness"):
            if ended.done():
                code = ended.result()
                raise Failed(f"the gateway could not start ({describe(code)}): its message is above", max(code, 1))
            await asyncio.sleep(READY_POLL_S)

    # ---- running ----------------------------------------------------------------------------

    async def _supervise(self, number: int, address: str) -> None:
        """Restart one engine whenever it dies, on the port that the gateway knows."""
        failures = 0
        while True:
            begun = time.monotonic()
            code = await self._engines[number].wait()
            failures = 0 if time.monotonic() - begun > STABLE_S else failures
            pause = BACKOFF_S[min(failures, len(BACKOFF_S) - 1)]
            failures += 1
            self._say(f"{self._engines[number].name} died ({describe(code)}); restarting it in {pause:g} s")
            await asyncio.sleep(pause)
            self._engines[number] = self._engine(number, int(address.rpartition(":")[2]))
            await self._engines[number].start()

    async def _watch_gateway(self, gateway: Child) -> None:
        raise Failed(f"the gateway died ({describe(await gateway.wait())}): stopping")

    def _announce(self, model: str) -> None:
        url = self._plan.url
        self._say("ready")
        header = " -H 'authorization: Bearer YOUR-KEY'" if self._plan.asks_for_keys else ""
        key = "YOUR-KEY" if self._plan.asks_for_keys else "none"
        print(_WELCOME.format(url=url, model=model, header=header, key=key), flush=True)

    # ---- stopping ---------------------------------------------------------------------------

    def _children(self) -> list[Child]:
        return [child for child in (self._router, *self._engines) if child is not None and child.is_running]

    async def _stop(self) -> None:
        """Gateway first, so that it ends its streams; then engines; then whatever is left by force."""
        if self._children():
            self._say("stopping: running requests may end first, up to --drain-timeout; Ctrl-C again kills at once")
        deadline = time.monotonic() + STOP_GRACE_S
        for group in ([self._router], self._engines):
            running = [child for child in group if child is not None and child.is_running]
            for child in running:
                child.signal(signal.SIGTERM)
            if running:
                await asyncio.wait(
                    [asyncio.ensure_future(child.wait()) for child in running],
                    timeout=max(0.1, deadline - time.monotonic()),
                )
        for child in self._children():
            self._say(f"{child.name} does not stop: killing it")
            child.signal(signal.SIGKILL)
        await asyncio.gather(*(child.wait() for child in self._children()))
        self._say("stopped")

    def _say(self, words: str) -> None:
        print(f"[{time.monotonic() - self._start:6.1f}s] {words}", file=sys.stderr, flush=True)


def free_port() -> int:
    """A port of loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


_WELCOME = """
Branchline serves {model} at {url}

  curl {url}/v1/chat/completions -H 'content-type: application/json'{header} \\
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="{key}")
  answer = client.chat.completions.create(model="{model}", messages=[{{"role": "user", "content": "Hello!"}}])
  print(answer.choices[0].message.content)

Ctrl-C stops it.
"""
