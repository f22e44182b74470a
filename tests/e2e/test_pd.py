"""Two prefill and two decode engines behind one gateway: answers are one engine's, and a dead half costs no request."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from .stack import MODEL, Engine, Gateway, Stack, metric, wait_until
from .test_cases_logprobs_cache import ids_of
from .tiny import TinyModels

PAGES = ("--max-total-tokens", "8192", "--kv-transfer-timeout", "5")
WAYS = "branchline_router_pd_requests_total"
PROMPT = ids_of(41, 300)
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "with a seed": {"temperature": 1.0, "sampling_seed": 11},
    "with penalties": {"temperature": 1.0, "sampling_seed": 5, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
    "two of them": {"temperature": 1.0, "sampling_seed": 9, "n": 2},
}


class Split(Stack):
    """Engines by role: `prefill` and `decode` hold theirs, and `engines` all of them."""

    def __init__(self, model: str, prefill: int = 2, decode: int = 2, *flags: str) -> None:
        self.engines, self.gateway = [], None
        try:
            self.prefill = [self.start("prefill", model, *flags) for _ in range(prefill)]
            self.decode = [self.start("decode", model, *flags) for _ in range(decode)]
            workers = [f"grpc://{engine.address}" for engine in self.engines]
            self.gateway = Gateway("--pd-bypass-tokens", "32", workers=workers)
            self.gateway.wait_ready()
            wait_until(lambda: self.client.get("/health").json()["workers_ready"] == len(workers), 60, "all ready")
        except BaseException:
            self.close()
            raise

    def start(self, role: str, model: str, *flags: str) -> Engine:
        engine = Engine("--role", role, "--threads", "1", *PAGES, *flags, model=model)
        self.engines.append(engine)
        return engine

    def info(self, engine: Engine) -> dict[str, Any]:
        """What a worker says of itself."""
        workers = self.client.get("/server_info").json()["workers"]
        return next(worker for worker in workers if worker["url"] == f"grpc://{engine.address}")

    def ways(self) -> dict[str, int]:
        """Requests by how they were served."""
        names = ("pair", "bypass", "decode_only")
        return {name: int(metric(self.client, WAYS, way=name) or 0) for name in names}

    def assert_nothing_held(self) -> None:
        """Every live engine is idle and holds no page for anybody."""

        def held(engine: Engine) -> bool:
            told = self.info(engine)
            cache, load = told["cache"], told["load"]
            return bool(cache["pages_protected"] or cache["pages_private"] or load["running"] or load["waiting"])

        live = [engine for engine in self.engines if engine.process.child.poll() is None]
        wait_until(lambda: not any(held(engine) for engine in live), 20, "no page held")


@pytest.fixture(scope="module")
def split(tiny: TinyModels) -> Iterator[Split]:
    running = Split(str(tiny.llama("plain")))
    yield running
    running.close()


@pytest.fixture(scope="module")
def alone(tiny: TinyModels) -> Iterator[Stack]:
    running = Stack("--threads", "1", *PAGES, model=str(tiny.llama("plain")))
    yield running
    running.close()


def told(answer: Any) -> Any:
    """What must be equal of an answer: ids, text, logprobs and how it ended."""
    if isinstance(answer, list):
        return [told(one) for one in answer]
    meta = answer["meta_info"]
    return answer["output_ids"], answer["text"], meta["output_token_logprobs"], meta["finish_reason"]


@pytest.mark.parametrize("how", SAMPLING)
def test_a_pair_gives_the_ids_text_and_logprobs_of_one_engine(split: Split, alone: Stack, how: str) -> None:
    prompt = ids_of(500 + list(SAMPLING).index(how), 300)
    wanted = {"sampling_params": {"max_new_tokens": 24, "ignore_eos": True, **SAMPLING[how]}, "return_logprob": True}
    before = split.ways()["pair"]
    pair = split.generate(prompt, **wanted)
    assert told(pair) == told(alone.generate(prompt, **wanted))
    assert split.ways()["pair"] == before + 1
    first = pair[0] if isinstance(pair, list) else pair
    assert first["meta_info"]["cached_tokens"] == (len(prompt) - 1) // 16 * 16, "only the last page was computed"
    split.assert_nothing_held()


def test_a_short_prompt_and_one_that_is_cached_already_are_not_split(split: Split) -> None:
    before = split.ways()
    split.generate(ids_of(71, 20), sampling_params={"max_new_tokens": 4})
    assert split.ways()["bypass"] == before["bypass"] + 1
    long = ids_of(72, 200)
    for _ in range(3):  # at the latest once both decode workers have had it
        split.generate(long, sampling_params={"max_new_tokens": 4})
    after = split.ways()
    assert after["pair"] > before["pair"] and after["bypass"] > before["bypass"] + 1


def test_logprobs_of_the_prompt_are_those_of_one_engine(split: Split, alone: Stack) -> None:
    wanted = {"sampling_params": {"max_new_tokens": 3}, "return_logprob": True, "logprob_start_len": 0}
    pair, one = (stack.generate(ids_of(73, 200), **wanted) for stack in (split, alone))
    assert pair["meta_info"]["input_token_logprobs"] == one["meta_info"]["input_token_logprobs"]


def test_many_at_once_are_right_and_leave_no_page_held(split: Split, alone: Stack) -> None:
    """Twelve over three prefixes, with different ends, all at the same time."""
    prompts = [ids_of(80 + number % 3, 160) + ids_of(90 + number, 30) for number in range(12)]
    wanted = {"sampling_params": {"max_new_tokens": 12, "ignore_eos": True}}
    right = [alone.generate(prompt, **wanted)["output_ids"] for prompt in prompts]
    with ThreadPoolExecutor(12) as pool:
        got = list(pool.map(lambda prompt: split.generate(prompt, **wanted)["output_ids"], prompts))
    assert got == right
    split.assert_nothing_held()


def test_a_client_that_leaves_frees_both_halves(split: Split) -> None:
    body = {"model": "", "prompt": ids_of(61, 400), "max_tokens": 400, "ignore_eos": True}
    with split.stream("/v1/completions", body) as events:
        next(events)
    split.assert_nothing_held()


@pytest.fixture
def mortal(tiny: TinyModels) -> Iterator[Split]:
    """Its own engines: the tests kill them."""
    running = Split(str(tiny.llama("plain")))
    yield running
    running.close()


def load(stack: Split, url: str) -> int:
    """Requests that a worker has by the gateway's count."""
    workers = stack.client.get("/workers").json()["workers"]
    return int(next(worker["in_flight"] for worker in workers if worker["url"] == url))


def kill(engine: Engine) -> None:
    os.kill(engine.process.child.pid, signal.SIGKILL)
    engine.process.child.wait(10)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_that_was_killed_before_costs_no_request(mortal: Split, alone: Stack, role: str) -> None:
    kill(getattr(mortal, role)[0])
    wanted = {"sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
    for number in range(6):
        prompt = ids_of(100 + number, 200)
        assert mortal.generate(prompt, **wanted)["output_ids"] == alone.generate(prompt, **wanted)["output_ids"]
    mortal.assert_nothing_held()


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("phase", ["prompt", "output"])
def test_a_worker_that_is_killed_at_work_costs_no_request(mortal: Split, alone: Stack, role: str, phase: str) -> None:
    """While the prompt is computed and moved, or in the middle of the stream: the text is the uninterrupted one."""
    size, wanted = (1500, 120) if phase == "prompt" else (300, 1600)  # long where the blow must fall
    body = {"model": "", "prompt": ids_of(200, size), "max_tokens": wanted, "ignore_eos": True, "temperature": 0}
    right = alone.post("/v1/completions", body).json()["choices"][0]["text"]
    engines = getattr(mortal, role)
    victims: list[Engine] = []

    def strike() -> bool:
        """Kill whichever of the role has the request; all prefill workers, once it is decoded elsewhere."""
        done = phase == "output" and role == "prefill"
        for engine in engines:
            if done or load(mortal, f"grpc://{engine.address}"):
                kill(engine)
                victims.append(engine)
                if not done:
                    break
        return bool(victims)

    if phase == "prompt":
        striker = threading.Thread(target=lambda: wait_until(strike, 20, "the request has reached a worker"))
        striker.start()
    text = ""
    with mortal.stream("/v1/completions", body) as events:
        for number, event in enumerate(events):
            if event == "[DONE]":
                break
            told = json.loads(event)
            assert "error" not in told, told
            text += "".join(choice["text"] for choice in told["choices"])
            if phase == "output" and number == 3:
                assert strike(), "somebody decodes"
        else:
            pytest.fail("the stream ended without its end mark")
    if phase == "prompt":
        striker.join()
        assert victims
    assert text == right
    mortal.assert_nothing_held()


def test_without_prefill_workers_decode_workers_serve_alone_and_new_ones_are_taken_up(mortal: Split) -> None:
    for engine in mortal.prefill:
        kill(engine)
    answer = mortal.generate(ids_of(300, 200), sampling_params={"max_new_tokens": 4, "ignore_eos": True})
    assert len(answer["output_ids"]) == 4
    assert mortal.client.get("/readiness").status_code == 200
    for engine in mortal.decode:
        kill(engine)
    wait_until(lambda: mortal.client.get("/readiness").status_code == 503, 20, "not ready")


@pytest.mark.model
@pytest.mark.slow
def test_the_real_model_answers_through_a_pair_as_alone(stacks: Any) -> None:
    split = Split(MODEL, 1, 1)
    try:
        body = {
            "model": "", "max_tokens": 24, "temperature": 0, "logprobs": True, "top_logprobs": 3,
            "messages": [{"role": "user", "content": "Count the words of this: " + "one two three four five " * 30}],
        }  # fmt: skip
        pair = split.post("/v1/chat/completions", body).json()
        assert split.ways()["pair"] == 1
        alone = stacks().post("/v1/chat/completions", body).json()
        assert pair["choices"] == alone["choices"]
        assert pair["usage"]["completion_tokens"] == alone["usage"]["completion_tokens"]
        split.assert_nothing_held()
    finally:
        split.close()
