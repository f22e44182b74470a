"""Drives the native executor without a scheduler, and builds tiny models of any weight format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from branchline.engine.executor.native import NativeExecutor, build_executor
from branchline.engine.model.source import LoadedModel, StoredTensor
from branchline.engine.model.spec import ModelSpec
from branchline.engine.types import ForwardBatch, RowPlan, SamplingParams
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from recast import Recast

F32 = npt.NDArray[np.float32]
GREEDY = SamplingParams(temperature=0.0)
ISAS = ("portable", "avx2", "avx512")


@dataclass(slots=True)
class Line:
    """One sequence: its pages, how many tokens are in them, and the ids chosen for it."""

    pages: list[int]
    length: int = 0
    ids: list[int] = field(default_factory=list)


Work = Sequence[tuple[Line, Sequence[int]]]


def batch_of(page_size: int, work: Work, every_row: bool = False) -> ForwardBatch:
    """A step that appends the given tokens to each line; asks for logits of the last or of every token."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    rows: list[int] = []
    for line, new in work:
        for token in new:
            tokens.append(token)
            positions.append(line.length)
            slots.append(line.pages[line.length // page_size] * page_size + line.length % page_size)
            line.length += 1
        rows.extend(range(len(tokens) - len(new), len(tokens)) if every_row else [len(tokens) - 1])
    return ForwardBatch(
        np.array(tokens, np.int32),
        np.array(positions, np.int32),
        np.array(slots, np.int64),
        np.array([len(new) for _, new in work], np.int32),
        np.array([line.length for line, _ in work], np.int32),
        [line.pages for line, _ in work],
        np.array(rows, np.int64),
    )


def logits_of(executor: NativeExecutor, work: Work, every_row: bool = False) -> F32:
    """Logits of one step, [rows, vocab]."""
    executor.run(batch_of(executor.page_size, work, every_row))
    return np.frombuffer(executor.model.logits(), np.float32).reshape(-1, executor.vocab_size)


def continue_greedily(
    executor: NativeExecutor, lines: Sequence[Line], prompts: Sequence[Sequence[int]], count: int
) -> None:
    """Append `count` greedy ids to each line's `ids`, all lines in one batch a step."""
    pending: list[Sequence[int]] = list(prompts)
    for _ in range(count):
        logits = executor.run(batch_of(executor.page_size, list(zip(lines, pending, strict=True))))
        answers = executor.sample(logits, [RowPlan(row, GREEDY) for row in range(len(lines))])
        for line, answer in zip(lines, answers, strict=True):
            assert answer.error is None
            line.ids.append(answer.token_id)
        pending = [[answer.token_id] for answer in answers]


def stored(values: F32, type_name: str) -> StoredTensor:
    """The values in a GGUF format. K formats, which the gguf package cannot write, get random valid blocks."""
    if type_name in ("Q4_K", "Q6_K"):
        return StoredTensor(type_name, values.shape, _random_blocks(values.shape, type_name))
    return StoredTensor(type_name, values.shape, quantize(values, GGMLQuantizationType[type_name]).tobytes())


def _random_blocks(shape: tuple[int, ...], type_name: str) -> bytes:
    chance = np.random.default_rng(shape[0] + shape[1])
    size = 144 if type_name == "Q4_K" else 210
    blocks = chance.integers(0, 256, (shape[0] * shape[1] // 256, size), dtype=np.uint8)
    scale = np.float16(chance.uniform(1e-4, 3e-4, len(blocks))).view(np.uint8).reshape(-1, 2)
    if type_name == "Q4_K":
        blocks[:, 0:2] = scale
        blocks[:, 2:4] = np.float16(chance.uniform(1e-3, 2e-3, len(blocks))).view(np.uint8).reshape(-1, 2)
    else:
        blocks[:, 208:210] = np.float16(chance.uniform(1e-5, 2e-5, len(blocks))).view(np.uint8).reshape(-1, 2)
    return blocks.tobytes()


def values_of(tensor: StoredTensor) -> F32:
    """What the stored bytes mean, according to the gguf package."""
    kind = GGMLQuantizationType[tensor.type_name]
    raw = np.frombuffer(tensor.data, np.uint8).reshape(tensor.shape[0], -1)
    result: F32 = dequantize(raw, kind).reshape(tensor.shape).astype(np.float32)
    return result


def tiny_spec(**changes: object) -> ModelSpec:
    """A two-layer Llama whose rows fit every format's blocks."""
    values: dict[str, object] = {
        "architecture": "LlamaForCausalLM", "hidden": 256, "layers": 2, "heads": 8, "kv_heads": 2, "head_dim": 32,
        "intermediate": 512, "vocab_size": 320, "context_length": 2048, "norm_eps": 1e-5, "rope_theta": 10000.0,
        "tied_head": True,
    }  # fmt: skip
    return ModelSpec(**{**values, **changes})  # type: ignore[arg-type]


def tiny_model(type_name: str, spec: ModelSpec | None = None, seed: int = 0) -> LoadedModel:
    """Random weights in one format; norms and biases are F32."""
    spec = spec or tiny_spec()
    chance = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (spec.vocab_size, spec.hidden), "model.norm.weight": (spec.hidden,)}
    for layer in range(spec.layers):
        parts = {
            "self_attn.q_proj": (spec.query_size, spec.hidden),
            "self_attn.k_proj": (spec.kv_size, spec.hidden),
            "self_attn.v_proj": (spec.kv_size, spec.hidden),
            "self_attn.o_proj": (spec.hidden, spec.query_size),
            "mlp.gate_proj": (spec.intermediate, spec.hidden),
            "mlp.up_proj": (spec.intermediate, spec.hidden),
            "mlp.down_proj": (spec.hidden, spec.intermediate),
            "input_layernorm": (spec.hidden,),
            "post_attention_layernorm": (spec.hidden,),
        }
        shapes.update({f"model.layers.{layer}.{part}.weight": shape for part, shape in parts.items()})
    tensors = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            tensors[name] = stored((1 + 0.1 * chance.standard_normal(shape)).astype(np.float32), "F32")
        else:
            values = chance.standard_normal(shape).astype(np.float32) * (1.0 / shape[1] ** 0.5)
            tensors[name] = stored(values, type_name)
    return LoadedModel("tiny", Path("tiny"), spec, Recast(tensors), f"tiny-{type_name}-{seed}", type_name)  # type: ignore[arg-type]


def build(
    model: LoadedModel,
    *,
    dtype: str = "auto",
    pages: int = 256,
    page_size: int = 16,
    threads: int = 1,
    isa: str | None = None,
    weight_dtype: str = "auto",
) -> NativeExecutor:
    """An executor on the CPU."""
    return build_executor(
        model, device="cpu", dtype=dtype, num_pages=pages, page_size=page_size, threads=threads, isa=isa,
        weight_dtype=weight_dtype,
    )  # fmt: skip
