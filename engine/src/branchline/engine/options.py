"""The machinery of option tables: one frozen dataclass is the table of a process.

Owns flags, environment, TOML file, validation of all faults at once, redaction and the reference page, all
derived from the dataclass fields made by `option`. Must not know any particular option. The only place that
is given the environment.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from branchline import registry

C = TypeVar("C")
ENV_PREFIX = "BRANCHLINE_"


class ConfigError(Exception):
    """Options are wrong; `faults` has one line each."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = tuple(faults)


@dataclass(frozen=True, slots=True)
class Rules:
    """What an option's field says beyond its type and default."""

    doc: str
    section: str
    since: str
    choices: tuple[str, ...]
    kind: str  # kind of the registry whose names are choices too
    minimum: float | None
    maximum: float | None
    secret: bool
    positional: bool
    env: str


def option(
    default: Any,
    doc: str,
    *,
    section: str = "general",
    since: str = "0.1.0",
    choices: tuple[str, ...] = (),
    kind: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    secret: bool = False,
    positional: bool = False,
    env: str = "",
) -> Any:
    """A dataclass field that is an option. `env` defaults to BRANCHLINE_ and the name in capitals."""
    rules = Rules(doc, section, since, choices, kind, minimum, maximum, secret, positional, env)
    return dataclasses.field(default=default, metadata={"rules": rules})


@dataclass(frozen=True, slots=True)
class Option:
    """One row of a table."""

    name: str
    type: type  # of one value: str, int, float or bool
    many: bool
    optional: bool
    default: object
    rules: Rules

    @property
    def flag(self) -> str:
        """Name on the command line."""
        return self.name if self.rules.positional else "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        """Name in the environment."""
        return self.rules.env or ENV_PREFIX + self.name.upper()

    @property
    def choices(self) -> tuple[str, ...]:
        """Fixed choices, then the registry's names; empty for free text."""
        return self.rules.choices + (_registry(self.rules.kind).names() if self.rules.kind else ())

    def parse(self, text: str, source: str) -> object:
        """A value from one string of the environment or command line. Raises ValueError with a full sentence."""
        if self.type is bool:
            lowered = text.lower()
            if lowered in ("1", "true", "yes", "on"):
                return True
            if lowered in ("0", "false", "no", "off"):
                return False
            raise ValueError(f"{source} must be true or false, not {self.shown(text)}")
        if self.type is str:
            return text
        try:
            return self.type(text)
        except ValueError:
            noun = "an integer" if self.type is int else "a number"
            raise ValueError(f"{source} must be {noun}, not {self.shown(text)}") from None

    def shown(self, value: object) -> str:
        """The value as faults may show it."""
        return "the given secret" if self.rules.secret else repr(value)


def table(cls: type) -> tuple[Option, ...]:
    """The options of a dataclass, in order."""
    hints = typing.get_type_hints(cls)
    return tuple(_row(field, hints[field.name]) for field in dataclasses.fields(cls))


def _row(field: dataclasses.Field[Any], hint: Any) -> Option:
    arguments = typing.get_args(hint)
    many = typing.get_origin(hint) is tuple
    optional = isinstance(hint, types.UnionType)
    inner = arguments[0] if many or optional else hint
    return Option(field.name, inner, many, optional, field.default, field.metadata["rules"])


def _registry(kind: str) -> registry.Registry[Any]:
    return next(one for one in registry.all_registries() if one.kind == kind)


# ---- command line -------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """Reports by exception, so that a caller can join its faults with others."""

    def error(self, message: str) -> typing.NoReturn:
        raise ConfigError([message])


def parser(cls: type, prog: str, description: str, *, skip: Sequence[str] = ()) -> argparse.ArgumentParser:
    """An argparse parser of the table. Values stay strings: `resolve` validates them all at once."""
    made = _Parser(prog=prog, description=description, allow_abbrev=False)
    made.add_argument("--config", metavar="FILE", help=f"TOML file with options of this table [env {ENV_PREFIX}CONFIG]")
    extend(made, cls, skip=skip)
    return made


def extend(made: argparse.ArgumentParser, cls: type, *, skip: Sequence[str] = ()) -> None:
    """Add a further table's flags; its positional arguments included."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for row in table(cls):
        if row.name not in skip:
            section = row.rules.section
            if section not in groups:
                groups[section] = made.add_argument_group(section)
            _add_argument(groups[section], row)


def _add_argument(group: argparse._ArgumentGroup, row: Option) -> None:
    help_text = _help(row).replace("%", "%%")
    if row.rules.positional:
        group.add_argument(row.name, nargs="?", metavar=row.name.upper(), help=help_text)
    elif row.type is bool:
        group.add_argument(row.flag, dest=row.name, action=argparse.BooleanOptionalAction, default=None, help=help_text)
    else:
        action = "append" if row.many else "store"
        metavar = "{" + ",".join(row.choices) + "}" if row.choices else row.name.upper()
        group.add_argument(row.flag, dest=row.name, action=action, metavar=metavar, help=help_text)


def _help(row: Option) -> str:
    return f"{row.rules.doc} [default {_default(row)}; env {row.env}]"


def _default(row: Option) -> str:
    if row.default is None or row.default in ((), ""):
        return "none"
    return str(row.default).lower() if row.type is bool else str(row.default)


def flags_of(
    tables: type | Sequence[type], made: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[dict[str, object], list[str]]:
    """The given flags by option name (and `config`), and faults about unknown ones of all `tables`."""
    classes = (tables,) if isinstance(tables, type) else tables
    known_flags = [row.flag for cls in classes for row in table(cls)]
    try:
        known, unknown = made.parse_known_args(list(argv))
    except ConfigError as error:
        return {}, list(error.faults)
    values = {name: value for name, value in vars(known).items() if value is not None}
    return values, [_unknown_flag(known_flags, flag) for flag in unknown]


def _unknown_flag(known: Sequence[str], flag: str) -> str:
    if not flag.startswith("-"):
        return f"unexpected argument {flag!r}"
    name = flag.partition("=")[0]
    return f"unknown option {name!r}{_hint(name, known)}"


def _hint(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f": did you mean {near[0]!r}?" if near else ": see --help"


# ---- resolution ---------------------------------------------------------------------------------


def resolve(
    cls: type[C],
    *,
    flags: Mapping[str, object] | None = None,
    env: Mapping[str, str] | None = None,
    file: str | None = None,
    faults: Sequence[str] = (),
) -> C:
    """The frozen options: defaults < file < environment < flags.

    `file` defaults to flags' `config`, then the environment's. Raises ConfigError with every fault found,
    those handed in first.
    """
    found = list(faults)
    flags = dict(flags or {})
    env = env or {}
    path = file or str(flags.pop("config", "") or env.get(ENV_PREFIX + "CONFIG", ""))
    flags.pop("config", None)
    rows = {row.name: row for row in table(cls)}
    values: dict[str, object] = {}
    values.update(_from_file(rows, path, found) if path else {})
    values.update(_from_env(rows, env, found))
    values.update(_from_flags(rows, flags, found))
    for name, value in list(values.items()):
        wrong = value_faults(rows[name], value)
        found.extend(wrong)
        if wrong:
            del values[name]
    made = cls(**values)
    checks = getattr(made, "faults", None)
    found.extend(checks() if checks is not None else ())
    if found:
        raise ConfigError(found)
    return made


def sources(
    cls: type, *, flags: Mapping[str, object] | None = None, env: Mapping[str, str] | None = None
) -> dict[str, list[tuple[str, object]]]:
    """(source, value) of each option that the user gave, the winner last. For options that `resolve` accepts."""
    flags, env = dict(flags or {}), env or {}
    path = str(flags.pop("config", "") or env.get(ENV_PREFIX + "CONFIG", ""))
    rows = {row.name: row for row in table(cls)}
    found: dict[str, list[tuple[str, object]]] = {}
    ignored: list[str] = []
    for name, value in (_from_file(rows, path, ignored) if path else {}).items():
        found.setdefault(name, []).append((f"file {path}", value))
    for name, value in _from_env(rows, env, ignored).items():
        found.setdefault(name, []).append((f"environment {rows[name].env}", value))
    for name, value in _from_flags(rows, flags, ignored).items():
        found.setdefault(name, []).append((f"flag {rows[name].flag}", value))
    return found


def _from_file(rows: Mapping[str, Option], path: str, found: list[str]) -> dict[str, object]:
    try:
        content = tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        found.append(f"options file {path!r} can't be read: {error.strerror or error}")
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        found.append(f"options file {path!r} is not TOML: {error}")
        return {}
    values: dict[str, object] = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name not in rows:
            found.append(f"unknown key {key!r} in {path!r}{_hint(name, list(rows))}")
            continue
        row = rows[name]
        if row.many and isinstance(value, list):
            value = tuple(value)
        elif row.many:
            value = (value,)
        elif row.type is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        values[name] = value
    return values


def _from_env(rows: Mapping[str, Option], env: Mapping[str, str], found: list[str]) -> dict[str, object]:
    by_env = {row.env: row for row in rows.values()}
    values: dict[str, object] = {}
    for key, text in env.items():
        if key in by_env:
            row = by_env[key]
            parts: object = [part.strip() for part in text.split(",") if part.strip()] if row.many else text
            _parse_into(values, row, parts, f"environment variable {key}", found)
        elif key.startswith(ENV_PREFIX) and (near := difflib.get_close_matches(key, by_env, n=1, cutoff=0.9)):
            found.append(f"unknown environment variable {key}: did you mean {near[0]}?")
    return values


def _from_flags(rows: Mapping[str, Option], flags: Mapping[str, object], found: list[str]) -> dict[str, object]:
    values: dict[str, object] = {}
    for name, given in flags.items():
        _parse_into(values, rows[name], given, rows[name].flag, found)
    return values


def _parse_into(values: dict[str, object], row: Option, given: object, source: str, found: list[str]) -> None:
    try:
        if row.many and isinstance(given, list | tuple):
            values[row.name] = tuple(row.parse(str(part), source) for part in given)
        else:
            values[row.name] = row.parse(given, source) if isinstance(given, str) else given
    except ValueError as error:
        found.append(str(error))


def value_faults(row: Option, value: object) -> list[str]:
    """What is wrong with a value of an option, one sentence each."""
    if value is None and row.optional:
        return []
    if row.many:
        values = value if isinstance(value, tuple) else (value,)
        return [fault for one in values for fault in _one_fault(row, one)]
    return _one_fault(row, value)


def _one_fault(row: Option, value: object) -> list[str]:
    label = row.name.replace("_", "-")
    if not isinstance(value, row.type) or (row.type is not bool and isinstance(value, bool)):
        return [f"{label} must be of type {row.type.__name__}, not {row.shown(value)}"]
    if row.choices and value not in row.choices:
        return [_choice_fault(row, label, str(value))]
    if isinstance(value, int | float) and not isinstance(value, bool):
        low, high = row.rules.minimum, row.rules.maximum
        outside = (low is not None and value < low) or (high is not None and value > high)
        if outside or not math.isfinite(value):
            return [f"{label} must be {_range(low, high)}, not {value}"]
    return []


def _choice_fault(row: Option, label: str, value: str) -> str:
    if row.rules.kind:
        return f"{label}: {_registry(row.rules.kind).unknown(value)}"
    hint = _hint(value, row.choices) if difflib.get_close_matches(value, row.choices, n=1) else ""
    return f"{label} must be one of {', '.join(row.choices)}, not {value!r}{hint}"


def _range(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f"between {low:g} and {high:g}"
    return f"at least {low:g}" if low is not None else f"at most {high:g}" if high is not None else "finite"


# ---- what is derived ------------------------------------------------------------------------------


def public(config: object) -> dict[str, object]:
    """The options as plain data, secrets replaced by whether they are set."""
    shown: dict[str, object] = {}
    for row in table(type(config)):
        value = getattr(config, row.name)
        shown[row.name] = ("set" if value else "unset") if row.rules.secret else value
    return shown


def arguments(config: object, *, skip: Sequence[str] = ()) -> list[str]:
    """Command line that gives back `config`, without options at their default and without secrets."""
    made: list[str] = []
    for row in table(type(config)):
        value = getattr(config, row.name)
        if row.name in skip or row.rules.secret or row.rules.positional or value == row.default:
            continue
        if row.type is bool:
            made.append(row.flag if value else "--no-" + row.flag[2:])
            continue
        made += [f"{row.flag}={one}" for one in (value if row.many else (value,))]
    return made


def markdown(cls: type, title: str, intro: str) -> str:
    """The reference page of a table."""
    lines = [f"# {title}", "", intro, ""]
    sections: dict[str, list[Option]] = {}
    for row in table(cls):
        sections.setdefault(row.rules.section, []).append(row)
    for section, rows in sections.items():
        lines += [f"## {section}", "", "| flag | environment | file | type | default | since | what |"]
        lines.append("|---|---|---|---|---|---|---|")
        lines += [_markdown_row(row) for row in rows]
        lines.append("")
    return "\n".join(lines)


def _markdown_row(row: Option) -> str:
    kind = row.type.__name__ + (", many" if row.many else "") + (", secret" if row.rules.secret else "")
    choices = " Choices: " + ", ".join(f"`{one}`" for one in row.rules.choices) + "." if row.rules.choices else ""
    registered = f" Registered names of `{row.rules.kind}`." if row.rules.kind else ""
    doc = row.rules.doc.rstrip(".") + "." + choices + registered
    return f"| `{row.flag}` | `{row.env}` | `{row.name}` | {kind} | {_default(row)} | {row.rules.since} | {doc} |"
