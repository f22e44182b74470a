"""What an encoder's folder asks for and can't have is refused by name before anything is computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from branchline.engine.encoder import is_encoder, load_encoder
from branchline.engine.errors import LoadError
from encoders import bert, change, classifier, network, pooled, roberta, save
from safetensors.numpy import load_file, save_file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path, bert())


def test_a_folder_without_settings_is_pooled_by_the_mean(folder: Path) -> None:
    spec = load_encoder(folder).spec
    assert (spec.pooling.modes, spec.pooling.normalise, spec.context_length) == (("mean",), False, 40)


def test_the_shorter_of_both_lengths_holds(folder: Path) -> None:
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 12}')
    assert load_encoder(folder).spec.context_length == 12
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 512}')
    assert load_encoder(folder).spec.context_length == 40


def test_positions_that_padding_takes_are_no_room(tmp_path: Path) -> None:
    spec = load_encoder(save(tmp_path, roberta())).spec
    assert (spec.first_position, spec.context_length) == (2, 38)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"hidden_act": "mish"}, "mish"),
        ({"num_attention_heads": 5}, "multiple"),
        ({"hidden_size": "many"}, "hidden_size"),
        ({"hidden_size": 16}, "word_embeddings"),
        ({"num_hidden_layers": 3}, "layer.2"),
        ({"vocab_size": 10_000}, "word_embeddings"),
    ],
)
def test_settings_that_do_not_fit_are_named(folder: Path, settings: dict[str, Any], word: str) -> None:
    change(folder, **settings)
    with pytest.raises(LoadError, match=word):
        network(folder)


def test_unknown_modules_and_poolings_are_named(folder: Path) -> None:
    pooled(folder, "pooling_mode_magic")
    with pytest.raises(LoadError, match="magic"):
        load_encoder(folder)
    pooled(folder)
    with pytest.raises(LoadError, match="no pooling"):
        load_encoder(folder)
    (folder / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Dense"}]))
    with pytest.raises(LoadError, match="Dense"):
        load_encoder(folder)
    (folder / "modules.json").write_text("{}")
    with pytest.raises(LoadError, match="array"):
        load_encoder(folder)


def test_classifiers_of_several_labels_and_strange_activations_are_named(tmp_path: Path) -> None:
    save(tmp_path, classifier("bert", labels=3))
    with pytest.raises(LoadError, match="3 labels"):
        load_encoder(tmp_path)
    save(tmp_path, classifier("bert"), sentence_transformers={"activation_fn": "torch.nn.modules.activation.Tanh"})
    with pytest.raises(LoadError, match="Tanh"):
        load_encoder(tmp_path)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["encoder.layer.1.output.dense.bias"]
    save_file(tensors, file)
    with pytest.raises(LoadError, match=r"layer\.1\.output\.dense\.bias"):
        network(folder)


def test_only_folders_of_known_architectures_are_encoders(folder: Path, tmp_path: Path) -> None:
    assert is_encoder(folder)
    change(folder, architectures=["LlamaForCausalLM"])
    assert not is_encoder(folder)
    assert not is_encoder(folder / "config.json")
    (folder / "config.json").write_text("{")
    assert not is_encoder(folder)
    assert not is_encoder(tmp_path / "absent")
