"""What a running stack tells of itself: server and model info, cache flush, metrics, tokenising, reflection."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from .conftest import Starter
from .stack import Stack, metric
from .test_cases_logprobs_cache import ids_of
from .tiny import CONFIG, TinyModels

PAGE = 16


@pytest.fixture
def small(stacks: Starter, tiny: TinyModels) -> Stack:
    return stacks(model=str(tiny.llama("plain")))


def test_model_info_is_that_of_the_checkpoint(small: Stack, tiny: TinyModels) -> None:
    info = small.client.get("/get_model_info").json()
    assert info["model_path"] == str(tiny.root / "plain")
    assert info["is_generation"] is True
    assert info["architecture"] == CONFIG["architectures"][0]
    assert info["vocab_size"] == CONFIG["vocab_size"]
    assert info["context_length"] == CONFIG["max_position_embeddings"]
    assert info["page_size"] == PAGE
    assert info["eos_token_ids"] == [2]
    assert info["has_chat_template"] is True
    assert info["served_model_name"] in [model["id"] for model in small.client.get("/v1/models").json()["data"]]


def test_server_info_adds_up(small: Stack) -> None:
    small.generate(ids_of(1, 40), sampling_params={"max_new_tokens": 2})
    small.assert_idle(10)
    info = small.client.get("/server_info").json()
    (worker,) = info["workers"]
    assert info["cache"] == worker["cache"]
    cache, load = worker["cache"], worker["load"]
    pages = [cache[f"pages_{kind}"] for kind in ("free", "evictable", "protected", "private")]
    assert sum(pages) == cache["pages_total"] == load["pages_total"]
    assert (load["running"], load["waiting"], worker["in_flight"], worker["ready"]) == (0, 0, 0, True)
    assert worker["page_size"] == PAGE
    assert worker["steps"] > 0 and worker["scheduler_ms_per_step"] >= 0
    assert worker["options"]["page_size"] == PAGE
    assert small.client.get("/get_server_info").json()["version"] == info["version"]


def test_flush_cache_empties_the_tree_and_says_how_much(small: Stack) -> None:
    small.flush()
    small.generate(ids_of(2, 5 * PAGE), sampling_params={"max_new_tokens": 0})
    small.assert_idle(10)
    assert small.cache()["pages_evictable"] == 5
    answer = small.post("/flush_cache", {}).json()
    assert answer["success"] is True
    assert [(worker["flushed_pages"], worker["held_pages"]) for worker in answer["workers"]] == [(5, 0)]
    assert small.cache()["pages_evictable"] == 0
    assert small.cache()["pages_free"] == small.cache()["pages_total"]
    again = small.generate(ids_of(2, 5 * PAGE), sampling_params={"max_new_tokens": 1})
    assert again["meta_info"]["cached_tokens"] == 0


def test_metrics_move_with_the_work(small: Stack) -> None:
    small.flush()
    names = {kind: f"branchline_router_{kind}_tokens_total" for kind in ("prompt", "completion", "cached")}
    before = {kind: metric(small.client, name) for kind, name in names.items()}
    served = metric(small.client, "branchline_router_requests_total", route="/generate", status="200")
    failed = metric(small.client, "branchline_router_requests_total", route="/generate", status="400")
    for _ in range(2):
        small.generate(ids_of(3, 3 * PAGE + 1), sampling_params={"max_new_tokens": 4, "ignore_eos": True})
    small.generate([-1], expect=400)
    moved = {kind: metric(small.client, name) - before[kind] for kind, name in names.items()}
    assert moved == {"prompt": 2 * (3 * PAGE + 1), "completion": 8, "cached": 3 * PAGE}
    assert metric(small.client, "branchline_router_requests_total", route="/generate", status="200") - served == 2
    assert metric(small.client, "branchline_router_requests_total", route="/generate", status="400") - failed == 1
    assert metric(small.client, "branchline_router_worker_ready", worker="w0", default=None) in (None, 1)
    text = small.client.get("/metrics").text
    assert text.endswith("# EOF\n")
    assert all(line.startswith("#") or " " in line for line in text.splitlines())


@pytest.mark.parametrize(
    "text", ["Hello, world!", " two  spaces ", "naïve 東京 🙂\n\ttab", "<|im_start|>user\nHi<|im_end|>\n"]
)
def test_tokenising_round_trip(small: Stack, text: str) -> None:
    for prefix in ("/v1", ""):
        told = small.post(f"{prefix}/tokenize", {"prompt": text, "add_special_tokens": False}).json()
        assert told["count"] == len(told["tokens"])
        assert told["max_model_len"] == CONFIG["max_position_embeddings"]
        body = {"tokens": told["tokens"], "skip_special_tokens": False}
        assert small.post(f"{prefix}/detokenize", body).json()["text"] == text


def test_tokenize_counts_what_the_engine_counts(small: Stack) -> None:
    text = "The tide comes in twice a day."
    count = small.post("/v1/tokenize", {"prompt": text}).json()["count"]
    assert small.generate(text, sampling_params={"max_new_tokens": 1})["meta_info"]["prompt_tokens"] == count


def test_reflection_alone_is_enough_to_call(small: Stack) -> None:
    """As grpcurl does: nothing of ours is imported, every type comes from the server."""
    with grpc.insecure_channel(small.engines[0].address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        services = set(database.get_services())
        assert {"branchline.engine.v1.Engine", "grpc.health.v1.Health"} <= services
        pool = DescriptorPool(database)
        method = pool.FindServiceByName("branchline.engine.v1.Engine").FindMethodByName("GetModelInfo")
        call = channel.unary_unary(
            "/branchline.engine.v1.Engine/GetModelInfo",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        info = call(GetMessageClass(method.input_type)(), timeout=10)
        assert info.vocab_size == CONFIG["vocab_size"]
        assert list(info.eos_token_ids) == [2]
        check = pool.FindServiceByName("grpc.health.v1.Health").FindMethodByName("Check")
        health = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(check.output_type).FromString,
        )
        assert health(GetMessageClass(check.input_type)(), timeout=10).status == 1
