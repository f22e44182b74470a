"""`branchline serve MODEL`: engines on loopback ports and one gateway before them, as one command.

Owns the order: options and port first, then engines, then the gateway, then the words for the user. Stopping
and restarting is launcher.py's.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from branchline.cli import extensions, router
from branchline.cli.backends.choose import OWN, Chosen, choose
from branchline.cli.engine import report
from branchline.cli.launcher import Launcher, Plan
from branchline.engine import options
from branchline.engine.config import EngineConfig
from branchline.engine.options import option

PROG = "branchline serve"
_OWN = ("host", "port", "parent_pid", "tls_cert", "tls_key", "tls_client_ca")  # engine options that serve sets itself
_OF_SERVE = ("model", "plugin", "plugins_disable", "log_level", "otlp_endpoint", "drain_timeout")  # whatever serves

# Flags of both tables, which both get, and how the gateway writes their value.
_SHARED: dict[str, Callable[[Any], str]] = {
    "--log-level": lambda level: "warn" if level == "warning" else str(level),
    "--otlp-endpoint": str,
    "--drain-timeout": lambda seconds: f"{float(seconds):g}s",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Options of the launcher itself; those of engines and gateway are in their own tables."""

    workers: int = option(
        1, "engines to run behind the gateway", section="serve", minimum=1, maximum=64, env="BRANCHLINE_SERVE_WORKERS"
    )
    prefill: int = option(
        0, "engines that only compute prompts, for as many as --decode says to decode from; both in place of --workers",
        section="serve", minimum=0, maximum=64, env="BRANCHLINE_SERVE_PREFILL",
    )  # fmt: skip
    decode: int = option(
        0, "engines that decode what the --prefill engines computed", section="serve", minimum=0, maximum=64,
        env="BRANCHLINE_SERVE_DECODE",
    )  # fmt: skip
    host: str = option("127.0.0.1", "address of the gateway", section="serve", env="BRANCHLINE_SERVE_HOST")
    port: int = option(
        8080, "port of the gateway; 0 takes a free one", section="serve", minimum=0, maximum=65535,
        env="BRANCHLINE_SERVE_PORT",
    )  # fmt: skip
    backend: str = option(
        "auto", "what serves the model behind the gateway; auto: our engine if it can, else what is installed here and "
        "can; the reason is printed", section="serve", choices=("auto",), kind="serve_backends",
        env="BRANCHLINE_SERVE_BACKEND",
    )  # fmt: skip
    backend_arg: tuple[str, ...] = option(
        (), "argument handed to a backend that is not our engine, as it is; repeat it", section="serve",
        env="BRANCHLINE_SERVE_BACKEND_ARG",
    )  # fmt: skip

    @property
    def roles(self) -> tuple[str, ...]:
        """Of each engine; empty if they have no roles."""
        return ("prefill",) * self.prefill + ("decode",) * self.decode

    def faults(self) -> list[str]:
        """Contradictions between options, one sentence each."""
        if bool(self.prefill) != bool(self.decode):
            return [f"prefill {self.prefill} and decode {self.decode} need each other: give both, or neither"]
        if self.roles and self.workers != 1:
            return [f"workers {self.workers} is given with prefill and decode: leave it out"]
        return []


def run(argv: Sequence[str]) -> int:
    """Serve until Ctrl-C; the exit code."""
    env = dict(os.environ)
    if not extensions.load_or_report(argv, env):
        return 2
    wants_help = any(word in ("-h", "--help") for word in argv)
    try:
        gateway = router.find(env)
    except router.RouterMissing as error:
        if not wants_help:
            print(f"error: {error}", file=sys.stderr)
            return 1
        gateway = router.Router("", {})
    try:
        plan = resolve(argv, env, gateway)
    except options.ConfigError as error:
        report(PROG, error.faults)
        return 2
    fault = exposed(plan) or port_fault(plan.host, plan.port)
    if fault:
        print(f"error: {fault}", file=sys.stderr)
        return 1
    try:
        return asyncio.run(Launcher(plan).run())
    except KeyboardInterrupt:
        return 130


def resolve(argv: Sequence[str], env: Mapping[str, str], gateway: router.Router) -> Plan:
    """What to start. Raises ConfigError with every fault of all three tables' flags."""
    engine_flags = {row.flag for row in options.table(EngineConfig) if row.name not in _OWN}
    ours = [*engine_flags, *(row.flag for row in options.table(ServeConfig)), "--config", "--help"]
    shared = [flag for flag in _SHARED if flag in engine_flags]
    rest, theirs = router.split(argv, gateway.flags, ours)
    parser = options.parser(EngineConfig, PROG, _DESCRIPTION, skip=_OWN)
    options.extend(parser, ServeConfig)
    flags, faults = options.flags_of((EngineConfig, ServeConfig), parser, rest)
    serve_flags = {row.name: flags.pop(row.name) for row in options.table(ServeConfig) if row.name in flags}
    own_env = {key: value for key, value in env.items() if key.startswith("BRANCHLINE_SERVE_")}
    found = list(faults)
    serve = ServeConfig()
    try:
        serve = options.resolve(ServeConfig, flags=serve_flags, env=own_env)
    except options.ConfigError as error:
        found += error.faults
    hidden = {row.env for row in options.table(EngineConfig) if row.name in _OWN}
    engine_env = {key: value for key, value in env.items() if key not in hidden}
    config = options.resolve(EngineConfig, flags=flags, env=engine_env, faults=found)
    for flag in shared:
        name = flag[2:].replace("-", "_")
        if name in flags:
            theirs += [flag, _SHARED[flag](flags[name])]
    chosen = choose(serve.backend, config.model)
    given = {name: getattr(config, name) for name in options.sources(EngineConfig, flags=flags, env=engine_env)}
    backend_faults(chosen, given, serve)
    return Plan(
        model=config.model,
        workers=len(serve.roles) or serve.workers,
        roles=serve.roles,
        host=serve.host,
        port=serve.port or free_port(serve.host),
        backend=chosen,
        name=(config.served_model_name or (short_name(config.model),))[0],
        given=given,
        arguments=tuple(options.arguments(config, skip=_OWN)) if chosen.name == OWN else serve.backend_arg,
        router_path=gateway.path,
        router_arguments=tuple(theirs),
        token=config.token,
        threads=config.threads,
        env={key: value for key, value in router.clean(env).items() if key not in _table_names()},
        gateway_env=_plugins(config),
    )


def backend_faults(chosen: Chosen, given: Mapping[str, object], serve: ServeConfig) -> None:
    """Raises ConfigError for options that the backend would not see. Nothing that was asked for is dropped."""
    found = []
    if chosen.name == OWN:
        if serve.backend_arg:
            found.append("backend-arg is for other backends than our engine: give the engine's options as they are")
    else:
        if serve.roles:
            found.append(f"prefill and decode are roles of our engine and {chosen.name} is to serve: leave them out")
        for name in given:
            if name not in chosen.backend.options and name not in _OF_SERVE:
                found.append(
                    f"{name.replace('_', '-')} is an option of our engine and {chosen.name} is to serve: leave it out, "
                    "say it by --backend-arg, or give --backend branchline"
                )
    if found:
        raise options.ConfigError(found)


def short_name(model: str) -> str:
    """What requests call a model that was given no name: a hub id as it is, else the file's, folder's or package's."""
    if model.startswith("pypi:"):
        return model.removeprefix("pypi:")
    path = Path(model).expanduser()
    return (path.stem if path.suffix == ".gguf" else path.resolve().name) if path.exists() else model


def _plugins(config: EngineConfig) -> dict[str, str]:
    """A plugin may register for both sides, so the gateway's script loads the same ones; its binary knows none."""
    given = {"BRANCHLINE_PLUGINS": config.plugin, "BRANCHLINE_PLUGINS_DISABLE": config.plugins_disable}
    return {name: ",".join(values) for name, values in given.items() if values}


def _table_names() -> set[str]:
    """Variables that are resolved here and must not be read a second time by the engines."""
    return {row.env for row in options.table(EngineConfig)} | {options.ENV_PREFIX + "CONFIG"}


def exposed(plan: Plan) -> str | None:
    """Why the gateway would refuse to listen there, told before a model is loaded; None if it would not."""
    try:
        near = ipaddress.ip_address(plan.host).is_loopback
    except ValueError:
        near = plan.host == "localhost"
    keyed = (
        "--user-api-key",
        "--admin-api-key",
        "--insecure",
        "BRANCHLINE_ROUTER_INSECURE",
        "BRANCHLINE_ROUTER_CONFIG",
    )
    if near or plan.asks_for_keys or plan.is_said(*keyed):
        return None
    return (
        f"host {plan.host} can be reached from other machines and no key is set: give --api-key or --api-key-file, "
        "listen on 127.0.0.1, or say --insecure to serve anybody"
    )


def port_fault(host: str, port: int) -> str | None:
    """Why the gateway could not listen there; None if it can."""
    try:
        with _listening(host, port):
            return None
    except OSError as error:
        return f"port {port} of {host} can't be used: {error.strerror}: stop what listens there, or give another --port"


def free_port(host: str) -> int:
    """A port that is free now."""
    with _listening(host, 0) as probe:
        return int(probe.getsockname()[1])


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    probe = socket.socket(family)
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind((host, port))
    except OSError:
        probe.close()
        raise
    return probe


_DESCRIPTION = (
    "Runs engines and a gateway on this machine. Options of `branchline-router` (see its --help), such as --policy or "
    "--api-key, are passed to the gateway."
)
