"""The shapes of programs (SGLang's paper and its benchmark folder), each as a program and as requests written by hand.

Texts are synthetic and fixed by the instance's number; greedy or seeded, of fixed length, so both forms must agree.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from branchline import lang as bl

WORDS = "river stone market winter letter garden window story bridge music silver forest morning captain paper".split()
AXES = ("clarity", "depth", "style", "truth", "order", "wit")
CHOICES = (" garden", " bridge", " winter", " music")


class Talk(Protocol):
    """What a form by hand may ask."""

    async def gen(self, prompt: str, tokens: int, **options: Any) -> str:
        """Text of that many tokens."""

    async def pick(self, prompt: str, choices: Sequence[str]) -> str:
        """The likeliest choice by the mean logprob of its tokens."""


def notes(number: int, count: int) -> str:
    """About `count` words that no other number begins with."""
    picked = (WORDS[(number * 7 + place * (number % 5 + 1)) % len(WORDS)] for place in range(count))
    return f"Case {number}. " + " ".join(picked) + ".\n"


def block(name: str, tokens: int, **options: Any) -> Any:
    """A gen of fixed length, greedy unless told otherwise."""
    return bl.gen(name, max_tokens=tokens, ignore_eos=True, **{"temperature": 0.0, **options})


@bl.function
def tips(s: bl.State, number: int, hold: bool) -> str:
    """Skeleton of thought: five tips at once, then a summary."""
    s += notes(number, 150) + "Tips:"
    forks = s.fork(5, hold=hold)
    for place, branch in enumerate(forks):
        branch += f"\n{place + 1}." + block("tip", 24)
    forks.join()
    s += "".join(f"\n{place + 1}.{tip}" for place, tip in enumerate(s["tip"])) + "\nIn short:" + block("sum", 64)
    return s["sum"]  # type: ignore[no-any-return]


async def tips_by_hand(talk: Talk, number: int) -> str:
    """`tips`."""
    base = notes(number, 150) + "Tips:"
    found = await asyncio.gather(*(talk.gen(f"{base}\n{place + 1}.", 24) for place in range(5)))
    return await talk.gen(base + "".join(f"\n{k + 1}.{tip}" for k, tip in enumerate(found)) + "\nIn short:", 64)


@bl.function
def tree(s: bl.State, number: int, hold: bool) -> str:
    """Tree of thought: two branches four times, 16 leaves."""

    def grow(state: bl.State, depth: int) -> None:
        forks = state.fork(2, hold=hold)
        for place, branch in enumerate(forks):
            branch += f"\nStep {depth}{'ab'[place]}:" + block(f"step{depth}", 24)
            if depth < 4:
                grow(branch, depth + 1)
        forks.join()

    s += notes(number, 200)
    grow(s, 1)
    return str(s["step4"])


async def tree_by_hand(talk: Talk, number: int) -> str:
    """`tree`."""

    async def grow(base: str, depth: int) -> list[Any]:
        async def child(place: int) -> Any:
            prompt = base + f"\nStep {depth}{'ab'[place]}:"
            text = await talk.gen(prompt, 24)
            return await grow(prompt + text, depth + 1) if depth < 4 else text

        return list(await asyncio.gather(child(0), child(1)))

    return str(await grow(notes(number, 200), 1))


@bl.function
def react(s: bl.State, number: int, hold: bool) -> str:
    """Reason and act: a thought, then what a tool says, four times."""
    s += notes(number, 120)
    for turn in range(4):
        s += f"Thought {turn}:" + block(f"thought{turn}", 24) + f"\nObservation {turn}: {notes(turn, 30)}"
    s += "Answer:" + block("answer", 16)
    return s["answer"]  # type: ignore[no-any-return]


async def react_by_hand(talk: Talk, number: int) -> str:
    """`react`."""
    text = notes(number, 120)
    for turn in range(4):
        text += f"Thought {turn}:"
        text += await talk.gen(text, 24) + f"\nObservation {turn}: {notes(turn, 30)}"
    return await talk.gen(text + "Answer:", 16)


@bl.function
def judge(s: bl.State, number: int, hold: bool) -> str:
    """A judge: six axes at once, each a reason and a mark, then a verdict."""
    s += notes(number, 250)
    forks = s.fork(len(AXES), hold=hold)
    for axis, branch in zip(AXES, forks, strict=True):
        branch += f"Of its {axis}:" + block("reason", 48) + "\nMark:" + block("mark", 2)
    forks.join()
    s += "Marks:" + ",".join(s["mark"]) + "\nVerdict:" + block("verdict", 16)
    return s["verdict"]  # type: ignore[no-any-return]


async def judge_by_hand(talk: Talk, number: int) -> str:
    """`judge`."""
    base = notes(number, 250)

    async def mark(axis: str) -> str:
        prompt = f"{base}Of its {axis}:"
        return await talk.gen(prompt + await talk.gen(prompt, 48) + "\nMark:", 2)

    return await talk.gen(f"{base}Marks:{','.join(await asyncio.gather(*map(mark, AXES)))}\nVerdict:", 16)


@bl.function
def consistency(s: bl.State, number: int, hold: bool) -> str:
    """Self-consistency: eight sampled chains of one question."""
    s += notes(number, 200) + "Let us think."
    forks = s.fork(8, hold=hold)
    for seed, branch in enumerate(forks):
        branch += block("chain", 48, temperature=0.8, seed=seed)
    forks.join()
    return str(s["chain"])


async def consistency_by_hand(talk: Talk, number: int) -> str:
    """`consistency`."""
    base = notes(number, 200) + "Let us think."
    return str(list(await asyncio.gather(*(talk.gen(base, 48, temperature=0.8, seed=seed) for seed in range(8)))))


SHOTS = "".join(f"{notes(number, 20)}It is about a{CHOICES[number % 4]}.\n" for number in range(20))


@bl.function
def few_shot(s: bl.State, number: int, hold: bool) -> str:
    """Twenty examples, then one of four choices."""
    s += SHOTS + notes(number, 20) + "It is about a" + bl.select("answer", CHOICES)
    return s["answer"]  # type: ignore[no-any-return]


async def few_shot_by_hand(talk: Talk, number: int) -> str:
    """`few_shot`."""
    return await talk.pick(SHOTS + notes(number, 20) + "It is about a", CHOICES)


FIELDS = ("name", "home", "trade", "friend")


@bl.function
def fields(s: bl.State, number: int, hold: bool) -> str:
    """An object, field by field, each by a regular expression."""
    s += notes(number, 120) + "{"
    for name in FIELDS:
        s += f'"{name}": "' + bl.gen(name, max_tokens=12, regex="[a-z]{3,10}", temperature=0) + '", '
    return "".join(s[name] for name in FIELDS)


async def fields_by_hand(talk: Talk, number: int) -> str:
    """`fields`."""
    text, found = notes(number, 120) + "{", []
    for name in FIELDS:
        text += f'"{name}": "'
        found.append(await talk.gen(text, 12, regex="[a-z]{3,10}", ignore_eos=False))
        text += found[-1] + '", '
    return "".join(found)


def turns(tokens: int) -> tuple[bl.Program, Callable[[Talk, int], Awaitable[str]]]:
    """Four turns with answers of that length."""

    @bl.function
    def chat(s: bl.State, number: int, hold: bool) -> str:
        for turn in range(4):
            s += f"User: {notes(number * 4 + turn, 80)}Answer:" + block(f"answer{turn}", tokens) + "\n"
        return s["answer3"]  # type: ignore[no-any-return]

    async def by_hand(talk: Talk, number: int) -> str:
        text = answer = ""
        for turn in range(4):
            text += f"User: {notes(number * 4 + turn, 80)}Answer:"
            answer = await talk.gen(text, tokens)
            text += answer + "\n"
        return answer

    return chat, by_hand


@dataclass(frozen=True, slots=True)
class Shape:
    """Both forms of one kind of program. `forks` says whether the bar of fork-heavy programs is its own."""

    program: bl.Program
    by_hand: Callable[[Talk, int], Awaitable[str]]
    forks: bool = False


SHAPES: dict[str, Shape] = {
    "tips": Shape(tips, tips_by_hand, True),
    "tree": Shape(tree, tree_by_hand, True),
    "judge": Shape(judge, judge_by_hand, True),
    "consistency": Shape(consistency, consistency_by_hand, True),
    "react": Shape(react, react_by_hand),
    "few_shot": Shape(few_shot, few_shot_by_hand),
    "fields": Shape(fields, fields_by_hand),
    "turns_short": Shape(*turns(8)),
    "turns_long": Shape(*turns(96)),
}
