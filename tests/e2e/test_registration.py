"""Workers come, go and come back over HTTP, before real engines and a real gateway process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .stack import Engine, Gateway, wait_until
from .test_cases_logprobs_cache import ids_of
from .tiny import TinyModels


@pytest.fixture
def engine(tiny: TinyModels) -> Iterator[Engine]:
    """One engine that no gateway knows yet."""
    engine = Engine(model=str(tiny.llama("plain")))
    yield engine
    engine.stop()


def url(engine: Engine) -> str:
    """Its address as a worker."""
    return f"grpc://{engine.address}"


def listed(gateway: Gateway) -> list[str]:
    """Addresses of the fleet."""
    found: list[str] = gateway.client.get("/list_workers").json()["urls"]
    return found


def ask(gateway: Gateway, **more: object) -> int:
    """Status of one short request."""
    body = {"input_ids": ids_of(3, 20), "sampling_params": {"max_new_tokens": 2}, **more}
    return gateway.client.post("/generate", json=body).status_code


def ready(gateway: Gateway) -> bool:
    """Whether the gateway would take a request."""
    return gateway.client.get("/health").status_code == 200


def test_registered_engine_survives_a_restart_of_the_gateway_and_its_removal_too(
    engine: Engine, tmp_path: Path
) -> None:
    state = str(tmp_path / "state.json")
    gateway = Gateway("--state-file", state, workers=[])
    wait_until(lambda: gateway.client.get("/liveness").status_code == 200, 10, "the port is open")
    added = gateway.client.post("/workers", json={"url": url(engine), "labels": {"zone": "a"}})
    assert (added.status_code, added.json()["status"]) == (202, "accepted")
    wait_until(lambda: ready(gateway), 20, "the engine is reached")
    assert ask(gateway) == 200
    shown = gateway.client.get(added.json()["location"]).json()
    assert (shown["runtime"], shown["status"], shown["labels"]) == ("branchline", "Ready", {"zone": "a"})
    assert gateway.stop() == 0

    gateway = Gateway("--state-file", state, workers=[])
    wait_until(lambda: ready(gateway), 20, "the engine is reached again")
    assert ask(gateway) == 200
    assert gateway.client.post("/remove_worker", params={"url": url(engine)}).status_code == 200
    assert gateway.stop() == 0

    gateway = Gateway("--state-file", state, workers=[url(engine)])
    wait_until(lambda: gateway.client.get("/liveness").status_code == 200, 10, "the port is open")
    assert listed(gateway) == [], "a worker that was removed stays away, also one of the command line"
    assert ask(gateway) == 503
    assert gateway.stop() == 0


def test_engine_is_found_by_its_bare_address_and_by_its_name(engine: Engine) -> None:
    port = engine.address.rsplit(":", 1)[1]
    for flags, workers in [((), [engine.address]), (("--worker-dns", f"grpc+dns://localhost:{port}"), [])]:
        gateway = Gateway(*flags, workers=workers)
        wait_until(lambda found=gateway: ready(found), 20, f"the engine is found by {flags or workers}")  # type: ignore[misc]
        assert ask(gateway) == 200
        assert all(address.startswith("grpc://") for address in listed(gateway))
        assert gateway.stop() == 0


def test_alias_names_the_engines_model_and_the_choice_is_explained(engine: Engine) -> None:
    gateway = Gateway(workers=[url(engine)])
    wait_until(lambda: ready(gateway), 20, "the engine is reached")
    model = gateway.client.get("/v1/models").json()["data"][0]["id"]
    assert gateway.stop() == 0
    gateway = Gateway("--model-alias", f"gpt={model}", workers=[url(engine)])
    wait_until(lambda: ready(gateway), 20, "the engine is reached")
    body = {"model": "gpt", "prompt": ids_of(5, 64), "max_tokens": 1}
    for cached in (0, 48):
        answer = gateway.client.post("/v1/completions", json=body, headers={"x-branchline-explain": "1"})
        assert (answer.status_code, answer.json()["model"]) == (200, "gpt")
        told = gateway.client.get(f"/explain/{answer.headers['x-request-id']}").json()["choices"][0]
        assert told["candidates"][0]["cached_tokens"] == cached, told
        assert "only worker" in told["reason"]
    assert gateway.client.post("/v1/completions", json={**body, "model": "nobody"}).status_code == 404
    assert gateway.stop() == 0
