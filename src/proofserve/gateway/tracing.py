"""Spans of relayed requests, by OpenTelemetry (the extra ``otel``).

Without spans a client's W3C trace headers reach the backend as they came.
"""

import logging
from collections.abc import Mapping
from typing import Any

# uvicorn's: a logger of this package has no handler in this process.
log = logging.getLogger("uvicorn.error")


class RequestTrace:
    """What happens to one request, in this order; here nothing is made of it.

    ``lines`` are the header lines by which the backend's spans become children of ours.
    """

    lines = b""

    def queued(self, client: str, model: str | None) -> None: ...
    def granted(self) -> None: ...
    def tried(self, backend: str) -> None: ...
    def answered(self, status: int) -> None: ...
    def ended(self, outcome: str, tokens: tuple[int, int] | None) -> None: ...


NO_TRACE = RequestTrace()


class Traces:
    """Makes spans by a TracerProvider of OpenTelemetry's SDK, which ``close`` shuts down.

    Request headers that ours replace are ``replaced``.
    """

    def __init__(self, provider: Any) -> None:
        from opentelemetry import trace  # noqa: PLC0415
        from opentelemetry.trace.propagation import tracecontext  # noqa: PLC0415

        self._provider = provider
        self.api = trace
        self.tracer = provider.get_tracer("proofserve.gateway")
        self.headers = tracecontext.TraceContextTextMapPropagator()
        self.replaced = frozenset(name.encode() for name in self.headers.fields)

    def begin(self, url: bytes, values: Mapping[bytes, bytes]) -> RequestTrace:
        given = {
            name.decode(): values[name].decode("latin-1")
            for name in self.replaced
            if name in values
        }
        return SpanTrace(self, url.partition(b"?")[0].decode("latin-1"), given)

    def close(self) -> None:
        self._provider.shutdown()


class SpanTrace(RequestTrace):
    """A span of the request, within it one of its wait for a permit and one of each attempt."""

    def __init__(self, traces: Traces, path: str, given: Mapping[str, str]) -> None:
        self._traces, self._api = traces, traces.api
        context = traces.headers.extract(given)
        kind = self._api.SpanKind.SERVER
        self._span = traces.tracer.start_span(f"POST {path}", context, kind)
        self._within = self._api.set_span_in_context(self._span)
        # The span that goes on: of the wait, or of the latest attempt.
        self._part: Any = None

    def _go_on(self, part: Any) -> None:
        if self._part is not None:
            self._part.end()
        self._part = part

    def queued(self, client: str, model: str | None) -> None:
        self._span.set_attribute("proofserve.client", client)
        if model is not None:
            self._span.set_attribute("gen_ai.request.model", model)
        self._go_on(self._traces.tracer.start_span("queue", self._within))

    def granted(self) -> None:
        self._go_on(None)

    def tried(self, backend: str) -> None:
        kind, told = self._api.SpanKind.CLIENT, {"server.address": backend}
        attempt = self._traces.tracer.start_span("backend", self._within, kind, told)
        carrier: dict[str, str] = {}
        self._traces.headers.inject(carrier, self._api.set_span_in_context(attempt))
        self.lines = "".join(f"{n}: {v}\r\n" for n, v in carrier.items()).encode("latin-1")
        self._go_on(attempt)

    def answered(self, status: int) -> None:
        self._part.add_event("first byte")
        self._span.set_attribute("http.response.status_code", status)

    def ended(self, outcome: str, tokens: tuple[int, int] | None) -> None:
        self._go_on(None)
        self._span.set_attribute("proofserve.outcome", outcome)
        if tokens is not None:
            self._span.set_attribute("gen_ai.usage.input_tokens", tokens[0])
            self._span.set_attribute("gen_ai.usage.output_tokens", tokens[1])
        if outcome not in ("ok", "client_left"):
            self._span.set_status(self._api.StatusCode.ERROR, outcome)
        self._span.end()


def exported() -> Traces | None:
    """Traces that go where OpenTelemetry's variables say, by OTLP over HTTP, if it is installed."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ModuleNotFoundError as error:
        log.warning("no traces: %s is not installed: pip install 'proofserve[otel]'", error.name)
        return None
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Traces(provider)
