"""Two prefill and two decode engines behind one gateway: answers are one engine's, and a dead half costs no request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from .stack import Engine, Gateway, Stack, metric, wait_until
from .test_cases_logprobs_cache import ids_of
from .tiny import TinyModels

PAGES = ("--max-total-tokens", "8192")
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
