"""A real HTTP server on this machine that makes the mistakes it is told to make; and an S3-compatible one."""

import contextlib
import socket
import ssl
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from vqclip.data.remote import transfer

Fault = Callable[[BaseHTTPRequestHandler, bytes], object]


class FaultyServer:
    """Serves files; the next requests for a path meet its faults, in order, then all goes well again."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.files: dict[str, bytes] = {}
        self.tags: dict[str, str] = {}
        self.faults: defaultdict[str, list[Fault]] = defaultdict(list)
        self.for_ever: dict[str, Fault] = {}
        self.requests: list[str] = []
        """Method and full path of each, in the order in which they came."""
        self.ranges = True
        self.counting = threading.Lock()
        self.sent = 0
        """Bytes of bodies sent, without those of faults; counted before the client has them."""
        self.stopped = threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self._http.server_port}"
        if tls:
            self._http.socket = tls.wrap_socket(self._http.socket, server_side=True)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def add(self, folder: Path, below: str = "") -> str:
        """Serves the files of a folder; the URL of it."""
        for file in folder.rglob("*"):
            if file.is_file():
                self.files[f"{below}/{file.relative_to(folder)}"] = file.read_bytes()
        return self.url + below

    def count(self, size: int) -> None:
        with self.counting:
            self.sent += size

    def close(self) -> None:
        self.stopped.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.requests.append(f"{self.command} {self.path}")
                path = self.path.partition("?")[0]
                body = server.files.get(self.path, server.files.get(path))
                fault = server.faults[path].pop(0) if server.faults[path] else server.for_ever.get(path)
                with contextlib.suppress(OSError):
                    if fault is not None:
                        fault(self, body or b"")
                    elif body is None:
                        self.send_error(404)
                    else:
                        part = self.headers.get("Range") if server.ranges else None
                        answer(self, body, tag=server.tags.get(path), part=part, count=server.count)

            do_HEAD = do_GET

            def log_message(self, *_: object) -> None: ...

        return Handler


def answer(
    handler: BaseHTTPRequestHandler,
    body: bytes,
    length: int | None = None,
    tag: str | None = None,
    part: str | None = None,
    count: Callable[[int], object] | None = None,
    **headers: str,
) -> None:
    """Sends a body, or the part of it in a header Range; tells `count` its size first."""
    if part is not None:
        first, _, last = part.removeprefix("bytes=").partition("-")
        total, body = len(body), body[int(first) : int(last) + 1]
        headers["Content_Range"] = f"bytes {first}-{int(first) + len(body) - 1}/{total}" if body else f"bytes */{total}"
    handler.send_response(200 if part is None else 206 if body else 416)
    if length != -1:
        handler.send_header("Content-Length", str(len(body) if length is None else length))
    if tag is not None:
        handler.send_header("ETag", tag)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    if count is not None:
        count(len(body))
    handler.wfile.write(body)


# ---- faults


def status(code: int, **headers: str) -> Fault:
    def fault(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        handler.send_response(code)
        for name, value in {"Content-Length": "0", **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()

    return fault


def truncated(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    """Ends in the middle, politely."""
    answer(handler, body[: len(body) // 2], length=len(body))


def too_long(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    answer(handler, body, length=len(body) + 1)


def unannounced(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    answer(handler, body, length=-1)


def compressed(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    answer(handler, body, Content_Encoding="gzip")


def reset(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    """Breaks the connection in the middle of the body."""
    answer(handler, body[: len(body) // 2], length=len(body))
    _hang_up(handler)


def reset_at_once(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    _hang_up(handler)


def _hang_up(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.flush()
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()


def silent(server: FaultyServer) -> Fault:
    return lambda handler, body: server.stopped.wait(60) and None


def dribbling(server: FaultyServer, every_s: float = 0.02) -> Fault:
    """Sends a byte now and then, for ever."""

    def fault(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        answer(handler, b"", length=len(body))
        for at in range(0 if handler.command == "HEAD" else len(body)):
            handler.wfile.write(body[at : at + 1])
            if server.stopped.wait(every_s):
                return

    return fault


def late(server: FaultyServer, seconds: float) -> Fault:
    def fault(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        server.stopped.wait(seconds)
        answer(handler, body)

    return fault


@contextlib.contextmanager
def serving(tls: ssl.SSLContext | None = None) -> Iterator[FaultyServer]:
    server = FaultyServer(tls)
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def s3(monkeypatch: pytest.MonkeyPatch, bucket: str) -> Iterator[Any]:
    """A real S3-compatible server with a bucket: moto's, on this machine; yields s3fs's files, and the server."""
    s3fs = pytest.importorskip("s3fs", reason="pip install 'vqclip[test-s3]'")
    moto = pytest.importorskip("moto.server", reason="pip install 'vqclip[test-s3]'")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    for name, value in (settings | {"AWS_DEFAULT_REGION": "us-east-1", "no_proxy": "*"}).items():
        monkeypatch.setenv(name, value)
    transfer._file_system.cache_clear()  # that of an earlier test knows only its server
    files = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)
    files.makedirs(bucket, exist_ok=True)  # what moto keeps, it keeps for the life of the process
    try:
        yield files, server
    finally:
        server.stop()
