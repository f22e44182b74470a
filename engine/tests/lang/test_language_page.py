"""Every Python block of docs/language.md and the README's program run, in order, as a reader would run them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from branchline import lang as bl

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "language.md"


@pytest.fixture(autouse=True)
def no_default() -> Iterator[None]:
    yield
    bl.set_default_backend(None)


def blocks(page: Path) -> list[tuple[int, str]]:
    """Line of the first line, and text, of each Python block."""
    text = page.read_text()
    return [
        (text[: match.start(1)].count("\n"), match.group(1))
        for match in re.finditer(r"```python\n(.*?)```", text, re.S)
    ]


def test_every_block_of_the_page_runs() -> None:
    names: dict[str, Any] = {}
    found = blocks(PAGE)
    assert len(found) >= 8
    for line, block in found:
        code = compile("\n" * line + block, str(PAGE), "exec")
        exec(code, names)


def test_links_of_the_page_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE.read_text()):
        assert (PAGE.parent / target).exists(), target


def test_the_readmes_program_runs() -> None:
    (program,) = [block for _, block in blocks(ROOT / "README.md") if "lang as bl" in block]
    mock = bl.Mock(answers=["tip"])
    code = re.sub(r"bl\.Runtime\([^)]*\)", "mock", program)
    assert code != program
    names: dict[str, Any] = {"mock": mock}
    exec(compile(code, "README.md", "exec"), names)
    assert mock.meter.planted == 1
    assert mock.meter.held == 0
