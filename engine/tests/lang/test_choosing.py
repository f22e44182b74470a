"""Choices scored by the server's prompt logprobs: where scoring begins, what is asked, what is made of the answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web
from branchline import lang as bl
from branchline.lang.backends import choosing
from hypothesis import given
from hypothesis import strategies as st

from .test_runtime import Server

ids = st.lists(st.integers(0, 3), min_size=1, max_size=6)


@given(ids, st.lists(ids, min_size=1, max_size=4))
def test_scoring_begins_where_the_rows_first_differ_and_never_past_a_row(
    prefix: list[int], tails: list[list[int]]
) -> None:
    rows = [prefix + tail for tail in tails]
    plan = choosing.plan(prefix, rows)
    assert plan.start == len(prefix)
    assert [list(tail) for tail in plan.tails] == tails


@given(ids, st.lists(ids, min_size=2, max_size=4))
def test_all_choices_are_scored_after_the_same_tokens(prefix: list[int], rows: list[list[int]]) -> None:
    rows = [[0, *row] for row in rows]  # nothing can be said of choices that share no token
    plan = choosing.plan([0, *prefix], rows)
    assert len({row[: plan.start] for row in plan.rows}) == 1
    assert all(plan.tails)
    assert plan.start <= len(prefix) + 1


def test_a_choice_that_recuts_the_prefix_moves_the_beginning_of_all() -> None:
    plan = choosing.plan([1, 2, 3], [[1, 2, 3, 4], [1, 2, 9]])
    assert plan.start == 2
    assert plan.tails == ((3, 4), (9,))


def test_the_first_token_of_a_text_counts_as_nothing() -> None:
    meta = {"input_token_logprobs": [[None, 5, None], [-0.5, 6, None]]}
    assert choosing.logprobs(meta, [5, 6]) == (0.0, -0.5)


@pytest.mark.parametrize("meta", [{}, {"input_token_logprobs": None}, {"input_token_logprobs": [[-1.0, 7, None]]}])
def test_logprobs_of_other_tokens_are_an_error(meta: dict[str, Any]) -> None:
    with pytest.raises(bl.BackendError, match="not those of the choice"):
        choosing.logprobs(meta, [5])


class Letters:
    """A tokenizer of letters and a model that finds each letter as likely as `likely` says."""

    def __init__(self, server: Server, likely: dict[str, float]) -> None:
        self.likely = likely
        self.info: dict[str, Any] = {}
        server.answers["/v1/tokenize"] = lambda body: {"tokens": [ord(letter) for letter in body["prompt"]]}
        server.answers["/generate"] = self.generate
        server.answers["/get_model_info"] = lambda body: self.info or web.Response(status=404)
        server.answers["/v1/score"] = self.score

    def logprob(self, index: int, token: int) -> float | None:
        return None if index == 0 else self.likely.get(chr(token), -9.0)

    def generate(self, body: Any) -> Any:
        start = body["logprob_start_len"]
        answers = []
        for row in body["input_ids"]:
            entries = [[self.logprob(index, token), token, None] for index, token in enumerate(row)]
            meta = {"input_token_logprobs": entries[start:], "prompt_tokens": len(row), "cached_tokens": 1}
            answers.append({"text": "", "meta_info": meta})
        return web.json_response(answers)

    def score(self, body: Any) -> Any:
        rows = [[self.likely.get(chr(token), -9.0) for token in choice] for choice in body["choices"]]
        scores = [
            {"index": index, "sum": sum(row), "token_logprobs": row, "tokens": choice}
            for index, (row, choice) in enumerate(zip(rows, body["choices"], strict=True))
        ]
        return {"scores": scores, "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}}


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.stop()


def pick(server: Server, choices: list[str], method: str | None = None, prefix: str = "Q:") -> bl.State:
    @bl.function
    def choose(s: bl.State) -> None:
        s += prefix + bl.select("x", choices, choices_method=method)

    with bl.Runtime(server.url) as backend:
        return choose.run(backend=backend)


@pytest.mark.parametrize(
    ("method", "picked"),
    [
        ("exact", "b"),
        ("token_length_normalized", "ac"),
        ("greedy_token_selection", "b"),
        ("unconditional_likelihood_normalized", "ac"),
    ],
)
def test_each_method_decides_by_its_own_rule(server: Server, method: str, picked: str) -> None:
    Letters(server, {"a": -1.2, "b": -1.0, "c": -0.1})
    state = pick(server, ["ac", "b"], method)
    assert state["x"] == picked
    assert state.text() == "Q:" + picked
    meta = state.get_meta_info("x")
    assert meta["input_token_logprobs"] == [[-1.2, -0.1], [-1.0]]
    assert sum(meta["probabilities"]) == pytest.approx(1.0)


def test_all_choices_are_scored_by_one_request(server: Server) -> None:
    Letters(server, {})
    state = pick(server, ["a", "b", "c"])
    asked = [(path, body) for _, path, body in server.seen if path != "/v1/tokenize"]
    assert asked == [("/v1/score", {"prompt": [ord("Q"), ord(":")], "choices": [[97], [98], [99]]})]
    meta = state.get_meta_info("x")
    assert (meta["prompt_tokens"], meta["cached_tokens"]) == (9, 4)


def test_the_gain_over_the_bare_choices_takes_one_request_more(server: Server) -> None:
    Letters(server, {"a": -1.0, "b": -0.5})
    pick(server, ["ab", "b"], "unconditional_likelihood_normalized")
    asked = [(path, body.get("input_ids")) for _, path, body in server.seen if path != "/v1/tokenize"]
    assert asked == [("/v1/score", None), ("/generate", [[97, 98], [98]])]


@pytest.mark.parametrize("status", [404, 405, 501])
def test_a_server_that_cannot_score_is_asked_for_prompt_logprobs(server: Server, status: int) -> None:
    Letters(server, {"a": -1.2, "b": -1.0})
    server.answers["/v1/score"] = lambda body: web.json_response({"error": "no"}, status=status)
    state = pick(server, ["a", "b"])
    assert state["x"] == "b"
    assert state.get_meta_info("x")["cached_tokens"] == 2


def test_scores_of_other_tokens_are_an_error(server: Server) -> None:
    Letters(server, {})
    server.answers["/v1/score"] = lambda body: {"scores": [{"tokens": [1], "token_logprobs": [-1.0], "sum": -1.0}] * 2}
    with pytest.raises(bl.ProgramError, match="not those of the choices"):
        pick(server, ["a", "b"])


def test_a_busy_server_is_asked_for_scores_again(server: Server) -> None:
    letters = Letters(server, {"b": -0.1})
    busy = [True]

    def once(body: Any) -> Any:
        return web.Response(status=503, headers={"retry-after": "0"}) if busy and busy.pop() else letters.score(body)

    server.answers["/v1/score"] = once
    assert pick(server, ["a", "b"])["x"] == "b"


@pytest.mark.parametrize(
    "info", [{"bos_token_id": 7, "eos_token_ids": [8]}, {"bos_token_id": None, "eos_token_ids": [7]}]
)
def test_choices_with_nothing_before_them_are_scored_after_the_text_that_begins_any(
    server: Server, info: dict[str, Any]
) -> None:
    Letters(server, {"a": -1.0, "b": -0.5}).info = info
    state = pick(server, ["a", "b"], prefix="")
    assert (state["x"], state.text()) == ("b", "b")
    assert ("POST", "/v1/score", {"prompt": [7], "choices": [[97], [98]]}) in server.seen


def test_choices_with_nothing_before_them_at_all_are_an_error_and_no_silent_tie(server: Server) -> None:
    Letters(server, {"a": -1.0, "b": -0.5})
    with pytest.raises(bl.ProgramError, match="append text first"):
        pick(server, ["a", "b"], prefix="")


def test_a_text_without_a_prefix_can_be_chosen(server: Server) -> None:
    Letters(server, {"a": -1.0, "b": -0.5})
    assert pick(server, ["xa", "xb"], "exact", prefix="")["x"] == "xb"


def test_a_refused_score_fails_the_select_with_the_servers_words(server: Server) -> None:
    Letters(server, {})
    refusal = {"error": {"message": "`prompt` is past the prompt"}}
    server.answers["/v1/score"] = lambda body: web.json_response(refusal, status=400)
    with pytest.raises(bl.ProgramError, match="past the prompt"):
        pick(server, ["a", "b"])


def test_the_cache_is_flushed_and_the_server_asked_about_itself(server: Server) -> None:
    server.answers["/flush_cache"] = lambda body: web.Response(text="cache flushed")
    server.answers["/server_info"] = lambda body: {"version": "1"}
    with bl.RuntimeEndpoint(server.url) as backend:
        bl.flush_cache(backend)
        assert bl.get_server_info(backend) == {"version": "1"}
    assert [(method, path) for method, path, _ in server.seen] == [("POST", "/flush_cache"), ("GET", "/server_info")]


def test_a_backend_without_a_server_says_so() -> None:
    with pytest.raises(bl.UnsupportedError, match="mock has no cache"):
        bl.flush_cache(bl.Mock())
    with pytest.raises(bl.UnsupportedError, match="mock has no server information"):
        bl.get_server_info(bl.Mock())


def test_an_unreachable_server_is_an_error_of_the_backend() -> None:
    with bl.Runtime("http://127.0.0.1:9") as backend, pytest.raises(bl.BackendError, match="cannot be used"):
        bl.get_server_info(backend)


def test_moving_pictures_are_refused_by_name() -> None:
    with pytest.raises(bl.UnsupportedError, match=r"video.*image\(\)"):
        bl.video("film.mp4", 8)
