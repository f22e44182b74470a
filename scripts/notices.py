"""Writes THIRD_PARTY_NOTICES.md: every crate linked into the wheels, its licence, and the licence texts once each."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGETS = ("branchline-gateway", "branchline-router-python", "branchline-engine-native")


def closure(metadata: dict) -> list[dict]:  # type: ignore[type-arg]
    """Packages reachable from our shipped crates over normal dependencies."""
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    packages = {package["id"]: package for package in metadata["packages"]}
    queue = [key for key, package in packages.items() if package["name"] in TARGETS]
    seen: set[str] = set()
    while queue:
        key = queue.pop()
        if key in seen:
            continue
        seen.add(key)
        for dependency in nodes[key]["deps"]:
            if any(kind["kind"] is None for kind in dependency["dep_kinds"]):
                queue.append(dependency["pkg"])
    ours = {package["id"] for package in metadata["packages"] if package["source"] is None}
    return sorted((packages[key] for key in seen - ours), key=lambda package: (package["name"], package["version"]))


def main() -> None:
    """Collects and writes."""
    command = [
        "cargo",
        "metadata",
        "--format-version",
        "1",
        "--locked",
        "--filter-platform",
        "x86_64-unknown-linux-gnu",
        "--features",
        "branchline-router-python/whole",
    ]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    rows, texts, users = [], {}, defaultdict(list)
    for package in closure(json.loads(out)):
        label = f"{package['name']} {package['version']}"
        rows.append(f"| {label} | {package['license'] or 'see its files'} | {', '.join(package['authors'][:3])} |")
        folder = Path(package["manifest_path"]).parent
        for path in sorted(folder.glob("*")):
            if path.is_file() and path.name.upper().startswith(("LICENSE", "LICENCE", "COPYING", "NOTICE")):
                text = path.read_text(errors="replace").strip()
                key = hashlib.sha256(" ".join(text.split()).encode()).hexdigest()
                texts[key] = text
                users[key].append(f"{label} ({path.name})")
    head = "# Third-party notices\n\nRust libraries linked into the wheels of Branchline, with their licences.\n\n"
    table = "| library | licence | authors |\n|---|---|---|\n" + "\n".join(rows)
    body = "\n\n".join(f"## {'; '.join(users[key])}\n\n```text\n{text}\n```" for key, text in texts.items())
    (ROOT / "THIRD_PARTY_NOTICES.md").write_text(f"{head}{table}\n\n{body}\n")
    print(f"{len(rows)} libraries, {len(texts)} licence texts")


main()
