"""HTTP workers on many loopback addresses: one listener answers for all of 127.77.0.0/16, each address as itself.

Owns a thread with an event loop. Must not know Kubernetes.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from contextlib import suppress
from typing import Any

MODEL = "tiny"


class Pool:
    """Workers at `127.77.x.y:port`, and at `[::1]:port`. A stream goes on until its gate is opened."""

    def __init__(self) -> None:
        self.served: Counter[str] = Counter()  # completions by address
        self.streaming: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()
        self._gate = asyncio.Event()
        self._servers: list[asyncio.Server] = []
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(20)

    def _run(self, started: threading.Event) -> None:
        async def start() -> None:
            first = await asyncio.start_server(self._serve, "0.0.0.0", 0, backlog=1024)
            self.port = int(first.sockets[0].getsockname()[1])
            self._servers = [first, await asyncio.start_server(self._serve, "::1", self.port)]

        self._loop.run_until_complete(start())
        started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(self._finish())
        self._loop.close()

    async def _finish(self) -> None:
        for server in self._servers:
            server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)

    def open_gate(self) -> None:
        """Lets the streams that run now end."""

        def swap() -> None:
            opened, self._gate = self._gate, asyncio.Event()
            opened.set()

        self._loop.call_soon_threadsafe(swap)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = writer.get_extra_info("sockname")[0]
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                lines = head.split("\r\n")
                fields = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                method, path, _ = lines[0].split(" ")
                await self._answer(address, method, path.split("?")[0], body, writer)
                if fields.get("connection") == "close":
                    return
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            return
        finally:
            writer.close()

    async def _answer(self, address: str, method: str, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if (method, path) == ("GET", "/health"):
            await send(writer, 200, {})
        elif (method, path) == ("GET", "/v1/models"):
            await send(writer, 200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})
        elif (method, path) == ("POST", "/v1/completions"):
            asked = json.loads(body)
            if asked.get("stream"):
                await self._stream(address, writer)
            else:
                await send(writer, 200, completion(address, "stop"))
            self.served[address] += 1
        else:
            await send(writer, 404, {"error": {"message": "no such path"}})

    async def _stream(self, address: str, writer: asyncio.StreamWriter) -> None:
        """One event, nothing until the gate is open, the end."""
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        self.streaming[address] += 1
        gate = self._gate
        try:
            await piece(writer, f"data: {json.dumps(completion(address, None))}\n\n")
            while not gate.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(gate.wait(), 0.2)
                # A stream that stands still for long would be suspected.
                await piece(writer, f"data: {json.dumps(completion('.', None))}\n\n")
            await piece(writer, f"data: {json.dumps(completion('', 'stop'))}\n\ndata: [DONE]\n\n")
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        finally:
            self.streaming[address] -= 1


def completion(text: str, finish: str | None) -> dict[str, Any]:
    """An answer or a piece of one."""
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return {"id": "c", "object": "text_completion", "created": 0, "model": MODEL, "choices": [choice]}


async def send(writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
    """A whole answer."""
    text = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
    writer.write(head.encode() + text)
    await writer.drain()


async def piece(writer: asyncio.StreamWriter, text: str) -> None:
    """One chunk."""
    writer.write(b"%x\r\n%s\r\n" % (len(text.encode()), text.encode()))
    await writer.drain()
