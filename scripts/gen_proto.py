"""Generates the engine's Python stubs from proto/; with --check only says whether the committed ones are current."""

from __future__ import annotations

import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parent.parent
PROTO = "branchline/engine/v1/engine.proto"
OUT = ROOT / "engine/src/branchline/engine/service/generated"
HEAD = '"""Stubs of proto/branchline/engine/v1/engine.proto, written by scripts/gen_proto.py. Do not edit."""\n'


def generate() -> dict[str, str]:
    """File names and contents of the stubs."""
    well_known = resources.files("grpc_tools") / "_proto"
    with tempfile.TemporaryDirectory() as folder:
        outputs = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
        status = protoc.main(
            ["protoc", f"-I{ROOT / 'proto'}", f"-I{well_known}", *outputs, str(ROOT / "proto" / PROTO)]
        )
        if status != 0:
            raise SystemExit(f"protoc failed with status {status}")
        made = {path.name: path.read_text("utf-8") for path in (Path(folder) / PROTO).parent.iterdir()}
    package = "branchline.engine.service.generated"
    made["engine_pb2_grpc.py"] = made["engine_pb2_grpc.py"].replace(
        "from branchline.engine.v1 import engine_pb2", f"from {package} import engine_pb2"
    )
    return {"__init__.py": HEAD, **made}


def main() -> int:
    """Write or compare; 1 if a committed stub is stale."""
    stale = [name for name, text in generate().items() if not _is_current(name, text)]
    if "--check" not in sys.argv:
        OUT.mkdir(parents=True, exist_ok=True)
        for name, text in generate().items():
            (OUT / name).write_text(text, "utf-8")
        return 0
    for name in stale:
        print(f"{OUT.relative_to(ROOT) / name} is stale: run make gen", file=sys.stderr)
    return 1 if stale else 0


def _is_current(name: str, text: str) -> bool:
    path = OUT / name
    return path.is_file() and path.read_text("utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
