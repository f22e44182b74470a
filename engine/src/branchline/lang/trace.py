"""A picture of a run: its tree of branches with each block's text, tokens, cached share and time. One HTML file."""

from __future__ import annotations

import html
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Block:
    """One call as it went."""

    kind: str
    branch: tuple[int, ...]
    variable: str | None
    prompt: str
    texts: tuple[str, ...]
    metas: tuple[dict[str, Any], ...]
    seconds: float


STYLE = """
:root{color-scheme:light dark;font:15px/1.45 system-ui,sans-serif}
body{margin:2rem auto;max-width:72rem;padding:0 1rem}
details{border-left:3px solid #7a8;margin:.4rem 0 .4rem 1rem;padding:.1rem .8rem}summary{cursor:pointer}
.n{font-variant-numeric:tabular-nums;opacity:.75;font-size:.85em}
pre{white-space:pre-wrap;margin:.3rem 0;font-size:.85em}
.bar{display:inline-block;height:.55em;background:#4a9;border-radius:2px;vertical-align:middle}
"""


class Trace:
    """Blocks of a run, in the order in which they ended."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.blocks: list[Block] = []
        self._ends: list[float] = []
        self._lock = threading.Lock()

    def add(self, block: Block, now: float) -> None:
        """One more block."""
        with self._lock:
            self.blocks.append(block)
            self._ends.append(now)

    def totals(self) -> dict[str, float]:
        """Calls, tokens in, cached and out, and seconds from the first call to the last."""
        spans = [(end - block.seconds, end) for block, end in zip(self.blocks, self._ends, strict=True)]
        return {
            "calls": len(self.blocks),
            "prompt_tokens": _sum(self.blocks, "prompt_tokens"),
            "cached_tokens": _sum(self.blocks, "cached_tokens"),
            "completion_tokens": _sum(self.blocks, "completion_tokens"),
            "seconds": max((end for _, end in spans), default=0.0) - min((start for start, _ in spans), default=0.0),
        }

    def html(self) -> str:
        """The picture; needs nothing but itself."""
        total = self.totals()
        longest = max((block.seconds for block in self.blocks), default=1.0) or 1.0
        head = (
            f"{total['calls']} calls, {total['prompt_tokens']} prompt tokens ({_share(total)} cached), "
            f"{total['completion_tokens']} generated, {total['seconds']:.2f} s"
        )
        body = self._branch((), longest)
        return (
            f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
            f"<title>program run {self.run[:8]}</title><style>{STYLE}</style><h1>Program run {self.run[:8]}</h1>"
            f"<p>{html.escape(head)}</p>{body}</html>"
        )

    def save(self, path: str | Path) -> None:
        """Writes the picture."""
        Path(path).write_text(self.html())

    def _branch(self, path: tuple[int, ...], longest: float) -> str:
        own = [block for block in self.blocks if block.branch == path]
        below = sorted({block.branch[: len(path) + 1] for block in self.blocks if _under(block.branch, path)})
        name = "program" if not path else f"branch {'.'.join(map(str, path))}"
        inner = "".join(_row(block, longest) for block in own) + "".join(self._branch(item, longest) for item in below)
        return f"<details open><summary>{name}</summary>{inner}</details>"


def _under(branch: tuple[int, ...], path: tuple[int, ...]) -> bool:
    return len(branch) > len(path) and branch[: len(path)] == path


def _sum(blocks: list[Block], name: str) -> int:
    return sum(int(meta.get(name) or 0) for block in blocks for meta in block.metas[:1])


def _share(total: dict[str, float]) -> str:
    return f"{100 * total['cached_tokens'] / total['prompt_tokens']:.0f} %" if total["prompt_tokens"] else "none"


def _row(block: Block, longest: float) -> str:
    meta = block.metas[0] if block.metas else {}
    numbers = ", ".join(
        f"{label} {meta[key]}"
        for key, label in (("prompt_tokens", "in"), ("cached_tokens", "cached"), ("completion_tokens", "out"))
        if meta.get(key) is not None
    )
    width = max(2, round(160 * block.seconds / longest))
    texts = "".join(f"<pre>{html.escape(text)}</pre>" for text in block.texts)
    return (
        f"<details><summary><b>{html.escape(block.variable or block.kind)}</b> <span class=bar style='width:{width}px'>"
        f"</span> <span class=n>{block.seconds * 1000:.0f} ms {html.escape(numbers)}</span></summary>{texts}"
        f"<details><summary class=n>prompt</summary><pre>{html.escape(block.prompt)}</pre></details></details>"
    )
