"""A demo in a process of its own, and requests to it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Demo(NamedTuple):
    process: subprocess.Popen[str]
    address: str
    said: str
    """Its output until it listened."""

    def uploads(self) -> Path:
        """Folder of the uploads."""
        return Path(self.upload(b"x", "x.png")).parents[1]

    def ask(self, path: str, data: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        request = urllib.request.Request(self.address + path, data, {"content-type": "application/json", **headers})
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def upload(self, data: bytes, name: str = "image.png") -> str:
        """Path of a file that was uploaded as the page uploads it."""
        head = f'--x\r\nContent-Disposition: form-data; name="files"; filename="{name}"\r\n\r\n'.encode()
        kind = {"content-type": "multipart/form-data; boundary=x"}
        status, body = self.ask("/gradio_api/upload", head + data + b"\r\n--x--\r\n", **kind)
        assert status == 200, body
        return json.loads(body)[0]

    def answer(
        self, image: object, caption: object = "", classes: object = "", template: object = "{c}"
    ) -> list[str] | None:
        """What the page shows of these inputs; None if they are refused."""
        session = os.urandom(4).hex()
        body = {"data": [image, caption, classes, template], "fn_index": 0, "session_hash": session}
        status, text = self.ask("/gradio_api/queue/join", json.dumps(body).encode())
        assert status == 200, text
        with urllib.request.urlopen(
            f"{self.address}/gradio_api/queue/data?session_hash={session}", timeout=20
        ) as lines:
            for line in lines:
                if b"process_completed" in line:
                    output: dict[str, Any] = json.loads(line.removeprefix(b"data: "))["output"]
                    return output.get("data")
        raise AssertionError("no answer")


def file_of(path: str, **more: object) -> dict[str, object]:
    return {"path": path, "meta": {"_type": "gradio.FileData"}, **more}


@contextlib.contextmanager
def serving(*arguments: str, **environment: str) -> Iterator[Demo]:
    """A demo on a free port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "vqclip", "demo", *arguments, "--port", "0", "--threads", "1"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | environment,
    )  # fmt: skip
    try:
        seen = ""
        assert process.stdout is not None
        for line in process.stdout:
            seen += line
            if found := re.search(r"http://\S+", line):
                yield Demo(process, found[0], seen)
                break
        else:
            raise AssertionError(seen)
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=20)
