"""Guessing tokens, quantised weights, metrics and explained options, through the real command lines and sockets."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from .conftest import Starter
from .stack import MODEL, Engine, Stack, collect
from .test_cases_logprobs_cache import ids_of
from .test_same_output import assert_identical, mix, run

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]
NGRAM = ("--speculative-algorithm", "ngram")
DRAFT = ("--speculative-algorithm", "draft", "--speculative-draft-model", MODEL, "--max-total-tokens", "8192")


def copied(seed: int) -> list[int]:
    """A prompt that has said everything several times."""
    return ids_of(seed, 40) * 4 + ids_of(seed, 40)[:10]


def bodies() -> list[dict[str, Any]]:
    """Prompts that repeat themselves, greedy and sampled, beside the usual mix."""
    params = {"max_new_tokens": 48, "temperature": 0, "ignore_eos": True}
    made = [{"input_ids": copied(seed), "sampling_params": params} for seed in range(4)]
    sampled = {**params, "temperature": 0.7, "sampling_seed": 4, "frequency_penalty": 0.2}
    made += [{"input_ids": copied(seed), "sampling_params": sampled} for seed in range(4, 7)]
    return [{**body, "return_logprob": True, "top_logprobs_num": 2} for body in made] + mix(31, count=10)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [NGRAM, DRAFT], ids=["ngram", "draft"])
def test_answers_with_guesses_are_the_same_bits_alone_and_together(flags: tuple[str, ...], stacks: Starter) -> None:
    wanted = [run(stacks("--disable-radix-cache"), body) for body in bodies()]
    stack = stacks(*flags)
    for _ in range(2):  # the second time everything is cached, and known to follow
        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(lambda body: run(stack, body), bodies()))
        for one, other in zip(found, wanted, strict=True):
            assert_identical(one, other)
    stack.assert_idle(10)


def test_a_stream_with_guesses_says_the_same_as_the_whole_answer(stacks: Starter) -> None:
    stack = stacks(*NGRAM)
    body = {"model": "x", "prompt": copied(1), "max_tokens": 40, "temperature": 0, "logprobs": 1}
    body["model"] = stack.client.get("/v1/models").json()["data"][0]["id"]
    stack.post("/v1/completions", body)
    whole = stack.post("/v1/completions", body).json()["choices"][0]
    with stack.stream("/v1/completions", body) as data:
        pieces = collect(data)
    choices = [piece["choices"][0] for piece in pieces if piece["choices"]]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    parts = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [one for part in parts for one in part[name]] == whole["logprobs"][name], name


def test_a_stop_string_and_a_token_limit_end_where_they_would(stacks: Starter) -> None:
    plain, guessing = stacks("--disable-radix-cache"), stacks(*NGRAM)
    text = plain.generate(copied(2), sampling_params={"max_new_tokens": 40, "ignore_eos": True})["text"]
    for stop in (text[5:9], text[17:20], text[30:36]):
        for _ in range(2):
            body = {"sampling_params": {"max_new_tokens": 40, "ignore_eos": True, "stop": stop}}
            one, other = plain.generate(copied(2), **body), guessing.generate(copied(2), **body)
            assert (one["text"], one["output_ids"]) == (other["text"], other["output_ids"])
            assert one["meta_info"]["finish_reason"] == other["meta_info"]["finish_reason"]
    for limit in (1, 2, 3, 7):
        answer = guessing.generate(copied(2), sampling_params={"max_new_tokens": limit, "ignore_eos": True})
        assert answer["meta_info"]["completion_tokens"] == limit


def test_clients_that_leave_among_guesses_leave_nothing_behind(stacks: Starter) -> None:
    stack = stacks(*NGRAM)
    for seed in range(6):
        body = {"input_ids": copied(seed), "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
        with stack.stream("/generate", body) as data:
            next(data)
    stack.assert_idle(20)


def series(port: int) -> dict[str, float]:
    """All samples of an engine's metrics."""
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0].removeprefix("branchline_engine_"): float(line.split()[-1]) for line in lines}


def port_of(engine: Engine) -> int:
    return int(json.loads(engine.process.wait_for_line('"event"'))["metrics_port"])


def test_an_engines_metrics_count_what_clients_got(stacks: Starter) -> None:
    stack = stacks(*NGRAM, "--metrics-port", "0")
    port = port_of(stack.engines[0])
    before = series(port)
    for _ in range(3):
        stack.generate(copied(9), sampling_params={"max_new_tokens": 32, "ignore_eos": True})
    after = series(port)

    def rise(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert rise("generation_tokens_total") == 96
    assert rise("prompt_tokens_total") == 3 * len(copied(9))
    assert rise("prefix_cache_hits_total") == 2 and rise("prefix_cache_queries_total") == 3
    assert rise('sequences_finished_total{reason="length"}') == 3
    assert rise("time_to_first_token_seconds_count") == rise("e2e_request_latency_seconds_count") == 3
    assert rise("inter_token_latency_seconds_count") == 93
    assert rise("spec_decode_accepted_tokens_total") <= rise("spec_decode_draft_tokens_total")
    assert rise("spec_decode_accepted_tokens_total") > 0, "the same prompt again is guessed from the tree"
    assert after["num_requests_running"] == 0 and 0 <= after["kv_cache_usage_ratio"] <= 1


def refused(*arguments: str) -> str:
    """What the command says when it refuses to start."""
    done = subprocess.run(
        [sys.executable, "-m", "branchline.cli", *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2, (done.returncode, done.stderr)
    return done.stderr


@pytest.mark.parametrize(
    "flags,words",
    [
        (("--speculative-algorithm", "ngrm"), "did you mean 'ngram'"),
        (("--speculative-algorithm", "draft"), "name the second model"),
        (("--speculative-draft-model", "x"), "needs speculative-algorithm"),
        ((*NGRAM, "--speculative-num-draft-tokens", "0"), "between 1 and 128"),
        ((*NGRAM, "--speculative-draft-model", "x"), "leave it out"),
        (("--quantization", "nope"), "registered: 'awq', 'fp8', 'gguf', 'gptq', 'int8_dynamic', 'int8_weight_only'"),
        (("--quantization", "gptq"), "does not fit the checkpoint, which is quantised with 'gguf'"),
        (("--quantization", "fp8", "--executor", "native"), "use --executor torch"),
        (("--metrics-port", "70000"), "between 0 and 65535"),
    ],
)
def test_options_that_can_not_hold_are_refused_with_what_to_do(flags: tuple[str, ...], words: str) -> None:
    assert words in refused("engine", MODEL, *flags)


def test_a_draft_model_that_is_not_there_is_told_before_serving() -> None:
    flags = ("--speculative-algorithm", "draft", "--speculative-draft-model", "/nowhere/at-all")
    assert "/nowhere/at-all" in refused("engine", MODEL, *flags)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [("int8_dynamic",), ("int8_weight_only", "--executor", "torch")], ids=["int8_dynamic", "int8_weight_only"]
)
def test_quantised_weights_serve_and_are_named_in_the_servers_info(flags: tuple[str, ...], stacks: Starter) -> None:
    stack: Stack = stacks("--quantization", *flags)
    answer = stack.generate("The capital of France is", sampling_params={"max_new_tokens": 4})
    assert "Paris" in answer["text"]
    info = json.dumps(stack.client.get("/server_info").json())
    assert f"quantization_methods={flags[0]}" in info


def test_explain_config_names_flag_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRANCHLINE_MAX_STEP_TOKENS", "256")
    command = [sys.executable, "-m", "branchline.cli", "explain-config", MODEL, "--page-size", "32"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert re.search(r"page-size = 32 +from flag --page-size", done.stdout)
    assert re.search(r"max-step-tokens = 256 +from environment BRANCHLINE_MAX_STEP_TOKENS", done.stdout)


PLUGIN = '''
from branchline import registry


@registry.speculative_algorithms.register("parrot", api_version=1)
class Parrot:
    """Guesses that the last token comes again."""

    api_version = 1
    free = True
    wants_hidden = False

    def __init__(self, context):
        self.context = context

    @staticmethod
    def option_faults(options):
        return ["parrot guesses one token: give 1"] if options.max_draft_tokens > 1 else []

    def propose(self, asked):
        from branchline.engine.speculative import Proposal

        return [Proposal([ask.sequence.tokens[-1]] * ask.limit, "parrot") for ask in asked]

    def accepted(self, sequence, hidden):
        pass

    def end(self, sequence, finished):
        pass

    def close(self):
        pass


@registry.model_overrides.register("smaller", api_version=1)
class Smaller:
    """SmolLM's size gets smaller pages."""

    api_version = 1
    architectures = ("LlamaForCausalLM",)

    def applies(self, facts):
        return facts.parameters < 200_000_000

    def options(self, facts):
        return {"page_size": 8}
'''


def test_a_plugins_algorithm_and_override_are_used_by_a_started_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "parrot_plugin.py").write_text(PLUGIN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    flags = ("--plugin", "parrot_plugin", "--speculative-algorithm", "parrot")
    assert "parrot guesses one token" in refused("engine", MODEL, *flags)
    stack = Stack(*flags, "--speculative-num-draft-tokens", "1")
    try:
        info = stack.client.get("/server_info").json()["workers"][0]
        assert "speculative_algorithms=parrot" in json.dumps(info)
        assert re.search(r"page_size\W+8\b", json.dumps(info))
        answer = stack.generate([504] * 12, sampling_params={"max_new_tokens": 12, "ignore_eos": True})
        assert answer["meta_info"]["completion_tokens"] == 12
    finally:
        stack.close()
