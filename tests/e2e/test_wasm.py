"""Middleware before a real engine: a module in text format, built by the router itself and loaded over HTTP."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from .stack import BIN, Stack, collect, metric
from .tiny import TinyModels

ROOT = Path(__file__).resolve().parents[2]
NOOP = ROOT / "examples" / "middleware" / "noop" / "noop.wat"
BODY: dict[str, object] = {"prompt": "Count", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
HANDLE = '(func (export "branchline:middleware/on-request@1.0.0#handle") (param i32) (result i32)'


def router(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A call of `branchline-router wasm`."""
    command = [str(BIN / "branchline-router"), "wasm", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def skip_without_runtime(said: str, words: str) -> None:
    """Skips before a router that was built without the runtime, but not where the set-up has built it whole."""
    if words in said and not (ROOT / "target/release/.whole-router").exists():
        pytest.skip("this router was built without middleware; `make test` builds it whole")


def built(source: Path, folder: Path) -> Path:
    """The component of a text file; skips in words where the router has no runtime."""
    output = folder / (source.stem + ".wasm")
    done = router("build", str(source), "-o", str(output))
    skip_without_runtime(done.stderr, "this build can't make components")
    assert done.returncode == 0, done.stderr
    return output


def rejecting(folder: Path, name: str, status: int, text: str) -> Path:
    """A module that answers every request itself, from the example that lets every request pass."""
    source = NOOP.read_text()
    start = source.index(HANDLE)
    words = [(0, 2), (4, status), (8, 0), (12, 0), (16, 512), (20, len(text))]
    stores = "\n".join(f"    (i32.store (i32.const {at}) (i32.const {value}))" for at, value in words)
    body = f'{HANDLE}\n{stores}\n    (i32.const 0))\n  (data (i32.const 512) "{text}"))\n'
    path = folder / f"{name}.wat"
    path.write_text(source[:start] + body)
    return built(path, folder)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the gateway keeps its modules."""
    return tmp_path_factory.mktemp("modules")


@pytest.fixture(scope="module")
def stack(tiny: TinyModels, kept: Path) -> Iterator[Stack]:
    """An engine behind a gateway that keeps its modules."""
    stack = Stack(model=str(tiny.llama("plain")), gateway_flags=("--wasm-dir", str(kept)))
    try:
        yield stack
    finally:
        stack.close()


def push(stack: Stack, module: Path, settings: dict[str, object]) -> dict[str, object]:
    """Loads a module as multipart, as a browser or curl would."""
    files = {"module": (module.name, module.read_bytes(), "application/wasm")}
    answer = stack.client.post("/wasm", files=files, data={"settings": json.dumps(settings)})
    assert answer.status_code == 201, answer.text
    loaded: dict[str, object] = answer.json()
    return loaded


def names(stack: Stack) -> list[str]:
    """Names of the modules, in their order."""
    modules = stack.client.get("/wasm").json()["modules"]
    return [module["settings"]["name"] for module in modules]


def test_a_module_that_lets_everything_pass_changes_no_token(stack: Stack, tmp_path: Path) -> None:
    before = stack.post("/v1/completions", BODY).json()
    with stack.stream("/v1/completions", {**BODY, "stream": True}) as data:
        streamed_before = "".join(chunk["choices"][0]["text"] for chunk in collect(data) if chunk["choices"])
    loaded = push(stack, built(NOOP, tmp_path), {})
    try:
        assert names(stack) == ["noop"]
        after = stack.post("/v1/completions", BODY).json()
        assert after["choices"] == before["choices"]
        with stack.stream("/v1/completions", {**BODY, "stream": True}) as data:
            streamed = "".join(chunk["choices"][0]["text"] for chunk in collect(data) if chunk["choices"])
        assert streamed == streamed_before == before["choices"][0]["text"]
        counted = metric(
            stack.client,
            "branchline_router_wasm_calls_total",
            module="noop",
            hook="on-request",
            outcome="continue",
        )
        assert counted == 2
    finally:
        stack.client.delete(f"/wasm/{loaded['uuid']}")
    assert names(stack) == []


def test_a_rejected_request_never_reaches_the_engine(stack: Stack, tmp_path: Path) -> None:
    served = metric(stack.client, "branchline_router_completion_tokens_total")
    loaded = push(stack, rejecting(tmp_path, "gate", 418, "no tea"), {"routes": {"paths": ["/v1/completions"]}})
    try:
        for body in (BODY, {**BODY, "stream": True}, {"nonsense": 1}):
            answer = stack.post("/v1/completions", body)
            assert (answer.status_code, answer.text) == (418, "no tea")
        assert metric(stack.client, "branchline_router_completion_tokens_total") == served
        # Another route is not the module's, and operators' never are.
        assert stack.post("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 1}}).status_code == 200
        assert stack.client.get("/health").status_code == 200
    finally:
        stack.client.delete(f"/wasm/{loaded['uuid']}")


def test_the_command_line_loads_replaces_lists_and_removes(stack: Stack, tmp_path: Path) -> None:
    gate = rejecting(tmp_path, "gate", 418, "no tea")
    pushed = router("push", str(gate), "--url", stack.url, "--settings", '{"order": 3}')
    assert pushed.returncode == 0, pushed.stderr
    assert "gate v1 on order 3" in pushed.stdout
    assert stack.post("/v1/completions", BODY).status_code == 418
    replaced = router("push", str(built(NOOP, tmp_path)), "--name", "gate", "--url", stack.url)
    assert "gate v2 on order 3" in replaced.stdout, replaced.stderr
    assert stack.post("/v1/completions", BODY).status_code == 200
    assert "[on-request]" in router("ls", "--url", stack.url).stdout
    assert router("rm", "gate", "--url", stack.url).stdout == "removed gate\n"
    assert router("rm", "gate", "--url", stack.url).returncode == 1
    assert names(stack) == []


def test_what_is_kept_on_disk_is_what_is_loaded(stack: Stack, kept: Path, tmp_path: Path) -> None:
    loaded = push(stack, built(NOOP, tmp_path), {"name": "kept", "fail": "open"})
    record = json.loads((kept / "modules" / f"{loaded['uuid']}.json").read_text())
    assert (record["spec"]["name"], record["spec"]["fail"]) == ("kept", "open")
    assert (kept / "bytes" / f"{record['sha256']}.wasm").read_bytes()[:4] == b"\0asm"
    assert (kept / "compiled").stat().st_mode & 0o077 == 0
    stack.client.delete(f"/wasm/{loaded['uuid']}")
    left = [path for folder in ("modules", "bytes", "compiled") for path in (kept / folder).iterdir()]
    assert left == []


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{}", 400, "no module is given"),
        (b'{"name": "x", "module": "AAAA"}', 400, "no WebAssembly component"),
        (b'{"name": "x", "path": "/etc/passwd"}', 403, "--wasm-upload-dirs"),
        (b"[", 400, "no JSON object"),
    ],
)
def test_bad_uploads_are_refused_in_words(stack: Stack, body: bytes, status: int, words: str) -> None:
    headers = {"content-type": "application/json"}
    answer: httpx.Response = stack.client.post("/wasm", content=body, headers=headers)
    skip_without_runtime(answer.text, "no WebAssembly runtime")
    assert answer.status_code == status, answer.text
    assert words in answer.json()["error"]["message"]
    assert names(stack) == []
