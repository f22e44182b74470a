"""Constraints made to blow up, on the same path as a request's: compiled in a child with limits, loaded, masks filled.

`python -m benchmarks.grammar.hostile [--timeout 4] [--memory-mib 512]` prints JSON: what became of each (served,
refused by name, out of time or memory), seconds until that was told, and the dearest mask of random walks, CPU time.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from typing import Any

from branchline.engine.errors import EngineError
from branchline.engine.grammar.hearth import Bounds, Hearth
from branchline.engine.grammar.manager import Compiled, Manager
from branchline.engine.grammar.mask import allowed_ids
from branchline.engine.grammar.testing import build_backend
from branchline.engine.types import GrammarAsk, GrammarKind

from benchmarks.grammar.vocabulary import Words

WALKS = 3
LONGEST = 160  # tokens of a walk


def nested(depth: int) -> str:
    """An array in an array …, as text: Python's own writer would stumble over it."""
    return '{"type": "array", "items": ' * depth + '{"type": "null"}' + "}" * depth


def forked(depth: int) -> dict[str, Any]:
    """`oneOf` of two that differ only far below."""
    inner: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        sides = [{"type": "object", "properties": {key: inner}, "required": [key]} for key in "ab"]
        inner = {"oneOf": sides}
    return inner


def referring(depth: int) -> dict[str, Any]:
    """The same through references: short to write, doubled at each step."""
    parts: dict[str, Any] = {f"d{depth}": {"type": "null"}}
    for number in range(depth):
        ahead = {"$ref": f"#/$defs/d{number + 1}"}
        sides = [{"type": "object", "properties": {key: ahead}, "required": [key]} for key in "ab"]
        parts[f"d{number}"] = {"oneOf": sides}
    return {"$defs": parts, "$ref": "#/$defs/d0"}


def patterned(pattern: str) -> dict[str, Any]:
    """A string of a pattern."""
    return {"type": "string", "pattern": pattern}


def optional(count: int, **more: Any) -> dict[str, Any]:
    """An object of that many optional strings."""
    return {"type": "object", "properties": {f"key{n}": {"type": "string", **more} for n in range(count)}}


def schemas() -> dict[str, Any]:
    """By name, those of counted classes first (each mask is dear in other backends), then those dear to compile."""
    found: dict[str, Any] = {}
    for pattern in (
        "^[^\\n]{1,128}$",
        "^[^\\n]{1,129}$",
        "^[^\\n]{1,1000}$",
        "^[a-z ]{0,300}$",
        "^.{0,500}$",
        "^[a-zA-Zà-ÿ ]{0,5000}$",
        "^((x{0,100}){0,100}){0,100}$",
        "^(a|b)*a(a|b){18}$",
        "^(a?){60}a{60}$",
        "^(\\w+\\s?)*$",
    ):
        found[pattern] = patterned(pattern)
    found["maxLength 65535"] = {"type": "string", "maxLength": 65535}
    found["oneOf^9"] = forked(9)
    found["oneOf by $ref^16"] = referring(16)
    found["anyOf of 3^7"] = _wide(3, 7)
    found["enum of 20,000"] = {"enum": [f"value-{n * 7919 % 100003}" for n in range(20000)]}
    found["300 properties"] = optional(300, maxLength=50)
    found["3000 properties"] = optional(3000)
    found["$ref to itself"] = {"$ref": "#"}
    found["allOf of 40 patterns"] = {"type": "string", "allOf": [{"pattern": f"a{n}?b"} for n in range(40)]}
    found["uniqueItems over 12"] = {"type": "array", "items": {"enum": list(range(12))}, "uniqueItems": True}
    found["contains with counts"] = {"type": "array", "contains": {"const": 1}, "minContains": 60, "maxContains": 90}
    found["required of 60"] = {"type": "object", "required": [f"k{n}" for n in range(60)], "minProperties": 61}
    return found


def _wide(width: int, depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "integer"}
    for level in range(depth):
        inner = {"anyOf": [{"type": "object", "properties": {f"p{level}{n}": inner}} for n in range(width)]}
    return inner


def expressions() -> dict[str, str]:
    """Regular expressions on their own."""
    return {
        one: one
        for one in (
            "(a|b)*a(a|b){18}",
            "((x{0,100}){0,100}){0,100}",
            "(((((a{1,20}){1,20}){1,20}){1,20}){1,20})",
            "(.*,){40}P",
            "[^\\n]{1,2000}",
            "(a*)*b",
            "(?=.*a)(?=.*b)(?=.*c)(?=.*d)[a-z]{1,60}",
        )
    }


def grammars() -> dict[str, str]:
    """EBNF."""
    doubling = "\n".join(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(40)) + '\nr40 ::= "a"\nroot ::= r0'
    return {
        "doubling^40": doubling,
        "ambiguous sum": 'root ::= root "+" root | "1"',
        "all empty": 'root ::= "" | root root',
        "(^20000": "root ::= " + "(" * 20000 + '"a"' + ")" * 20000,
        "count of 99999999": 'root ::= "a"{99999999}',
        "many spellings": 'root ::= ("a"|"aa"|"aaa"|"aaaa")* ("a"|"aa")* "b"',
    }


def asks() -> list[tuple[str, GrammarAsk]]:
    """All of them."""
    texts = {name: json.dumps(one) for name, one in schemas().items()} | {"1000 nested": nested(1000)}
    found = [(f"json: {name}", GrammarAsk(GrammarKind.JSON, text)) for name, text in texts.items()]
    found += [(f"regex: {name}", GrammarAsk(GrammarKind.REGEX, one)) for name, one in expressions().items()]
    return found + [(f"ebnf: {name}", GrammarAsk(GrammarKind.EBNF, one)) for name, one in grammars().items()]


def dearest(first: Compiled, words: Words, seed: int) -> tuple[float, int]:
    """(CPU seconds of the dearest mask, masks filled) along random walks, as a model that babbles would go."""
    worst, filled = 0.0, 0
    chance = random.Random(seed)
    for _ in range(WALKS):
        state = first.grammar.start(words.context.eos_ids)
        mask = state.allocate_vocab_mask(1, words.context.vocab_size)
        for _ in range(LONGEST):
            started = time.thread_time()
            state.fill_vocab_mask(mask, 0)
            worst, filled = max(worst, time.thread_time() - started), filled + 1
            allowed = allowed_ids(mask[0], words.context.vocab_size)
            if not len(allowed) or not state.accept_token(int(allowed[chance.randrange(len(allowed))])):
                break
            if state.is_terminated():
                break
    return worst, filled


def run(wall_s: float, memory_bytes: int, only: tuple[str, ...] = ("",)) -> dict[str, Any]:
    """Each constraint whose name holds one of `only`, one after another, on a manager of its own."""
    words = Words.of_model()
    names = ("llguidance", "outlines")
    backends = {name: build_backend(name, words.context) for name in names}
    hearth = Hearth(words.context, names, Bounds(wall_s, memory_bytes))
    hearth.start()
    manager = Manager(hearth, backends)
    found: dict[str, Any] = {}
    try:
        for name, ask in asks():
            if any(part in name for part in only):
                found[name] = _one(manager, ask, words)
    finally:
        manager.close()
    return found


def _one(manager: Manager, ask: GrammarAsk, words: Words) -> dict[str, Any]:
    told: list[Compiled | EngineError] = []
    over, started = threading.Event(), time.monotonic()

    def ready(outcome: Compiled | EngineError) -> None:
        told.append(outcome)
        over.set()

    manager.request(ask, "", ready)
    if not over.wait(600):
        return {"verdict": "NOT ANSWERED"}
    outcome, seconds = told[0], round(time.monotonic() - started, 2)
    if isinstance(outcome, EngineError):
        return {"verdict": outcome.code.name.lower(), "seconds": seconds, "why": outcome.message[:160]}
    try:
        worst, filled = dearest(outcome, words, 1)
    except EngineError as error:
        return {"verdict": f"{error.code.name.lower()} while filling", "seconds": seconds, "why": error.message[:160]}
    return {"verdict": "served", "seconds": seconds, "masks": filled, "dearest_mask_cpu_ms": round(worst * 1e3, 2)}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--timeout", type=float, default=4.0)
    parser.add_argument("--memory-mib", type=int, default=512)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    print(json.dumps(run(given.timeout, given.memory_mib << 20, (given.only,)), indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
