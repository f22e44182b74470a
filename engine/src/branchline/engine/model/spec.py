"""ModelSpec: everything about a checkpoint that is not a weight, read once and frozen.

Owned by the model package; executors build from it and the service answers from it. It must not import
torch: anything that only wants to know a context length or an end id reads this file's types.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies differ from theta^(-2i/d).

    `kind` is `linear` (all divided by `factor`), `llama3` (low frequencies divided, high ones kept, smooth
    in between) or `factors` (each divided by its own number, as GGUF's rope_freqs.weight stores it).
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling options that the checkpoint's generation_config proposes; None where it is silent."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What a gateway needs to speak the model's tokens. `json` is a whole tokenizer.json."""

    json: bytes
    chat_template: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None


@dataclass(frozen=True, slots=True)
class Experts:
    """A layer's MLP as a choice of `chosen` out of `count` smaller ones of `intermediate` each.

    A router's softmax weighs them; `normalise` makes the chosen ones' weights sum to 1. The layers in `dense` have one
    MLP of the model's own `intermediate` instead.
    """

    count: int
    chosen: int
    intermediate: int
    normalise: bool
    dense: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shape and constants of one decoder-only model with RMSNorm, rotary positions and a gated MLP.

    `sliding_window` is the number of last positions a token may attend to (itself included), None for all.
    `qkv_bias` and `output_bias` say whether attention projections carry biases; `qk_norm` whether each
    query and key head is normalised before rotation. `eos_ids` is the union over every file that names one.
    `fallback` marks an architecture without a family of ours: sizes are approximate, only `transformers` runs it.
    """

    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    tied_head: bool = False
    sliding_window: int | None = None
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    tokenizer: TokenizerFiles = TokenizerFiles(b"")
    sampling: SamplingDefaults = SamplingDefaults()
    fallback: bool = False
    experts: Experts | None = None

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.kv_heads * self.head_dim

    def parameters(self) -> int:
        """Number of weights, biases and norms of attention left out (they are under 0.1 %)."""
        attention = self.hidden * (2 * self.query_size + 2 * self.kv_size)
        mlps = self.layers * 3 * self.hidden * self.intermediate
        if self.experts is not None:
            sparse = self.layers - len(self.experts.dense)
            each = 3 * self.hidden * self.experts.intermediate + self.hidden
            mlps = len(self.experts.dense) * 3 * self.hidden * self.intermediate + sparse * self.experts.count * each
        head = 0 if self.tied_head else self.vocab_size * self.hidden
        return self.layers * attention + mlps + self.vocab_size * self.hidden + head

    def page_bytes(self, page_size: int, element_bytes: int) -> int:
        """Bytes of keys and values that one page takes over all layers."""
        return 2 * self.layers * page_size * self.kv_size * element_bytes
