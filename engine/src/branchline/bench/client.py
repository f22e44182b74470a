"""One streamed request, timed as its client sees it. Speaks only what every OpenAI-compatible server speaks."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType

import aiohttp

ERROR_CHARS = 200  # of an error's words that are kept


@dataclass(slots=True)
class Sample:
    """One request. Times are seconds since the run began; `chunks` are the arrivals of pieces with output."""

    kind: str
    begun: float
    ended: float = 0.0
    chunks: list[float] = field(default_factory=list)
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    server_times: dict[str, float] = field(default_factory=dict)
    error: str = ""
    valid: bool | None = None  # of output that had to have a form

    @property
    def ttft(self) -> float | None:
        """Seconds to the first output; None without any."""
        return self.chunks[0] - self.begun if self.chunks else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between two pieces."""
        return [later - earlier for earlier, later in zip(self.chunks, self.chunks[1:], strict=False)]


class Client:
    """A session with one server."""

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._url = url.rstrip("/").removesuffix("/v1")
        self._session = aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            connector=aiohttp.TCPConnector(limit=0),
            read_bufsize=1 << 20,
        )
        self._zero = time.perf_counter()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    def now(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._zero

    def restart(self) -> None:
        """The run begins now."""
        self._zero = time.perf_counter()

    async def models(self) -> list[str]:
        """What the server lists. Raises OSError with the reason if it can't be asked."""
        try:
            async with self._session.get(f"{self._url}/v1/models") as answer:
                body = await answer.text()
                if answer.status != 200:
                    raise OSError(f"/v1/models of {self._url} answers {answer.status}: {_words(body)}")
                return [str(one["id"]) for one in json.loads(body)["data"]]
        except (TimeoutError, aiohttp.ClientError) as error:
            raise OSError(f"{self._url} can't be asked: {error or type(error).__name__}") from None
        except (ValueError, KeyError, TypeError):
            raise OSError(f"/v1/models of {self._url} lists no models in OpenAI's form") from None

    async def send(self, kind: str, path: str, body: Mapping[str, object]) -> Sample:
        """One request to its end; what goes wrong stands in the sample."""
        sample = Sample(kind, self.now())
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        try:
            async with self._session.post(self._url + path, json=asked) as answer:
                if answer.status != 200:
                    sample.error = f"{answer.status}: {_words(await answer.text())}"
                else:
                    await self._read(answer, sample)
        except (TimeoutError, aiohttp.ClientError, ValueError) as error:
            sample.error = str(error) or type(error).__name__
        sample.ended = self.now()
        if not sample.output_tokens:
            sample.output_tokens = len(sample.chunks)
        return sample

    async def _read(self, answer: aiohttp.ClientResponse, sample: Sample) -> None:
        done = False
        async for line in answer.content:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                done = True
                continue
            _take(json.loads(data), sample, self.now())
        if not done and not sample.error:
            sample.error = "the stream ended without [DONE]"


def _take(event: dict[str, object], sample: Sample, now: float) -> None:
    """Add what one event of a stream says."""
    if "error" in event:
        sample.error = _words(json.dumps(event))
        return
    for choice in _items(event.get("choices")):
        delta = choice.get("delta")
        told = delta if isinstance(delta, dict) else choice
        piece = told.get("content") or told.get("text") or told.get("reasoning_content")
        if isinstance(piece, str) and piece:
            sample.text += piece
            sample.chunks.append(now)
    usage = event.get("usage")
    if isinstance(usage, dict):
        sample.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        sample.output_tokens = int(usage.get("completion_tokens") or 0)
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            sample.cached_tokens = int(details.get("cached_tokens") or 0)
        for name in ("queue_time", "prompt_time", "completion_time", "detokenize_time"):
            if isinstance(usage.get(name), int | float):
                sample.server_times[name] = float(usage[name])


def _items(value: object) -> list[dict[str, object]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _words(body: str) -> str:
    """The message of an error body, or its beginning."""
    try:
        found = json.loads(body)["error"]
        body = str(found["message"] if isinstance(found, dict) else found)
    except (ValueError, KeyError, TypeError):
        pass
    return body[:ERROR_CHARS]
