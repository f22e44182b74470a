"""Turns an answer's text into the value its type asks for. Pure but for pydantic, which is imported when needed."""

from __future__ import annotations

import enum
import json
import typing
from typing import Any

from branchline.lang.errors import ParseError


def parse(text: str, target: Any) -> Any:
    """The value.

    Raises:
        ParseError: the text is no such value; holds the raw text.
    """
    stripped = text.strip()
    try:
        if target is bool:
            return {"true": True, "false": False}[stripped.lower()]
        if target in (int, float):
            return target(stripped)
        if target is str:
            return text
        if typing.get_origin(target) is typing.Literal:
            return next(item for item in typing.get_args(target) if str(item) == text)
        if isinstance(target, type) and issubclass(target, enum.Enum):
            return next(item for item in target if str(item.value) == text)
        if hasattr(target, "model_validate_json"):
            return target.model_validate_json(stripped)
        import pydantic

        return pydantic.TypeAdapter(target).validate_python(json.loads(stripped))
    except (ValueError, KeyError, StopIteration) as error:
        name = getattr(target, "__name__", str(target))
        raise ParseError(f"the answer is no {name}: {error} (raw text: {text!r:.200})", text) from error
