"""What the executors on torch share: sampling from logits in memory, and names of devices and dtypes."""

from __future__ import annotations

import torch

from branchline.engine.errors import LoadError
from branchline.engine.sampling import sampler
from branchline.engine.sampling.penalties import PenaltyState, penalty_state
from branchline.engine.types import RowPlan, RowResult, SamplingParams

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class SamplesOnTorch:
    """The sampling half of an executor whose logits are a tensor."""

    def sample(self, logits: object, plans: list[RowPlan]) -> list[RowResult]:
        """Answer each plan, in order; a bad row gets its own error."""
        assert isinstance(logits, torch.Tensor), "logits come from run"
        with torch.inference_mode():
            return sampler.sample(logits, plans)

    def penalty_state(self, prompt: tuple[int, ...], params: SamplingParams) -> object | None:
        """State for a sequence's penalties, or None if `params` has none."""
        return penalty_state(prompt, params)

    def observe(self, state: object, token_id: int) -> None:
        """Count one generated token in a penalty state."""
        assert isinstance(state, PenaltyState), "states come from penalty_state"
        state.observe(token_id)


def device_of(name: str) -> torch.device:
    """The device of a name: cpu, cuda or cuda:N. Raises LoadError for one that is unknown or not there."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise LoadError(f"device {name!r} is unknown; use cpu, cuda or cuda:N", field="device") from None
    if device.type not in ("cpu", "cuda"):
        raise LoadError(f"device {name!r} is not supported; use cpu, cuda or cuda:N", field="device")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise LoadError(f"device {name!r} is not available: torch finds no usable GPU; use cpu", field="device")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise LoadError(f"device {name!r} does not exist: torch finds {torch.cuda.device_count()} GPUs", field="device")
    return device


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    """The dtype of a name; `auto` is float32 on a CPU, else bfloat16. Raises LoadError for one that is unknown."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    full = _SHORT.get(name, name)
    if full not in DTYPES:
        raise LoadError(f"dtype {name!r} is unknown; use auto, {', '.join(DTYPES)}", field="dtype")
    return DTYPES[full]
