"""The options of `branchline bench`: one frozen table, checked before the first request."""

from __future__ import annotations

from dataclasses import dataclass

from branchline.engine.options import option

SCENARIOS = ("throughput", "shared-prefix", "multi-turn", "fork", "json")


def _env(name: str) -> str:
    return f"BRANCHLINE_BENCH_{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """What to send where. Lengths are in the server's tokens, reached by a calibrating request."""

    scenario: str = option(
        "throughput", "what is measured", section="bench", positional=True, choices=SCENARIOS, env=_env("SCENARIO")
    )
    url: str = option("http://127.0.0.1:8080", "server, without /v1", section="bench", env=_env("URL"))
    model: str | None = option(
        None, "model name in requests (default: the first that /v1/models lists)", section="bench", env=_env("MODEL")
    )
    api_key: str | None = option(None, "key sent as bearer token", section="bench", secret=True, env=_env("API_KEY"))
    requests: int = option(64, "requests, conversations or forks", section="bench", minimum=1, env=_env("REQUESTS"))
    concurrency: int = option(
        8, "requests, conversations or forks at once", section="bench", minimum=1, env=_env("CONCURRENCY")
    )
    rate: float = option(
        0.0, "starts a second, at random intervals; 0: as fast as concurrency allows", section="bench", minimum=0.0,
        env=_env("RATE"),
    )  # fmt: skip
    input_tokens: int = option(
        256, "tokens of a prompt's own part", section="bench", minimum=1, env=_env("INPUT_TOKENS")
    )
    output_tokens: int = option(64, "tokens to generate", section="bench", minimum=1, env=_env("OUTPUT_TOKENS"))
    shared_tokens: int = option(
        1024, "tokens of a shared prefix (shared-prefix, fork)", section="bench", minimum=1, env=_env("SHARED_TOKENS")
    )
    groups: int = option(4, "different shared prefixes", section="bench", minimum=1, env=_env("GROUPS"))
    turns: int = option(4, "turns of a conversation", section="bench", minimum=1, env=_env("TURNS"))
    branches: int = option(8, "continuations of one fork", section="bench", minimum=1, env=_env("BRANCHES"))
    warmup: int = option(2, "requests before the clock starts", section="bench", minimum=0, env=_env("WARMUP"))
    seed: int = option(1, "seed of prompts and intervals", section="bench", minimum=0, env=_env("SEED"))
    timeout: float = option(
        600.0, "seconds after which a request has failed", section="bench", minimum=0.001, env=_env("TIMEOUT")
    )
    ignore_eos: bool = option(
        True, "ask for exactly output-tokens; off for servers that refuse the field", section="bench",
        env=_env("IGNORE_EOS"),
    )  # fmt: skip
    out: str | None = option(None, "file for figures and every request as JSON", section="bench", env=_env("OUT"))
    plot: str | None = option(
        None, "picture to write, .svg or .png; needs branchline[bench]", section="bench", env=_env("PLOT")
    )
