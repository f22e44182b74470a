"""Connections end when they should, and nothing warns of them: by hand, by `with`, once collected, at the end."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator

import pytest
from branchline import lang as bl
from branchline.lang import hosts

from .test_runtime import Server, answer, ask, event


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    whole = [event(answer("fine")), event("[DONE]")]
    made.answers["/generate"] = lambda body: whole if body.get("stream") else answer("fine")
    yield made
    made.stop()


def connections(backend: bl.Runtime) -> int:
    return len(backend._sessions._by_loop)


def test_closing_ends_the_connections_and_the_next_run_makes_new_ones(server: Server) -> None:
    backend = bl.Runtime(server.url)
    for _ in range(2):
        assert ask.run(backend=backend).ret_value == "fine"
        assert connections(backend) == 1
        backend.close()
        assert connections(backend) == 0


def test_closing_twice_or_unused_is_no_error(server: Server) -> None:
    backend = bl.Runtime(server.url)
    backend.close()
    backend.close()
    assert connections(backend) == 0


def test_a_with_block_closes(server: Server) -> None:
    with bl.Runtime(server.url) as backend:
        assert ask.run(backend=backend).ret_value == "fine"
    assert connections(backend) == 0


def test_an_async_with_block_closes_the_connections_of_every_loop(server: Server) -> None:
    @bl.function
    async def question(s: bl.State) -> None:
        s += bl.gen("a")

    async def main() -> bl.Runtime:
        async with bl.Runtime(server.url) as backend:
            await question.run_async(backend=backend)
            await ask.run_async(backend=backend)
            assert connections(backend) == 2
        return backend

    assert connections(asyncio.run(main())) == 0


def test_a_close_on_the_running_loop_does_not_wait_for_itself(server: Server) -> None:
    @bl.function
    async def question(s: bl.State) -> None:
        s += bl.gen("a")

    async def main() -> int:
        backend = bl.Runtime(server.url)
        await question.run_async(backend=backend)
        backend.close()
        await asyncio.sleep(0)
        return connections(backend)

    assert asyncio.run(main()) == 0


def test_a_collected_backend_closes_without_a_warning(server: Server) -> None:
    backend = bl.Runtime(server.url)
    ask.run(backend=backend)
    session = next(iter(backend._sessions._by_loop.values()))
    gone = weakref.ref(backend)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del backend
        gc.collect()
    assert gone() is None
    closed = threading.Event()
    hosts.background().post(lambda: closed.set() if session.closed else None)
    assert closed.wait(30)


def test_connections_of_a_loop_that_ended_are_dropped_by_the_next(server: Server) -> None:
    backend = bl.Runtime(server.url)

    @bl.function
    async def question(s: bl.State) -> None:
        s += bl.gen("a")

    async def leave_open() -> None:
        await question.run_async(backend=backend)
        connector = next(iter(backend._sessions._by_loop.values())).connector
        assert connector is not None
        await connector.close()
        await asyncio.sleep(0)

    asyncio.run(leave_open())
    assert ask.run(backend=backend).ret_value == "fine"
    assert connections(backend) == 1
    backend.close()


SCRIPT = """
from branchline import lang as bl

@bl.function
def ask(s):
    s += "Q" + bl.gen("a")

print(ask.run(backend=bl.Runtime("{url}"))["a"])
{end}
"""


@pytest.mark.parametrize("end", ["", "raise SystemExit(0)", "kept = bl.Runtime('{url}')"])
def test_a_process_that_forgets_its_backend_ends_at_once_and_in_silence(server: Server, end: str) -> None:
    script = SCRIPT.format(url=server.url, end=end.format(url=server.url))
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", script]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    slow = [line for line in ended.stderr.splitlines() if line.startswith("Executing ")]  # of a busy machine
    assert (ended.returncode, ended.stdout, ended.stderr.splitlines()) == (0, "fine\n", slow)


MANY = """
import resource, sys, threading
from branchline import lang as bl

soft = 256
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, soft))
bl.set_default_backend(bl.Runtime(sys.argv[1]))

@bl.function
def one(s, number):
    s += "x" * 4000 + str(number) + bl.gen("a")
    return s["a"]

@bl.function
def wide(s):
    s += "x" * 4000
    forks = s.fork(1000)
    for number, branch in enumerate(forks):
        branch += str(number) + bl.gen("b")
    forks.join()
    return s["b"]

branches = []
other = threading.Thread(target=lambda: branches.extend(wide.run().ret_value))
other.start()
states = one.run_batch([{"number": number} for number in range(1000)])
other.join()
assert [state["a"] for state in states] == branches == ["v"] * 1000
# Not ru_maxrss, which a child inherits from whoever started it.
print(next(int(line.split()[1]) // 1024 for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def test_a_thousand_programs_and_a_fork_of_a_thousand_take_few_descriptors_and_little_memory(server: Server) -> None:
    server.answers["/generate"] = lambda body: answer("v")
    server.answers["/v1/leases"] = lambda body: {"id": "lease-1", "tokens": 16, "ttl_ms": 60000}
    done = subprocess.run([sys.executable, "-c", MANY, server.url], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 300, "MiB"
