"""The HTTP backend against a scripted server of the same wire: bodies, streams, refusals, leases, markup."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from aiohttp import web
from branchline import lang as bl
from branchline.lang.templates import TEMPLATES


class Server:
    """Answers by path from a table of functions; keeps the requests. Runs on a thread of its own."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.answers: dict[str, Any] = {}
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._ready.wait(30)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._ready.set()
        self._loop.run_forever()

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body = json.loads(raw) if raw else None
        self.seen.append((request.method, request.path, body))
        self.headers.append(request.headers)
        answer = self.answers[request.path.split("/lease-1")[0]](body)
        if isinstance(answer, web.Response):
            return answer
        if isinstance(answer, list):
            return web.Response(body=b"".join(answer), content_type="text/event-stream")
        return web.json_response(answer)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.stop()


def event(value: Any) -> bytes:
    return b"data: " + (value.encode() if isinstance(value, str) else json.dumps(value).encode()) + b"\n\n"


def answer(text: str) -> dict[str, Any]:
    return {"text": text, "meta_info": {"prompt_tokens": 3, "cached_tokens": 1, "completion_tokens": 2}}


@bl.function
def ask(s: bl.State) -> Any:
    s += "Q" + bl.gen("a", max_tokens=8, stop="x", temperature=0.5, seed=7, min_tokens=2)
    return s["a"]


def test_options_go_out_under_the_servers_names(server: Server) -> None:
    server.answers["/generate"] = lambda body: answer("fine")
    state = ask.run(backend=bl.Runtime(server.url, model="m"))
    assert state.ret_value == "fine"
    assert state.get_meta_info("a")["cached_tokens"] == 1
    params = {"max_new_tokens": 8, "stop": ["x"], "temperature": 0.5, "sampling_seed": 7, "min_new_tokens": 2}
    assert server.seen == [("POST", "/generate", {"text": "Q", "sampling_params": params, "model": "m"})]


def test_a_stream_of_cumulative_texts_becomes_pieces(server: Server) -> None:
    texts = ["fi", "fine", "fine ✓"]
    server.answers["/generate"] = lambda body: [*(event(answer(text)) for text in texts), event("[DONE]")]
    state = ask.run(backend=bl.Runtime(server.url), stream=True)
    assert list(state.text_iter("a")) == ["fi", "ne", " ✓"]
    assert state["a"] == "fine ✓"


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([event(answer("fi"))], "ended before the answer did"),
        ([event(answer("fi")), event({"error": {"message": "worker died"}})], "worker died"),
        ([event(answer("fi")), b"data: {not json\n\n"], "the stream broke"),
        ([event("[DONE]")], "without an answer"),
    ],
)
def test_a_stream_that_lies_is_an_error(server: Server, events: list[bytes], message: str) -> None:
    server.answers["/generate"] = lambda body: events
    with pytest.raises(bl.ProgramError, match=message):
        list(ask.run(backend=bl.Runtime(server.url), stream=True).text_iter("a"))


def test_a_refusal_carries_the_servers_words_and_status(server: Server) -> None:
    refusal = {"error": {"message": "`temperature` is 9; give at most 2", "type": "invalid_request_error"}}
    server.answers["/generate"] = lambda body: web.json_response(refusal, status=400)
    with pytest.raises(bl.ProgramError, match="`temperature` is 9") as raised:
        ask.run(backend=bl.Runtime(server.url))
    assert isinstance(raised.value.cause, bl.BackendError)
    assert raised.value.cause.status == 400
    assert len(server.seen) == 1


def test_a_busy_server_is_asked_again_when_it_says(server: Server) -> None:
    busy = [True]

    def once(body: Any) -> Any:
        return web.Response(status=503, headers={"retry-after": "0"}) if busy and busy.pop() else answer("fine")

    server.answers["/generate"] = once
    assert ask.run(backend=bl.Runtime(server.url)).ret_value == "fine"


def test_nobody_at_the_address_is_an_error_that_names_it() -> None:
    @bl.function
    def once(s: bl.State) -> None:
        s += bl.gen("a", retries=0)

    with pytest.raises(bl.ProgramError, match=r"http://127\.0\.0\.1:9\b"):
        once.run(backend=bl.Runtime("http://127.0.0.1:9/"))


@bl.function
def tree(s: bl.State) -> Any:
    s += "root"
    forks = s.fork(2)
    forks += bl.gen("a")
    forks.join()
    return s["a"]


def test_a_fork_holds_its_prefix_and_lets_it_go(server: Server) -> None:
    server.answers["/generate"] = lambda body: answer("v")
    server.answers["/v1/leases"] = lambda body: {"id": "lease-1", "tokens": 16, "ttl_ms": 60000}
    assert tree.run(backend=bl.Runtime(server.url)).ret_value == ["v", "v"]
    first, *calls, last = server.seen
    assert first == ("POST", "/v1/leases", {"prompt": "root", "ttl_ms": 60000})
    assert [body["lease"] for _, _, body in calls] == [{"id": "lease-1"}] * 2
    assert last == ("DELETE", "/v1/leases/lease-1", None)


def test_all_calls_of_a_run_are_of_one_session_and_of_no_other_runs(server: Server) -> None:
    server.answers["/generate"] = lambda body: answer("v")
    server.answers["/v1/leases"] = lambda body: {"id": "lease-1", "tokens": 16, "ttl_ms": 60000}
    sessions = []
    for _ in range(2):
        server.headers.clear()
        tree.run(backend=bl.Runtime(server.url))
        calls = [headers for headers in server.headers if "x-branchline-program" in headers]
        assert len(calls) == 3
        assert calls[1]["x-branchline-fork-width"] == "2"
        sessions.append({headers["x-branchline-session"] for headers in calls})
    assert [len(found) for found in sessions] == [1, 1]
    assert sessions[0] != sessions[1]


@pytest.mark.parametrize("status", [404, 429, 501])
def test_branches_run_without_a_lease_where_none_is_granted(server: Server, status: int) -> None:
    server.answers["/generate"] = lambda body: answer("v")
    server.answers["/v1/leases"] = lambda body: web.json_response({"error": {"message": "no"}}, status=status)
    assert tree.run(backend=bl.Runtime(server.url)).ret_value == ["v", "v"]
    assert all("lease" not in body for method, path, body in server.seen if path == "/generate")


def chatml(messages: list[dict[str, str]], generation: bool) -> str:
    head = "" if messages[0]["role"] == "system" else "<|im_start|>system\nBe good<|im_end|>\n"
    body = "".join(f"<|im_start|>{item['role']}\n{item['content']}<|im_end|>\n" for item in messages)
    return head + body + ("<|im_start|>assistant\n" if generation else "")


def test_roles_are_written_as_the_models_own_template_does(server: Server) -> None:
    rendered: list[str] = []

    def tokenize(body: Any) -> Any:
        rendered.append(chatml(body["messages"], body["add_generation_prompt"]))
        return {"tokens": [len(rendered) - 1]}

    server.answers["/v1/tokenize"] = tokenize
    server.answers["/v1/detokenize"] = lambda body: {"text": rendered[body["tokens"][0]]}
    server.answers["/generate"] = lambda body: answer("fine")

    @bl.function
    def chat(s: bl.State, system: str | None) -> None:
        if system:
            s += bl.system(system)
        s += bl.user("Q1") + bl.assistant(bl.gen("a")) + bl.user("Q2") + bl.assistant(bl.gen("b"))

    backend = bl.Runtime(server.url)
    for system in (None, "S"):
        server.seen.clear()
        chat.run(system=system, backend=backend)
        first: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        one = [*first, {"role": "user", "content": "Q1"}]
        two = [*one, {"role": "assistant", "content": "fine"}, {"role": "user", "content": "Q2"}]
        sent = [body["text"] for _, path, body in server.seen if path == "/generate"]
        assert sent == [chatml(one, True), chatml(two, True)]


def gemma(messages: list[dict[str, str]], generation: bool) -> str:
    names = {"user": "user", "assistant": "model"}
    body = "".join(f"<turn>{names[item['role']]}\n{item['content']}<end>\n" for item in messages)
    return "<bos>" + body + ("<turn>model\n" if generation else "")


@bl.function
def two_turns(s: bl.State, first: str | None = None) -> Any:
    if first is not None:
        s += bl.system(first)
    s += bl.user("Q1") + bl.assistant(bl.gen("a", stop="x")) + bl.user("Q2") + bl.assistant(bl.gen("b"))
    return s.text()


def test_a_template_without_a_system_role_writes_the_others_and_names_the_one_it_lacks(server: Server) -> None:
    rendered: list[str] = []

    def tokenize(body: Any) -> Any:
        if body["messages"][0]["role"] == "system":
            return web.json_response({"error": {"message": "System role not supported"}}, status=400)
        rendered.append(gemma(body["messages"], body["add_generation_prompt"]))
        return {"tokens": [len(rendered) - 1]}

    server.answers["/v1/tokenize"] = tokenize
    server.answers["/v1/detokenize"] = lambda body: {"text": rendered[body["tokens"][0]]}
    server.answers["/generate"] = lambda body: answer("fine")
    backend = bl.Runtime(server.url)
    two_turns.run(backend=backend)
    one = {"role": "user", "content": "Q1"}
    two = [one, {"role": "assistant", "content": "fine"}, {"role": "user", "content": "Q2"}]
    sent = [body["text"] for _, path, body in server.seen if path == "/generate"]
    assert sent == [gemma([one], True), gemma(two, True)]
    with pytest.raises(bl.ProgramError, match="no role 'system'"):
        two_turns.run(first="S", backend=backend)


def test_a_chat_template_by_name_writes_roles_and_ends_answers_without_asking_the_server(server: Server) -> None:
    server.answers["/generate"] = lambda body: answer("fine")
    state = two_turns.run(first="S", backend=bl.Runtime(server.url, chat_template="llama-2-chat"))
    wanted = "[INST] <<SYS>>\nS\n<</SYS>>\n\nQ1 [/INST]fine </s><s>[INST] Q2 [/INST]fine </s><s>"
    assert state.ret_value == wanted
    assert [path for _, path, _ in server.seen] == ["/generate"] * 2
    stops = [body["sampling_params"]["stop"] for _, _, body in server.seen]
    assert stops == [["x", "[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"], ["[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"]]


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_every_named_template_writes_a_conversation_that_holds_its_contents_in_order(name: str) -> None:
    template = bl.get_chat_template(name)
    system = "S" if "system" in template.begin else None
    state = two_turns.run(first=system, backend=bl.Mock(style=template))
    text = state.ret_value
    places = [text.index(part) for part in ((system or "Q1"), "Q1", "answer", "Q2")]
    assert places == sorted(places)
    assert text.endswith("answer" + template.end["assistant"])


def test_an_unknown_template_is_refused_with_those_there_are() -> None:
    with pytest.raises(bl.ArgumentError, match=r"chatml.*llama-3-instruct"):
        bl.Runtime("http://127.0.0.1:9", chat_template="llama-9")
