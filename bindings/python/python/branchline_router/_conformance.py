"""Compares an object with a typed protocol by reflection.

Written by scripts/gen_registry.py from the engine's; do not edit.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator


def faults(product: object, protocol: type) -> list[str]:
    """Members of `protocol` that `product` (a class or an instance) misses or has in another shape.

    Data members are checked on instances only: a class may set them in its constructor.
    """
    return [*_method_faults(product, protocol), *_data_faults(product, protocol)]


def _data_faults(product: object, protocol: type) -> Iterator[str]:
    if isinstance(product, type):
        return
    for name in inspect.get_annotations(protocol):
        if not name.startswith("_") and not hasattr(product, name):
            yield f"missing attribute {name!r}"


def _method_faults(product: object, protocol: type) -> Iterator[str]:
    for name, wanted in inspect.getmembers(protocol, inspect.isfunction):
        if name.startswith("_"):
            continue
        if not hasattr(product, name):
            yield f"missing method {name!r}"
            continue
        found = getattr(product, name)
        if not callable(found):
            yield f"{name!r} must be a method, not {type(found).__name__}"
            continue
        yield from _signature_faults(name, found, wanted, bound=not isinstance(product, type))


def _signature_faults(name: str, found: object, wanted: object, *, bound: bool) -> Iterator[str]:
    try:
        have = _parameters(found, drop_self=not bound)
    except (TypeError, ValueError):  # built-in callables have no signature to compare
        return
    want = _parameters(wanted, drop_self=True)
    kinds = inspect.Parameter
    accepts_any = any(parameter.kind in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD) for parameter in have.values())
    if not accepts_any:
        for parameter in want:
            if parameter not in have:
                yield f"method {name!r} misses parameter {parameter!r}"
    for parameter, detail in have.items():
        variadic = detail.kind in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
        if parameter not in want and detail.default is kinds.empty and not variadic:
            yield f"method {name!r} has an extra required parameter {parameter!r}"


def _parameters(member: object, *, drop_self: bool) -> dict[str, inspect.Parameter]:
    parameters = dict(inspect.signature(member).parameters)  # type: ignore[arg-type]
    if drop_self:
        parameters.pop("self", None)
    return parameters
