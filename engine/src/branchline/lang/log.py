"""A content-addressed log of calls: what was asked, by its hash, and what came back. Replays without a backend."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from branchline.lang.backends.base import ChoiceScore, GenCall, Scores, SelectCall
from branchline.lang.errors import LangError


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _key(call: GenCall | SelectCall) -> str:
    """Everything that decides the answer; not when, where or under which lease it was asked."""
    prompt = call.prompt
    images = [hashlib.sha256(item).hexdigest() if isinstance(item, bytes) else item for item in prompt.images]
    base: dict[str, Any] = {"text": prompt.text, "images": images, "branch": list(call.context.branch)}
    if isinstance(call, GenCall):
        gen = call.gen
        base |= {
            "gen": gen.name,
            "sampling": call.sampling.given(),
            "constraint": [gen.regex, gen.json_schema, gen.ebnf],
        }
    else:
        select = call.select
        base |= {"select": select.name, "choices": list(select.choices), "method": select.method}
    return _hash(base)


@dataclass(frozen=True, slots=True)
class Entry:
    """One call: its key, what was asked in words, and the answer."""

    key: str
    asked: dict[str, Any]
    answer: dict[str, Any]


class Log:
    """Calls in the order of their answers; equal calls are told apart by their number.

    `Log()` records; `Log.load(path)` replays and raises on a call that is not in it. Two logs are compared by `diff`.
    """

    def __init__(self, entries: Sequence[Entry] = (), *, replay: bool = False) -> None:
        self.entries = list(entries)
        self.replay = replay
        self._lock = threading.Lock()
        self._stored: dict[str, list[Entry]] = defaultdict(list)
        for entry in entries:
            self._stored[entry.key].append(entry)

    @classmethod
    def load(cls, path: str | Path) -> Log:
        """A log that replays what a file holds."""
        lines = Path(path).read_text().splitlines()
        return cls([Entry(**json.loads(line)) for line in lines], replay=True)

    def save(self, path: str | Path) -> None:
        """Writes JSON lines."""
        Path(path).write_text("".join(json.dumps(asdict(entry)) + "\n" for entry in self.entries))

    def _take(self, call: GenCall | SelectCall) -> Entry | None:
        if not self.replay:
            return None
        with self._lock:
            stored = self._stored[_key(call)]
            if not stored:
                what = call.gen.name if isinstance(call, GenCall) else call.select.name
                raise LangError(
                    f"the log holds no call for {what!r} with this prompt: the program or its inputs changed"
                )
            return stored.pop(0)

    def _add(self, call: GenCall | SelectCall, answer: dict[str, Any]) -> None:
        name = call.gen.name if isinstance(call, GenCall) else call.select.name
        asked = {"variable": name, "branch": list(call.context.branch), "prompt": call.prompt.text}
        with self._lock:
            self.entries.append(Entry(_key(call), asked, answer))

    def answer(self, call: GenCall) -> tuple[list[str], list[dict[str, Any]]] | None:
        """The logged answer of a call, when replaying."""
        entry = self._take(call)
        return (entry.answer["texts"], entry.answer["metas"]) if entry else None

    def keep(self, call: GenCall, texts: Sequence[str], metas: Sequence[dict[str, Any]]) -> None:
        """Records an answer."""
        if not self.replay:
            self._add(call, {"texts": list(texts), "metas": list(metas)})

    def scores(self, call: SelectCall) -> Scores | None:
        """The logged scores of a selection, when replaying."""
        entry = self._take(call)
        if entry is None:
            return None
        return Scores(
            [
                ChoiceScore(tuple(item[0]), None if item[1] is None else tuple(item[1]), item[2])
                for item in entry.answer["scores"]
            ],
            entry.answer.get("meta", {}),
        )

    def keep_scores(self, call: SelectCall, scores: Scores) -> None:
        """Records scores."""
        if not self.replay:
            rows = [[item.token_logprobs, item.unconditional, item.total] for item in scores.choices]
            self._add(call, {"scores": rows, "meta": dict(scores.meta)})


def diff(one: Log, other: Log) -> list[str]:
    """Differences of two runs, a line each: calls only in one of them, and texts or scores that differ."""
    out = []
    left, right = _numbered(one), _numbered(other)
    for key, entry in left.items():
        match = right.get(key)
        where = f"{entry.asked['variable']!r} of branch {entry.asked['branch']}"
        if match is None:
            out.append(f"- {where}: only in the first run")
        elif _said(match.answer) != _said(entry.answer):
            out.append(f"! {where}: {_short(entry.answer)} became {_short(match.answer)}")
    for key, entry in right.items():
        if key not in left:
            out.append(f"+ {entry.asked['variable']!r} of branch {entry.asked['branch']}: only in the second run")
    return out


def _numbered(log: Log) -> dict[tuple[str, int], Entry]:
    """Entries by key and by how many of the same key came before."""
    seen: Counter[str] = Counter()
    out = {}
    for entry in log.entries:
        out[entry.key, seen[entry.key]] = entry
        seen[entry.key] += 1
    return out


def _said(answer: dict[str, Any]) -> Any:
    """What was answered, as JSON keeps it; not how long it took or under which id."""
    return json.loads(json.dumps(answer.get("texts", answer.get("scores"))))


def _short(answer: dict[str, Any]) -> str:
    return repr(_said(answer))[:80]
