"""Several processes that share one model, by torch.distributed: NCCL between GPUs, gloo on CPUs.

Rank 0 schedules; what every rank does is what rank 0 told it, never what its own clock says. Telling goes over a group
of its own, on the CPU, whose connections break when a process ends. Ranks are children of rank 0, or torchrun's.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from branchline.engine.errors import LoadError

TIMEOUT = timedelta(minutes=30)  # of one collective: loading and capturing differ between ranks by less
KEEPALIVE_S = 60.0  # rank 0 says so often that it is there
WATCH_S = 0.25
FOLLOWER = ("-m", "branchline.engine.executor.cuda.follow")

logger = logging.getLogger(__name__)

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Place:
    """Which rank this process is; `local` is its number on its machine."""

    rank: int
    size: int
    local: int


def place_of(env: Mapping[str, str]) -> Place | None:
    """What torchrun says in the environment; None without it."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= env.keys():
        return None
    return Place(int(env["RANK"]), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", env["RANK"])))


class Ranks:
    """Group of several processes; see group.py. `fixed_order` adds parts up rank after rank, whatever their size."""

    def __init__(self, place: Place, *, gpu: bool, address: str, fixed_order: bool = False) -> None:
        """Meet the others at `address` (tcp://host:port). Raises LoadError if they do not come."""
        self.rank, self.size = place.rank, place.size
        self.fixed_order = fixed_order
        self._children: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        self._over = threading.Event()
        self.reason = ""  # why the ranks can't go on; empty in good order
        try:
            dist.init_process_group("gloo", init_method=address, rank=self.rank, world_size=self.size, timeout=TIMEOUT)
            self._control: Any = dist.new_group(backend="gloo", timeout=TIMEOUT)
            self._data: Any = dist.new_group(backend="nccl", timeout=TIMEOUT) if gpu else dist.group.WORLD
        except (RuntimeError, ValueError) as error:
            raise LoadError(
                f"the {self.size} ranks can't meet at {address}: {error}", field="tensor_parallel_size"
            ) from error

    # ---- one step's collectives -------------------------------------------------------------

    def add_up(self, part: torch.Tensor) -> torch.Tensor:
        """See Group."""
        if not self.fixed_order:
            dist.all_reduce(part, group=self._data)
            return part
        parts = self._gathered(part)
        total = parts[0]
        for other in parts[1:]:
            total = total + other
        return total

    def join(self, part: torch.Tensor, width: int) -> torch.Tensor:
        """See Group. A part that is whole already is left alone."""
        if part.shape[1] >= width:
            return part
        return torch.cat(self._gathered(part), dim=1)[:, :width]

    def share(self, values: torch.Tensor) -> None:
        """Make `values` what rank 0 has."""
        dist.broadcast(values, 0, group=self._data)

    def _gathered(self, part: torch.Tensor) -> list[torch.Tensor]:
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part, group=self._data)
        return parts

    # ---- telling ----------------------------------------------------------------------------

    def tell(self, what: str, facts: Mapping[str, object] | None = None, arrays: Arrays | None = None) -> None:
        """Rank 0: say the same to all others. Raises RuntimeError if one of them is gone."""
        named = {name: np.ascontiguousarray(array) for name, array in (arrays or {}).items()}
        shapes = {name: [array.dtype.str, list(array.shape)] for name, array in named.items()}
        head = json.dumps({"what": what, "facts": dict(facts or {}), "arrays": shapes}).encode()
        body = b"".join([len(head).to_bytes(8, "little"), head, *(array.tobytes() for array in named.values())])
        message = torch.frombuffer(bytearray(body), dtype=torch.uint8)
        with self._lock:
            if self.reason:
                raise RuntimeError(self.reason)
            dist.broadcast(torch.tensor([message.numel()]), 0, group=self._control)
            dist.broadcast(message, 0, group=self._control)

    def hear(self) -> tuple[str, dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """The others: wait for what rank 0 says next. Raises RuntimeError if it is gone."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, 0, group=self._control)
        message = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(message, 0, group=self._control)
        body = message.numpy().tobytes()
        at = 8 + int.from_bytes(body[:8], "little")
        head = json.loads(body[8:at])
        arrays = {}
        for name, (dtype, shape) in head["arrays"].items():
            count = int(np.prod(shape)) * np.dtype(dtype).itemsize
            arrays[name] = np.frombuffer(body[at : at + count], dtype=dtype).reshape(shape)
            at += count
        return head["what"], head["facts"], arrays

    # ---- staying together -------------------------------------------------------------------

    def watch(self, children: list[subprocess.Popen[bytes]], on_loss: Callable[[str], None]) -> None:
        """Rank 0: see whether children end, and let all know that this process is there. A thread of its own."""
        self._children = children
        threading.Thread(target=self._watch, args=(on_loss,), name="ranks", daemon=True).start()

    def _watch(self, on_loss: Callable[[str], None]) -> None:
        waited = 0.0
        while not self._over.wait(WATCH_S):
            waited += WATCH_S
            for number, child in enumerate(self._children, 1):
                if child.poll() is not None:
                    self.lose(f"rank {number} of {self.size} ended with exit code {child.returncode}", on_loss)
                    return
            if waited >= KEEPALIVE_S:
                waited = 0.0
                try:
                    self.tell("still")
                except RuntimeError as error:
                    self.lose(f"a rank can't be reached: {error}", on_loss)
                    return

    def lose(self, reason: str, on_loss: Callable[[str], None]) -> None:
        """The ranks can't go on. Told once."""
        if self.reason or self._over.is_set():
            return
        self.reason = f"{reason}; the model can't be computed without all {self.size} ranks"
        logger.error("%s", self.reason)
        on_loss(self.reason)

    def close(self) -> None:
        """Part. Rank 0 tells the others first and waits for its children. Idempotent."""
        if self._over.is_set():
            return
        if self.rank == 0:
            try:
                self.tell("stop")
            except RuntimeError:  # somebody is gone already
                logger.info("not all ranks could be told to stop")
        self._over.set()
        for child in self._children:
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
        dist.destroy_process_group()


def leave(reason: str) -> None:
    """End this process with a word: a rank is gone, and a collective may never return."""
    print(f"error: {reason}; the engine ends", file=sys.stderr, flush=True)
    os._exit(1)


def gather(
    size: int, *, gpu: bool, fixed_order: bool, env: Mapping[str, str], on_loss: Callable[[str], None] = leave
) -> Ranks:
    """Rank 0's group of `size`: torchrun's where the environment names it, else with children started here.

    Raises LoadError if torchrun has another number of ranks or there are too few GPUs.
    """
    place = place_of(env)
    if place is not None:
        if place.size != size:
            raise LoadError(
                f"tensor-parallel-size is {size} and torchrun started {place.size} ranks: make them equal",
                field="tensor_parallel_size",
            )
        made = Ranks(
            place, gpu=gpu, address=f"tcp://{env['MASTER_ADDR']}:{env['MASTER_PORT']}", fixed_order=fixed_order
        )
        made.watch([], on_loss)
        return made
    if gpu and torch.cuda.device_count() < size:
        raise LoadError(
            f"tensor-parallel-size is {size} and this machine has {torch.cuda.device_count()} GPUs: lower it, or start "
            "the engine by torchrun on several machines",
            field="tensor_parallel_size",
        )
    port = _free_port()
    shared = {**env, "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if not gpu:
        shared["BRANCHLINE_RANKS_ON"] = "cpu"
        shared.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    children = [
        subprocess.Popen([sys.executable, *FOLLOWER], env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(1, size)
    ]
    try:
        made = Ranks(Place(0, size, 0), gpu=gpu, address=f"tcp://127.0.0.1:{port}", fixed_order=fixed_order)
    except BaseException:
        for child in children:
            child.kill()
        raise
    made.watch(children, on_loss)
    return made


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
