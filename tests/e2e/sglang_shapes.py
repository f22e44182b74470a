"""Bodies of SGLang's HTTP server: model and server reports, OpenAI answers, chunks and errors. Holds no state."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Step:
    """What is known of an output after one more token, all of it from the start."""

    text: str
    ids: list[int]
    meta: Json


def model_list(model: str, context: int) -> Json:
    """`GET /v1/models`."""
    card = {"id": model, "object": "model", "created": int(time.time()), "owned_by": "sglang"}
    return {"object": "list", "data": [{**card, "root": model, "parent": None, "max_model_len": context}]}


def model_info(model: str) -> Json:
    """`GET /get_model_info`."""
    path = f"/models/{model}"
    return {
        "model_path": path,
        "tokenizer_path": path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": "default",
    }


def server_info(model: str, context: int, running: int) -> Json:
    """`GET /get_server_info`: options, the scheduler's figures, one state a data-parallel rank."""
    state = {"last_gen_throughput": 0.0, "num_running_reqs": running, "weight_version": "default"}
    return {
        "model_path": f"/models/{model}",
        "served_model_name": model,
        "context_length": context,
        "disaggregation_mode": "null",
        "dp_size": 1,
        "max_total_num_tokens": 4096,
        "max_req_input_len": context - 1,
        "internal_states": [state],
        "version": "0.5.4",
    }


def openai_error(message: str, kind: str = "BadRequestError", code: int = 400) -> Json:
    """An error of the OpenAI routes that is the whole answer."""
    return {"object": "error", "message": message, "type": kind, "param": None, "code": code}


def native(step: Step, index: int | None = None) -> Json:
    """One output of `/generate`; `index` where a batch is streamed."""
    body: Json = {"text": step.text, "output_ids": step.ids, "meta_info": step.meta}
    return body if index is None else {**body, "index": index}


def usage(step: Step) -> Json:
    """Tokens of one output."""
    prompt, output = step.meta["prompt_tokens"], step.meta["completion_tokens"]
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + output,
        "completion_tokens": output,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
    }


def head(step: Step, kind: str, model: str) -> Json:
    """What each answer and chunk begins with."""
    return {"id": step.meta["id"], "object": kind, "created": int(time.time()), "model": model}


def finish(step: Step) -> Json:
    """Why an output ended, if it did."""
    reason = step.meta["finish_reason"]
    return {"logprobs": None, "finish_reason": reason and reason["type"], "matched_stop": None}


def completion(step: Step, model: str) -> Json:
    """The answer of `/v1/completions`."""
    choice = {"index": 0, "text": step.text, **finish(step)}
    return {
        **head(step, "text_completion", model),
        "choices": [choice],
        "usage": usage(step),
        "metadata": {"weight_version": "default"},
    }


def chat(step: Step, model: str) -> Json:
    """The answer of `/v1/chat/completions`."""
    message = {"role": "assistant", "content": step.text, "reasoning_content": None, "tool_calls": None}
    choice = {"index": 0, "message": message, **finish(step)}
    return {
        **head(step, "chat.completion", model),
        "choices": [choice],
        "usage": usage(step),
        "metadata": {"weight_version": "default"},
    }


def completion_chunks(steps: Iterator[Step], model: str, with_usage: bool) -> Iterator[Json]:
    """The events of a streamed completion: text is new text only."""
    known = 0
    for step in steps:
        choice = {"index": 0, "text": step.text[known:], **finish(step)}
        known = len(step.text)
        yield {**head(step, "text_completion", model), "choices": [choice], "usage": None}
        if with_usage and step.meta["finish_reason"]:
            yield {**head(step, "text_completion", model), "choices": [], "usage": usage(step)}


def chat_chunks(steps: Iterator[Step], model: str, with_usage: bool) -> Iterator[Json]:
    """The events of a streamed chat: the role alone, new text, the reason alone, then the tokens."""
    known = 0
    for step in steps:
        chunk = head(step, "chat.completion.chunk", model)

        def event(delta: Json, ended: Json, chunk: Json = chunk) -> Json:
            return {**chunk, "choices": [{"index": 0, "delta": delta, **ended}], "usage": None}

        running = {"logprobs": None, "finish_reason": None, "matched_stop": None}
        if known == 0:
            yield event({"role": "assistant", "content": ""}, running)
        yield event({"content": step.text[known:], "tool_calls": None}, running)
        known = len(step.text)
        if step.meta["finish_reason"]:
            yield event({"content": None, "tool_calls": None}, finish(step))
            if with_usage:
                yield {**chunk, "choices": [], "usage": usage(step)}
