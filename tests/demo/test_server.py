from __future__ import annotations

import asyncio
import builtins
import os
import signal
import socket
from pathlib import Path

import pytest

from vqclip.cli.demo import main
from vqclip.demo.server import Guard, is_local, listen, require_gradio, upload_folder
from vqclip.errors import ConfigError

UPLOADS = Path("/tmp/uploads")


def ask(
    path: str,
    host: str = "localhost:7860",
    method: str = "GET",
    local: bool = True,
    uploads: Path = UPLOADS,
    **headers: str,
) -> int:
    """Status of a request to an application that answers everything with 200."""
    sent = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        sent.append(message)

    given = [
        (b"host", host.encode()),
        *((name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()),
    ]
    scope = {"type": "http", "path": path, "method": method, "headers": given}
    asyncio.run(Guard(app, uploads, local)(scope, None, send))
    if sent[0]["status"] == 200:
        policy = dict(sent[0]["headers"])[b"content-security-policy"].decode()
        assert "http" not in policy
    return sent[0]["status"]


@pytest.mark.parametrize(
    "path", ["/", "/config", "/assets/index.js", "/gradio_api/queue/join", "/gradio_api/heartbeat/a1"]
)
def test_what_the_page_asks_for_is_answered(path):
    assert ask(path) == 200


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/file=/etc/passwd",
        "/gradio_api/file=http://example.org/",
        "/gradio_api/file=/tmp/uploads/../x",
        "/gradio_api/file=/tmp/uploads",
        "/gradio_api/proxy=http://example.org",
        "/gradio_api/run/predict",
        "/gradio_api/call/predict",
        "/gradio_api/queue/join/x",
        "/file=/etc/passwd",
        "/file/etc/passwd",
        "/monitoring",
        "/docs",
        "//etc/passwd",
    ],
)
def test_other_routes_are_not(path):
    assert ask(path) == 404


def test_uploads_are_served():
    assert ask("/gradio_api/file=/tmp/uploads/abc/image.png") == 200


def test_a_page_elsewhere_cannot_give_its_name_to_our_address():
    assert ask("/", host="evil.example:7860") == 421
    assert ask("/", host="evil.example:7860", local=False) == 200
    assert ask("/", host="[::1]:7860") == 200


def test_the_size_of_what_is_sent_is_known_and_bounded():
    assert ask("/gradio_api/upload", method="POST") == 411
    assert ask("/gradio_api/upload", method="POST", content_length="-1") == 411
    assert ask("/gradio_api/upload", method="POST", content_length=str(1 << 30)) == 413
    assert ask("/gradio_api/upload", method="POST", content_length="1000") == 200


@pytest.mark.parametrize(
    ("host", "local"), [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False)]
)
def test_addresses_of_this_machine_alone(host, local):
    assert is_local(host) == local


def test_uploads_do_not_fill_the_disk(tmp_path, monkeypatch):
    (tmp_path / "below").mkdir()
    monkeypatch.setattr("vqclip.demo.server._MOST_UPLOADS", 1 << 20)
    given = {"method": "POST", "content_length": "9", "uploads": tmp_path}
    assert ask("/gradio_api/upload", **given) == 200
    (tmp_path / "below" / "image.png").write_bytes(bytes(1 << 20))
    assert ask("/gradio_api/upload", **given) == 507
    assert ask("/gradio_api/queue/join", **given) == 200


def test_a_port_in_use_and_a_wrong_host_are_named():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port: {port} is in use.*--port {port + 1}"):
            listen("127.0.0.1", port)
    with pytest.raises(ConfigError, match="cannot listen on no such host:0: Name or service not known; expected"):
        listen("no such host", 0)
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.1:0"):
        listen("203.0.113.1", 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_uploads_are_removed_also_by_signals(number):
    def stay():
        with upload_folder() as folder:
            folders.append(folder)
            os.kill(os.getpid(), number)

    folders: list[Path] = []
    before = signal.signal(number, signal.SIG_DFL)  # under nohup SIGHUP is ignored, also by the demo
    try:
        with pytest.raises(SystemExit) as ended:
            stay()
    finally:
        signal.signal(number, before)
    assert ended.value.code == 128 + number
    assert not folders[0].exists()


def test_a_missing_extra_is_named(monkeypatch):
    def fail(name, *args, **options):
        if name == "gradio":
            raise ImportError("No module named 'gradio'")
        return real(name, *args, **options)

    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", fail)
    monkeypatch.setattr(os, "environ", {"GRADIO_SHARE": "True"})
    with pytest.raises(ConfigError, match=r"pip install 'vqclip\[demo\]'"):
        require_gradio(UPLOADS)
    assert "GRADIO_SHARE" not in os.environ


def test_the_command_names_a_wrong_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("vqclip.cli.demo.require_gradio", lambda uploads: None)
    assert main([str(tmp_path), "--port", "0"]) == 2
    assert "no model here" in capsys.readouterr().err


def test_the_port_is_asked_for_before_anything_is_loaded(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main([str(tmp_path / "none"), "--port", str(taken.getsockname()[1])]) == 2
    assert "is in use" in capsys.readouterr().err
