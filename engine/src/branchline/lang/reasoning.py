"""Splits reasoning from answers in whole texts. The gateway does the same for streams of its chat API."""

from __future__ import annotations

from branchline.lang.errors import ArgumentError

# Model type: its markers, and whether a text without the opening one has reasoning all the same.
MARKERS: dict[str, tuple[str, str, bool]] = {
    "deepseek-r1": ("<think>", "</think>", True),
    "qwen3": ("<think>", "</think>", False),
    "qwen3-thinking": ("<think>", "</think>", True),
    "kimi": ("◁think▷", "◁/think▷", False),
}


def split(text: str, model_type: str) -> tuple[str, str]:
    """Reasoning and answer. Without an end marker all is an answer unless the opening marker stands there."""
    try:
        begin, end, implicit = MARKERS[model_type.lower()]
    except KeyError:
        raise ArgumentError(f"model_type is {model_type!r}: give one of {', '.join(MARKERS)}") from None
    opened = text.lstrip().startswith(begin)
    if not opened and not (implicit and end in text):
        return "", text
    body = text.lstrip()[len(begin) :] if opened else text
    inner, _, content = body.partition(end)
    return inner.strip("\n"), content.lstrip("\n")
