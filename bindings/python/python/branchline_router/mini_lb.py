"""`branchline-router mini-lb`: a load balancer to read and to step through, for pairs of prefill and decode workers.

PD only, random only: SGLang's hand-over over HTTP, one try, no health, no breakers, no queues. It is there to find out
whether a fault is the router's; serve with `branchline-router` itself. Anything else is refused with ValueError.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import aiohttp
    from aiohttp import web

NOTICE = "mini-lb: for debugging only: prefill/decode pairs only, random choice only; serve with branchline-router"
PATHS = ("/generate", "/v1/chat/completions", "/v1/completions")


@dataclass(frozen=True, slots=True)
class Prefill:
    """A worker that computes prompts, and the port of its bootstrap server."""

    url: str
    bootstrap_port: int | None = None

    @property
    def host(self) -> str:
        """Where decode workers reach it."""
        return urlsplit(self.url).hostname or ""


@dataclass(frozen=True, slots=True)
class Options:
    """What it can be asked for."""

    prefill: tuple[Prefill, ...]
    decode: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    policy: str = "random"

    def __post_init__(self) -> None:
        """Raises ValueError for anything but random pairs over HTTP."""
        if self.policy != "random":
            raise ValueError(f"policy is {self.policy!r} and mini-lb only draws at random: leave it out")
        if not self.prefill or not self.decode:
            raise ValueError("mini-lb only serves pairs: give at least one --prefill and one --decode")
        for url in (*(one.url for one in self.prefill), *self.decode):
            if urlsplit(url).scheme != "http" or not urlsplit(url).hostname:
                raise ValueError(f"worker {url!r} can't be used: mini-lb speaks http://host:port only")


def batch_size(body: dict[str, Any]) -> int | None:
    """How many prompts a body holds as a list; None for a single one."""
    for name in ("text", "prompt", "input_ids"):
        given = body.get(name)
        if isinstance(given, list) and given and isinstance(given[0], str | list):
            return len(given)
    return None


def paired(body: dict[str, Any], prefill: Prefill) -> dict[str, Any]:
    """The body as both workers get it: with the room, or the rooms, where they meet."""
    count = batch_size(body)
    rooms = [random.getrandbits(63) for _ in range(count or 1)]
    where: dict[str, object]
    if count is None:
        where = {
            "bootstrap_host": prefill.host,
            "bootstrap_port": prefill.bootstrap_port,
            "bootstrap_room": rooms[0],
        }
    else:
        where = {
            "bootstrap_host": [prefill.host] * count,
            "bootstrap_port": [prefill.bootstrap_port] * count,
            "bootstrap_room": rooms,
        }
    return {**body, **where}


class MiniLb:
    """One balancer. `session` is the client for both workers."""

    def __init__(self, options: Options, session: aiohttp.ClientSession) -> None:
        self.options = options
        self.session = session

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Send the request to a random pair; the decode worker's bytes are the answer."""
        from aiohttp import web

        prefill, decode = random.choice(self.options.prefill), random.choice(self.options.decode)
        body = paired(json.loads(await request.read()), prefill)
        first = asyncio.create_task(self.prompt(prefill.url + request.path, body))
        try:
            async with self.session.post(decode + request.path, json=body) as answer:
                out = web.StreamResponse(status=answer.status)
                out.content_type = answer.content_type
                await out.prepare(request)
                async for data in answer.content.iter_any():
                    await out.write(data)
            await first
            await out.write_eof()
            return out
        finally:
            first.cancel()

    async def prompt(self, url: str, body: dict[str, Any]) -> None:
        """The prefill worker's answer is read and dropped."""
        async with self.session.post(url, json=body) as answer:
            text = await answer.text()
            if answer.status >= 400:
                print(f"mini-lb: prefill answered {answer.status}: {text[:500]}", file=sys.stderr)


async def serve(options: Options) -> None:
    """Serve until cancelled."""
    import aiohttp
    from aiohttp import web

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        balancer = MiniLb(options, session)
        app = web.Application(client_max_size=1 << 30)
        for path in PATHS:
            app.router.add_post(path, balancer.answer)

        async def health(_: web.Request) -> web.Response:
            return web.Response(text="ok")

        app.router.add_get("/health", health)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, options.host, options.port).start()
        print(f"{NOTICE}\nmini-lb: listening on http://{options.host}:{options.port}", file=sys.stderr, flush=True)
        try:
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()


def parse(argv: Sequence[str]) -> Options:
    """Options of a command line. Raises ValueError for what mini-lb does not do."""
    parser = argparse.ArgumentParser("branchline-router mini-lb", description=NOTICE, allow_abbrev=False)
    parser.add_argument(
        "--prefill", action="append", nargs="+", default=[], metavar=("URL", "PORT"),
        help="a prefill worker and the port of its bootstrap server, if it has one",
    )  # fmt: skip
    parser.add_argument("--decode", action="append", default=[], metavar="URL", help="a decode worker")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on")
    parser.add_argument("--policy", default="random", help="random, and nothing else")
    parser.add_argument("--pd-disaggregation", action="store_true", help="taken for granted")
    given, rest = parser.parse_known_args(list(argv))
    if rest:
        raise ValueError(f"mini-lb has no {rest[0]!r}: it is for debugging; branchline-router has all options")
    prefill = tuple(_prefill(one) for one in given.prefill)
    return Options(prefill, tuple(given.decode), given.host, given.port, given.policy)


def _prefill(words: Sequence[str]) -> Prefill:
    if len(words) > 2:
        raise ValueError(f"--prefill has {len(words)} values: give a URL and at most a port")
    if len(words) == 1 or words[1].lower() == "none":
        return Prefill(words[0])
    if not words[1].isdigit() or not 0 < int(words[1]) < 65536:
        raise ValueError(f"bootstrap port {words[1]!r} is no port: give 1 to 65535, or none")
    return Prefill(words[0], int(words[1]))


def run(argv: Sequence[str]) -> int:
    """Serve by a command line; the exit code. Raises ValueError for what mini-lb does not do."""
    options = parse(argv)
    try:
        asyncio.run(serve(options))
    except ImportError as error:
        print(f"error: mini-lb needs aiohttp ({error}): pip install 'branchline-router[mini-lb]'", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0
