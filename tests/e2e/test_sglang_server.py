"""The gateway before SGLang's HTTP server, spoken by a stand-in that has its routes, shapes, errors and manners."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import httpx
import openai
import pytest

from .sglang_server import FLUSHED, SGLangServer, tokens_of
from .stack import Gateway, collect, events, metric, wait_until
from .test_http_workers import last_sent, tapped

PARAMS = {"temperature": 0, "max_new_tokens": 5}
CHAT = {"messages": [{"role": "user", "content": "tell me a story"}], "max_tokens": 4}
ANSWERED: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"text": "once upon a time", "sampling_params": PARAMS, "rid": "mine"}),
    ("/generate", {"input_ids": [3, 1, 4, 1, 5], "sampling_params": PARAMS}),
    ("/generate", {"text": ["one two", "three"], "sampling_params": PARAMS, "rid": ["a", "b"]}),
    ("/v1/completions", {"model": "sgl-fake", "prompt": "once upon a time", "max_tokens": 3}),
    ("/v1/completions", {"prompt": [7, 8, 9], "max_tokens": 1, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {"model": "sgl-fake", **CHAT, "stream_options": {"include_usage": True}}),
]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/generate", {"text": "x", "sampling_params": {"temperature": -1}}, "must be non-negative"),
    ("/generate", {"sampling_params": PARAMS}, "should be provided"),
    ("/generate", {"input_ids": [1] * 600, "sampling_params": PARAMS}, "context length"),
    ("/v1/completions", {"prompt": "x", "temperature": -1}, "must be non-negative"),
    ("/v1/completions", {"prompt": [1] * 600}, "context length"),
    ("/v1/chat/completions", {"messages": []}, "cannot be empty"),
]


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[SGLangServer, Gateway]]:
    """A server and a gateway before it. Its health is quicker than SGLang's own, which has a test of its own."""
    server = SGLangServer(health_s=0.05)
    gateway = Gateway(workers=[server.url])
    gateway.wait_ready()
    named(gateway)
    yield server, gateway
    assert gateway.stop() == 0
    server.close()


@pytest.fixture
def server(pair: tuple[SGLangServer, Gateway]) -> SGLangServer:
    """The server as it was at its start."""
    pair[0].forget()
    return pair[0]


@pytest.fixture
def gateway(pair: tuple[SGLangServer, Gateway], server: SGLangServer) -> Gateway:
    """The gateway before `server`."""
    return pair[1]


def workers(gateway: Gateway) -> list[dict[str, Any]]:
    """What the gateway tells of its workers."""
    told: list[dict[str, Any]] = gateway.client.get("/workers").json()["workers"]
    return told


def named(gateway: Gateway, count: int = 1) -> None:
    """Waits until so many workers are ready and have told their models."""
    wait_until(
        lambda: [bool(one["ready"] and one.get("models")) for one in workers(gateway)] == [True] * count,
        30,
        "workers have told their models",
    )


def test_a_bare_address_is_found_out_to_be_sglang() -> None:
    server = SGLangServer("llama-3")
    gateway = Gateway(workers=[server.address])
    try:
        gateway.wait_ready()
        named(gateway)
        [worker] = workers(gateway)
        assert (worker["connection_mode"], worker["runtime"], worker["models"]) == ("http", "sglang", ["llama-3"])
        assert [model["id"] for model in gateway.client.get("/v1/models").json()["data"]] == ["llama-3"]
        body = {"model": "llama-3", "prompt": "x", "max_tokens": 2}
        assert gateway.client.post("/v1/completions", json=body).status_code == 200
        unknown = gateway.client.post("/v1/completions", json={**body, "model": "llama-4"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")
    finally:
        assert gateway.stop() == 0
        server.close()


@pytest.mark.parametrize("streamed", [False, True])
def test_its_answers_and_errors_are_relayed_byte_for_byte(server: SGLangServer, streamed: bool) -> None:
    with tapped(server.url) as (tap, gateway):
        named(gateway)
        for path, body, words in [(path, body, '"finish_reason"') for path, body in ANSWERED] + REFUSED:
            answer = gateway.client.post(path, json={**body, "stream": streamed})
            assert (answer.status_code, answer.headers["content-type"], answer.content) == last_sent(tap, path)
            assert words in answer.text
            if streamed and answer.status_code == 200:
                assert answer.content.endswith(b"data: [DONE]\n\n")
        refused = metric(gateway.client, "branchline_router_worker_failures_total", worker=tap.url)
        assert (workers(gateway)[0]["health"], refused) == ("well", 0), "what clients do wrong says nothing of it"


def test_a_native_stream_tells_all_of_the_text_in_each_event(server: SGLangServer, gateway: Gateway) -> None:
    body = {"text": "once upon", "sampling_params": PARAMS, "rid": "r1", "stream": True}
    with gateway.client.stream("POST", "/generate", json=body) as answer:
        told = collect(events(answer.iter_text()))
    assert [event["meta_info"]["completion_tokens"] for event in told] == [1, 2, 3, 4, 5]
    for event, after in itertools.pairwise(told):
        assert after["text"].startswith(event["text"])
    assert told[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 5}
    assert (told[-1]["output_ids"], server.ended) == (tokens_of(told[-1]["text"]), {"r1": "length"})


def test_the_openai_client_reads_its_streams_and_errors(server: SGLangServer, gateway: Gateway) -> None:
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)
    plain = client.chat.completions.create(model="sgl-fake", **CHAT)  # type: ignore[call-overload]
    chunks = list(
        client.chat.completions.create(model="sgl-fake", **CHAT, stream=True, stream_options={"include_usage": True})  # type: ignore[call-overload]
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == plain.choices[0].message.content and len(text.split()) == 4
    assert chunks[-1].usage.total_tokens == plain.usage.total_tokens
    with pytest.raises(openai.BadRequestError, match="context length"):
        client.completions.create(model="sgl-fake", prompt=[1] * 600)


@pytest.mark.parametrize("everything", [False, True])
def test_a_stream_is_aborted_through_the_gateway(server: SGLangServer, gateway: Gateway, everything: bool) -> None:
    server.hold()
    body = {"text": "once upon", "sampling_params": PARAMS, "stream": True}
    with (
        gateway.client.stream("POST", "/generate", json={**body, "rid": "one"}) as one,
        gateway.client.stream("POST", "/generate", json={**body, "rid": "two"}) as two,
    ):
        first, second = events(one.iter_text()), events(two.iter_text())
        assert json.loads(next(first))["text"] == json.loads(next(second))["text"] != ""
        order = {"abort_all": True} if everything else {"rid": "one"}
        assert gateway.client.post("/abort_request", json=order).status_code == 200
        assert collect(first)[-1]["meta_info"]["finish_reason"]["type"] == "abort"
        if not everything:
            assert server.running == {"two"}
        server.release()
        assert collect(second)[-1]["meta_info"]["finish_reason"]["type"] == ("abort" if everything else "length")
    assert server.ended["one"] == "abort"


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_leaves_ends_the_work_there(
    server: SGLangServer, gateway: Gateway, path: str, streamed: bool
) -> None:
    server.hold()
    body = {**CHAT, "prompt": "x y", "text": "x y", "rid": "left", "stream": streamed}
    if streamed:
        with gateway.client.stream("POST", path, json=body) as answer:
            assert next(events(answer.iter_text()))
    else:
        connection = HTTPConnection("127.0.0.1", gateway.port, timeout=60)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        wait_until(lambda: server.running == {"left"}, 20, "the work has begun")
        connection.close()
    wait_until(lambda: server.ended == {"left": "gone"}, 20, "the work has ended")
    wait_until(lambda: workers(gateway)[0]["in_flight"] == 0, 20, "the gateway counts nothing any more")
    server.release()


def test_its_cache_is_flushed_unless_it_is_busy(server: SGLangServer, gateway: Gateway) -> None:
    body = {"text": "a b c d", "sampling_params": PARAMS}

    def cached() -> int:
        return int(gateway.client.post("/generate", json=body).json()["meta_info"]["cached_tokens"])

    assert [cached(), cached()] == [0, 3]
    server.hold()
    with gateway.client.stream("POST", "/generate", json={**body, "stream": True}) as answer:
        data = events(answer.iter_text())
        next(data)
        busy = gateway.client.post("/flush_cache")
        assert (busy.status_code, busy.json()["success"]) == (502, False)
        assert FLUSHED.split(". ")[0].split("\n")[0] in busy.json()["workers"][0]["error"]["message"]
        server.release()
        collect(data)
    wait_until(lambda: not server.running, 20, "nothing runs there")
    flushed = gateway.client.post("/flush_cache")
    assert (flushed.status_code, flushed.json()["workers"][0]["supported"]) == (200, True)
    assert cached() == 0


def test_its_reports_are_told(server: SGLangServer, gateway: Gateway) -> None:
    direct = httpx.get(f"{server.url}/get_model_info").json()
    assert gateway.client.get("/get_model_info").json() == direct and direct["is_generation"] is True
    info = gateway.client.get("/get_server_info").json()
    assert [(one["kind"], one["ready"]) for one in info["workers"]] == [("http", True)]


def test_its_key_goes_to_it_and_no_client_needs_to_know_it() -> None:
    server = SGLangServer("secret-model", api_key="k1", health_s=0.05)
    gateway = Gateway(workers=[])
    try:
        wait_until(lambda: gateway.client.get("/liveness").status_code == 200, 30, "the port is open")
        added = gateway.client.post("/workers", json={"url": server.url, "api_key": "k1"})
        assert added.status_code == 202 and "k1" not in added.text
        named(gateway)
        [worker] = workers(gateway)
        assert (worker["runtime"], worker["models"]) == ("sglang", ["secret-model"])
        for path, body in ANSWERED:
            body = {name: value for name, value in body.items() if name != "model"}
            headers = {"Authorization": "Bearer of-the-client"}
            assert gateway.client.post(path, json=body, headers=headers).status_code == 200
            assert server.asked(path)[-1][0]["authorization"] == "Bearer k1"
        assert gateway.client.get("/get_model_info").status_code == 200
        assert gateway.client.post("/flush_cache").json()["success"] is True
    finally:
        assert gateway.stop() == 0
        server.close()


def test_one_that_is_told_to_stop_gets_nothing_new_and_ends_what_it_has() -> None:
    staying, going = SGLangServer(health_s=0.0), SGLangServer(health_s=0.0)
    gateway = Gateway("--policy", "round_robin", workers=[staying.url, going.url])
    body = {"text": "x", "sampling_params": PARAMS}
    try:
        gateway.wait_ready()
        named(gateway, 2)
        for server in (staying, going):
            server.hold()
        with (
            gateway.client.stream("POST", "/generate", json={**body, "stream": True}) as one,
            gateway.client.stream("POST", "/generate", json={**body, "stream": True}) as two,
        ):
            data = [events(one.iter_text()), events(two.iter_text())]
            assert all([json.loads(next(each))["text"] for each in data])
            assert len(staying.running) == len(going.running) == 1
            going.leaving = True
            wait_until(
                lambda: {one["url"]: one["ready"] for one in workers(gateway)}[going.url] is False, 60, "it is out"
            )
            before = len(going.asked("/generate"))
            for server in (staying, going):
                server.release()
            for _ in range(4):
                assert gateway.client.post("/generate", json=body).status_code == 200
            assert len(going.asked("/generate")) == before
            for each in data:
                assert collect(each)[-1]["meta_info"]["finish_reason"]["type"] == "length"
    finally:
        assert gateway.stop() == 0
        staying.close()
        going.close()
