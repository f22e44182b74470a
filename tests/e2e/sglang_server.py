"""A stand-in for SGLang's HTTP server: its routes, errors and manners, without a model.

Written after SGLang's `http_server.py` and `openai/serving_*.py`: cumulative text in native streams, errors of three
shapes, a `/health` that takes its second, aborts by the beginning of an id, a `/flush_cache` in plain text. An output's
words follow from the prompt. It knows nothing of gateways.
"""

from __future__ import annotations

import json
import select
import socket
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Condition, Thread
from typing import Any

from . import sglang_shapes as shapes
from .sglang_shapes import Json, Step

FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)


class GoneError(Exception):
    """The client has left."""


def tokens_of(text: str) -> list[int]:
    """One token a word."""
    return [zlib.crc32(word.encode()) % 32000 for word in text.split()]


def common(left: list[int], right: list[int]) -> int:
    """Length of what both begin with."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(left), len(right)))


class SGLangServer:
    """One server. `hold()` makes outputs stand still after their first token until `release()`."""

    def __init__(
        self, model: str = "sgl-fake", *, api_key: str = "", health_s: float = 1.0, context: int = 512
    ) -> None:
        self.model, self.api_key, self.health_s, self.context = model, api_key, health_s, context
        self.seen: list[tuple[str, dict[str, str], bytes]] = []  # path, headers, body
        self.ended: dict[str, str] = {}  # id of a request → length, abort or gone
        self.leaving = False  # it was told to stop: not healthy any more
        self.running: set[str] = set()
        self._aborted: set[str] = set()
        self._cached: list[list[int]] = []
        self._held = False
        self._changed = Condition()
        handler = type("Handler", (_Handler,), {"owner": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self.address = f"127.0.0.1:{self._http.server_address[1]}"
        self.url = f"http://{self.address}"
        self._thread = Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends it; outputs that stand still are let go."""
        self.release()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def forget(self) -> None:
        """Whatever was: a test begins."""
        self.release()
        self.seen, self.ended, self._cached = [], {}, []

    def hold(self) -> None:
        """Outputs stand still after their first token."""
        self._held = True

    def release(self) -> None:
        """They go on."""
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def asked(self, path: str) -> list[tuple[dict[str, str], bytes]]:
        """Headers and bodies of the requests for a path."""
        return [(headers, body) for own, headers, body in list(self.seen) if own == path]

    def abort(self, rid: str, everything: bool) -> None:
        """Aborts all requests whose id begins so: SGLang compares beginnings."""
        with self._changed:
            self._aborted |= {own for own in set(self.running) if everything or own.startswith(rid)}
            self._changed.notify_all()

    def flush(self) -> bool:
        """Forgets what is cached, unless something runs."""
        if self.running:
            return False
        self._cached.clear()
        return True

    def check(self, ids: list[int], params: Json) -> None:
        """Refuses what can't be served, as ValueError with words for the client."""
        if params.get("temperature", 1.0) < 0:
            raise ValueError(f"temperature must be non-negative, got {params['temperature']}.")
        if not ids:
            raise ValueError("Either text, input_ids or input_embeds should be provided.")
        if len(ids) >= self.context:
            length = f"The input ({len(ids)} tokens) is longer than the model's context length"
            raise ValueError(f"{length} ({self.context} tokens).")

    def generate(self, rid: str, ids: list[int], params: Json, left: Callable[[], bool]) -> Iterator[Step]:
        """One output, token by token. Raises `GoneError` once `left()`."""
        limit = params.get("max_new_tokens", 128)
        cached = min(max((common(ids, known) for known in self._cached), default=0), len(ids) - 1)
        self._cached.append(ids)
        self.running.add(rid)
        started, words, why = time.monotonic(), "", "gone"
        try:
            for count in range(1, limit + 1):
                finish = self._step(rid, count, limit, left)
                words = f"{words} w{(ids[-1] + count) % 97}".lstrip()
                meta = {
                    "id": rid,
                    "finish_reason": finish,
                    "prompt_tokens": len(ids),
                    "weight_version": "default",
                    "completion_tokens": count,
                    "cached_tokens": cached,
                    "e2e_latency": time.monotonic() - started,
                }
                if finish:
                    why = str(finish["type"])
                    self.running.discard(rid)
                yield Step(words, tokens_of(words), meta)
                if finish:
                    return
        finally:
            self.running.discard(rid)
            self._aborted.discard(rid)
            self.ended[rid] = why

    def _step(self, rid: str, count: int, limit: int, left: Callable[[], bool]) -> Json | None:
        """Waits while outputs stand still; why this one ends with its `count`th token, if it does."""
        if count > 1:
            with self._changed:
                while self._held and rid not in self._aborted and not left():
                    self._changed.wait(0.01)
        if left():
            raise GoneError
        if rid in self._aborted:
            return {"type": "abort", "message": "Aborted"}
        return {"type": "length", "length": limit} if count >= limit else None


class _Handler(BaseHTTPRequestHandler):
    """Routes of one connection."""

    protocol_version = "HTTP/1.1"
    owner: SGLangServer

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        """Probes and reports."""
        self.route(b"")

    def do_POST(self) -> None:
        """Work and orders."""
        self.route(self.rfile.read(int(self.headers.get("Content-Length") or 0)))

    def route(self, body: bytes) -> None:
        """Answers one request."""
        owner = self.owner
        owner.seen.append((self.path, {name.lower(): value for name, value in self.headers.items()}, body))
        if self.path in ("/health", "/health_generate"):
            # It runs one token and looks after a second whether anything came of it.
            if not owner.leaving:
                time.sleep(owner.health_s)
            self.send(503 if owner.leaving else 200)
        elif owner.api_key and self.headers.get("Authorization") != f"Bearer {owner.api_key}":
            self.send(401, {"error": "Unauthorized"})
        elif self.path == "/v1/models":
            self.send(200, shapes.model_list(owner.model, owner.context))
        elif self.path == "/get_model_info":
            self.send(200, shapes.model_info(owner.model))
        elif self.path == "/get_server_info":
            self.send(200, shapes.server_info(owner.model, owner.context, len(owner.running)))
        elif self.path == "/flush_cache":
            self.send(200 if owner.flush() else 400, FLUSHED)
        elif self.command == "POST" and self.path in WORK:
            self.work(body)
        else:
            self.send(404, {"detail": "Not Found"})

    def work(self, body: bytes) -> None:
        """Routes with a JSON body."""
        try:
            given = json.loads(body)
        except ValueError as error:
            self.send(400, shapes.openai_error(f"1 validation error:\n  JSON decode error: {error}", "Bad Request"))
            return
        if self.path == "/abort_request":
            self.owner.abort(given.get("rid", ""), given.get("abort_all", False))
            self.send(200)
        elif self.path == "/generate":
            self.native(given)
        else:
            self.openai(given)

    def native(self, given: Json) -> None:
        """`/generate`: one prompt or a list of them, one after the other."""
        prompts: Any = given["text"] if given.get("text") is not None else given.get("input_ids", [])
        several = isinstance(prompts, list) and bool(prompts) and not isinstance(prompts[0], int)
        rids = given.get("rid") or [uuid.uuid4().hex for _ in (prompts if several else [0])]
        pairs = zip(prompts if several else [prompts], rids if isinstance(rids, list) else [rids], strict=True)
        jobs = [(tokens_of(one) if isinstance(one, str) else one, rid) for one, rid in pairs]
        params = given.get("sampling_params", {})
        try:
            for ids, _ in jobs:
                self.owner.check(ids, params)
        except ValueError as error:
            refusal = {"error": {"message": str(error)}}
            # A stream has begun by then.
            if given.get("stream"):
                self.stream(iter([refusal]))
            else:
                self.send(400, refusal)
            return
        outputs = [self.owner.generate(rid, ids, params, self.left) for ids, rid in jobs]
        if given.get("stream"):
            numbered = enumerate(outputs)
            self.stream(shapes.native(step, at if several else None) for at, steps in numbered for step in steps)
            return
        try:
            whole = [shapes.native(list(steps)[-1]) for steps in outputs]
        except GoneError:
            self.close_connection = True
            return
        self.send(200, whole if several else whole[0])

    def openai(self, given: Json) -> None:
        """`/v1/completions` and `/v1/chat/completions`, of one prompt. Any model's name is taken and told back."""
        chat = self.path == "/v1/chat/completions"
        if chat and not given.get("messages"):
            self.send(400, shapes.openai_error("Messages cannot be empty."))
            return
        told = " ".join(f"{one['role']}: {one['content']}" for one in given["messages"]) if chat else given["prompt"]
        ids = tokens_of(told) if isinstance(told, str) else told
        params = {"max_new_tokens": given.get("max_tokens", 16), "temperature": given.get("temperature", 1.0)}
        try:
            self.owner.check(ids, params)
        except ValueError as error:
            self.send(400, shapes.openai_error(str(error)))
            return
        rid = given.get("rid") or f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4()}"
        steps, model = self.owner.generate(rid, ids, params, self.left), given.get("model", "default")
        if given.get("stream"):
            with_usage = bool((given.get("stream_options") or {}).get("include_usage"))
            self.stream((shapes.chat_chunks if chat else shapes.completion_chunks)(steps, model, with_usage))
            return
        try:
            last = list(steps)[-1]
        except GoneError:
            self.close_connection = True
            return
        self.send(200, (shapes.chat if chat else shapes.completion)(last, model))

    def send(self, status: int, body: Any = None) -> None:
        """A whole answer: a text as it is, all else but None as JSON."""
        raw = b"" if body is None else (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        if raw and not isinstance(body, str):
            self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def stream(self, events: Iterator[Json]) -> None:
        """Server-sent events, each as soon as it is there, and the mark of the end."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for event in events:
                self.chunk(f"data: {json.dumps(event)}\n\n".encode())
            self.chunk(b"data: [DONE]\n\n")
            self.chunk(b"")
        except (GoneError, ConnectionError):
            self.close_connection = True

    def chunk(self, data: bytes) -> None:
        """One piece of a body; an empty one is the last."""
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def left(self) -> bool:
        """Whether the client has hung up."""
        readable, _, _ = select.select([self.connection], [], [], 0)
        try:
            return bool(readable) and self.connection.recv(1, socket.MSG_PEEK) == b""
        except ConnectionError:
            return True


WORK = ("/generate", "/abort_request", "/v1/completions", "/v1/chat/completions")
