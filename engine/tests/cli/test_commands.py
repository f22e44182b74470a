"""The command line as a user meets it: doctor, version, wrong usage, exit codes, and the ties between processes."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from branchline import __version__
from branchline.cli import children, doctor, router, serve
from branchline.cli.backends.choose import choose
from branchline.cli.launcher import Launcher, Plan
from branchline.engine.options import ConfigError

SOURCE = Path(__file__).resolve().parents[2] / "src"
ENV = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONDONTWRITEBYTECODE": "1"}
HELP = """
Options:
      --host <TEXT>          Address
      --policy <CHOICE>      How
      --log-level <LEVEL>    Level
      --insecure[=<BOOL>]    Keyless
  -h, --help                 Print help
"""
GATEWAY = router.Router("/bin/router", router.flags_of(HELP))


def branchline(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "branchline.cli", *arguments],
        env={**ENV, **env}, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def test_version_help_and_wrong_usage_have_their_exit_codes() -> None:
    assert branchline("--version").stdout == f"branchline {__version__}\n"
    assert branchline("--help").returncode == 0 and branchline().returncode == 2
    wrong = branchline("sevre")
    assert wrong.returncode == 2 and "unknown command 'sevre'" in wrong.stderr


def test_the_version_is_that_of_the_workspace() -> None:
    workspace = (SOURCE.parents[1] / "Cargo.toml").read_text()
    assert f'version = "{__version__}"' in workspace


def test_a_model_that_is_not_there_is_one_clear_line_and_exit_code_2(tmp_path: Path) -> None:
    done = branchline("engine", str(tmp_path / "missing.gguf"))
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert done.returncode == 2 and len(errors) == 1 and "missing.gguf" in errors[0]
    assert "Traceback" not in done.stderr and done.stdout == ""


def test_a_taken_engine_port_is_told_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = branchline("engine", "missing.gguf", "--port", str(port))
        assert done.returncode == 2 and f"can't listen on 127.0.0.1:{port}" in done.stderr
        assert "missing.gguf" not in done.stderr


def test_doctor_reports_as_json_what_it_reports_in_words() -> None:
    report = json.loads(branchline("doctor", "--json").stdout)
    assert report["branchline"] == __version__
    assert set(report["cpu"]["features"]) == set(doctor.FEATURES)
    assert set(report["packages"]) == set(doctor.PACKAGES)
    assert report["memory"]["total_bytes"] >= report["memory"]["free_bytes"] > 0
    used = report["use"]
    assert used["executor"] == "native" and used["why"]
    assert used["kernels"] in ("portable", "avx2", "avx512") and int(used["threads"]) >= 1
    assert report["cpu"]["features"]["avx2"] or used["kernels"] == "portable"
    words = doctor.render(report)
    for part in (report["cpu"]["model"], "avx2", "8080", "would use", "because", "cache_limit"):
        assert part in words


def test_doctor_reads_cores_and_features_of_the_processor() -> None:
    block = (
        "processor\t: {0}\nmodel name\t: Fast 9\nphysical id\t: 0\ncore id\t\t: {1}\nflags\t\t: fma avx2 amx_tile\n\n"
    )
    found = doctor.cpu("".join(block.format(number, number // 2) for number in range(8)))
    assert (found["model"], found["physical_cores"]) == ("Fast 9", 4)
    assert [name for name, has in found["features"].items() if has] == ["avx2", "fma", "amx_tile"]
    assert doctor.cpu("")["model"] == "unknown"


# ---- serve -------------------------------------------------------------------------------------


def test_serve_gives_each_table_its_own_options() -> None:
    argv = ["--policy", "random", "m.gguf", "--workers", "3", "--insecure", "--page-size=8", "--host", "::1",
            "--log-level", "debug", "--port", "9"]  # fmt: skip
    plan = serve.resolve(argv, {"BRANCHLINE_TOKEN": "s3cret", "BRANCHLINE_PAGE_SIZE": "4", "HOME": "/h"}, GATEWAY)
    assert (plan.model, plan.workers, plan.host, plan.port, plan.token) == ("m.gguf", 3, "::1", 9, "s3cret")
    assert set(plan.arguments) == {"--page-size=8", "--log-level=debug"}
    assert plan.router_arguments == ("--policy", "random", "--insecure", "--log-level", "debug")
    assert dict(plan.env) == {"HOME": "/h"}
    assert plan.url == "http://[::1]:9"


@pytest.mark.parametrize(
    ("host", "arguments", "env", "refused"),
    [
        ("0.0.0.0", (), {}, True),
        ("::", ("--policy", "random"), {}, True),
        ("::1", (), {}, False),
        ("127.9.9.9", (), {}, False),
        ("0.0.0.0", ("--insecure",), {}, False),
        ("0.0.0.0", ("--api-key-file=k",), {}, False),
        ("0.0.0.0", (), {"BRANCHLINE_ROUTER_API_KEY": "k"}, False),
    ],
)
def test_an_open_address_without_keys_is_refused_before_a_model_is_loaded(
    host: str, arguments: tuple[str, ...], env: dict[str, str], refused: bool
) -> None:
    plan = replace(serve.resolve(["m.gguf"], {}, GATEWAY), host=host, router_arguments=arguments, env=env)
    assert (serve.exposed(plan) is not None) is refused
    assert plan.url.startswith("http://")
    assert replace(plan, router_arguments=("--tls-cert-path", "c")).url.startswith("https://")


def test_an_option_of_both_tables_reaches_both_in_their_own_writing() -> None:
    plan = serve.resolve(["m.gguf", "--drain-timeout", "2.5", "--log-level", "warning"], {}, GATEWAY)
    assert set(plan.arguments) == {"--drain-timeout=2.5", "--log-level=warning"}
    assert plan.router_arguments == ("--log-level", "warn", "--drain-timeout", "2.5s")


def test_serve_reports_faults_of_all_tables_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        serve.resolve(["--workers", "0", "--page-size", "x", "--polcy", "a"], {}, GATEWAY)
    words = "\n".join(caught.value.faults)
    for part in ("workers must be between", "--page-size must be an integer", "unknown option '--polcy'"):
        assert part in words


def test_serve_says_how_to_get_the_gateway_if_there_is_none(tmp_path: Path) -> None:
    done = branchline("serve", "m", BRANCHLINE_ROUTER_BIN=str(tmp_path / "nothing"))
    assert done.returncode == 1 and "pip install" in done.stderr and "branchline-router" in done.stderr


def test_serve_tells_of_a_taken_port_before_loading() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        fault = serve.port_fault("127.0.0.1", port)
        assert fault is not None and str(port) in fault and "--port" in fault
    assert serve.port_fault("127.0.0.1", serve.free_port("127.0.0.1")) is None


def plan_of(router_path: str, **fields: object) -> Plan:
    base = {
        "model": "m", "workers": 1, "host": "127.0.0.1", "port": serve.free_port("127.0.0.1"),
        "backend": choose("branchline", "m"), "name": "m", "given": {}, "arguments": (),
        "router_path": router_path, "router_arguments": (), "token": "", "threads": 0, "env": ENV,
    }  # fmt: skip
    return Plan(**{**base, **fields})  # type: ignore[arg-type]


async def test_an_engine_that_can_not_start_ends_the_launch_with_its_exit_code(
    capfd: pytest.CaptureFixture[str],
) -> None:
    code = await Launcher(plan_of("/bin/false", model="/no/such.gguf")).run()
    said = capfd.readouterr().err
    assert code == 2 and "engine | error:" in said and "/no/such.gguf" in said and "could not start" in said


async def test_a_childs_ready_line_is_taken_and_the_rest_is_relayed(capfd: pytest.CaptureFixture[str]) -> None:
    code = 'print(\'{"event": "ready", "address": "a:1"}\'); print(\'hello\'); print(\'{"event" nonsense\')'
    child = children.Child("engine", [sys.executable, "-c", code], ENV)
    await child.start()
    assert await child.wait() == 0
    assert (await child.ready)["address"] == "a:1"
    assert capfd.readouterr().err == 'engine | hello\nengine | {"event" nonsense\n'


async def test_a_child_shares_the_group_and_leaves_the_terminals_signals_to_the_launcher() -> None:
    code = "import os, signal, sys; print(os.getpgrp(), file=sys.stderr); signal.raise_signal(signal.SIGINT); "
    code += "print('survived', file=sys.stderr); signal.raise_signal(signal.SIGTERM)"
    said = io.StringIO()
    child = children.Child("c", [sys.executable, "-c", code], ENV, said)
    await child.start()
    assert await child.wait() == -signal.SIGTERM
    assert said.getvalue() == f"c | {os.getpgrp()}\nc | survived\n"


@pytest.mark.parametrize(("code", "words"), [(3, "exit code 3"), (-9, "signal SIGKILL"), (-250, "signal 250")])
def test_exit_codes_have_words(code: int, words: str) -> None:
    assert children.describe(code) == words


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def gone(pid: int) -> None:
    deadline = time.monotonic() + 20
    while is_alive(pid):
        assert time.monotonic() < deadline, f"{pid} is still alive"
        await asyncio.sleep(0.01)


async def test_a_child_dies_with_a_launcher_that_is_killed() -> None:
    code = (
        "import asyncio, os, sys\nfrom branchline.cli.children import Child\n"
        "async def main():\n"
        "    code = 'import time; print(1, flush=True); time.sleep(600)'\n"
        "    child = Child('c', [sys.executable, '-c', code], os.environ)\n"
        "    await child.start()\n    print(child.pid, flush=True)\n    await child.wait()\n"
        "asyncio.run(main())\n"
    )
    launcher = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, env=ENV, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert launcher.stdout is not None and launcher.stderr is not None
    pid = int(await launcher.stdout.readline())
    await launcher.stderr.readline()  # the child has run: it is tied
    assert is_alive(pid)
    launcher.kill()
    await launcher.wait()
    await gone(pid)


async def test_an_engine_follows_a_parent_that_is_not_its_own() -> None:
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(600)")
    code = "import sys, time\nfrom branchline.cli import parent\nparent.follow(int(sys.argv[1]))\n"
    code += "print(1, flush=True)\ntime.sleep(600)"
    follower = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(parent.pid), env=ENV, stdout=asyncio.subprocess.PIPE
    )
    assert follower.stdout is not None
    await follower.stdout.readline()
    parent.send_signal(signal.SIGKILL)
    await parent.wait()
    assert await asyncio.wait_for(follower.wait(), 20) == 1
