"""`branchline plugins new KIND NAME`: a package that works, with a test, to be changed into a plugin.

Owns the templates. Writes into one new folder and nothing else.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from branchline import __version__, registry
from branchline.cli import extensions

NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*\Z")


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A kind's minimal implementation; `{cls}` and `{name}` are filled in. `try_it` is a command line."""

    code: str
    target: str  # what the entry point names
    try_it: str


_CACHE = Skeleton(
    '''from branchline.engine.cache import CacheContext
from branchline.engine.cache.reference import ReferenceCache


class {cls}(ReferenceCache):
    """A radix cache: begins as the plain reference one. Members: branchline.engine.cache.RadixCacheBackend."""

    def __init__(self, context: CacheContext) -> None:
        super().__init__(context)
''',
    "{cls}",
    "branchline serve MODEL --radix-cache-backend {name}",
)
_EVICTION = Skeleton(
    '''class {cls}:
    """What was used least goes first. Members: branchline.engine.cache.eviction.EvictionPolicy."""

    def rank(self, uses: int, priority: int) -> int:
        """0 to 255, higher is kept longer; must not fall when uses or priority rises."""
        return min(uses, 255)
''',
    "{cls}",
    "branchline serve MODEL --eviction-policy {name}",
)
_SPECULATIVE = Skeleton(
    '''from branchline.engine.config import SpeculativeOptions
from branchline.engine.speculative.base import NOTHING, Ask, DraftContext, Drafted, Proposal


class {cls}:
    """Guesses that the last token comes again. Members: branchline.engine.speculative.base.SpeculativeAlgorithm."""

    api_version = 1
    free = True
    wants_hidden = False

    def __init__(self, context: DraftContext) -> None:
        self.context = context

    @staticmethod
    def option_faults(options: SpeculativeOptions) -> list[str]:
        """What is wrong with the engine's options for this algorithm."""
        return []

    def propose(self, asked: list[Ask]) -> list[Proposal]:
        """One proposal an ask, none longer than its limit."""
        return [Proposal([ask.sequence.tokens[-1]] * ask.limit) if ask.sequence.tokens else NOTHING for ask in asked]

    def accepted(self, sequence: Drafted, hidden: object) -> None:
        """Only called with wants_hidden."""

    def end(self, sequence: Drafted, finished: bool) -> None:
        """Forget what is known of the sequence."""

    def close(self) -> None:
        """Release memory."""
''',
    "{cls}",
    "branchline serve MODEL --speculative-algorithm {name}",
)
_QUANTIZATION = Skeleton(
    '''from __future__ import annotations

from typing import TYPE_CHECKING

from branchline.engine.model.source import LoadedModel
from branchline.engine.quantization.base import Matrix

if TYPE_CHECKING:
    import torch


class {cls}:
    """Leaves weights as they are. Members: branchline.engine.quantization.QuantizationMethod."""

    api_version = 1
    name = "{name}"
    executors = ("torch", "native")
    native_dtype = ""
    of_checkpoint = False

    def open(self, model: LoadedModel) -> LoadedModel:
        """The checkpoint with its tensors under canonical names."""
        return model

    def matrix(self, weight: torch.Tensor) -> Matrix | None:
        """Another form of one linear weight; None keeps it."""
        return None
''',
    "{cls}",
    "branchline serve MODEL --quantization {name}",
)
_OVERRIDES = Skeleton(
    '''from collections.abc import Mapping

from branchline.engine.overrides.base import ModelFacts


class {cls}:
    """Wishes of some checkpoints. Members: branchline.engine.overrides.base.ModelOverride."""

    api_version = 1
    architectures = ("{cls}ForCausalLM",)  # empty: `applies` alone decides

    def applies(self, facts: ModelFacts) -> bool:
        """Whether this checkpoint is meant."""
        return True

    def options(self, facts: ModelFacts) -> Mapping[str, object]:
        """Option names as in the option table, with their values."""
        return {{"max_running_requests": 32}}
''',
    "{cls}",
    "branchline explain-config MODEL",
)
_ATTENTION = Skeleton(
    '''import torch
from branchline.engine.attention.base import AttentionShape
from branchline.engine.attention.reference import ReferenceAttention


class {cls}(ReferenceAttention):
    """Paged attention: begins as the plain one. Members: branchline.engine.attention.base.AttentionBackend."""


def build(shape: AttentionShape, device: torch.device) -> {cls}:
    """What the registry calls."""
    return {cls}(shape, device)
''',
    "build",
    "branchline serve MODEL --executor torch --attention-backend {name}",
)
_EXECUTOR = Skeleton(
    '''from branchline.engine.executor.native import build_executor
from branchline.engine.types import Executor


def build(*given: object, **options: object) -> Executor:
    """Begins as the native executor. Members of what it returns: branchline.engine.types.Executor."""
    return build_executor(*given, **options)
''',
    "build",
    "branchline serve MODEL --executor {name}",
)
_MODEL = Skeleton(
    """from branchline.engine.model.families import llama as {cls}

__all__ = ["{cls}"]  # begins as the Llama family; the name to register is the checkpoint's `architectures` entry
""",
    "{cls}",
    "branchline serve MODEL",
)
_HOOK = Skeleton(
    '''from branchline.engine.types import Delta, Request


class {cls}:
    """Counts what ends. Points, their arguments and modes: branchline.engine.hooks.points."""

    api_version = 1
    point = "request.end"
    point_version = 1
    mode = "before"
    priority = 0

    def __init__(self) -> None:
        self.ended = 0

    def __call__(self, request: Request, delta: Delta) -> None:
        """One sequence ends."""
        self.ended += 1
''',
    "{cls}",
    "branchline serve MODEL",
)
_BACKEND = Skeleton(
    '''import shutil

from branchline.cli.backends import Ask, Command, Detection
from branchline.cli.backends.base import answers


class {cls}:
    """The program {name}, an OpenAI-compatible server. Members: branchline.cli.backends.ServeBackend."""

    api_version = 1
    scheme = "http"
    announces = False
    options = ("threads",)  # engine options that it understands; others are refused

    def detect(self, model: str) -> Detection:
        """Quick, without a download."""
        if shutil.which("{name}") is None:
            return Detection(0.0, "{name} is not on PATH")
        return Detection(0.1, "{name} is installed")

    def launch(self, ask: Ask) -> Command:
        """The command line of one worker."""
        return Command(("{name}", ask.model, "--host", ask.host, "--port", str(ask.port), *ask.arguments))

    def health(self, url: str) -> bool:
        """Whether it takes requests."""
        return answers(url + "/health")
''',
    "{cls}",
    "branchline serve MODEL --backend {name}",
)
_PLATFORM = Skeleton(
    '''from branchline.engine.platforms.cpu import Cpu


class {cls}(Cpu):
    """Begins as the cpu, chosen by name only. Members: branchline.engine.platforms.Platform."""

    rank = -1  # below the cpu: auto never takes it
''',
    "{cls}",
    "branchline serve MODEL --executor torch --device {name}",
)
_GRAMMAR = Skeleton(
    '''from branchline.engine.grammar.guidance import GuidanceBackend


class {cls}(GuidanceBackend):
    """Begins as ours. Members: branchline.engine.grammar.base.BaseGrammarBackend."""
''',
    "{cls}",
    "branchline serve MODEL --grammar-backend {name}",
)
SKELETONS = {
    "models": _MODEL,
    "executors": _EXECUTOR,
    "attention_backends": _ATTENTION,
    "radix_cache_backends": _CACHE,
    "eviction_policies": _EVICTION,
    "speculative_algorithms": _SPECULATIVE,
    "quantization_methods": _QUANTIZATION,
    "grammar_backends": _GRAMMAR,
    "model_overrides": _OVERRIDES,
    "platforms": _PLATFORM,
    "hooks": _HOOK,
    "serve_backends": _BACKEND,
}
_PROJECT = """[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{package}"
version = "0.1.0"
description = "{noun} {name} for Branchline"
requires-python = ">=3.11"
dependencies = ["branchline>={version}"]

[project.optional-dependencies]
test = ["pytest>=8"]

[project.entry-points."branchline.{kind}"]
{name} = "{module}:{target}"

[tool.setuptools.packages.find]
where = ["src"]
"""
_TEST = '''"""What Branchline asks of every {noun}."""

from collections.abc import Callable

pytest_plugins = ["branchline.testing.plugin"]
conformance_of = ("{kind}", "{name}")


def test_conformance(conformance_check: Callable[[], None]) -> None:
    conformance_check()
'''
_README = """# {package}

The {noun} `{name}` for Branchline, API version {api}.

    pip install -e '.[test]'
    pytest
    branchline plugins --check
    {try_it}
"""


def files(kind: str, name: str, noun: str) -> dict[str, str]:
    """Path in the new folder → text. Raises KeyError for a kind without a skeleton."""
    skeleton = SKELETONS[kind]
    module = "branchline_" + re.sub(r"[^a-z0-9]+", "_", name)
    words = {
        "kind": kind,
        "name": name,
        "noun": noun,
        "module": module,
        "package": module.replace("_", "-"),
        "cls": "".join(part.capitalize() for part in re.split(r"[-_]", name)),
        "version": __version__,
        "api": str(registry.API_VERSION),
    }
    words["target"] = skeleton.target.format(**words)
    words["try_it"] = skeleton.try_it.format(**words)
    head = f'"""The {noun} `{name}`."""\n\n'
    return {
        "pyproject.toml": _PROJECT.format(**words),
        "README.md": _README.format(**words),
        f"src/{module}/__init__.py": head + skeleton.code.format(**words),
        "tests/test_conformance.py": _TEST.format(**words),
    }


def run(argv: Sequence[str]) -> int:
    """Write the folder; 2 if a word is wrong, 1 if it can't be written."""
    extensions.load([], {})
    nouns = {one.kind: one.noun for one in registry.all_registries()}
    parser = argparse.ArgumentParser(prog="branchline plugins new", description="Writes a plugin that works.")
    parser.add_argument("kind", choices=[kind for kind in nouns if kind in SKELETONS])
    parser.add_argument("name", help="what users will write to choose it: small letters, digits, '-' and '_'")
    parser.add_argument("--into", default=".", help="folder to make the package's folder in (default: here)")
    given = parser.parse_args(list(argv))
    if not NAME.match(given.name):
        print(f"error: name {given.name!r} must be small letters, digits, '-' and '_'", file=sys.stderr)
        return 2
    taken = {one.kind: one for one in registry.all_registries()}[given.kind].names()
    if given.name in taken:
        print(f"error: {nouns[given.kind]} {given.name!r} is registered already: choose another name", file=sys.stderr)
        return 2
    folder = Path(given.into) / f"branchline-{given.name.replace('_', '-')}"
    try:
        folder.mkdir(parents=True)
        for path, text in files(given.kind, given.name, nouns[given.kind]).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, "utf-8")
    except OSError as error:
        print(f"error: {folder} can't be written: {error.strerror}", file=sys.stderr)
        return 1
    print(f"{folder}: change src/, then: pip install -e '{folder}[test]' && pytest {folder}")
    return 0
