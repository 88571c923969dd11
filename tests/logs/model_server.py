"""A server that speaks the protocol of chat completions, on loopback, and remembers every byte it was sent."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Turn = Callable[[BaseHTTPRequestHandler], None]


class Model:
    """Takes its turns one after the other; the last one is repeated."""

    def __init__(self, *turns: Turn) -> None:
        self.turns = turns
        self.bodies: list[bytes] = []
        self.heads: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.url = ""
        self._lock = threading.Lock()

    def take_turn(self, path: str, head: dict[str, str], body: bytes) -> Turn:
        with self._lock:  # samples are asked for at the same time
            self.paths.append(path)
            self.heads.append(head)
            self.bodies.append(body)
            return self.turns[min(len(self.bodies), len(self.turns)) - 1]

    @property
    def heard(self) -> str:
        """All that came over the wire, with the escapes of JSON undone."""
        return "\n".join(json.dumps(json.loads(body), ensure_ascii=False) for body in self.bodies) + str(self.heads)

    def asked(self, at: int = 0) -> dict[str, Any]:
        tree: dict[str, Any] = json.loads(self.bodies[at])
        return tree


@contextmanager
def serving(*turns: Turn) -> Iterator[Model]:
    model = Model(*turns)

    class Answering(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            turn = model.take_turn(self.path, dict(self.headers), body)
            try:
                turn(self)
            except OSError:
                pass  # the one who asked has gone: that is what some tests are about

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    server.daemon_threads = True
    server.block_on_close = False
    model.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield model
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def answering(content: Any) -> Turn:
    """A completion with this content; what is no text becomes JSON."""
    text = content if isinstance(content, str) else json.dumps(content)
    reply = {"id": "1", "object": "chat.completion", "choices": [{"index": 0, "message": {"role": "assistant"}}]}
    reply["choices"][0]["message"]["content"] = text  # type: ignore[index]
    return sending(200, json.dumps(reply).encode())


def sending(status: int, body: bytes = b"{}", **headers: str) -> Turn:
    def turn(to: BaseHTTPRequestHandler) -> None:
        to.send_response(status)
        for name, value in headers.items():
            to.send_header(name.replace("_", "-"), value)
        to.send_header("Content-Length", str(len(body)))
        to.end_headers()
        to.wfile.write(body)

    return turn


def dripping(seconds: float) -> Turn:
    """A byte now and then: no single read takes long, the answer never ends."""

    def turn(to: BaseHTTPRequestHandler) -> None:
        to.send_response(200)
        to.end_headers()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            to.wfile.write(b" ")
            to.wfile.flush()
            time.sleep(0.05)

    return turn
