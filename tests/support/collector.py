"""A collector of OpenTelemetry's protocol over HTTP, for the spans of other processes."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class Span(NamedTuple):
    """Ids in hex; times in nanoseconds since the epoch."""

    name: str
    trace: str
    parent: str
    service: str
    start: int
    end: int


class Collector:
    """``url`` takes exports; ``spans`` has all that came so far."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector._take(ExportTraceServiceRequest.FromString(body))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_args: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"

    def _take(self, request: Any) -> None:
        for of_resource in request.resource_spans:
            about = {each.key: each.value.string_value for each in of_resource.resource.attributes}
            self.spans += [
                Span(
                    span.name,
                    span.trace_id.hex(),
                    span.parent_span_id.hex(),
                    about.get("service.name", ""),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                )
                for scope in of_resource.scope_spans
                for span in scope.spans
            ]

    def of_trace(self, trace: str, name: str) -> list[Span]:
        return [each for each in self.spans if (each.trace, each.name) == (trace, name)]


@contextmanager
def collecting() -> Iterator[Collector]:
    made = Collector()
    thread = threading.Thread(target=made.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.server.shutdown()
        made.server.server_close()
        thread.join()
