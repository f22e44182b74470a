"""Constructors of blocks, with the argument checks: `gen`, `select`, role markers, `image`, `separate_reasoning`."""

from __future__ import annotations

import enum
import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from branchline.lang.errors import ArgumentError, UnsupportedError
from branchline.lang.ir import (
    DTYPE_REGEX,
    ROLES,
    SELECT_METHODS,
    Appendable,
    Expr,
    Gen,
    Image,
    RoleBegin,
    RoleEnd,
    Sampling,
    Select,
    SeparateReasoning,
    Seq,
    VarBegin,
    VarEnd,
    check_regex,
    check_seconds,
    closed,
    flatten,
    schema_text,
    texts,
)


def _one_of(**given: object) -> str | None:
    """Name of the one constraint that was given; more than one is an error."""
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise ArgumentError(f"{' and '.join(names)} were given together: give one of them")
    return names[0] if names else None


def _check_count(name: str, value: int | None, least: int) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise ArgumentError(f"{name} is {value!r}: give a whole number of at least {least}")


def _check_number(name: str, value: float | None) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value)):
        raise ArgumentError(f"{name} is {value!r}: give a number")


def _check_ranges(**counts: int | None) -> None:
    for label, count in counts.items():
        _check_count(label, count, 1 if label == "n" else 0)


def _check_numbers(**numbers: float | None) -> None:
    for label, number in numbers.items():
        _check_number(label, number)


def _typed(target: Any) -> tuple[str | None, str | None, tuple[str, ...] | None]:
    """Regex, schema and choices that a type stands for."""
    if isinstance(target, type) and target in DTYPE_REGEX:
        return DTYPE_REGEX[target], None, None
    if typing.get_origin(target) is typing.Literal:
        return None, None, tuple(str(item) for item in typing.get_args(target))
    if isinstance(target, type) and issubclass(target, enum.Enum):
        return None, None, tuple(str(item.value) for item in target)
    if hasattr(target, "model_json_schema"):
        return None, schema_text(target)[0], None
    try:
        import pydantic
    except ImportError:
        raise ArgumentError(
            f"type is {target!r}: int, float, bool, str, Literal and Enum need nothing; install pydantic for others"
        ) from None
    try:
        return None, schema_text(closed(pydantic.TypeAdapter(target).json_schema()))[0], None
    except Exception as error:
        raise ArgumentError(f"type is {target!r}, which has no JSON schema: {error}") from None


def _dtype_regex(dtype: type | str | None) -> str:
    kind = {item.__name__: item for item in DTYPE_REGEX}.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if not isinstance(kind, type) or kind not in DTYPE_REGEX:
        raise ArgumentError(f"dtype is {dtype!r}: give int, float, bool or str, or use type=")
    return DTYPE_REGEX[kind]


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: str | Sequence[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: type | str | None = None,
    choices: Sequence[str] | None = None,
    choices_method: str | None = None,
    regex: str | None = None,
    json_schema: str | Mapping[str, Any] | type | None = None,
    ebnf: str | None = None,
    *,
    type: Any = None,
    repetition_penalty: float | None = None,
    seed: int | None = None,
    timeout_s: float | None = None,
    retries: int | None = None,
) -> Expr:
    """Generated text, kept under `name`.

    `dtype` (int, float, bool, str) restrains the text and leaves it a string, as SGLang does; `type` also parses it:
    int, float, bool, str, Literal, Enum, a pydantic model or whatever pydantic can describe. `choices` makes a select.
    `timeout_s` bounds this call; `retries` (default 2) are made only before the first token.

    Raises:
        ArgumentError: an argument is out of range, or two exclude each other.
    """
    constraint = _one_of(dtype=dtype, choices=choices, regex=regex, json_schema=json_schema, ebnf=ebnf, type=type)
    _check_ranges(max_tokens=max_tokens, min_tokens=min_tokens, n=n, retries=retries)
    _check_numbers(temperature=temperature, top_p=top_p, min_p=min_p)
    check_seconds("timeout_s", timeout_s)
    if constraint == "choices":
        assert choices is not None
        return select(name, choices, temperature or 0.0, choices_method, seed=seed, timeout_s=timeout_s)
    if choices_method is not None:
        raise ArgumentError(f"choices_method is {choices_method!r} without choices: give choices too")
    target, schema = None, None
    stops = texts("stop", stop)
    if constraint == "json_schema":
        assert json_schema is not None
        schema, target = schema_text(json_schema)
    elif constraint == "dtype":
        regex = _dtype_regex(dtype)
    elif constraint == "type":
        regex, schema, options = _typed(type)
        target = type
        if options is not None:
            picked = select(name, options, temperature or 0.0, seed=seed, timeout_s=timeout_s)
            assert isinstance(picked, Select)
            return replace(picked, target=target)
    check_regex("regex", regex)
    for pattern in texts("stop_regex", stop_regex) or ():
        check_regex("stop_regex", pattern)
    sampling = Sampling(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        n=n,
        stop=stops,
        stop_token_ids=None if stop_token_ids is None else tuple(stop_token_ids),
        stop_regex=texts("stop_regex", stop_regex),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        repetition_penalty=repetition_penalty,
        seed=seed,
        ignore_eos=ignore_eos,
        return_logprob=return_logprob,
        logprob_start_len=logprob_start_len,
        top_logprobs_num=top_logprobs_num,
        return_text_in_logprobs=return_text_in_logprobs,
    )
    return Gen(name, sampling, regex, schema, ebnf, target, timeout_s, retries)


def gen_int(name: str | None = None, **options: Any) -> Expr:
    """A whole number, as text."""
    return gen(name, dtype=int, **options)


def gen_string(name: str | None = None, **options: Any) -> Expr:
    """A short plain text."""
    return gen(name, dtype=str, **options)


def select(
    name: str | None = None,
    choices: Sequence[str] | None = None,
    temperature: float = 0.0,
    choices_method: str | None = None,
    *,
    seed: int | None = None,
    timeout_s: float | None = None,
) -> Expr:
    """One of `choices`; exactly the picked one is appended.

    Methods: `token_length_normalized` (default: the mean logprob of a choice's tokens), `greedy_token_selection` (token
    by token), `unconditional_likelihood_normalized` (the gain over the choice without its prefix), `exact` (the
    probability of the whole text). Ties go to the first. `temperature` > 0 samples by the method's scores. Scores and
    probabilities are in `s.get_meta_info(name)`.

    Raises:
        ArgumentError: no choices, an empty or doubled one, an unknown method.
    """
    options = texts("choices", choices)
    if not options:
        raise ArgumentError("choices is empty: give at least one text")
    if len(set(options)) < len(options):
        raise ArgumentError(f"choices holds a text twice: {options!r:.200}")
    method = choices_method or "token_length_normalized"
    if callable(method) or method not in SELECT_METHODS:
        raise ArgumentError(f"choices_method is {choices_method!r}: give one of {', '.join(SELECT_METHODS)}")
    _check_number("temperature", temperature)
    check_seconds("timeout_s", timeout_s)
    if temperature < 0:
        raise ArgumentError(f"temperature is {temperature!r}: give 0 or more")
    return Select(name, options, method, float(temperature), seed, timeout_s)


def _role(role: str, expr: Appendable) -> Expr:
    return Seq((RoleBegin(role), *flatten(expr), RoleEnd(role)))


def system(expr: Appendable = None) -> Expr:
    """A system message."""
    return _role("system", expr)


def user(expr: Appendable = None) -> Expr:
    """A user message."""
    return _role("user", expr)


def assistant(expr: Appendable = None) -> Expr:
    """An assistant message."""
    return _role("assistant", expr)


def _marker(kind: type[RoleBegin] | type[RoleEnd], role: str) -> Any:
    def marker() -> Expr:
        return kind(role)

    marker.__name__ = f"{role}_{'begin' if kind is RoleBegin else 'end'}"
    marker.__doc__ = f"{'Opens' if kind is RoleBegin else 'Closes'} a message of role {role}."
    return marker


system_begin, user_begin, assistant_begin = (_marker(RoleBegin, role) for role in ROLES)
system_end, user_end, assistant_end = (_marker(RoleEnd, role) for role in ROLES)


def image(source: str | bytes) -> Expr:
    """A picture: a path, an http(s) or data URL, or encoded bytes."""
    if not source:
        raise ArgumentError("image is empty: give a path, a URL or encoded bytes")
    return Image(source)


def video(path: str, num_frames: int) -> Expr:
    """Refused: no backend here takes moving pictures."""
    raise UnsupportedError(f"video({path!r}, {num_frames}) is not offered: give single frames by image()")


def separate_reasoning(expr: Appendable, model_type: str = "deepseek-r1") -> Expr:
    """Splits what `expr` generates into reasoning (`NAME_reasoning_content`) and answer (`NAME`)."""
    return SeparateReasoning(flatten(expr), model_type)


def named(name: str, expr: Appendable) -> Expr:
    """Blocks whose whole text also becomes the variable `name`."""
    return Seq((VarBegin(name), *flatten(expr), VarEnd(name)))
