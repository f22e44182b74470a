"""The interface that EAGLE-style heads fit: the states that chose each token reach the algorithm, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from branchline.engine.cache import CacheContext, build_cache
from branchline.engine.config import SpeculativeOptions
from branchline.engine.executor.pytorch import TorchExecutor, build_executor
from branchline.engine.loop import EngineLoop, LoopOptions
from branchline.engine.model.load import load_model
from branchline.engine.speculative import Ask, Drafted, Drafter, Proposal
from branchline.engine.types import Delta, Request, SamplingParams
from harness import vocabulary
from random_families import TOKENIZER
from transformers import LlamaConfig, LlamaForCausalLM

SPEC = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchExecutor]:
    torch.manual_seed(0)
    folder: Path = tmp_path_factory.mktemp("head")
    LlamaForCausalLM(LlamaConfig(**SPEC)).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(TOKENIZER)
    made = build_executor(
        load_model(str(folder)), device="cpu", dtype="float32", num_pages=64, page_size=4, threads=1,
        attention_backend="torch_paged",
    )  # fmt: skip
    yield made
    made.close()


class Head:
    """Keeps the states it is given, checks that they chose the tokens, and guesses by a linear map of the last one."""

    api_version = 1
    free = True
    wants_hidden = True

    def __init__(self, head: torch.Tensor) -> None:
        self.head = head
        self.states: dict[int, list[torch.Tensor]] = {}
        self.guess: list[int] = []

    @staticmethod
    def option_faults(options: SpeculativeOptions) -> list[str]:
        return []

    def accepted(self, sequence: Drafted, hidden: object) -> None:
        assert isinstance(hidden, torch.Tensor)
        chosen = (hidden @ self.head.T).argmax(dim=1).tolist()
        assert chosen == sequence.tokens[-len(chosen) :], "these are not the states that chose the tokens"
        self.states.setdefault(sequence.number, []).append(hidden.clone())

    def propose(self, asked: list[Ask]) -> list[Proposal]:
        made = []
        for ask in asked:
            assert ask.sequence.number in self.states, "the prompt's last state comes before the first guess"
            grown = len(ask.sequence.tokens) - ask.sequence.prompt_len
            made.append(Proposal(self.guess[grown : grown + ask.limit], "head"))
        return made

    def end(self, sequence: Drafted, finished: bool) -> None: ...

    def close(self) -> None: ...


class Eager(Drafter):
    """Checks whatever it is given."""

    def measured(self, tokens: int, ms: float) -> None:
        super().measured(tokens, 1.0)


def run(executor: TorchExecutor, drafter: Drafter | None) -> list[int]:
    loop = EngineLoop(
        executor, build_cache("native", CacheContext(64, 4)), vocabulary(), LoopOptions(), draw_seed=lambda: 1,
        drafter=drafter,
    )  # fmt: skip
    tokens: list[int] = []

    def sink(step: int, deltas: list[Delta]) -> None:
        for delta in deltas:
            assert delta.error is None, delta.error
            tokens.extend(delta.token_ids)

    loop.submit(Request("r", (5, 6, 7, 8), SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)), sink)
    while loop.busy:
        loop.step()
    return tokens


@pytest.mark.parametrize("wrong_from", [0, 3, 24])
def test_each_token_comes_with_the_state_that_chose_it(executor: TorchExecutor, wrong_from: int) -> None:
    plain = run(executor, None)
    weight = executor.decoder.weights.head
    assert isinstance(weight, torch.Tensor)
    head = Head(weight)
    head.guess = [token if at < wrong_from else (token + 1) % 96 for at, token in enumerate(plain)]
    drafter = Eager(head, SpeculativeOptions("head", 4))
    assert run(executor, drafter) == plain
    [states] = head.states.values()
    assert sum(map(len, states)) == 24
    assert (drafter.counts.accepted > 0) == (wrong_from > 0)
