"""What a quantisation method is, and which one a checkpoint and the options come to.

A method may change what a checkpoint's tensors are read as (`open`), how the torch executor holds a matrix
(`matrix`) and which weight type the native executor is asked for (`native_dtype`). Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from branchline.engine.errors import LoadError
from branchline.engine.model.source import LoadedModel
from branchline.registry import RegistryError, quantization_methods

if TYPE_CHECKING:
    import torch

AUTO = "auto"


class Matrix(Protocol):
    """A weight [out, in] held in another form, for the torch executor."""

    shape: tuple[int, int]

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [rows, in] times the weight's transpose, plus bias: [rows, out] in the dtype of x."""

    def nbytes(self) -> int:
        """Bytes held."""


class QuantizationMethod(Protocol):
    """One way to hold weights. `name` is the registered one.

    `executors` are those that can run it, the preferred first. `native_dtype` is the weight dtype that the native
    executor is then built with; empty leaves the option's. `of_checkpoint` says that the checkpoint decides:
    `--quantization` may name the method then but not apply it to another checkpoint.
    """

    api_version: int
    name: str
    executors: tuple[str, ...]
    native_dtype: str
    of_checkpoint: bool

    def open(self, model: LoadedModel) -> LoadedModel:
        """The checkpoint with its tensors under canonical names. Raises LoadError for settings it lacks."""

    def matrix(self, weight: torch.Tensor) -> Matrix | None:
        """The torch executor's form of one linear weight; None keeps it as it is."""


def choose(option: str, model: LoadedModel) -> QuantizationMethod | None:
    """The method that the option and the checkpoint come to; None for weights as they are.

    Raises LoadError if the checkpoint needs another method than the one asked for, or one that is not registered.
    """
    own = str(model.quantization.get("quant_method", "")) if model.quantization else ""
    if not own and model.path.suffix == ".gguf":
        own = "gguf"
    if option == AUTO:
        return _build(own, f"the checkpoint is quantised with {own!r}") if own else None
    method = _build(option, f"quantization {option!r} is asked for")
    if own and own != option and (method.of_checkpoint or own != "gguf"):
        raise LoadError(
            f"quantization {option!r} does not fit the checkpoint, which is quantised with {own!r}: leave the option "
            "out, or give an unquantised checkpoint",
            field="quantization",
        )
    if method.of_checkpoint and own != option:
        raise LoadError(
            f"quantization {option!r} needs a checkpoint quantised so, and this one is not: leave the option out",
            field="quantization",
        )
    return method


def _build(name: str, why: str) -> QuantizationMethod:
    try:
        factory = quantization_methods.get(name)
        method = factory()
        quantization_methods.verify(name, method)
    except RegistryError as error:
        raise LoadError(f"{why}: {error}", field="quantization") from None
    return method  # type: ignore[return-value]
