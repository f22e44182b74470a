"""Chooses the serve backend of a model, and says why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from branchline import registry
from branchline.cli.backends.base import Detection, ServeBackend
from branchline.engine.options import ConfigError

OWN = "branchline"


@dataclass(frozen=True, slots=True)
class Chosen:
    """A made backend, its name, and why it is it."""

    name: str
    backend: ServeBackend
    why: str


def choose(name: str, model: str) -> Chosen:
    """The backend of that name, or for auto the most confident one. Raises ConfigError if none can serve the model."""
    if name == OWN:
        return Chosen(name, make(name), "asked for")
    if name != "auto":
        backend = make(name)
        found = _detect(name, backend, model)
        if found.confidence <= 0:
            raise ConfigError([f"backend {name!r} can't serve {model!r}: {found.reason}"])
        return Chosen(name, backend, f"asked for; {found.reason}")
    made = {entry.name: make(entry.name) for entry in registry.serve_backends.in_order() if not entry.failure}
    others = {name: _detect(name, backend, model) for name, backend in made.items() if name != OWN}
    rivals = {name: found for name, found in others.items() if found.confidence > 0}
    if OWN not in made or not rivals:  # nothing to compare: the engine itself says what it can't serve
        return _alone(made, others, model)
    found_by = {OWN: _detect(OWN, made[OWN], model), **others}
    best = max(found_by, key=lambda one: found_by[one].confidence)  # the first of equals, ours first
    if found_by[best].confidence <= 0:
        raise ConfigError([_none(model, found_by)])
    rest = "; ".join(f"{one}: {found.reason}" for one, found in found_by.items() if one != best)
    return Chosen(best, made[best], f"{found_by[best].reason} (not {rest})" if rest else found_by[best].reason)


def _alone(made: dict[str, ServeBackend], others: dict[str, Detection], model: str) -> Chosen:
    if OWN not in made:
        best = max(others, key=lambda one: others[one].confidence, default="")
        if not best or others[best].confidence <= 0:
            raise ConfigError([_none(model, others)])
        return Chosen(best, made[best], others[best].reason)
    rest = "; ".join(f"{one}: {found.reason}" for one, found in others.items())
    return Chosen(OWN, made[OWN], f"no other backend can serve it here ({rest})" if rest else "the only backend")


def _none(model: str, found: dict[str, Detection]) -> str:
    return f"no backend can serve {model!r}: " + "; ".join(f"{name}: {one.reason}" for name, one in found.items())


def make(name: str) -> ServeBackend:
    """A backend, checked. Raises ConfigError with the registry's words."""
    try:
        backend = registry.serve_backends.get(name)()
        registry.serve_backends.verify(name, backend)
    except Exception as error:
        raise ConfigError([f"backend {name!r} can't be made: {error}"]) from error
    return cast("ServeBackend", backend)


def _detect(name: str, backend: ServeBackend, model: str) -> Detection:
    """A backend that raises can't serve it: the others are asked all the same."""
    try:
        return backend.detect(model)
    except Exception as error:
        return Detection(0.0, f"its detection failed: {type(error).__name__}: {error}")
