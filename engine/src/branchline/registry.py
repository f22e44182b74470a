"""The one extension seam: named, versioned implementations of everything pluggable.

Owns registration rules, conformance checks, plugin loading and the messages about them. Our own
implementations register through the same calls as anyone's. Must not import an implementation before
it is asked for, nor anything of the engine. Called from modules that register, and from the engine's assembly.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import importlib.util
import logging
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from branchline import __version__
from branchline._conformance import faults as conformance_faults

API_VERSION = 1  # of a registration that states none
ALL = "all"  # as the name of a plugin to leave out
PLUGIN_GROUP = "branchline.plugins"

logger = logging.getLogger(__name__)

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., object])


class RegistryError(Exception):
    """A registration or a lookup is refused; the message names the origins and what to do."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a registration comes from."""

    package: str  # distribution, or the top-level module if it belongs to none
    version: str  # of the distribution; "-" if it belongs to none
    file: str

    @property
    def builtin(self) -> bool:
        """Whether it is ours: such names are reserved."""
        return self.package == "branchline"

    def __str__(self) -> str:
        return f"{self.package} {self.version} ({self.file})"


@dataclass(slots=True)
class Entry(Generic[T]):
    """One registered name. `item` is None until a lazy entry is first asked for."""

    name: str
    api_version: int
    module: str
    origin: Origin
    target: str = ""  # "module:object" of a lazy entry
    item: T | None = None
    failure: str = ""  # traceback of the failed import
    replaced: Origin | None = None  # what an override displaced

    @property
    def state(self) -> str:
        """`loaded`, `lazy` or `failed`."""
        if self.failure:
            return "failed"
        return "lazy" if self.item is None else "loaded"


@dataclass(frozen=True, slots=True)
class PluginFailure:
    """A plugin module or entry point that could not be loaded."""

    name: str
    origin: Origin
    trace: str

    @property
    def reason(self) -> str:
        """Last line of the traceback."""
        return self.trace.strip().splitlines()[-1]


@dataclass(frozen=True, slots=True)
class Disabled:
    """An installed entry point that the user left out by `--plugins-disable`."""

    group: str
    name: str
    origin: Origin


class Registry(Generic[T]):
    """Implementations of one kind by name.

    `protocol` is what a registered class, or what a factory returns, must offer; as "module:object" it is
    imported at the first check. Registered objects are callables: classes or factories. `changes` says of each
    version after the first what authors must do who come from the one before.
    """

    def __init__(
        self,
        kind: str,
        noun: str,
        protocol: type | str | None = None,
        *,
        api_version: int = API_VERSION,
        changes: Mapping[int, Sequence[str]] | None = None,
    ) -> None:
        self.kind = kind
        self.noun = noun
        self.api_version = api_version
        self.changes = dict(changes or {})
        self._protocol = protocol
        self._entries: dict[str, Entry[T]] = {}

    # ---- registration -----------------------------------------------------------------------

    def register(self, name: str, *, api_version: int = API_VERSION, override: bool = False) -> Callable[[F], F]:
        """Decorator that registers a class or factory.

        Raises RegistryError for a taken or reserved name, another API version or a non-conforming object.
        """

        def apply(item: F) -> F:
            module = getattr(item, "__module__", "") or ""
            self._check(name, item, origin_of(module))
            entry: Entry[T] = Entry(name, api_version, module, origin_of(module), item=item)  # type: ignore[arg-type]
            self._add(entry, override)
            return item

        return apply

    def register_lazy(self, name: str, target: str, *, api_version: int = API_VERSION, override: bool = False) -> None:
        """Register "module:object", imported and checked when first asked for."""
        module, _, attribute = target.partition(":")
        if not module or not attribute:
            raise RegistryError(f"{self.noun} {name!r}: target must be 'module:object', not {target!r}")
        self._add(Entry(name, api_version, module, origin_of(module), target=target), override)

    def _add(self, entry: Entry[T], override: bool) -> None:
        name, origin = entry.name, entry.origin
        if not name or not isinstance(name, str):
            raise RegistryError(f"{self.noun} name must be a non-empty string, not {name!r} (from {origin})")
        self._check_version(name, origin, entry.api_version)
        present = self._entries.get(name)
        if present is not None:
            if _same(present, entry):
                return
            self._refuse_duplicate(present, entry, override)
            entry.replaced = present.origin
            logger.warning("%s %r of %s overridden by %s", self.noun, name, present.origin, origin)
        self._entries[name] = entry

    def _check_version(self, name: str, origin: Origin, stated: object) -> None:
        if stated == self.api_version and not isinstance(stated, bool):
            return
        parts = [
            f"{self.noun} {name!r} from {origin} is written for API version {stated!r}; this is API version "
            f"{self.api_version}: install a plugin release that matches branchline {__version__}"
        ]
        if isinstance(stated, int) and stated < self.api_version:
            for version in range(max(stated, API_VERSION) + 1, self.api_version + 1):
                parts.append(f"version {version} changed: " + ", ".join(self.changes.get(version, ("nothing told",))))
        raise RegistryError("; ".join(parts))

    def _refuse_duplicate(self, present: Entry[T], entry: Entry[T], override: bool) -> None:
        both = f"registered by {present.origin} and again by {entry.origin}"
        if override and present.replaced is not None:
            raise RegistryError(
                f"{self.noun} {entry.name!r} is overridden twice: by {present.origin} and by {entry.origin}; "
                "load only one of them"
            )
        if override:
            return
        if present.origin.builtin:
            raise RegistryError(
                f"{self.noun} name {entry.name!r} is reserved: {both}; choose another name, or say override=True"
            )
        raise RegistryError(
            f"{self.noun} {entry.name!r} is a duplicate: {both}; choose another name, or say override=True"
        )

    def _check(self, name: str, item: object, origin: Origin) -> None:
        if not callable(item):
            raise RegistryError(f"{self.noun} {name!r} must be a class or factory, not {type(item).__name__}")
        stated = getattr(item, "api_version", None)  # an entry point can say it nowhere else
        if isinstance(stated, int):
            self._check_version(name, origin, stated)
        if isinstance(item, type):
            self.verify(name, item)

    # ---- lookup -----------------------------------------------------------------------------

    def names(self) -> tuple[str, ...]:
        """Registered names whose import has not failed, sorted."""
        return tuple(sorted(name for name, entry in self._entries.items() if not entry.failure))

    def entries(self) -> tuple[Entry[T], ...]:
        """All entries, failed ones included, by name."""
        return tuple(self._entries[name] for name in sorted(self._entries))

    def in_order(self) -> tuple[Entry[T], ...]:
        """All entries in the order of their registration."""
        return tuple(self._entries.values())

    def entry(self, name: str) -> Entry[T]:
        """The entry of a name. Raises RegistryError for an unknown one."""
        if name not in self._entries:
            raise RegistryError(self.unknown(name))
        return self._entries[name]

    def get(self, name: str) -> T:
        """The class or factory registered under `name`, imported now if lazy.

        Raises RegistryError if the name is unknown, its import fails or the object does not conform.
        """
        entry = self.entry(name)
        if entry.failure:
            raise RegistryError(self._import_failed(entry))
        if entry.item is None:
            entry.item = self._import(entry)
        return entry.item

    def _import(self, entry: Entry[T]) -> T:
        module, _, attribute = entry.target.partition(":")
        try:
            item = getattr(importlib.import_module(module), attribute)
        except Exception:
            entry.failure = traceback.format_exc()
            raise RegistryError(self._import_failed(entry)) from None
        self._check(entry.name, item, entry.origin)
        return item  # type: ignore[no-any-return]

    def verify(self, name: str, product: object) -> None:
        """Raise RegistryError naming every member of `product` that the kind's protocol misses or that differs."""
        protocol = self._resolved_protocol()
        if protocol is None:
            return
        found = conformance_faults(product, protocol)
        if found:
            raise RegistryError(f"{self.noun} {name!r} does not conform to {protocol.__name__}: {'; '.join(found)}")

    def _resolved_protocol(self) -> type | None:
        if isinstance(self._protocol, str):
            module, _, attribute = self._protocol.partition(":")
            self._protocol = getattr(importlib.import_module(module), attribute)
        return self._protocol  # type: ignore[return-value]

    # ---- words ------------------------------------------------------------------------------

    def unknown(self, name: str) -> str:
        """The message for a name that is not registered."""
        parts = [f"unknown {self.noun} {name!r}"]
        near = difflib.get_close_matches(name, self.names(), n=1)
        if near:
            parts[0] += f" (did you mean {near[0]!r}?)"
        parts.append("registered: " + (", ".join(repr(known) for known in self.names()) or "none"))
        failed = [self._brief(entry) for entry in self.entries() if entry.failure]
        failed += [f"plugin {failure.name} of {failure.origin}: {failure.reason}" for failure in plugins.failures]
        if failed:
            parts.append("failed to import: " + ", ".join(failed))
        parts.append(
            f"to add it, call @branchline.registry.{self.kind}.register({name!r}, api_version={self.api_version}) in a "
            f"module named by --plugin or BRANCHLINE_PLUGINS, or declare an entry point {name!r} in the group "
            f"'branchline.{self.kind}'; this must happen before options are built"
        )
        return "; ".join(parts)

    def _brief(self, entry: Entry[T]) -> str:
        return f"{entry.name!r} of {entry.origin}: {entry.failure.strip().splitlines()[-1]}"

    def _import_failed(self, entry: Entry[T]) -> str:
        usable = ", ".join(self.names()) or "none"
        return f"{self.noun} {self._brief(entry)}; repair or uninstall it, or choose one of: {usable}"


class Plugins:
    """Loads entry points and named modules once a process; keeps what failed."""

    def __init__(self) -> None:
        self.failures: list[PluginFailure] = []
        self.disabled: list[Disabled] = []
        self._seen: set[str] = set()

    def load(self, named: Iterable[str] = (), disable: Collection[str] = ()) -> None:
        """Discover entry points, then import the modules `named` by the user ("module" or "module:function").

        `disable` holds names of distributions or of entry points that are left out, or "all" for every one. A
        failing entry point is recorded; a failing named module raises RegistryError with its traceback.
        """
        if "" not in self._seen:
            self._seen.add("")
            self._discover(disable)
        for name in named:
            if name in self._seen:
                continue
            self._load_named(name)
            self._seen.add(name)

    def _load_named(self, name: str) -> None:
        try:
            _run(name)
        except Exception:
            failure = PluginFailure(name, origin_of(name.partition(":")[0]), traceback.format_exc())
            self.failures.append(failure)
            raise RegistryError(
                f"plugin {name!r} can't be loaded: {failure.reason}; it was named by --plugin or BRANCHLINE_PLUGINS\n"
                + failure.trace.rstrip()
            ) from None

    def _discover(self, disable: Collection[str]) -> None:
        unmatched = {canonical(name) for name in disable} - {ALL}
        for point in importlib.metadata.entry_points(group=PLUGIN_GROUP):
            if self._is_disabled(point, disable, unmatched):
                continue
            if point.value not in self._seen:
                self._seen.add(point.value)
                self._attempt(point, lambda value=point.value: _run(value))  # type: ignore[misc]
        for registry in all_registries():
            for point in importlib.metadata.entry_points(group=f"branchline.{registry.kind}"):
                if self._is_disabled(point, disable, unmatched):
                    continue
                self._attempt(
                    point,
                    lambda registry=registry, point=point: registry.register_lazy(point.name, point.value),  # type: ignore[misc]
                )
        for name in sorted(unmatched):
            logger.warning("plugins-disable names %r, which no installed plugin has: see `branchline plugins`", name)

    def _is_disabled(self, point: importlib.metadata.EntryPoint, disable: Collection[str], unmatched: set[str]) -> bool:
        """Whether the user left it out, by its name or by its distribution's."""
        names = {canonical(point.name), *([canonical(point.dist.name)] if point.dist is not None else [])}
        if not names & {canonical(name) for name in disable} and ALL not in disable:
            return False
        unmatched -= names
        self.disabled.append(Disabled(point.group, point.name, origin_of(point.module)))
        return True

    def _attempt(self, point: importlib.metadata.EntryPoint, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            failure = PluginFailure(f"{point.name} = {point.value}", origin_of(point.module), traceback.format_exc())
            self.failures.append(failure)
            logger.error("plugin %s of %s can't be loaded: %s", failure.name, failure.origin, failure.reason)


def canonical(name: str) -> str:
    """A distribution's name as packaging compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _run(value: str) -> None:
    module, _, attribute = value.partition(":")
    loaded = importlib.import_module(module)
    if attribute:
        getattr(loaded, attribute)()


def _same(present: Entry[T], entry: Entry[T]) -> bool:
    """Whether both say the same thing: a module imported twice or an entry point beside its own decorator."""
    if present.target and entry.target:
        return present.target == entry.target
    if present.item is not None and entry.item is not None:
        return present.item is entry.item
    lazy, eager = (present, entry) if present.target else (entry, present)
    return lazy.target == f"{eager.module}:{getattr(eager.item, '__qualname__', '')}"


def origin_of(module: str) -> Origin:
    """Distribution, version and file of a module, without importing it."""
    top = module.partition(".")[0]
    if top == "branchline":
        return Origin("branchline", __version__, _file_of(module))
    owner = _owner(top)
    if owner is None:
        return Origin(top or "unknown", "-", _file_of(module))
    return Origin(owner.metadata["Name"], owner.version, _file_of(module))


def _owner(top: str) -> importlib.metadata.Distribution | None:
    """The installed distribution of a top-level module.

    Reads their files' texts alone: to parse all, as `packages_distributions` does, takes half a second beside torch.
    """
    inside = re.compile(rf"^{re.escape(top)}(/|\.[^/,]*,)", re.MULTILINE)
    for found in importlib.metadata.distributions() if top else ():
        listed = found.read_text("top_level.txt")
        if top in listed.split() if listed else inside.search(found.read_text("RECORD") or ""):
            return found
    return None


def _file_of(module: str) -> str:
    """Source file of a module; a module that is not loaded is located without running any of its packages."""
    loaded = sys.modules.get(module)
    if loaded is not None:
        return getattr(loaded, "__file__", None) or module
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top) if top else None
    except (ImportError, ValueError):
        return module
    if spec is None:
        return module
    for location in spec.submodule_search_locations or () if rest else ():
        base = Path(location).joinpath(*rest)
        for candidate in (base.with_suffix(".py"), base / "__init__.py"):
            if candidate.is_file():
                return str(candidate)
    return spec.origin or module


models: Registry[Callable[..., object]] = Registry("models", "model")
executors: Registry[Callable[..., object]] = Registry("executors", "executor", "branchline.engine.types:Executor")
attention_backends: Registry[Callable[..., object]] = Registry(
    "attention_backends", "attention backend", "branchline.engine.attention.base:AttentionBackend"
)
radix_cache_backends: Registry[Callable[..., object]] = Registry(
    "radix_cache_backends", "radix cache backend", "branchline.engine.cache.base:RadixCacheBackend"
)
speculative_algorithms: Registry[Callable[..., object]] = Registry(
    "speculative_algorithms",
    "speculative algorithm",
    "branchline.engine.speculative.base:SpeculativeAlgorithm",
)
quantization_methods: Registry[Callable[..., object]] = Registry(
    "quantization_methods", "quantization method", "branchline.engine.quantization.base:QuantizationMethod"
)
model_overrides: Registry[Callable[..., object]] = Registry(
    "model_overrides", "model override", "branchline.engine.overrides.base:ModelOverride"
)
eviction_policies: Registry[Callable[..., object]] = Registry(
    "eviction_policies", "eviction policy", "branchline.engine.cache.eviction:EvictionPolicy"
)
grammar_backends: Registry[Callable[..., object]] = Registry(
    "grammar_backends", "grammar backend", "branchline.engine.grammar.base:BaseGrammarBackend"
)
platforms: Registry[Callable[..., object]] = Registry(
    "platforms", "platform", "branchline.engine.platforms.base:Platform"
)
hooks: Registry[Callable[..., object]] = Registry("hooks", "hook", "branchline.engine.hooks.points:Hook")
serve_backends: Registry[Callable[..., object]] = Registry(
    "serve_backends", "serve backend", "branchline.cli.backends.base:ServeBackend"
)
kv_transfer_backends: Registry[Callable[..., object]] = Registry(
    "kv_transfer_backends", "kv transfer backend", "branchline.engine.handover.base:KvTransferBackend"
)
plugins = Plugins()


def all_registries() -> tuple[Registry[Callable[..., object]], ...]:
    """Every registry, in the order in which `branchline plugins` lists them."""
    return (
        models,
        executors,
        attention_backends,
        radix_cache_backends,
        eviction_policies,
        grammar_backends,
        speculative_algorithms,
        quantization_methods,
        model_overrides,
        platforms,
        hooks,
        serve_backends,
        kv_transfer_backends,
    )
