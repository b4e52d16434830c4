"""Serve the page on this machine: which requests are answered, where uploads are kept, and how it ends."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import re
import signal
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from pathlib import Path
from types import FrameType
from typing import Any

from vqclip.demo.answers import MAX_FILE_BYTES, Answers
from vqclip.errors import ConfigError

__all__ = ["is_local", "listen", "require_gradio", "serve", "upload_folder"]

Message = MutableMapping[str, Any]
App = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]

_ROUTES = re.compile(
    r"/((config|theme\.css|manifest\.json|favicon\.ico|robots\.txt)/?|(assets|static|svelte)/.*)?"
    r"|/gradio_api/((info|startup-events|upload|upload_progress|queue/join|queue/data|cancel|reset)/?|heartbeat/\w+)"
)
"""Paths that the page itself asks for."""
_POLICY = (
    "default-src 'self' data: blob:; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'; object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
)
"""Browsers fetch nothing from elsewhere, even if some data got past the escaping."""
_MOST_UPLOADS = 1 << 30
"""Bytes of uploads that are kept at a time."""
_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")


def require_gradio(uploads: Path) -> None:
    """Import Gradio, with its settings in the environment replaced by ours.

    Args:
        uploads: from `upload_folder`.

    Raises:
        ConfigError: it is not installed.
    """
    for name in [name for name in os.environ if name.startswith("GRADIO_")]:
        del os.environ[name]  # they could share the page, open other folders, or send usage statistics
    os.environ["GRADIO_TEMP_DIR"], os.environ["GRADIO_ANALYTICS_ENABLED"] = str(uploads), "False"
    try:
        import gradio
    except ImportError as error:
        raise ConfigError(f"vqclip demo needs Gradio ({error}): pip install 'vqclip[demo]'") from None
    _accept_uploads_alone(gradio.blocks.Block, uploads)


def _accept_uploads_alone(block: Any, uploads: Path) -> None:
    """Refuse requests that name another file, or an address, in place of an upload.

    Gradio would copy that file to where visitors can read it, or fetch the address. Its own check of files is skipped
    unless `launch` was called, which also tries to reach this machine through a proxy and to share the page.

    Args:
        block: Gradio's class of inputs.
        uploads: from `upload_folder`.
    """
    accept = block.async_move_resource_to_block_cache

    async def accept_upload(self: Any, path: str | Path | None) -> str | None:
        if path is not None and not Path(path).resolve().is_relative_to(uploads):
            raise ValueError("expected a file that was uploaded here")
        return await accept(self, path)

    block.async_move_resource_to_block_cache = accept_upload


def is_local(host: str) -> bool:
    """Return whether only this machine can reach a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        ConfigError: the port is in use or the host is not one of this machine.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"--port: {port} is in use, perhaps by another demo; stop it, or give another port: --port {port + 1} "
                "(0: any that is free)"
            ) from None
        reason = str(error.strerror or error).partition(" (")[0]
        raise ConfigError(
            f"--host, --port: cannot listen on {host}:{port}: {reason}; expected an address of this machine, such as "
            "127.0.0.1, and a port that you may use, such as 7860"
        ) from None


@contextlib.contextmanager
def upload_folder() -> Iterator[Path]:
    """Make the temporary folder of uploads; it is removed at the end, also after SIGTERM and SIGHUP."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    handled = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) != signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in handled}
    try:
        with tempfile.TemporaryDirectory(prefix="vqclip-demo-") as folder:
            yield Path(folder).resolve()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def serve(folder: str, answers: Answers, listener: socket.socket, uploads: Path) -> None:
    """Serve the page until Ctrl-C, which raises KeyboardInterrupt.

    Args:
        folder: name of the model's folder.
        answers: model and index.
        listener: from `listen`.
        uploads: from `upload_folder`.
    """
    import gradio
    import uvicorn
    from fastapi import FastAPI

    from vqclip.demo.page import CSS, THEME, build_page

    app = gradio.mount_gradio_app(
        FastAPI(openapi_url=None),
        build_page(folder, answers, uploads),
        path="/",
        theme=THEME,
        css=CSS,
        footer_links=[],
        run_history=False,
        allowed_paths=[],
        show_error=False,
        max_file_size=MAX_FILE_BYTES,
        ssr_mode=False,
        enable_monitoring=False,
        pwa=False,
        mcp_server=False,
    )
    local = is_local(listener.getsockname()[0])
    config = uvicorn.Config(
        Guard(app, uploads, local),
        log_level="critical",
        lifespan="on",
        timeout_graceful_shutdown=1,
        server_header=False,
    )
    uvicorn.Server(config).run(sockets=[listener])


class Guard:
    """Answers only what the page needs, and tells browsers to fetch nothing from elsewhere.

    Gradio has more routes than a page needs: some fetch addresses, others serve files of further folders.

    Args:
        app: the application.
        uploads: the only folder whose files are served.
        local: refuse names of hosts that are not this machine's: a page elsewhere could give its own name our address.
    """

    def __init__(self, app: App, uploads: Path, local: bool):
        self._app, self._uploads, self._local = app, uploads, local
        self._files = f"/gradio_api/file={uploads.as_posix()}/"

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        """Pass a request to the application, or refuse it."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return None
        refused = self._refuse(scope)
        if refused is not None:
            status, text = refused
            headers = [(b"content-type", b"text/plain; charset=utf-8")]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            return await send({"type": "http.response.body", "body": text.encode()})

        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                policy = [(b"content-security-policy", _POLICY.encode()), (b"referrer-policy", b"no-referrer")]
                message["headers"] = [*message.get("headers", ()), *policy, (b"x-content-type-options", b"nosniff")]
            await send(message)

        return await self._app(scope, receive, send_with_policy)

    def _refuse(self, scope: Message) -> tuple[int, str] | None:
        """Return status and reason if a request is not answered."""
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        path: str = scope["path"]
        if self._local and re.sub(r":\d+$", "", headers.get(b"host", "")) not in _LOCAL_NAMES:
            return 421, "expected a request to localhost or 127.0.0.1"
        is_upload = path.startswith(self._files) and ".." not in path
        if not is_upload and not _ROUTES.fullmatch(path):
            return 404, "not part of this page"
        if scope["method"] == "POST" and not headers.get(b"content-length", "").isdecimal():
            return 411, "expected a Content-Length"
        if int(headers.get(b"content-length", "0")) > MAX_FILE_BYTES + (1 << 20):
            return 413, f"expected at most {MAX_FILE_BYTES >> 20} MB"
        if path.startswith("/gradio_api/upload") and _size_of(self._uploads) > _MOST_UPLOADS:
            return 507, "many files were uploaded in the last hour; they are removed after an hour"
        return None


def _size_of(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            total += file.stat().st_size
    return total
