"""Writes the router's registration rules from the engine's, so that both packages have the same; --check only compares.

The two packages never import each other; what they share by text is made here.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENGINE = ROOT / "engine/src/branchline"
ROUTER = ROOT / "bindings/python/python/branchline_router"
HEAD = '"""{title}\n\nWritten by scripts/gen_registry.py from the engine\'s; do not edit.\n"""\n'
CHANGES = {
    "from branchline import __version__\n": "from branchline_router._native import VERSION as __version__\n",
    "from branchline._conformance": "from branchline_router._conformance",
    '"branchline.plugins"': '"branchline_router.plugins"',
    'self.package == "branchline"': 'self.package == "branchline-router"',
    'top == "branchline"': 'top == "branchline_router"',
    'Origin("branchline", ': 'Origin("branchline-router", ',
    "matches branchline {": "matches branchline-router {",
    "@branchline.registry.": "@branchline_router.registry.",
}


def after_docstring(text: str) -> str:
    """The text from the first import on."""
    return text[text.index("from __future__") :]


def generate() -> dict[str, str]:
    """File names and contents."""
    rules = after_docstring((ENGINE / "registry.py").read_text())
    rules = rules[: rules.index("\nmodels: Registry[")].rstrip() + "\n"
    for old, new in CHANGES.items():
        if old not in rules:
            raise SystemExit(f"engine/src/branchline/registry.py has no {old!r} any more; mend scripts/gen_registry.py")
        rules = rules.replace(old, new)
    # The list of kinds is the caller's own.
    rules = rules.replace("for registry in all_registries():", "for registry in self.kinds:")
    rules = rules.replace("    def __init__(self) -> None:\n        self.failures", KINDS)
    conformance = after_docstring((ENGINE / "_conformance.py").read_text())
    rules_head = HEAD.format(title="Named, versioned implementations: rules of registration and their messages.")
    conformance_head = HEAD.format(title="Compares an object with a typed protocol by reflection.")
    return {
        "_registry.py": formatted(f"{rules_head}\n{rules}\n\nplugins = Plugins([])\n"),
        "_conformance.py": formatted(f"{conformance_head}\n{conformance}"),
    }


def formatted(text: str) -> str:
    """The text as the formatter leaves it."""
    place = ["--stdin-filename", str(ROUTER / "_registry.py"), "-"]
    for arguments in (["check", "--select", "I", "--fix", "-q"], ["format"]):
        command = [sys.executable, "-m", "ruff", *arguments, *place]
        text = subprocess.run(command, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return text


KINDS = """    def __init__(self, kinds: list[Registry[Callable[..., object]]]) -> None:
        self.kinds = kinds
        self.failures"""


def main() -> int:
    """Writes the files, or says which are not current."""
    stale = [name for name, text in generate().items() if not same(ROUTER / name, text)]
    if "--check" in sys.argv[1:]:
        for name in stale:
            print(f"{name} is not current; run scripts/gen_registry.py")
        return 1 if stale else 0
    for name, text in generate().items():
        (ROUTER / name).write_text(text)
    return 0


def same(path: Path, text: str) -> bool:
    """Whether a file has this text."""
    return path.is_file() and path.read_text() == text


if __name__ == "__main__":
    sys.exit(main())
