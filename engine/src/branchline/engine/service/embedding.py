"""Embed: messages to texts for the encoder's queue and its results back, and the service of a worker that has no other.

Owns the checks of an EmbedRequest and the wiring of such a worker. Must not do arithmetic (encoder/).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

import numpy as np

from branchline.engine.config import EngineConfig
from branchline.engine.encoder import EncoderQueue, EncoderSpec, Network, Text, Work, load_encoder
from branchline.engine.errors import InternalError, InvalidArgument, LoadError, Unavailable, Unimplemented
from branchline.engine.loop import EngineLoop
from branchline.engine.service import wire
from branchline.engine.service.generated import engine_pb2 as pb
from branchline.engine.service.limits import ModelInfo
from branchline.engine.service.servicer import Context, EngineServicer, refuse
from branchline.engine.service.validate import check_ids, check_request_id
from branchline.engine.types import Request

if TYPE_CHECKING:
    from branchline.engine.service.metrics import Metrics

MAX_INPUTS = 2049  # 2,048 documents and their query
# Options that say how text is generated; a user who sets one means another model.
ABOUT_GENERATION = frozenset(
    {"quantization", "speculative_algorithm", "role", "host_cache_gib", "weight_dtype", "dtype", "executor", "adapter"}
)


@dataclass(frozen=True, slots=True)
class Encoder:
    """A worker that embeds or ranks, built and not yet started."""

    config: EngineConfig
    loop: EncoderQueue
    network: Network
    model: ModelInfo
    components: tuple[str, ...]
    metrics: Metrics | None

    def servicer(self, options: dict[str, object]) -> EncoderServicer:
        """Its gRPC methods."""
        return EncoderServicer(self, options)

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        self.loop.close(step_s=5.0)


def build(
    config: EngineConfig, path: Path, progress: Callable[[str, int, int], None], given: Collection[str]
) -> Encoder:
    """Load the checkpoint at `path`. Raises LoadError."""
    found = load_encoder(path)
    spec = found.spec
    for name in sorted(ABOUT_GENERATION & set(given)):
        raise LoadError(
            f"{name.replace('_', '-')} is for models that generate and {spec.architecture} does not: leave it out",
            field=name,
        )
    length = config.context_length or spec.context_length
    if length > spec.context_length:
        raise LoadError(
            f"context-length {length} is above the checkpoint's {spec.context_length}: lower it", field="context_length"
        )
    network = Network(found, progress)
    metrics = None
    if config.metrics_port is not None:
        from branchline.engine.service.metrics import Metrics

        metrics = Metrics()
    queue = EncoderQueue(config.max_queued_requests, None if metrics is None else metrics.request_seconds)
    if metrics is not None:
        metrics.stats = queue.stats
    from branchline.engine.service.assembly import default_names

    names = config.served_model_name or default_names(config.model, path)
    model = ModelInfo(
        model_path=config.model,
        served_names=names,
        architecture=spec.architecture,
        vocab_size=spec.vocab_size,
        context_length=length,
        page_size=config.page_size,
        dtype="float32",
        numerics_id=f"numpy-float32-{found.fingerprint}",
        weight_version=config.weight_version,
        max_request_tokens=length,
        executor="numpy",
        output_promise="bitwise",
        tokenizer_json=found.tokenizer.json,
        bos_token=found.tokenizer.bos_token,
        eos_token=found.tokenizer.eos_token,
        pad_token=found.tokenizer.pad_token,
        tasks=spec.tasks,
        embedding_size=spec.embedding_size or None,
    )
    return Encoder(replace(config), queue, network, model, (), metrics)


class EncoderServicer(EngineServicer):
    """The methods of a worker that embeds or ranks; whatever would generate is refused."""

    def __init__(self, encoder: Encoder, options: dict[str, object]) -> None:
        loop = cast(EngineLoop, encoder.loop)  # it has the part of a loop that is used where nothing is generated
        super().__init__(loop, encoder.model, _no_namespace, options=options, components=encoder.components)
        self._encoder = encoder

    def validate(self, message: pb.GenerateRequest) -> Request:
        """Refuses the request: every way to generate comes through here."""
        model = self._encoder.model
        raise Unimplemented(
            f"model {model.served_names[0]!r} ({model.architecture}) does not generate: send texts to "
            f"{'/v1/rerank' if 'rank' in model.tasks else '/v1/embeddings'}",
            field="model",
        )

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """One result a text."""
        return await self._answered(request, context, self._embed(request))

    async def SubscribeKvEvents(self, request: pb.SubscribeKvEventsRequest, context: Context) -> None:
        """Nothing is cached."""
        await self._nothing_cached(context)

    async def GetCacheTree(self, request: pb.GetCacheTreeRequest, context: Context) -> pb.GetCacheTreeResponse:
        """Nothing is cached."""
        await self._nothing_cached(context)

    async def RenewLease(self, request: pb.RenewLeaseRequest, context: Context) -> pb.RenewLeaseResponse:
        """Nothing is cached."""
        await self._nothing_cached(context)

    async def ReleaseLease(self, request: pb.ReleaseLeaseRequest, context: Context) -> pb.ReleaseLeaseResponse:
        """Nothing is cached."""
        await self._nothing_cached(context)

    async def _nothing_cached(self, context: Context) -> NoReturn:
        await refuse(context, wire.to_error(Unimplemented("this worker embeds or ranks: it has no prefix cache")))

    async def _embed(self, request: pb.EmbedRequest) -> pb.EmbedResponse:
        if self.draining:
            raise Unavailable("the worker is draining: send the request to another one", retry_after_ms=1000)
        texts = to_texts(request, self._encoder.network.spec, self._encoder.model)
        network = self._encoder.network
        dimensions = request.dimensions if request.HasField("dimensions") else None

        def run(text: Text) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
            if request.task == pb.EMBED_TASK_RANK:
                made = network.rank(text.ids, text.types)
            else:
                made = network.embed(text.ids, text.types, dimensions)
            if not np.isfinite(made).all():
                raise InternalError("the model gave values that are not finite")
            return made

        now = time.monotonic()
        deadline = now + request.deadline_ms / 1e3 if request.HasField("deadline_ms") else None
        queue = self._encoder.loop
        results = await asyncio.wrap_future(queue.submit(Work(request.request_id, texts, run, deadline, now)))
        return pb.EmbedResponse(results=[pb.EmbedResult(values=result) for result in results])


def to_texts(request: pb.EmbedRequest, spec: EncoderSpec, model: ModelInfo) -> tuple[Text, ...]:
    """The checked inputs. Raises InvalidArgument or Unimplemented."""
    check_request_id(request.request_id)
    _check_task(request, spec, model)
    if not 1 <= len(request.inputs) <= MAX_INPUTS:
        raise InvalidArgument(f"inputs has {len(request.inputs)} entries: give 1 to {MAX_INPUTS}", field="inputs")
    texts = []
    for position, one in enumerate(request.inputs):
        path = f"inputs[{position}]"
        text = Text(tuple(one.token_ids), tuple(one.type_ids))
        if not 1 <= len(text.ids) <= model.context_length:
            raise InvalidArgument(
                f"{path} has {len(text.ids)} tokens: give 1 to {model.context_length}", field=f"{path}.token_ids"
            )
        check_ids(text.ids, spec.vocab_size, f"{path}.token_ids")
        if text.types and len(text.types) != len(text.ids):
            raise InvalidArgument(
                f"{path}.type_ids has {len(text.types)} entries for {len(text.ids)} tokens", field=f"{path}.type_ids"
            )
        if spec.types == 1:  # a family without second texts: its tokenizer marks them by tokens alone
            text = Text(text.ids)
        check_ids(text.types, spec.types, f"{path}.type_ids")
        texts.append(text)
    return tuple(texts)


def _check_task(request: pb.EmbedRequest, spec: EncoderSpec, model: ModelInfo) -> None:
    words = {pb.EMBED_TASK_EMBED: "embed", pb.EMBED_TASK_RANK: "rank"}
    task = words.get(request.task)
    if task is None:
        raise InvalidArgument(f"task is {request.task}: give EMBED or RANK", field="task")
    if task not in spec.tasks:
        raise Unimplemented(f"model {model.served_names[0]!r} can't {task}: it can {spec.tasks[0]}", field="task")
    if not request.HasField("dimensions"):
        return
    if task == "rank":
        raise InvalidArgument("dimensions is for vectors: leave it out", field="dimensions")
    if not 1 <= request.dimensions <= spec.embedding_size:
        raise InvalidArgument(
            f"dimensions is {request.dimensions}: give 1 to {spec.embedding_size}", field="dimensions"
        )


def _no_namespace(*_: object) -> bytes:
    return b""
