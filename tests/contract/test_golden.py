"""The Python side of the contract's golden messages: golden/NAME.txtpb must serialise to golden/NAME.bin.

The Rust side (crates/worker) reads the same files, so both languages are held to the same bytes. The first line
of a text file names its message: `# branchline.engine.v1.GenerateRequest`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from branchline.engine.service.generated import engine_pb2 as pb
from google.protobuf import text_format
from google.protobuf.message import Message

GOLDEN = Path(__file__).resolve().parent / "golden"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.txtpb"))


def parse(name: str) -> Message:
    """The message of a text file."""
    text = (GOLDEN / f"{name}.txtpb").read_text("utf-8")
    head = text.splitlines()[0]
    package = f"# {pb.DESCRIPTOR.package}."
    assert head.startswith(package), f"{name}.txtpb must name its message in its first line"
    kind = head.removeprefix(package).strip()
    return text_format.Parse(text, getattr(pb, kind)())


def test_there_are_golden_messages_with_both_forms() -> None:
    assert NAMES == sorted(path.stem for path in GOLDEN.glob("*.bin"))
    assert NAMES, "no golden messages"


@pytest.mark.parametrize("name", NAMES)
def test_python_writes_the_golden_bytes(name: str) -> None:
    assert parse(name).SerializeToString(deterministic=True) == (GOLDEN / f"{name}.bin").read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_python_reads_the_golden_bytes_as_the_same_message(name: str) -> None:
    message = parse(name)
    assert type(message).FromString((GOLDEN / f"{name}.bin").read_bytes()).SerializeToString(
        deterministic=True
    ) == message.SerializeToString(deterministic=True)
