"""The arithmetic of BERT and RoBERTa in numpy, float32: one text at a time.

A text never shares a matrix product with another, so what comes of it can't depend on its company. Attention is done
for blocks of queries, so that a long text takes bounded memory. Oracle: transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from branchline.engine.encoder.spec import EncoderModel
from branchline.engine.errors import LoadError
from branchline.engine.model.source import Progress, no_progress

Array = npt.NDArray[np.float32]
SCORES = 1 << 22  # attention scores held at once, all heads together


@dataclass(frozen=True, slots=True)
class _Linear:
    """y = x W + b, W laid (inputs, outputs)."""

    weight: Array
    bias: Array

    def __call__(self, x: Array) -> Array:
        product: Array = x @ self.weight
        product += self.bias
        return product


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: Array
    bias: Array
    eps: float

    def __call__(self, x: Array) -> Array:
        centred = x - x.mean(axis=-1, keepdims=True)
        spread = np.square(centred).mean(axis=-1, keepdims=True)
        result: Array = centred / np.sqrt(spread + np.float32(self.eps)) * self.weight + self.bias
        return result


@dataclass(frozen=True, slots=True)
class _Layer:
    joined: _Linear  # query, key and value side by side
    out: _Linear
    attended: _Norm
    up: _Linear
    down: _Linear
    fed: _Norm


class Network:
    """A loaded encoder. Its methods may be called from one thread at a time."""

    def __init__(self, model: EncoderModel, progress: Progress = no_progress) -> None:
        self.spec = model.spec
        self._read = _Reader(model)
        spec, read = self.spec, self._read
        self._words = read("embeddings.word_embeddings.weight", (spec.vocab_size, spec.hidden))
        positions = read("embeddings.position_embeddings.weight", (None, spec.hidden))
        self._positions = positions[spec.first_position :]
        self._types = read("embeddings.token_type_embeddings.weight", (spec.types, spec.hidden))
        self._norm = self._norm_at("embeddings.LayerNorm")
        self._layers: list[_Layer] = []
        for number in range(spec.layers):
            progress("reading weights", number, spec.layers)
            self._layers.append(self._layer(f"encoder.layer.{number}."))
        self._activate = _ACTIVATIONS[spec.activation]
        self._head = self._classifier() if spec.labels else None

    def hidden(self, ids: Sequence[int], types: Sequence[int] = ()) -> Array:
        """Last hidden states, shape (tokens, hidden). The ids are checked by the caller."""
        count = len(ids)
        x = self._words[np.asarray(ids)] + self._positions[:count]
        x += self._types[np.asarray(types)] if types else self._types[0]
        x = self._norm(x)
        for layer in self._layers:
            x = layer.attended(x + layer.out(self._attention(layer.joined(x))))
            x = layer.fed(x + layer.down(self._activate(layer.up(x))))
        return x

    def embed(self, ids: Sequence[int], types: Sequence[int] = (), dimensions: int | None = None) -> Array:
        """One vector, shape (dimensions or embedding_size,): pooled, cut and, if the model says so, of length 1."""
        states = self.hidden(ids, types)
        vector = np.concatenate([_POOLINGS[mode](states) for mode in self.spec.pooling.modes])[:dimensions]
        if self.spec.pooling.normalise:
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
        return vector.astype(np.float32)

    def rank(self, ids: Sequence[int], types: Sequence[int] = ()) -> Array:
        """The classifier's score of a pair, shape (1,)."""
        assert self._head is not None, "only a model with a classifier is asked to rank"
        first, last = self._head
        score: Array = last(np.tanh(first(self.hidden(ids, types)[:1])))[0]
        if self.spec.sigmoid:
            score = (1 / (1 + np.exp(-score.astype(np.float64)))).astype(np.float32)
        return score

    def _attention(self, joined: Array) -> Array:
        count, heads = len(joined), self.spec.heads
        wide = self.spec.hidden // heads
        query, key, value = joined.reshape(count, 3, heads, wide).transpose(1, 2, 0, 3)
        scale = np.float32(1 / np.sqrt(wide))
        turned = np.ascontiguousarray(key.transpose(0, 2, 1))
        mixed = np.empty((heads, count, wide), np.float32)
        rows = max(SCORES // (heads * count), 1)
        for begin in range(0, count, rows):
            block = slice(begin, begin + rows)
            scores = (query[:, block] * scale) @ turned
            scores -= scores.max(axis=-1, keepdims=True)
            np.exp(scores, out=scores)
            scores /= scores.sum(axis=-1, keepdims=True)
            mixed[:, block] = scores @ value
        return mixed.transpose(1, 0, 2).reshape(count, -1)

    def _layer(self, at: str) -> _Layer:
        hidden, inner = self.spec.hidden, self.spec.inner
        parts = [self._linear(f"{at}attention.self.{name}", hidden, hidden) for name in ("query", "key", "value")]
        joined = _Linear(
            np.concatenate([part.weight for part in parts], axis=1), np.concatenate([part.bias for part in parts])
        )
        return _Layer(
            joined=joined,
            out=self._linear(f"{at}attention.output.dense", hidden, hidden),
            attended=self._norm_at(f"{at}attention.output.LayerNorm"),
            up=self._linear(f"{at}intermediate.dense", hidden, inner),
            down=self._linear(f"{at}output.dense", inner, hidden),
            fed=self._norm_at(f"{at}output.LayerNorm"),
        )

    def _classifier(self) -> tuple[_Linear, _Linear]:
        hidden, labels = self.spec.hidden, self.spec.labels
        if self.spec.family == "bert":
            return self._linear("pooler.dense", hidden, hidden), self._linear("classifier", hidden, labels)
        return self._linear("classifier.dense", hidden, hidden), self._linear("classifier.out_proj", hidden, labels)

    def _linear(self, name: str, inputs: int, outputs: int) -> _Linear:
        weight = self._read(f"{name}.weight", (outputs, inputs))
        return _Linear(np.ascontiguousarray(weight.T), self._read(f"{name}.bias", (outputs,)))

    def _norm_at(self, name: str) -> _Norm:
        size = (self.spec.hidden,)
        return _Norm(self._read(f"{name}.weight", size), self._read(f"{name}.bias", size), self.spec.eps)


class _Reader:
    """Tensors in float32 by the names of a bare encoder, whatever prefix the file puts before them."""

    def __init__(self, model: EncoderModel) -> None:
        self._tensors = model.tensors
        self._names = model.tensors.names()

    def __call__(self, name: str, shape: tuple[int | None, ...]) -> Array:
        prefixed = [f"{prefix}.{name}" for prefix in ("bert", "roberta", "model")]
        found = next((one for one in (name, *prefixed) if one in self._names), name)
        values = self._tensors.raw(found)
        fits = len(values.shape) == len(shape) and all(
            wanted in (None, real) for wanted, real in zip(shape, values.shape, strict=True)
        )
        if not fits:
            wanted = ["any" if size is None else size for size in shape]
            raise LoadError(f"tensor {found} has shape {list(values.shape)}, {wanted} is needed", field="model")
        return values.astype(np.float32)


def _erf(x: Array) -> Array:
    """The error function within 1.5e-7: Abramowitz and Stegun, 7.1.26."""
    size = np.abs(x)
    t = 1 / (1 + np.float32(0.3275911) * size)
    steps = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
    total = np.zeros_like(t)
    for factor in steps:
        total = (total + np.float32(factor)) * t
    signed: Array = np.copysign(1 - total * np.exp(-size * size), x)
    return signed


def _gelu(x: Array) -> Array:
    return np.float32(0.5) * x * (1 + _erf(x * np.float32(np.sqrt(0.5))))


def _gelu_tanh(x: Array) -> Array:
    inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
    result: Array = np.float32(0.5) * x * (1 + np.tanh(inner))
    return result


def _silu(x: Array) -> Array:
    result: Array = x * (np.float32(0.5) * (1 + np.tanh(np.float32(0.5) * x)))
    return result


def _relu(x: Array) -> Array:
    return np.maximum(x, np.float32(0))


def _tanh(x: Array) -> Array:
    result: Array = np.tanh(x)
    return result


def _weighted(states: Array) -> Array:
    weights = np.arange(1, len(states) + 1, dtype=np.float32)
    result: Array = weights @ states / weights.sum()
    return result


_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": _gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "relu": _relu,
    "silu": _silu,
    "tanh": _tanh,
}
_POOLINGS: dict[str, Callable[[Array], Array]] = {
    "cls": lambda states: states[0],
    "mean": lambda states: states.mean(axis=0),
    "max": lambda states: states.max(axis=0),
    "mean_sqrt_len": lambda states: states.sum(axis=0) / np.float32(np.sqrt(len(states))),
    "weightedmean": _weighted,
    "lasttoken": lambda states: states[-1],
}
