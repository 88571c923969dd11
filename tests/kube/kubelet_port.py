"""What a kubelet serves at `/portForward`: connections to ports of a pod, as SPDY/3.1 streams in one upgraded request.

Each connection is two streams of one `requestid`: its bytes, and a text that says why it failed. The API server passes
all of it on between kubectl and this port.
"""

import asyncio
import contextlib
import ssl
import struct
import subprocess
import threading
import zlib
from pathlib import Path

from tests.kube.cluster import BINARIES

_DICTIONARY = (b"\0\0\0\7options", 1423, 0xE3C6A7C2)  # of SPDY's headers: how it begins, its length and its checksum
_CONTROL, _FIN = 1 << 31, 1
_SYN_STREAM, _SYN_REPLY, _PING = 1, 2, 6
_SWITCHED = (
    b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n"
    b"X-Stream-Protocol-Version: portforward.k8s.io\r\n\r\n"
)
_REFUSED = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
Place = tuple[str, str, int]  # a namespace, a pod in it, and a port of the pod

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class KubeletPort:
    """A server on loopback. Pods of tests are processes of this host, so their ports are other ones here."""

    def __init__(self, folder: Path, ports: dict[Place, int]) -> None:
        self._ports, self._links = ports, set[asyncio.Task[None]]()
        self.asked: list[str] = []  # the paths of requests
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(*_make_certificate(folder))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        opening = asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self._server = asyncio.run_coroutine_threadsafe(opening, self._loop).result(20)
        self.port: int = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        self._server.close()
        for task in self._links:
            task.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._links.add(task)
        try:
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().rstrip().split("\r\n")
            path = first.split()[1].partition("?")[0]
            self.asked.append(path)
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            if headers.get("upgrade", "").lower() != "spdy/3.1":
                writer.write(_REFUSED)  # of a newer kubectl, which asks for WebSockets first
                return
            writer.write(_SWITCHED)
            _, _, namespace, pod = path.split("/")
            await Forwarding(
                (reader, writer), {at[2]: to for at, to in self._ports.items() if at[:2] == (namespace, pod)}
            ).run()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # whoever asked has gone, or the test is over
        finally:
            self._links.discard(task)
            writer.close()


class Forwarding:
    def __init__(self, link: Streams, ports: dict[int, int]) -> None:
        self._reader, self._writer = link
        self._ports = ports
        self._unpack = zlib.decompressobj(zdict=_find_dictionary())  # one for all frames, as SPDY has it
        self._pack = zlib.compressobj()
        self._complaints: dict[str, int] = {}  # by connection: the stream for what goes wrong
        self._targets: dict[int, asyncio.StreamWriter] = {}  # by stream
        self._pumps: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        try:
            while True:
                head, size = struct.unpack(">II", await self._reader.readexactly(8))
                content = await self._reader.readexactly(size & 0xFFFFFF)
                if not head & _CONTROL:
                    self._on_bytes(head, content, ends=bool(size >> 24 & _FIN))
                elif head & 0xFFFF == _SYN_STREAM:
                    await self._on_stream(struct.unpack(">I", content[:4])[0], self._read_headers(content[10:]))
                elif head & 0xFFFF == _PING:
                    self._send_control(_PING, content)
        finally:
            for pump in self._pumps:
                pump.cancel()
            for target in self._targets.values():
                target.close()

    def _read_headers(self, packed: bytes) -> dict[str, str]:
        block = self._unpack.decompress(packed)
        texts, at = [], 4
        while at < len(block):
            size = struct.unpack(">I", block[at : at + 4])[0]
            texts.append(block[at + 4 : at + 4 + size].decode())
            at += 4 + size
        return dict(zip(texts[::2], texts[1::2], strict=True))

    async def _on_stream(self, stream: int, headers: dict[str, str]) -> None:
        none = self._pack.compress(struct.pack(">I", 0)) + self._pack.flush(zlib.Z_SYNC_FLUSH)  # headers of ours
        self._send_control(_SYN_REPLY, struct.pack(">I", stream) + none)
        if headers["streamtype"] == "error":
            self._complaints[headers["requestid"]] = stream
            return
        complaints = self._complaints.pop(headers["requestid"])
        try:
            target = await asyncio.open_connection("127.0.0.1", self._ports[int(headers["port"])])
        except (OSError, KeyError) as e:
            self._send_bytes(complaints, f"nobody listens at port {headers['port']}: {e}".encode(), ends=True)
            self._send_bytes(stream, b"", ends=True)
            return
        self._targets[stream] = target[1]
        pump = asyncio.create_task(self._pump(stream, complaints, target[0]))
        self._pumps.add(pump)
        pump.add_done_callback(self._pumps.discard)

    def _on_bytes(self, stream: int, content: bytes, *, ends: bool) -> None:
        if target := self._targets.get(stream):
            target.write(content)
            if ends:
                target.write_eof()

    async def _pump(self, stream: int, complaints: int, source: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while content := await source.read(1 << 16):
                self._send_bytes(stream, content)
                await self._writer.drain()
        for one in (stream, complaints):
            self._send_bytes(one, b"", ends=True)

    def _send_bytes(self, stream: int, content: bytes, *, ends: bool = False) -> None:
        self._writer.write(struct.pack(">II", stream, ends * _FIN << 24 | len(content)) + content)

    def _send_control(self, kind: int, content: bytes) -> None:
        self._writer.write(struct.pack(">II", _CONTROL | 3 << 16 | kind, len(content)) + content)


def _find_dictionary() -> bytes:
    """The bytes with which SPDY compresses headers, out of a program that speaks it."""
    begin, size, checksum = _DICTIONARY
    program = (BINARIES / "kubectl").read_bytes()
    at = program.index(begin)
    found = program[at : at + size]
    assert zlib.adler32(found) == checksum
    return found


def _make_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate of nobody in particular: an API server without an authority for kubelets takes any."""
    certificate, key = folder / "kubelet.crt", folder / "kubelet.key"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=kubelet"]
    subprocess.run([*words, "-out", str(certificate), "-keyout", str(key)], check=True, capture_output=True)
    return certificate, key
