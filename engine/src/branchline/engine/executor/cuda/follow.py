"""A rank other than 0: builds its share of the model as rank 0 says, and takes part in every step until told to stop.

Run as a process by rank 0 or, in the place of an engine, by torchrun. Exit codes: 0 told to stop, 1 rank 0 is gone or
the share can't be built. Has no options: everything is heard from rank 0.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch

import branchline.engine.attention
import branchline.engine.quantization  # noqa: F401  both register
from branchline.engine.errors import EngineError, LoadError
from branchline.engine.executor.cuda.build import CudaOptions, build_executor
from branchline.engine.executor.cuda.lead import follow
from branchline.engine.executor.cuda.parallel import Place, Ranks, place_of
from branchline.engine.model.load import load_model
from branchline.engine.quantization import choose

logger = logging.getLogger(__name__)


def main(env: Mapping[str, str]) -> int:
    """Follow until the end; the exit code."""
    place = place_of(env)
    if place is None or place.rank == 0:
        print("error: a follower needs RANK above 0 and WORLD_SIZE, MASTER_ADDR, MASTER_PORT", file=sys.stderr)
        return 1
    try:
        _follow(place, env)
    except EngineError as error:
        print(f"error: rank {place.rank}: {error}", file=sys.stderr, flush=True)
        return 1
    except RuntimeError as error:
        print(f"error: rank {place.rank} has lost rank 0 or its device: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def _follow(place: Place, env: Mapping[str, str]) -> None:
    gpu = torch.cuda.is_available() and env.get("BRANCHLINE_RANKS_ON") != "cpu"
    if gpu:
        torch.cuda.set_device(place.local)
    ranks = Ranks(place, gpu=gpu, address=f"tcp://{env['MASTER_ADDR']}:{env['MASTER_PORT']}")
    what, facts, _ = ranks.hear()
    if what != "build":
        raise LoadError(f"rank 0 says {what!r} before the model is built: all ranks need the same release")
    ranks.fixed_order = bool(facts["options"]["deterministic"])
    follow(_built(facts, ranks, f"cuda:{place.local}" if gpu else "cpu"), ranks)


def _built(facts: Mapping[str, Any], ranks: Ranks, device: str) -> Any:
    model = load_model(facts["model"])
    if model.fingerprint != facts["fingerprint"]:
        raise LoadError(f"{facts['model']} has other weights here than at rank 0: give all ranks the same checkpoint")
    method = choose(facts["quantization"], model) if facts["quantization"] else None
    model = model if method is None else method.open(model)
    return build_executor(
        model, device=device, dtype=facts["dtype"], num_pages=facts["num_pages"],
        page_size=facts["page_size"], threads=facts["threads"], attention_backend=facts["attention_backend"],
        quantization=method, options=CudaOptions(**facts["options"]), group=ranks,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(os.environ))
