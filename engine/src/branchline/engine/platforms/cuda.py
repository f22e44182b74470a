"""The platform `cuda`: GPUs that torch can use."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SHARE = 0.8  # of free device memory, weights included
DRIVER_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


class Cuda:
    """NVIDIA's, and AMD's by torch's build for them."""

    api_version = 1
    rank = 100
    device = "cuda"
    dtype = "bfloat16"
    executors = ("torch-cuda", "torch", "transformers")

    def devices(self) -> list[str]:
        """Names of the GPUs; empty without torch or without a driver's device.

        The device file is looked for first: importing torch takes seconds that a machine without a GPU need not spend.
        """
        if importlib.util.find_spec("torch") is None or not any(Path(path).exists() for path in DRIVER_FILES):
            return []
        import torch

        if not torch.cuda.is_available():
            return []
        return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]

    def room(self, weights: int) -> float:
        """What the first device has free."""
        import torch

        free, _ = torch.cuda.mem_get_info(self.device)
        return max(0.0, free * SHARE - weights)
