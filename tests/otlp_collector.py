"""A collector of traces on loopback, and what it makes of the bytes that it gets."""

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Collector(ThreadingHTTPServer):
    """Takes what is posted, and says when something came."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Posted)
        self.bodies: list[tuple[str, str, bytes]] = []
        self.status = 200


class Posted(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.bodies.append((self.path, self.headers["Content-Type"], body))
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *words: object) -> None:
        pass


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def decoded(body: bytes) -> Any:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    (part,) = ExportTraceServiceRequest.FromString(body).resource_spans
    return part


def words(attributes: Any) -> dict[str, Any]:
    found = {}
    for one in attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        found[one.key] = [v.string_value or v.int_value for v in value.values] if kind == "array_value" else value
    return found
