"""Shards at Azure and at the Hugging Face hub, as far as servers on this machine can play them."""

import base64
import json
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.data import serving
from tests.data.serving import FaultyServer, status
from vqclip.data.remote import transfer
from vqclip.data.remote.files import RemoteShard, fetch_bytes, remote_shards
from vqclip.data.remote.retry import Deadline, FetchError, RemoteConfig
from vqclip.data.remote.urls import display_url
from vqclip.errors import DataError, StorageError

OPTIONS = RemoteConfig(tries=3, timeout_s=5.0, total_s=30.0)
BODY = bytes(range(256)) * 99


@pytest.fixture(autouse=True)
def new_systems(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("no_proxy", "*")
    transfer._file_system.cache_clear()


def whole(shard: RemoteShard) -> bytes:
    return fetch_bytes(shard.url, shard.options, 1 << 20)


# ---- the hub


@pytest.fixture
def hub(server: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str | None]]:
    """A repository with two shards, whose bytes another host has; the tokens that the two got."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setenv("HF_TOKEN", "hf_s3cr3t")
    got: dict[str, str | None] = {}
    with serving.serving() as storage:

        def redirect(handler: BaseHTTPRequestHandler, body: bytes) -> None:
            got["hub"] = handler.headers["Authorization"]
            status(302, Location=f"{storage.url}/blob?sig=s3cr3t-s3cr3t")(handler, body)

        def send(handler: BaseHTTPRequestHandler, _: bytes) -> None:
            got["storage"] = handler.headers["Authorization"]
            serving.answer(handler, BODY, part=handler.headers["Range"])

        storage.for_ever["/blob"] = send
        entry = {"oid": "b" * 40, "size": len(BODY)}
        files = [entry | {"type": "file", "path": f"a/{name}"} for name in ("1.tar", "0.tar", "x.txt")]
        repository = json.dumps({"id": "me/data", "sha": "a" * 40}).encode()
        server.files |= {
            "/api/datasets/me/data": repository,
            "/api/datasets/me/data/revision/main": repository,
            "/api/datasets/me/data/tree/main": json.dumps([entry | {"type": "directory", "path": "a"}]).encode(),
            "/api/datasets/me/data/tree/main/a": json.dumps(files).encode(),
        }
        for name in ("0", "1"):
            server.for_ever[f"/datasets/me/data/resolve/main/a/{name}.tar"] = redirect
        yield got


def test_shards_at_the_hub(hub: dict[str, str | None], server: FaultyServer) -> None:
    shards = remote_shards("hf://datasets/me/data/a", OPTIONS)
    assert [shard.url for shard in shards] == [f"hf://datasets/me/data/a/{number}.tar" for number in (0, 1)]
    assert shards[0].read(256, 260, len(BODY), Deadline(20)) == BODY[256:260]
    assert whole(shards[1]) == BODY
    assert hub == {"hub": "Bearer hf_s3cr3t", "storage": None}  # which is another host
    server.requests.clear()
    shards[0].read(0, 9, len(BODY), Deadline(20))
    assert server.requests == ["GET /datasets/me/data/resolve/main/a/0.tar"]  # one for each part


def test_what_the_hub_does_not_have(hub: dict[str, str | None], server: FaultyServer, pauses: list[float]) -> None:
    for url in ("hf://datasets/me/data/a/2.tar", "hf://datasets/me/other/0.tar", "hf://buckets/me/b/0.tar"):
        with pytest.raises(StorageError, match=f"^{url}: cannot be fetched: .*; this is not tried again") as error:
            whole(RemoteShard(url, OPTIONS))
        assert "s3cr3t" not in str(error.value)
    server.faults["/datasets/me/data/resolve/main/a/0.tar"] = [status(503), status(429)]
    assert whole(RemoteShard("hf://datasets/me/data/a/0.tar", OPTIONS)) == BODY
    assert len(pauses) == 2
    assert display_url("hf://datasets/me/data@v1/0.tar") == "hf://datasets/me/data@v1/0.tar"


# ---- Azure


def azure(handler: BaseHTTPRequestHandler, blobs: dict[str, bytes]) -> None:
    """Answers as Blob Storage does, to the requests that adlfs makes; anybody may read."""
    path, query = urlsplit(handler.path).path, parse_qs(urlsplit(handler.path).query)
    name = path.removeprefix("/account/box").lstrip("/")
    if query.get("comp") == ["list"]:
        prefix = query.get("prefix", [""])[0]
        listed = "".join(
            f"<Blob><Name>{each}</Name><Properties><Content-Length>{len(data)}</Content-Length><BlobType>BlockBlob"
            f"</BlobType><Etag>e</Etag><Last-Modified>{formatdate(0, usegmt=True)}</Last-Modified></Properties></Blob>"
            for each, data in blobs.items()
            if each.startswith(prefix)
        )
        text = f'<EnumerationResults ContainerName="box"><Blobs>{listed}</Blobs><NextMarker/></EnumerationResults>'
        serving.answer(
            handler, f'<?xml version="1.0" encoding="utf-8"?>{text}'.encode(), Content_Type="application/xml"
        )
    elif name not in blobs:
        status(404, x_ms_error_code="BlobNotFound" if name else "")(handler, b"")
    else:
        part = handler.headers["x-ms-range"] or handler.headers["Range"]
        body = blobs[name]
        if part and int(part.removeprefix("bytes=").partition("-")[0]) >= len(body):
            status(416, x_ms_error_code="InvalidRange")(handler, b"")
            return
        facts = {"x-ms-blob-type": "BlockBlob", "Last-Modified": formatdate(0, usegmt=True)}
        whole_length = len(body) if handler.command == "HEAD" else None
        serving.answer(handler, b"" if whole_length else body, whole_length, tag='"e"', part=part, **facts)


@pytest.fixture
def blobs(server: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    pytest.importorskip("adlfs", reason="pip install 'vqclip[az]'")
    key = base64.b64encode(b"s3cr3t-s3cr3t").decode()
    account = f"AccountName=account;AccountKey={key};BlobEndpoint={server.url}/account;"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"DefaultEndpointsProtocol=http;{account}")
    blobs = {"a/1.tar": BODY, "a/0.tar": BODY[::-1], "a/x.txt": b"x"}

    class Every(dict):
        """Any path that has no fault of its own."""

        def get(self, path: str, default: object = None) -> object:
            return super().get(path, lambda handler, _: azure(handler, blobs))

    server.for_ever = Every()
    return blobs


def test_shards_at_azure(blobs: dict[str, bytes], server: FaultyServer) -> None:
    shards = remote_shards("az://box/a", OPTIONS)
    assert [shard.url for shard in shards] == ["az://box/a/0.tar", "az://box/a/1.tar"]
    server.requests.clear()
    assert shards[1].read(256, 260, len(BODY), Deadline(20)) == BODY[256:260]
    assert [request.partition("?")[0] for request in server.requests] == ["GET /account/box/a/1.tar"]
    assert whole(shards[0]) == BODY[::-1]


@pytest.mark.parametrize("size", [100, 258, len(BODY) + 1])
def test_a_blob_of_another_size(blobs: dict[str, bytes], size: int) -> None:
    blobs["a/1.tar"] = (BODY + b"x")[:size]
    shard = RemoteShard("az://box/a/1.tar", OPTIONS)
    if size > len(BODY):  # which one request does not show: the digest of the chunk does
        assert shard.read(256, 260, len(BODY), Deadline(20)) == BODY[256:260]
        return
    with pytest.raises(StorageError, match=rf"az://box/a/1.tar: has changed since .* {len(BODY)} bytes then, {size} b"):
        shard.read(256, 260, len(BODY), Deadline(20))


def test_what_azure_does_not_have(blobs: dict[str, bytes], pauses: list[float], monkeypatch) -> None:
    with pytest.raises(DataError, match=r"az://box/none/\*: matches nothing; .* names of bucket and folder right"):
        remote_shards("az://box/none", OPTIONS)
    with pytest.raises(StorageError, match=r"az://box/a/2.tar: cannot be fetched: not found .404.; this is not tried"):
        whole(RemoteShard("az://box/a/2.tar", OPTIONS))
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING")
    transfer._file_system.cache_clear()
    with pytest.raises(StorageError, match=r"az://box/a/1.tar: cannot be fetched: ValueError: .*; this is not tried"):
        whole(RemoteShard("az://box/a/1.tar", OPTIONS))


def test_missing_credentials_are_asked_for() -> None:
    error = type("NoCredentialsError", (Exception,), {})("Unable to locate credentials")
    with pytest.raises(FetchError, match="locate credentials; give AWS_ACCESS"), transfer.translate_errors("s3://b/a"):
        raise error
