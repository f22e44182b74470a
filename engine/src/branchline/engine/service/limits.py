"""What the service knows of the loaded model and promises on the wire. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from branchline.engine.types import SamplingParams

MEBIBYTE = 1 << 20
MAX_MESSAGE = 64 * MEBIBYTE
MAX_CHUNK = MEBIBYTE  # of snapshots, tokenizers and logprobs
CONTRACT_REVISION = 1

MAX_REQUEST_ID_BYTES = 128
MAX_SEQUENCES = 128
MAX_STOPS = 64
MAX_STOP_BYTES = 1024
MAX_STOP_IDS = 1024
MAX_TOP_LOGPROBS = 128
MAX_CHOSEN_LOGPROBS = 1024
MAX_KEY_BYTES = 4096
MAX_TENANT_BYTES = 128
MAX_TTL_MS = 86_400_000
MAX_PRIORITY = 100  # either way
MAX_GRAMMAR_BYTES = MEBIBYTE
MAX_MARK_BYTES = 64  # of reasoning


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What GetModelInfo and GetTokenizer answer from, and what requests are checked against."""

    model_path: str
    served_names: tuple[str, ...]
    architecture: str
    vocab_size: int
    context_length: int
    page_size: int
    dtype: str
    numerics_id: str
    weight_version: str
    max_request_tokens: int  # prompt plus output that the KV pool can hold
    executor: str
    output_promise: str = "seed"  # bitwise, near-ties or seed
    role: str = "both"  # prefill, decode or both
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    default_sampling: SamplingParams = field(default_factory=SamplingParams)
    tokenizer_json: bytes = b""
    chat_template: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    add_special_tokens: bool = True
    tasks: tuple[str, ...] = ("generate",)  # generate, embed, rank
    embedding_size: int | None = None
