"""One engine process: build, listen, say so, serve until a signal, drain, leave.

Owns stdout (one JSON line when ready) and the progress lines on stderr; exit codes: 0 after a drain, 1 if a
second signal cut it short or a step did not end, 2 if it can't start.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import socket
import sys
import time

from branchline import _native
from branchline.engine.config import EngineConfig
from branchline.engine.errors import EngineError, LoadError
from branchline.engine.options import public
from branchline.engine.service import assembly, embedding
from branchline.engine.service.handover import PeerOptions, Pulls
from branchline.engine.service.server import EngineServer, ServerOptions, read_pem
from branchline.engine.service.servicer import EngineServicer
from branchline.engine.service.watchdog import Watchdog
from branchline.registry import RegistryError

logger = logging.getLogger(__name__)


class ProgressLines:
    """Says on stderr which stage runs: once at its start, then at most every two seconds, with per cent."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._stage = ""
        self._last = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        """One report; `total` 0 if unknown."""
        now = time.monotonic()
        if stage == self._stage and now - self._last < 2.0:
            return
        self._stage, self._last = stage, now
        share = f" {100 * done // total} %" if total else ""
        self.say(f"{stage}{share}")

    def say(self, words: str) -> None:
        """One line with the seconds since the start."""
        print(f"[{time.monotonic() - self._start:6.1f}s] {words}", file=sys.stderr, flush=True)

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._start


def run(config: EngineConfig, *, given: frozenset[str] = frozenset()) -> int:
    """Serve until told to stop; the exit code. No model override changes the options `given` by the user."""
    logging.basicConfig(
        level=config.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if config.tensor_parallel_size > 1 and int(os.environ.get("RANK", "0")) > 0:  # torchrun's: rank 0 serves
        from branchline.engine.executor.cuda import follow

        return follow.main({**os.environ, **({"BRANCHLINE_RANKS_ON": "cpu"} if config.device == "cpu" else {})})
    progress = ProgressLines()
    try:
        _check_port(config)
        engine = assembly.build(config, progress, given)
    except (EngineError, RegistryError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        return 130
    try:
        return asyncio.run(_serve(engine, progress))
    except LoadError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    finally:
        engine.close()


def _servicer(engine: assembly.Engine | embedding.Encoder) -> EngineServicer:
    config = engine.config  # what model overrides decided included
    if isinstance(engine, embedding.Encoder):
        return engine.servicer(public(config))
    return EngineServicer(
        engine.loop,
        engine.model,
        _native.namespace,
        options=public(config),
        components=engine.components,
        stream_buffer=config.stream_buffer,
        adapter_book=engine.adapters,
    )


def _check_port(config: EngineConfig) -> None:
    """Refuse a taken port before anything is loaded."""
    if config.port == 0:
        return
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.host, config.port))
        except OSError as error:
            raise LoadError(
                f"can't listen on {config.host}:{config.port}: {error.strerror}: free the port or choose another"
            ) from None


async def _serve(engine: assembly.Engine | embedding.Encoder, progress: ProgressLines) -> int:
    config = engine.config
    servicer = _servicer(engine)
    server = EngineServer(servicer, _server_options(config))
    pulls = None
    if engine.loop.handovers is not None:
        pulls = engine.loop.handovers.puller = Pulls(engine.loop.handovers, _peers(config))
    stop = _stop_event()
    engine.loop.start()
    watchdog = Watchdog(engine.loop, config.step_timeout, config.stall_dump_dir)
    watchdog.start()
    await server.start()
    exposed = None
    if engine.metrics is not None:
        exposed = engine.metrics.serve(config.host, config.metrics_port or 0)
    gc.collect()
    gc.freeze()  # what is loaded stays: no later collection walks it in the middle of a step
    shown = f"[{config.host}]" if ":" in config.host else config.host
    address = f"{shown}:{server.port}"
    progress.say(f"serving {engine.model.served_names[0]} on grpc://{address}")
    ready = {
        "event": "ready",
        "address": address,
        "model": engine.model.served_names[0],
        "engine_id": servicer.engine_id,
        "pid": os.getpid(),
        "seconds": round(progress.seconds, 3),
    }
    if exposed is not None:
        ready["metrics_port"] = exposed.port
        progress.say(f"metrics on http://{shown}:{exposed.port}/metrics")
    print(json.dumps(ready), flush=True)
    await stop.wait()
    progress.say(f"draining, at most {config.drain_timeout:g} s")
    ended = await server.drain(config.drain_timeout)
    watchdog.stop()
    if pulls is not None:
        await pulls.close()
    if exposed is not None:
        exposed.close()
    if not ended:
        progress.say("stopped while a step does not end")
        sys.stderr.flush()
        os._exit(1)  # the executor's threads can't be joined
    progress.say("stopped")
    return 0


def _peers(config: EngineConfig) -> PeerOptions:
    """Workers of one fleet share their token, or the authority that certifies all of them."""
    if not config.tls_client_ca:
        return PeerOptions(config.token)
    paths = (config.tls_client_ca, config.tls_cert, config.tls_key)
    ca, cert, key = (read_pem(path) for path in paths)
    return PeerOptions(config.token, ca, cert, key)


def _stop_event() -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT; a second one leaves at once."""
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(1)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return stop


def _server_options(config: EngineConfig) -> ServerOptions:
    return ServerOptions(
        host=config.host,
        port=config.port,
        token=config.token,
        tls_cert=config.tls_cert,
        tls_key=config.tls_key,
        tls_client_ca=config.tls_client_ca,
        step_timeout_s=config.step_timeout,
    )
