"""OpenTelemetry spans of requests: one a sequence with queue, prefill, decode and detokenise inside it.

Made when the sequence has ended, from its measured times, so that running requests cost nothing. The gateway's
traceparent is the parent. The packages come with the extra `branchline[otel]`; nothing is imported without
`--otlp-endpoint`.
"""

from __future__ import annotations

import time
from typing import Any

from branchline import __version__
from branchline.engine.errors import LoadError
from branchline.engine.types import Delta, Finish, Request


class Tracing:
    """Exports spans. `news` is the loop's watcher."""

    def __init__(self, tracer: Any, provider: Any, model: str) -> None:
        self._tracer = tracer
        self._provider = provider
        self._model = model
        self._wall = time.time() - time.monotonic()

    def news(self, request: Request, delta: Delta, now: float) -> None:
        """Make the spans of a sequence that ended, or of a request that failed."""
        if delta.finish is not None:
            self._sequence(request, delta, delta.finish)
        elif delta.error is not None:
            span = self._start("generate", request, request.arrival_s)
            self._describe(span, request, delta.index)
            from opentelemetry.trace import Status, StatusCode

            span.set_status(Status(StatusCode.ERROR, str(delta.error)))
            span.end(self._at(now))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()

    def _sequence(self, request: Request, delta: Delta, finish: Finish) -> None:
        from opentelemetry import trace

        begin = request.arrival_s
        queued = begin + finish.queue_ms / 1e3
        first = queued + finish.prefill_ms / 1e3
        end = first + finish.decode_ms / 1e3
        root = self._start("generate", request, begin)
        self._describe(root, request, delta.index)
        root.set_attribute("gen_ai.usage.input_tokens", len(request.token_ids))
        root.set_attribute("gen_ai.usage.output_tokens", finish.completion_tokens)
        root.set_attribute("gen_ai.response.finish_reasons", [str(finish.reason)])
        root.set_attribute("branchline.retractions", finish.retractions)
        root.set_attribute("branchline.drafted_tokens", finish.drafted)
        root.set_attribute("branchline.accepted_tokens", finish.accepted)
        inside = trace.set_span_in_context(root)
        phases = [("queue", begin, queued)]
        if finish.completion_tokens:
            # Text is made piece by piece while tokens come: its span has the right length, not the right place.
            phases += [("prefill", queued, first), ("decode", first, end)]
            phases += [("detokenise", max(end - finish.detokenise_ms / 1e3, first), end)]
        for name, start, stop in phases:
            span = self._tracer.start_span(name, context=inside, start_time=self._at(start))
            span.end(self._at(stop))
        root.end(self._at(end))

    def _describe(self, span: Any, request: Request, index: int) -> None:
        span.set_attribute("gen_ai.request.model", self._model)
        span.set_attribute("branchline.request_id", request.request_id)
        span.set_attribute("branchline.sequence", index)

    def _start(self, name: str, request: Request, at: float) -> Any:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract({"traceparent": request.traceparent})
        return self._tracer.start_span(name, context=parent, kind=SpanKind.SERVER, start_time=self._at(at))

    def _at(self, seconds: float) -> int:
        """Nanoseconds of the epoch from seconds of the loop's clock."""
        return int((seconds + self._wall) * 1e9)


def start(endpoint: str, model: str) -> Tracing:
    """Tracing to an OTLP endpoint: http(s)://HOST:PORT of a collector. Raises LoadError without the packages."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise LoadError(
            f"otlp-endpoint needs the OpenTelemetry packages ({error.name} is missing): run pip install "
            "'branchline[otel]'",
            field="otlp_endpoint",
        ) from None
    url = endpoint.rstrip("/")
    url = url if url.endswith("/v1/traces") else url + "/v1/traces"
    resource = Resource.create({"service.name": "branchline-engine", "service.version": __version__})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    return Tracing(provider.get_tracer("branchline.engine", __version__), provider, model)
