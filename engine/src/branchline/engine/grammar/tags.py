"""Structural tags → llguidance's text: free text with parts that are constrained, and formats built of parts.

Reads both shapes that clients send: `{"structures": [...], "triggers": [...]}` and `{"type": "structural_tag",
"format": {...}}`. Each constrained part is a grammar of its own, with its own lexer. Runs in the compiling child.
"""

from __future__ import annotations

import json
from typing import Any

from branchline.engine.grammar import source
from branchline.engine.grammar.pattern import Quoting
from branchline.engine.grammar.pattern.write import literal
from branchline.engine.grammar.refusal import GrammarInvalid, GrammarUnsupported

MAX_PARTS = 1024
MAX_DEPTH = 32


def of_structural_tag(text: str) -> str:
    """llguidance's text of a structural tag. Raises GrammarInvalid or GrammarUnsupported, with a JSON pointer."""
    source.check_size(text, "the structural tag")
    value = source.read_json(text, "the structural tag")
    if not isinstance(value, dict):
        raise GrammarInvalid("the structural tag is no JSON object: give type and format, or structures and triggers")
    writer = _Writer()
    if "structures" in value:
        start = writer.triggered(_legacy(value), "/structures")
    elif value.get("type") == "structural_tag" and isinstance(value.get("format"), dict):
        start = writer.format(value["format"], "/format", 0)
    else:
        raise GrammarInvalid("the structural tag has neither format nor structures: give one of them", pointer="")
    return writer.finish(start)


def _legacy(value: dict[str, Any]) -> dict[str, Any]:
    """The older shape as a format of the newer one."""
    tags = [
        {
            "begin": _text(one, "begin", f"/structures/{at}"),
            "content": {"type": "json_schema", "json_schema": one.get("schema", True)},
            "end": _text(one, "end", f"/structures/{at}"),
        }
        for at, one in enumerate(_objects(value, "structures", ""))
    ]
    return {"type": "triggered_tags", "triggers": value.get("triggers"), "tags": tags}


class _Writer:
    """Collects rules of the outer grammar and the inner ones."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.inner: list[dict[str, str]] = []
        self.free = False
        self.count = 0

    def finish(self, start: str) -> str:
        outer = "\n".join([f"start: {start}", *self.lines]) + "\n"
        return json.dumps({"grammars": [{"name": "outer", "lark_grammar": outer}, *self.inner]})

    def name(self, kind: str) -> str:
        self.count += 1
        if self.count > MAX_PARTS:
            raise GrammarInvalid(f"the structural tag has more than {MAX_PARTS} parts: send fewer")
        return f"{kind}{self.count}"

    def rule(self, body: str) -> str:
        name = self.name("part")
        self.lines.append(f"{name}: {body}")
        return name

    def nested(self, grammar: str) -> str:
        """A grammar of its own, by reference."""
        name = self.name("inner")
        if grammar.startswith("{"):
            raise GrammarUnsupported("grammar", "a structural tag inside another one is not enforced")
        self.inner.append({"name": name, "lark_grammar": grammar})
        return f"@{name}"

    def format(self, value: dict[str, Any], at: str, depth: int) -> str:
        """The expression of one format."""
        if depth > MAX_DEPTH:
            raise GrammarInvalid(f"formats are nested more than {MAX_DEPTH} deep: flatten them", pointer=at)
        kind = value.get("type")
        if kind in ("const_string", "json_schema", "regex", "grammar", "any_text"):
            return self.leaf(value, at)
        match kind:
            case "sequence":
                return self.sequence(value, at, depth)
            case "or":
                return self.rule(" | ".join(self.several(value, "elements", at, depth)))
            case "tag":
                return self.tag(value, at, depth)
            case "triggered_tags":
                return self.triggered(value, at, depth)
            case "tags_with_separator":
                return self.separated(value, at, depth)
            case "optional" | "plus" | "star":
                body = self.rule(self.format(_object(value, "content", at), f"{at}/content", depth + 1))
                return body + {"optional": "?", "plus": "+", "star": "*"}[kind]
        raise GrammarUnsupported(f"type: {kind}", "there is no such format here", pointer=f"{at}/type")

    def leaf(self, value: dict[str, Any], at: str) -> str:
        """A format that holds no other."""
        match value["type"]:
            case "const_string":
                return _quoted(_text(value, "value", at))
            case "json_schema":
                _only(value, at, "style", ("json",))
                schema = value.get("json_schema", value.get("schema", True))
                return self.nested(_at(f"{at}/json_schema", source.of_json, json.dumps(schema)))
            case "regex":
                return self.nested(_at(f"{at}/pattern", source.of_regex, _text(value, "pattern", at)))
            case "grammar":
                return self.nested(_at(f"{at}/grammar", source.of_ebnf, _text(value, "grammar", at)))
        return self.text(value.get("excludes") or [], at)

    def sequence(self, value: dict[str, Any], at: str, depth: int) -> str:
        """One after the other. Free text would swallow what follows, so it must come last."""
        elements = _objects(value, "elements", at)
        for number, one in enumerate(elements[:-1]):
            if one.get("type") in ("any_text", "triggered_tags"):
                raise GrammarUnsupported(
                    str(one["type"]), "free text must come last", pointer=f"{at}/elements/{number}"
                )
        return self.rule(" ".join(self.several(value, "elements", at, depth)))

    def several(self, value: dict[str, Any], key: str, at: str, depth: int) -> list[str]:
        items = _objects(value, key, at)
        return [self.format(one, f"{at}/{key}/{number}", depth + 1) for number, one in enumerate(items)]

    def text(self, excludes: list[str], at: str) -> str:
        """Any text that holds none of some strings."""
        name = self.name("TEXT")
        banned = _excluded(excludes, at)
        self.lines.append(f"{name}: /(?s:.*)/{banned}")
        return name

    def tag(self, value: dict[str, Any], at: str, depth: int, skip: int = 0) -> str:
        """begin, content, end; `skip` characters of begin are already written."""
        begin = _text(value, "begin", at)
        content = _object(value, "content", at)
        ends = value.get("end", "")
        ends = ends if isinstance(ends, list) else [ends]
        if not ends or not all(isinstance(one, str) for one in ends):
            raise GrammarInvalid("end must be a string, or strings", pointer=f"{at}/end")
        head = _quoted(begin[skip:])
        if content.get("type") == "any_text" and all(ends):  # runs to the first end
            banned = _excluded(content.get("excludes") or [], f"{at}/content")
            name = self.name("body")
            closing = "|".join(literal(one, Quoting.PLAIN) for one in ends)
            self.lines.append(f"{name}[lazy]: {name.upper()}")
            self.lines.append(f"{name.upper()}: /(?s:.*)(?:{closing})/{banned}")
            return self.rule(f"{head} {name}")
        body = self.format(content, f"{at}/content", depth + 1)
        return self.rule(f"{head} {body} ({' | '.join(_quoted(one) for one in ends)})")

    def triggered(self, value: dict[str, Any], at: str, depth: int = 0) -> str:
        """Free text in which a trigger is always the beginning of a tag."""
        triggers = value.get("triggers")
        if not isinstance(triggers, list) or not triggers or not all(isinstance(one, str) and one for one in triggers):
            raise GrammarInvalid("triggers must be one or more strings that are not empty", pointer=f"{at}/triggers")
        by_trigger: dict[str, list[str]] = {one: [] for one in triggers}
        for number, one in enumerate(_objects(value, "tags", at)):
            begin = _text(one, "begin", f"{at}/tags/{number}")
            fits = [trigger for trigger in triggers if begin.startswith(trigger)]
            if len(fits) != 1:
                raise GrammarInvalid(
                    f"begin {begin[:80]!r} starts with {len(fits)} triggers: exactly one must fit",
                    pointer=f"{at}/tags/{number}/begin",
                )
            by_trigger[fits[0]].append(self.tag(one, f"{at}/tags/{number}", depth + 1, len(fits[0])))
        excludes = [*triggers, *(value.get("excludes") or [])]
        text = self.text(excludes, at)
        heads = []
        for trigger, tags in by_trigger.items():
            if not tags:
                raise GrammarInvalid(f"trigger {trigger[:80]!r} begins no tag: leave it out", pointer=f"{at}/triggers")
            head = self.name("head")
            self.lines.append(f"{head}[lazy]: /(?s:.*)/ {_quoted(trigger)}")
            heads.append(self.rule(f"{head} ({' | '.join(tags)})"))
        if value.get("excludes"):
            raise GrammarUnsupported("excludes", "beside triggers it is not enforced", pointer=f"{at}/excludes")
        one_of = self.rule(" | ".join(heads))
        first = bool(value.get("stop_after_first"))
        need = bool(value.get("at_least_one"))
        if first:
            return one_of if need else self.rule(f"{one_of} | {text}")
        return self.rule(f"{one_of}{'+' if need else '*'} {text}")

    def separated(self, value: dict[str, Any], at: str, depth: int) -> str:
        """Tags with a separator between them and nothing else."""
        separator = _quoted(_text(value, "separator", at))
        tags = [self.tag(one, f"{at}/tags/{n}", depth + 1) for n, one in enumerate(_objects(value, "tags", at))]
        one_of = self.rule(" | ".join(tags))
        more = "" if value.get("stop_after_first") else f" ({separator} {one_of})*"
        body = self.rule(f"{one_of}{more}")
        return body if value.get("at_least_one") else f"{body}?"


def _at(pointer: str, compile: Any, text: str) -> str:
    """Compile a part; its refusal tells where it stands."""
    try:
        return str(compile(text))
    except GrammarInvalid as error:
        raise GrammarInvalid(f"{pointer}: {error.message}") from None
    except GrammarUnsupported as error:
        raise GrammarUnsupported(error.keyword, f"{pointer}: {error.message.partition('exactly')[2][:300]}") from None


def _excluded(excludes: list[str], at: str) -> str:
    """What a terminal must not hold."""
    if not all(isinstance(one, str) and one for one in excludes):
        raise GrammarInvalid("excludes must be strings that are not empty", pointer=f"{at}/excludes")
    return "".join(f" & ~/(?s:.*)(?:{literal(one, Quoting.PLAIN)})(?s:.*)/" for one in excludes)


def _quoted(text: str) -> str:
    return f"/{literal(text, Quoting.PLAIN)}/" if text else '""'


def _only(value: dict[str, Any], at: str, key: str, known: tuple[str, ...]) -> None:
    if key in value and value[key] not in known:
        raise GrammarUnsupported(f"{key}: {value[key]}", f"use one of {', '.join(known)}", pointer=f"{at}/{key}")


def _text(value: dict[str, Any], key: str, at: str) -> str:
    found = value.get(key)
    if not isinstance(found, str):
        raise GrammarInvalid(f"{key} must be a string", pointer=f"{at}/{key}")
    return found


def _object(value: dict[str, Any], key: str, at: str) -> dict[str, Any]:
    found = value.get(key)
    if not isinstance(found, dict):
        raise GrammarInvalid(f"{key} must be an object", pointer=f"{at}/{key}")
    return found


def _objects(value: dict[str, Any], key: str, at: str) -> list[dict[str, Any]]:
    found = value.get(key)
    if not isinstance(found, list) or not found or not all(isinstance(one, dict) for one in found):
        raise GrammarInvalid(f"{key} must be one or more objects", pointer=f"{at}/{key}")
    return found
