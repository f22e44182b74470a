"""What a backend of the language is: calls in, pieces out, and a plain list of what it can do.

A backend refuses what it cannot do by `check`, before anything is sent. It owns its connections and chat markup.
"""

from __future__ import annotations

import abc
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from branchline.lang.errors import UnsupportedError
from branchline.lang.ir import Gen, Sampling, Select


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation; `images` are sources as given."""

    role: str
    content: str
    images: tuple[str | bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """Everything before a call: the text so far, and the same as messages where roles were used.

    `open_role` is the role of the message being written, whose content so far is the last message.
    """

    text: str
    messages: tuple[Message, ...] = ()
    open_role: str | None = None
    images: tuple[str | bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Context:
    """Of which program and branch a call is."""

    program: str  # unique id of the run
    branch: tuple[int, ...]
    lease: str | None = None
    fork_width: int | None = None
    expected_tokens: int | None = None
    deadline: float | None = None  # seconds on the loop's clock
    stream: bool = True  # whether anybody may read pieces; else the answer may come whole


@dataclass(frozen=True, slots=True)
class GenCall:
    """One generation. `sampling` has the program's options merged in."""

    prompt: Prompt
    gen: Gen
    sampling: Sampling
    context: Context


@dataclass(frozen=True, slots=True)
class SelectCall:
    """One selection."""

    prompt: Prompt
    select: Select
    context: Context


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a generation; `index` counts the n sequences. The last one of a sequence has `meta`."""

    text: str
    index: int = 0
    meta: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ChoiceScore:
    """Logprobs (natural) of a choice's own tokens after the prompt, and of the same text without it where asked for."""

    token_logprobs: tuple[float, ...]
    unconditional: tuple[float, ...] | None = None
    total: float | None = None  # exact sum over the choice's bytes; None: the sum of token_logprobs


@dataclass(frozen=True, slots=True)
class Scores:
    """One score a choice, in order, and what the scoring took (`prompt_tokens`, `cached_tokens`)."""

    choices: Sequence[ChoiceScore]
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Lease:
    """A held prefix. `tokens` is how much of it is held."""

    id: str
    tokens: int = 0
    ttl_ms: int = 0


@dataclass(frozen=True, slots=True)
class Markup:
    """How a backend's model writes a conversation as text."""

    begin: dict[str, str] = field(default_factory=dict)  # role: what opens its message
    end: dict[str, str] = field(default_factory=dict)
    default_system: str = ""  # written before a conversation that does not begin with a system message
    user_after_system: str | None = None  # opens a user message right after the system's; None: as any other
    stops: tuple[str, ...] = ()  # end an assistant's message, beside the stops of its gen


CHATML = Markup(
    begin={role: f"<|im_start|>{role}\n" for role in ("system", "user", "assistant")},
    end={role: "<|im_end|>\n" for role in ("system", "user", "assistant")},
)
PLAIN = Markup(
    begin={"system": "", "user": "USER: ", "assistant": "ASSISTANT: "},
    end={"system": "\n", "user": "\n", "assistant": "\n"},
)


class Backend(abc.ABC):
    """Base of all backends. Methods run on the language's event loop."""

    name: str = "backend"
    #: options of gen beyond max_tokens, stop and temperature that reach the model
    options: frozenset[str] = frozenset()
    #: of regex, json_schema, ebnf
    constraints: frozenset[str] = frozenset()
    select_methods: frozenset[str] = frozenset()
    #: whether `Prompt.text` is what the model reads; else messages are
    completes_text: bool = True
    images: bool = False
    leases: bool = False

    async def markup(self) -> Markup:
        """How roles are written. Asked for once, before the first role."""
        return CHATML

    def check(self, block: Gen | Select, sampling: Sampling) -> None:
        """Refuses what the backend cannot do, before anything is sent.

        Raises:
            UnsupportedError: names the option and this backend.
        """
        if isinstance(block, Select):
            if len(block.choices) > 1 and block.method not in self.select_methods:
                can = ", ".join(sorted(self.select_methods)) or "none"
                raise UnsupportedError(
                    f"choices_method {block.method!r} is not possible on {self.name} (possible: {can}): "
                    "choose another method or backend"
                )
            return
        for name in ("regex", "json_schema", "ebnf"):
            if getattr(block, name) is not None and name not in self.constraints:
                raise UnsupportedError(
                    f"{name} cannot be enforced by {self.name}: leave it out, or use another backend"
                )
        for name in sampling.given():
            if name not in self.options and name not in ("max_tokens", "stop", "temperature"):
                raise UnsupportedError(f"{name} is not possible on {self.name}: leave it out or use another backend")

    @abc.abstractmethod
    def generate(self, call: GenCall) -> AsyncGenerator[Piece]:
        """Pieces of the answer, as they come. Closing the generator aborts the call on the server.

        Raises:
            BackendError: the backend refused or failed; never a silent end.
        """

    async def score(self, call: SelectCall) -> Scores:
        """Scores of every choice, in order."""
        raise UnsupportedError(f"select is not possible on {self.name}")

    async def plant(self, prompt: Prompt, ttl_ms: int, context: Context) -> Lease | None:
        """Computes a prefix and holds it. None: nothing to hold, or the backend has no such thing."""
        return None

    async def renew(self, lease: Lease, ttl_ms: int) -> None:
        """Holds it longer."""
        return None

    async def release(self, lease: Lease) -> None:
        """Lets go of it."""
        return None

    async def flush_cache(self) -> None:
        """Empties the server's prefix cache."""
        raise UnsupportedError(f"{self.name} has no cache to flush: use a Runtime backend")

    async def server_info(self) -> dict[str, Any]:
        """What the server tells of itself."""
        raise UnsupportedError(f"{self.name} has no server information: use a Runtime backend")

    def close(self) -> None:
        """Ends the backend's connections. A backend also is a context manager, plain and async."""
        return None

    async def aclose(self) -> None:
        """`close` without blocking the event loop."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
