"""The demo as a process: what its server gives out, keeps and asks for."""

from __future__ import annotations

import re
import signal
import urllib.parse
from pathlib import Path

import pytest
import torch

from tests.data.making import encode, pixels
from tests.demo.serving import Demo, file_of, serving
from tests.search.making import built

pytest.importorskip("gradio", reason="Gradio is not installed (extra demo)")
pytestmark = pytest.mark.slow

NO_NETWORK = """
import os, sys
def refuse(event, arguments):
    host = None
    if event == "socket.getaddrinfo":
        host = arguments[0]
    elif event == "socket.connect" and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    if host not in (None, "", "127.0.0.1", "localhost", "::1", b"127.0.0.1"):
        print("leaves this machine:", event, host, flush=True)
        os._exit(99)
sys.addaudithook(refuse)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("demo")
    torch.manual_seed(0)
    built().save_pretrained(place / "tokenizer")
    (place / "sitecustomize.py").write_text(NO_NETWORK)
    (place / "secret.txt").write_text("a secret of this machine")
    return place


@pytest.fixture(scope="module")
def demo(folder):
    environment = {"PYTHONPATH": f"{folder}:{Path(__file__).parents[2] / 'src'}", "HTTP_PROXY": "http://203.0.113.1:1"}
    settings = {
        "GRADIO_SHARE": "True",
        "GRADIO_ALLOWED_PATHS": "/",
        "GRADIO_SERVER_NAME": "0.0.0.0",
        "GRADIO_MCP_SERVER": "True",
    }
    with serving(str(folder / "tokenizer"), **environment, **settings, GRADIO_ANALYTICS_ENABLED="True") as running:
        yield running
        assert running.process.poll() is None


def test_it_listens_on_this_machine_alone(demo: Demo):
    assert demo.address.startswith("http://127.0.0.1:")
    assert demo.ask("/")[0] == 200
    assert demo.ask("/", host="elsewhere.example")[0] == 421


def test_the_page_names_no_address_to_fetch(demo: Demo):
    pages = [demo.ask(path)[1].decode() for path in ("/", "/theme.css", "/config")]
    fetched = [
        each
        for page in pages
        for each in re.findall(r"""(?:src|href)=["']?(https?:[^"'\s>]+)|url\(["']?(https?:[^)]+)""", page)
    ]
    assert [each for each in fetched if not "".join(each).startswith(demo.address)] == []


@pytest.mark.parametrize(
    "route", ["/gradio_api/file=", "/file=", "/gradio_api/file/", "/static/", "/assets/", "/gradio_api/proxy="]
)
def test_no_file_of_the_machine_is_given_out(demo: Demo, folder: Path, route: str):
    secret = str(folder / "secret.txt")
    for path in (
        secret,
        "/etc/passwd",
        f"..{'/..' * 20}{secret}",
        urllib.parse.quote(secret, safe=""),
        "http://example.org/",
    ):
        status, body = demo.ask(f"{route}{path}")
        assert status in (403, 404), path
        assert b"secret" not in body
        assert b"root:" not in body


def test_an_upload_is_given_back_and_answered(demo: Demo):
    image = encode(pixels(0), "PNG")
    path = demo.upload(image)
    assert demo.ask(f"/gradio_api/file={path}") == (200, image)
    shown = demo.answer(file_of(path), "a cat", "cat, dog")
    assert shown is not None
    assert shown[0].count("<svg") == 2
    assert "cut short" in (demo.answer(file_of(demo.upload(image[:-30]))) or [""])[0]


@pytest.mark.parametrize("more", [{}, {"is_stream": True}, {"url": "http://203.0.113.1/x.png"}])
@pytest.mark.parametrize("place", ["image", "caption"])
def test_a_request_cannot_name_another_file(demo: Demo, folder: Path, place: str, more: dict[str, object]):
    for path in (str(folder / "secret.txt"), "http://203.0.113.1/x.png", "file:///etc/passwd"):
        given = file_of(path, **more)
        shown = demo.answer(**{"image": None} | {place: given})
        assert shown is None or "bytes)" not in shown[0]  # the decoder quotes the beginning of what it has read
    copies = [file for file in demo.uploads().rglob("*") if file.is_file() and b"secret" in file.read_bytes()]
    assert copies == []


def test_inputs_of_no_use_do_not_end_it(demo: Demo):
    for given in ([5, None, [], {}], ["x", "y", "z", "{c}"]):
        demo.answer(*given)
    assert demo.ask("/gradio_api/queue/join", b"x", **{"content-length": str(30 << 20)})[0] == 413
    assert demo.answer(None, "a cat") is not None


def test_visitors_do_not_see_each_other(demo: Demo):
    first = demo.answer(file_of(demo.upload(encode(pixels(1), "PNG"))), "a cat")
    second = demo.answer(None, "")
    assert first is not None
    assert second is not None
    assert first[1] != "" == second[1]
    assert "<svg" not in second[0] + second[2]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_it_ends_in_one_line_and_removes_the_uploads(folder: Path, number: int, status: int):
    with serving(str(folder / "tokenizer")) as running:
        running.upload(encode(pixels(0), "PNG"))
        uploads = running.uploads()
        running.process.send_signal(number)
        rest, _ = running.process.communicate(timeout=20)
        assert running.process.returncode == status
        assert rest.splitlines() == (["vqclip demo: interrupted"] if number == signal.SIGINT else [])
        assert not uploads.exists()


def test_another_host_is_warned_of(folder: Path):
    with serving(str(folder / "tokenizer"), "--host", "0.0.0.0") as running:
        assert "no password" in running.said
