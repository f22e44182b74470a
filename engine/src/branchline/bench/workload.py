"""What is sent: five scenarios as plans of requests, drawn from a seed. Measures nothing.

A plan is a coroutine that sends one or several requests and reports each; the runner decides when it starts.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from branchline.bench.client import Client, Sample
from branchline.bench.options import BenchConfig

Report = Callable[[Sample], None]
Plan = Callable[[Report], Awaitable[None]]
_SYLLABLES = ("ba", "co", "di", "fen", "gar", "hil", "jo", "kel", "lum", "mo", "nar", "pos", "ri", "sun", "tek", "vo")
CALIBRATION_WORDS = 200
SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "skills": {"type": "array", "items": {"type": "string", "maxLength": 16}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "skills"],
    "additionalProperties": False,
}


def words(generator: random.Random, count: int) -> str:
    """Text of so many made-up words, which no two draws share."""
    return " ".join("".join(generator.choices(_SYLLABLES, k=2)) for _ in range(count))


@dataclass(frozen=True, slots=True)
class Workload:
    """Makes the plans of a scenario. `per_token` is how many words one token of the server holds."""

    config: BenchConfig
    client: Client
    model: str
    per_token: float

    def plans(self) -> list[Plan]:
        """One a request, conversation or fork, in the order of their start."""
        make = {
            "throughput": self._single,
            "shared-prefix": self._shared,
            "multi-turn": self._conversation,
            "fork": self._fork,
            "json": self._json,
        }[self.config.scenario]
        return [make(number) for number in range(self.config.requests)]

    def warmup(self, number: int) -> Plan:
        """A request whose figures don't count and whose prompt nobody repeats."""
        return self._single(-1 - number)

    def _text(self, name: str, tokens: int) -> str:
        generator = random.Random(f"{self.config.seed} {name}")
        return words(generator, max(round(tokens * self.per_token), 1))

    def _body(self, **more: object) -> dict[str, object]:
        body: dict[str, object] = {"model": self.model, "temperature": 0, **more}
        body.setdefault("max_tokens", self.config.output_tokens)
        if self.config.ignore_eos and "response_format" not in body:
            body["ignore_eos"] = True
        return body

    def _complete(self, kind: str, prompt: str) -> Awaitable[Sample]:
        return self.client.send(kind, "/v1/completions", self._body(prompt=prompt))

    def _single(self, number: int) -> Plan:
        async def plan(report: Report) -> None:
            report(await self._complete("request", self._text(f"own {number}", self.config.input_tokens)))

        return plan

    def _shared(self, number: int) -> Plan:
        async def plan(report: Report) -> None:
            group = number % self.config.groups
            shared = self._text(f"shared {group}", self.config.shared_tokens)
            own = self._text(f"own {number}", self.config.input_tokens)
            report(await self._complete("first" if number < self.config.groups else "request", f"{shared} {own}"))

        return plan

    def _conversation(self, number: int) -> Plan:
        async def plan(report: Report) -> None:
            messages: list[dict[str, str]] = []
            for turn in range(self.config.turns):
                said = self._text(f"turn {number} {turn}", self.config.input_tokens)
                messages.append({"role": "user", "content": said})
                body = self._body(messages=list(messages))
                sample = await self.client.send(f"turn {turn + 1}", "/v1/chat/completions", body)
                report(sample)
                if sample.error:
                    return
                messages.append({"role": "assistant", "content": sample.text})

        return plan

    def _fork(self, number: int) -> Plan:
        async def branch(report: Report, shared: str, which: int) -> None:
            own = self._text(f"branch {number} {which}", self.config.input_tokens)
            report(await self._complete("branch", f"{shared} {own}"))

        async def plan(report: Report) -> None:
            shared = self._text(f"fork {number}", self.config.shared_tokens)
            trunk = await self._complete("trunk", shared)
            report(trunk)
            if not trunk.error:
                prefix = shared + trunk.text
                await asyncio.gather(*(branch(report, prefix, which) for which in range(self.config.branches)))

        return plan

    def _json(self, number: int) -> Plan:
        async def plan(report: Report) -> None:
            said = f"Invent a person. {self._text(f'own {number}', self.config.input_tokens)}"
            form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
            body = self._body(messages=[{"role": "user", "content": said}], response_format=form)
            sample = await self.client.send("request", "/v1/chat/completions", body)
            if not sample.error:
                sample.valid = fits(sample.text)
            report(sample)

        return plan


def fits(text: str) -> bool:
    """Whether the text is a person as SCHEMA has it."""
    try:
        found = json.loads(text)
    except ValueError:
        return False
    if not isinstance(found, dict) or set(found) != {"name", "age", "skills"}:
        return False
    age, skills = found["age"], found["skills"]
    return (
        isinstance(found["name"], str)
        and isinstance(age, int)
        and not isinstance(age, bool)
        and 0 <= age <= 120
        and isinstance(skills, list)
        and 1 <= len(skills) <= 3
        and all(isinstance(one, str) for one in skills)
    )


async def words_per_token(client: Client, model: str) -> float:
    """Measured by one short request. 0.5 for a server that does not count tokens. Raises OSError if it refuses."""
    prompt = words(random.Random("calibration"), CALIBRATION_WORDS)
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    sample = await client.send("calibration", "/v1/completions", body)
    if sample.error:
        raise OSError(f"the server does not answer /v1/completions: {sample.error}")
    return CALIBRATION_WORDS / sample.prompt_tokens if sample.prompt_tokens else 0.5
