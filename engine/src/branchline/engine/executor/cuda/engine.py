"""The executor `torch-cuda`: steps that are queued on the device, by graph where they only decode.

Built by `build.build_executor`, called from the step loop's one thread. `run` and `sample` are a step in two calls;
`launch` and `collect` the same step without waiting in between, so that the next one can be scheduled meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from branchline.engine.attention.base import AttentionBackend, GraphAttention
from branchline.engine.errors import InternalError
from branchline.engine.executor.cuda.decoder import Output, PagedDecoder
from branchline.engine.executor.cuda.device import Device
from branchline.engine.executor.cuda.graphs import DecodeGraphs
from branchline.engine.executor.cuda.staging import Staging
from branchline.engine.executor.cuda.step import StepInputs, arrays, is_decode
from branchline.engine.executor.holding import HoldsHost, HoldsPages
from branchline.engine.sampling import queued
from branchline.engine.sampling.penalties import PenaltyState, penalty_state
from branchline.engine.types import ForwardBatch, RowPlan, RowResult, SamplingParams

MAX_AHEAD = 1 << 16  # plans of one step whose tokens the next one may read


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """Which graphs to make: numbers of rows, rising (none: no graphs), and the most pages of one sequence."""

    sizes: tuple[int, ...] = ()
    pages: int = 1
    at_start: bool = True  # else each when it is first needed


class CudaSteps(HoldsHost):
    """Executor, QueueExecutor and HostExecutor; see `branchline.engine.types`."""

    api_version = 1

    def __init__(
        self,
        device: Device,
        decoder: PagedDecoder,
        attention: AttentionBackend,
        graphs: GraphOptions,
        *,
        num_pages: int,
        page_size: int,
        numerics_id: str,
    ) -> None:
        self._device = device
        self._decoder: PagedDecoder | None = decoder
        self._attention = attention
        self._staging = Staging(device)
        self._tokens = torch.zeros(MAX_AHEAD, dtype=torch.int64, device=device.device)
        self._graphs: DecodeGraphs | None = None
        self._output: Output | None = None
        self.vocab_size = decoder.spec.vocab_size
        self.num_pages = num_pages
        self.page_size = page_size
        self.numerics_id = numerics_id
        if isinstance(attention, GraphAttention):
            attention.connect(self._staging.upload, decoder.weights.embedding.dtype, decoder.pool.dtype)
            if graphs.sizes and decoder.can_be_captured:
                self._graphs = DecodeGraphs(
                    device, decoder, attention, self._staging, self._tokens,
                    sizes=graphs.sizes, pages=graphs.pages, page=num_pages, page_size=page_size,
                )  # fmt: skip
                if graphs.at_start:
                    with torch.inference_mode():
                        self._graphs.capture_all()

    # ---- steps ------------------------------------------------------------------------------

    def run(self, batch: ForwardBatch) -> object:
        """Queue a step; logits float32 [R, vocab] on the device, valid until the next `run` or `launch`."""
        with torch.inference_mode():
            self._output = self._step(batch)
        return self._output.logits

    def sample(self, logits: object, plans: list[RowPlan]) -> list[RowResult]:
        """Answer each plan, in order; a bad row gets its own error."""
        assert isinstance(logits, torch.Tensor), "logits come from run"
        if not plans:
            return []
        with torch.inference_mode():
            return queued.results(queued.queue(logits, plans, self._staging.upload, self._fetch))

    def launch(self, batch: ForwardBatch, plans: list[RowPlan]) -> object:
        """See QueueExecutor."""
        if not 0 < len(plans) <= MAX_AHEAD:
            raise InternalError(f"a step with {len(plans)} plans can't be launched: 1 to {MAX_AHEAD} can")
        with torch.inference_mode():
            self._output = self._step(batch)
            flight = queued.queue(self._output.logits, plans, self._staging.upload, self._fetch)
            self._tokens[: len(plans)].copy_(flight.tokens)
        return flight

    def take_part(self, batch: ForwardBatch, tokens: int, share: Callable[[torch.Tensor], None]) -> None:
        """Run a step of another rank's, and get the `tokens` chosen there by `share`, which fills a tensor."""
        with torch.inference_mode():
            self._output = self._step(batch)
            if tokens:
                share(self._tokens[:tokens])

    def collect(self, flight: object) -> list[RowResult]:
        """See QueueExecutor."""
        assert isinstance(flight, queued.Queued), "flights come from launch"
        return queued.results(flight)

    def hidden(self) -> object:
        """The normed last hidden states [R, hidden] of the latest step's logits rows, for speculative heads."""
        return None if self._output is None else self._output.hidden

    def _step(self, batch: ForwardBatch) -> Output:
        decoder = self.decoder
        if self._graphs is not None and is_decode(batch) and self._graphs.fits(len(batch.query_lens)):
            return self._graphs.run(batch)
        inputs = StepInputs.of(self._staging.upload(arrays(batch)))
        plan = self._staging.plan(lambda: self._attention.plan(batch))
        return decoder.forward(inputs, self._tokens, plan)

    def _fetch(self, source: torch.Tensor) -> Callable[[], npt.NDArray[np.uint8]]:
        target = self._device.pinned(source.numel())
        self._device.fetch(target, source)
        mark = self._device.mark()

        def read() -> npt.NDArray[np.uint8]:
            mark.wait()
            found: npt.NDArray[np.uint8] = target.numpy()
            return found

        return read

    # ---- the rest of Executor ---------------------------------------------------------------

    def penalty_state(self, prompt: tuple[int, ...], params: SamplingParams) -> object | None:
        """State for a sequence's penalties, or None if `params` has none."""
        return penalty_state(prompt, params)

    def observe(self, state: object, token_id: int) -> None:
        """Count one generated token in a penalty state."""
        assert isinstance(state, PenaltyState), "states come from penalty_state"
        state.observe(token_id)

    @property
    def decoder(self) -> PagedDecoder:
        """The decoder. Raises InternalError once closed."""
        if self._decoder is None:
            raise InternalError("executor is closed")
        return self._decoder

    @property
    def pool(self) -> torch.Tensor:
        """See HoldsHost."""
        return self.decoder.pool

    def close(self) -> None:
        """Drop graphs, weights and pool; idempotent."""
        self._graphs = self._decoder = self._output = self._host = None


class CudaExecutor(CudaSteps, HoldsPages):
    """The executor of one process, whose pages can also be handed to other workers."""
