"""Questions about terminals, answered by llguidance's automata over single bytes: empty? matching this text?"""

from __future__ import annotations

import functools
import re

from llguidance import LLMatcher, LLTokenizer

from branchline.engine.grammar.refusal import GrammarUnsupported

_NAME = re.compile(r"\bT[0-9]+\b")


@functools.cache
def byte_tokenizer() -> LLTokenizer:
    """256 tokens of a byte each, and a few special ones."""
    return LLTokenizer("byte")


class Probe:
    """Remembers its answers. `inline` names rules that are llguidance's own, by their text."""

    def __init__(self) -> None:
        self.inline: dict[str, str] = {}
        self._nonempty: dict[str, bool] = {}
        self._accepts: dict[tuple[str, str], bool] = {}
        self._compiles: dict[str, bool] = {}
        self._matchers: dict[str, LLMatcher] = {}

    def is_nonempty(self, name: str, terminals: dict[str, str]) -> bool:
        """Whether any text matches the terminal."""
        if name not in self._nonempty:
            matcher = self._matcher(name, terminals).deep_copy()
            found = matcher.is_accepting() or any(matcher.compute_bitmask())
            error = matcher.get_error()
            # No byte may follow: that is how an empty language shows; any other error is a limit.
            if error and not error.startswith("NoExtension"):
                raise GrammarUnsupported("pattern", f"it needs too large an automaton ({error[:80]!r})")
            self._nonempty[name] = found and not error
        return self._nonempty[name]

    def accepts(self, name: str, terminals: dict[str, str], text: str) -> bool:
        """Whether the terminal matches the whole text."""
        key = (name, text)
        if key not in self._accepts:
            matcher = self._matcher(name, terminals).deep_copy()
            data = list(text.encode("utf-8", "surrogatepass"))
            self._accepts[key] = (
                matcher.validate_tokens(data) == len(data)
                and (matcher.consume_tokens(data) if data else True)
                and matcher.is_accepting()
            )
        return self._accepts[key]

    def compiles(self, text: str) -> bool:
        """Whether llguidance takes the rule and something matches it."""
        if text not in self._compiles:
            matcher = LLMatcher(byte_tokenizer(), f"start: inner\ninner: {text}\n", log_level=0)
            self._compiles[text] = not matcher.is_error() and any(matcher.compute_bitmask()) and not matcher.is_error()
        return self._compiles[text]

    def _matcher(self, name: str, terminals: dict[str, str]) -> LLMatcher:
        if name not in self._matchers:
            needed: dict[str, str] = {}
            todo = [name]
            while todo:
                one = todo.pop()
                if one not in needed:
                    needed[one] = terminals[one]
                    if not terminals[one].startswith(("/", '"')):
                        todo.extend(_NAME.findall(terminals[one]))
            lines = "\n".join(f"{one}: {definition}" for one, definition in needed.items())
            matcher = LLMatcher(byte_tokenizer(), f"start: {name}\n{lines}\n", log_level=0)
            if matcher.is_error():
                raise GrammarUnsupported("pattern", f"it can't be compiled ({matcher.get_error()[:160]})")
            self._matchers[name] = matcher
        return self._matchers[name]
