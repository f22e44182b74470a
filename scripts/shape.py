"""Shape gate: file and function sizes, test share, crate walls and stray words. Prints a table, exits 1 on breach."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE_CAP, FUNCTION_CAP = 500, 80
TEST_SHARE = 0.62  # a ratchet on the way to 0.8: raise it, never lower it
SKIP = ("service/generated/", "benchmarks/engine/", "benchmarks/router/", "benchmarks/wasm/")
# Which of our crates each may depend on (DESIGN section 2); dev-dependencies are free.
WALLS = {
    "core": set[str](),
    "prefix": {"core"},
    "text": {"core"},
    "protocol": {"core"},
    "routing": {"core", "prefix"},
    "telemetry": {"core"},
    "worker": {"core", "prefix", "text", "protocol", "routing", "telemetry"},
    "plugins": {"core", "telemetry"},
    "discovery": {"core", "telemetry"},
    "testkit": {"core", "worker", "protocol"},
    "gateway": {"core", "prefix", "text", "protocol", "routing", "telemetry", "worker", "plugins", "discovery"},
    "router-python": {"core", "telemetry", "gateway"},
    "engine-native": {"core", "prefix", "text"},
}
STRAY = re.compile(r"/work/|/root/|https?://[a-z.-]*(pypi|pythonhosted|npmjs|crates\.io|golang|debian)[a-z.-]*/")

RUST_EXAMPLE = re.compile(r"^\s*//[/!]\s*```(?!text)\w*\n\s*//[/!] [^`]", re.M)


def tracked() -> list[str]:
    """Paths of all tracked files."""
    out = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for path in out.splitlines() if (ROOT / path).is_file()]


def is_test(path: str) -> bool:
    """Whether a file counts as test code."""
    return bool(re.search(r"(^|/)(tests|testkit)/|(^|/)tests\.rs$|_test\.rs$|/benches/|(^|/)examples/", path))


def rust_split(text: str) -> tuple[int, int]:
    """Source and inline-test lines of a Rust file; inline tests stand last."""
    cut = re.search(r"^#\[cfg\(test\)\]\n(?:#.*\n)*mod \w+ \{", text, re.M)
    total = text.count("\n")
    source = text[: cut.start()].count("\n") if cut else total
    return source, total - source


def python_functions(path: str, text: str) -> list[str]:
    """Functions over the cap; decorators and docstring do not count."""
    over = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            doc = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            lines = (node.end_lineno or 0) - node.lineno + 1
            lines -= ((first.end_lineno or 0) - first.lineno + 1) if doc else 0
            if lines > FUNCTION_CAP:
                over.append(f"{path}:{node.lineno} {node.name} has {lines} lines (cap {FUNCTION_CAP})")
    return over


def crate_walls() -> list[str]:
    """Edges between our crates that the design forbids."""
    command = ["cargo", "metadata", "--format-version", "1", "--no-deps", "--offline", "--locked"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    faults = []
    for package in json.loads(out)["packages"]:
        name = package["name"].removeprefix("branchline-")
        allowed = WALLS.get(name)
        if allowed is None:
            faults.append(f"crate {package['name']} has no row in scripts/shape.py WALLS")
            continue
        for dependency in package["dependencies"]:
            target = dependency["name"].removeprefix("branchline-")
            if dependency["name"].startswith("branchline-") and dependency["kind"] is None and target not in allowed:
                faults.append(f"crate {name} may not depend on {target}")
    return faults


def left_out_tests() -> list[str]:
    """Files of integration tests that their crate's one test program does not name, and so would never run."""
    faults = []
    for root in [path for path in tracked() if path.endswith("/tests/main.rs")]:
        named = set(re.findall(r"^mod (\w+);", (ROOT / root).read_text(), re.M))
        folder = root.removesuffix("/main.rs")
        for path in (ROOT / folder).glob("*.rs"):
            if path.stem != "main" and path.stem not in named:
                faults.append(f"{folder}/{path.name} is not named in {root}: it would never run")
    return faults


def main() -> int:
    """Runs all checks."""
    faults = crate_walls() + left_out_tests()
    source = test = 0
    for path in tracked():
        if path.startswith(SKIP) or any(part in path for part in SKIP):
            continue
        if not path.endswith((".rs", ".py")):
            continue
        text = (ROOT / path).read_text()
        if path != "scripts/shape.py":
            faults += [f"{path}: stray path or package host: {m.group(0)}" for m in STRAY.finditer(text)]
        if path.endswith(".rs"):
            faults += [
                f"{path}: examples in comments are not run (doctest = false)" for _ in RUST_EXAMPLE.finditer(text)
            ]
        lines = text.count("\n")
        code, inline = rust_split(text) if path.endswith(".rs") else (lines, 0)
        if is_test(path):
            test += lines
        else:
            source += code
            test += inline
            if code > FILE_CAP:
                faults.append(f"{path} has {code} lines (cap {FILE_CAP})")
        if path.endswith(".py"):
            faults += python_functions(path, text)
    share = test / max(source, 1)
    print(f"source {source} lines, tests {test} lines, share {share:.2f} (floor {TEST_SHARE})")
    if share < TEST_SHARE:
        faults.append(f"test share {share:.2f} is below {TEST_SHARE}")
    for fault in faults:
        print(f"shape: {fault}")
    return 1 if faults else 0


sys.exit(main())
