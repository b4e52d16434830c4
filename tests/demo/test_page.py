"""The demo as a process, asked as its page asks it."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.data.making import encode, pixels
from tests.search.making import built, pictures
from vqclip.cli.main import main as vqclip

pytest.importorskip("gradio", reason="Gradio is not installed (extra demo)")
client = pytest.importorskip("gradio_client")
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
EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("demo")
    built().save_pretrained(place / "tokenizer")
    images, index = pictures(place / "pictures"), place / "index"
    given = ["--tokenizer", str(place / "tokenizer"), "--data", str(images), "--out", str(index)]
    assert vqclip(["search", "build", *given]) == 0
    (place / "sitecustomize.py").write_text(NO_NETWORK)
    (place / "secret.png").write_text("a secret of this machine")
    (place / "image.png").write_bytes(encode(pixels(0), "PNG"))
    return place


def start(folder, *arguments):
    path = f"{folder}:{Path(__file__).parents[2] / 'src'}"
    hostile = {"GRADIO_SHARE": "True", "GRADIO_ALLOWED_PATHS": "/", "GRADIO_SERVER_NAME": "0.0.0.0"}
    environment = os.environ | {"PYTHONPATH": path, "HTTP_PROXY": "http://203.0.113.1:1"} | hostile
    process = subprocess.Popen(
        [sys.executable, "-m", "vqclip", "demo", str(folder / "tokenizer"), "--port", "0", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
    )  # fmt: skip
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if found := re.search(r"Open (http://\S+)", line):
            return process, found[1], said
    raise AssertionError(said)


@pytest.fixture(scope="module")
def demo(folder):
    process, address, _ = start(folder, "--index", str(folder / "index"), "--data", str(folder / "pictures"))
    assert address.startswith("http://127.0.0.1:")
    yield client.Client(address, verbose=False)
    assert process.poll() is None
    process.terminate()
    process.communicate(timeout=20)


def test_image_caption_and_classes_are_answered(demo, folder):
    image = client.handle_file(str(folder / "image.png"))
    maps, ids, cost, nearest = demo.predict(image, api_name="/image")
    assert len(maps) == 1 + 2
    assert ids.startswith("[[")
    assert "4 tokens x 2 codebooks: 48 bits" in cost
    assert len(nearest) == 8
    table, ids, note, _ = demo.predict(f"a {EVIL}", image, api_name="/caption")
    assert table["data"][0][0] == "<start>"
    assert ids.count("\n") == len(table["data"]) - 1
    assert "cosine with the image" in note
    continuous, codes = demo.predict(f"cat\n{EVIL}", "a {c}", image, api_name="/classes")
    for each in (continuous, codes):
        assert sum(one["confidence"] for one in each["confidences"]) == pytest.approx(1)


def test_refusals_are_shown_and_end_nothing(demo, folder, tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes((folder / "image.png").read_bytes()[:-30])
    with pytest.raises(client.exceptions.AppError, match="cut short"):
        demo.predict(client.handle_file(str(broken)), api_name="/image")
    with pytest.raises(client.exceptions.AppError, match="expected {c} in it"):
        demo.predict("cat", "photo", client.handle_file(str(folder / "image.png")), api_name="/classes")
    assert demo.predict("a cat", None, api_name="/caption")[1].startswith("[[")


@pytest.mark.parametrize("event", [0, 1], ids=["as an image", "as a caption"])
@pytest.mark.parametrize("path", ["secret.png", "/etc/passwd", "http://203.0.113.1/x.png"])
def test_a_request_cannot_name_another_file(demo, folder, path, event):
    """The client would upload a file of this machine itself, so this asks as a browser does."""
    given = {"path": path if "/" in path else str(folder / path), "meta": {"_type": "gradio.FileData"}}
    body = json.dumps({"data": [given, None][: event + 1], "fn_index": event, "session_hash": "x"}).encode()
    api = f"{demo.src.rstrip('/')}/gradio_api/queue"
    joined = urllib.request.Request(f"{api}/join", body, {"content-type": "application/json"})
    said = ""
    try:
        urllib.request.urlopen(joined, timeout=20).close()
        with urllib.request.urlopen(f"{api}/data?session_hash=x", timeout=20) as lines:
            said = next(line for line in lines if b"process_completed" in line).decode()
    except urllib.error.HTTPError as error:
        said = f'"success": false {error.code}'
    assert re.search(r'"success": ?false', said)
    assert "not a JPEG" not in said  # the decoder did not see it


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_it_ends_in_a_line_and_removes_the_uploads(folder, number, status):
    process, address, said = start(folder, "--host", "127.0.0.1")
    assert "no password" not in said
    demo = client.Client(address, verbose=False)
    (uploaded, _), *_ = [demo.predict(client.handle_file(str(folder / "image.png")), api_name="/image")[1:3]]
    assert uploaded.startswith("[[")
    process.send_signal(number)
    rest, _ = process.communicate(timeout=20)
    assert process.returncode == status, rest
    assert "Traceback" not in rest
