"""Files, and shards as a source, from a real HTTP server that makes mistakes."""

import json
import logging
import os
import shutil
import ssl
import subprocess
import sys
import time
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.data import serving
from tests.data.loading import SIZE, tokenize
from tests.data.making import caption_members, caption_shards, class_folder, write_tar
from tests.data.serving import FaultyServer, status
from tests.training import run_tree
from vqclip.cli.main import main
from vqclip.data import CaptionShardsConfig, ClassShardsConfig, DataConfig, EvalSet, EvalTransformConfig
from vqclip.data.remote import transfer
from vqclip.data.remote.files import RemoteShard, fetch_bytes
from vqclip.data.remote.retry import Deadline, RemoteConfig
from vqclip.data.remote.urls import display_url
from vqclip.errors import DataError, StorageError

OPTIONS = {"tries": 4, "timeout_s": 5.0, "total_s": 30.0}


def fetched(url: str, **options) -> bytes:
    return fetch_bytes(url, RemoteConfig(**{**OPTIONS, **options}), 1 << 24)


def refusal(url: str, **options) -> str:
    with pytest.raises(StorageError) as error:
        fetched(url, **options)
    return str(error.value)


@pytest.fixture
def shard(server: FaultyServer) -> str:
    server.files["/0.tar"] = bytes(range(256)) * 999
    return f"{server.url}/0.tar"


def test_proxies_are_those_of_the_environment(server, monkeypatch, pauses):
    server.files["http://far.example/0.tar"] = b"through a proxy"
    monkeypatch.setenv("http_proxy", server.url.removeprefix("http://"))
    assert "resolve" in refusal("http://far.example/0.tar")  # no_proxy is *
    monkeypatch.setenv("no_proxy", "near.example")
    assert fetched("http://far.example/0.tar") == b"through a proxy"


def test_a_url_is_sent_as_it_is_written(server: FaultyServer) -> None:
    query = "X-Signature=a%2Fb%2B%3D&q=a+b%20c"
    server.files[f"/a%2Fb%20.tar?{query}"] = b"x"
    assert fetched(f"{server.url}/a%2Fb%20.tar?{query}") == b"x"


MENDED = {
    "503, then 500": ([status(503), status(500)], ["HTTP 503", "HTTP 500"]),
    "429": ([status(429)], ["HTTP 429"]),
    "408": ([status(408)], ["HTTP 408"]),
    "reset before any answer": ([serving.reset_at_once] * 3, ["ProtocolError"] * 3),
    "reset in the body": ([serving.reset], ["ProtocolError"]),
    "truncated": ([serving.truncated] * 3, ["IncompleteRead"] * 3),
    "wrong length": ([serving.too_long], ["IncompleteRead"]),
}


@pytest.mark.parametrize("case", MENDED)
def test_what_passes_is_tried_again(server, shard, pauses, caplog, case):
    faults, messages = MENDED[case]
    server.faults["/0.tar"] = list(faults)
    with caplog.at_level(logging.WARNING, "vqclip.data"):
        assert fetched(shard) == server.files["/0.tar"]
    assert server.requests == ["GET /0.tar"] * (len(faults) + 1)
    assert len(caplog.messages) == len(messages) == len(pauses)
    for number, (line, message) in enumerate(zip(caplog.messages, messages, strict=True), 1):
        assert line.startswith(f"{shard}: try {number} of 4 failed (")
        assert any(part in line for part in message.split("|")), line


LOST = {
    "503 for ever": (status(503), "HTTP 503", 4),
    "404": (status(404), "not found (404)", 1),
    "401": (status(401), "HTTP 401", 1),
    "410": (status(410), "HTTP 410", 1),
    "204": (status(204), "HTTP 204", 1),
    "reset for ever": (serving.reset_at_once, "ProtocolError", 4),
    "truncated for ever": (serving.truncated, "IncompleteRead", 4),
    "compressed on the way": (serving.compressed, "sent with Content-Encoding 'gzip'", 1),
    "redirect to a file": (status(302, Location="file:///etc/passwd"), "edirect", 1),
    "redirect to another protocol": (status(302, Location="ftp://host/0.tar"), "edirect", 1),
    "redirect in a circle": (status(302, Location="/0.tar"), "more than 10 redirects", 1),
}


@pytest.mark.parametrize("case", LOST)
def test_what_does_not_pass_is_an_error(server: FaultyServer, shard: str, pauses: list[float], case: str) -> None:
    server.for_ever["/0.tar"], message, tries = LOST[case]
    text = refusal(shard)
    assert text.startswith(f"{shard}: cannot be fetched: ")
    assert message in text
    assert f"Tries: {tries} of remote.tries=4, in " in text
    assert text.endswith("s of remote.total_s=30")
    assert ("; this is not tried again" in text) == (tries == 1)
    assert len(pauses) == tries - 1
    assert len(server.requests) == (10 if "circle" in case else tries)


def test_pauses_double_and_obey_the_server(server: FaultyServer, shard: str, pauses: list[float]) -> None:
    server.for_ever["/0.tar"] = status(503)
    refusal(shard, tries=9, total_s=3600.0)
    first = pauses.copy()
    for number, pause in enumerate(first):
        assert min(0.5 * 2**number, 30) / 2 <= pause <= min(0.5 * 2**number, 30)
    assert len(set(first[-2:])) == 2  # both half a minute, less a part of their own
    date = formatdate(time.time() + 100, usegmt=True)
    server.faults["/0.tar"] = [status(503, Retry_After=after) for after in ("77", "99999", date, "soon")]
    refusal(shard, tries=5, total_s=3600.0)
    assert pauses[-4:-2] == [77.0, 120.0]
    assert 90 < pauses[-2] <= 100
    assert pauses[-1] <= 4


def test_the_time_is_bounded(server: FaultyServer, shard: str, pauses: list[float]) -> None:
    server.faults["/0.tar"] = [status(503, Retry_After="77")]
    assert "Tries: 1 of remote.tries=4" in refusal(shard)  # the pause would be longer than what is left
    assert pauses == []
    server.for_ever["/0.tar"] = serving.dribbling(server)
    text = refusal(shard, total_s=0.3)
    assert "Tries: 1 of remote.tries=4, in 0." in text


@pytest.mark.parametrize("slowness", [serving.dribbling, serving.silent])
def test_slow_ones_are_tried_again(server, shard, pauses, caplog, slowness):
    server.faults["/0.tar"] = [slowness(server)]
    assert fetched(shard, timeout_s=0.2) == server.files["/0.tar"]
    assert len(server.requests) == 2
    assert "slow: " in caplog.text or "imeout" in caplog.text


def test_credentials_stay_out_of_messages(server, shard, pauses, caplog):
    server.faults["/0.tar"] = [status(503), serving.reset, status(302, Location="ftp://a:hunter22@x?t=s3cr3t-s3cr3t")]
    url = shard.replace("http://", "http://me:hunter22@") + "?sig=s3cr3t-s3cr3t"
    text = refusal(url)
    assert "edirect" in text
    assert len(caplog.messages) == 2
    fetched(url)
    everything = text + caplog.text
    assert "s3cr3t" not in everything
    assert "hunter22" not in everything
    assert url.partition("@")[2].partition("?")[0] + "?... [" in text


def test_a_file_larger_than_the_limit_is_refused(server: FaultyServer, shard: str) -> None:
    server.for_ever["/0.tar"] = serving.unannounced
    assert fetched(shard) == server.files["/0.tar"]
    for fault, size in ((serving.unannounced, "more than 1000"), (None, str(len(server.files["/0.tar"])))):
        server.for_ever = {"/0.tar": fault} if fault else {}
        with pytest.raises(DataError, match=f"0.tar: has {size} bytes; at most "):
            fetch_bytes(shard, RemoteConfig(), 1000)
    assert len(server.requests) == 3


@pytest.mark.parametrize("ranges", [True, False])
def test_a_file_is_read_at_any_place(server: FaultyServer, shard: str, ranges: bool) -> None:
    server.ranges, body = ranges, server.files["/0.tar"]
    with RemoteShard(shard, RemoteConfig(**OPTIONS)).open() as file:
        assert (file.seek(-9, os.SEEK_END), file.read(5), file.read()) == (len(body) - 9, body[-9:-4], body[-4:])
        assert (file.read(3), file.seek(1000), file.read(24), file.tell()) == (b"", 1000, body[1000:1024], 1024)
        assert len(server.requests) == (4 if ranges else 3)
        server.files["/0.tar"] += b"x"
        if ranges:
            with pytest.raises(StorageError, match="has changed since"):
                file.read(1)


# ---- as a source


def test_data_that_do_not_fit_are_warned_about(server, tmp_path, caplog):
    url = server.add(caption_shards(tmp_path / "a", (2, 2)))
    size = len(server.files["/00000.tar"]) / 2**30
    path = f"{url}/{{00000..00001}}.tar"
    CaptionShardsConfig(path=path, remote={"cache_gib": 3 * size}).build()
    assert "do not fit" not in caplog.text
    CaptionShardsConfig(path=path, remote={"cache_gib": 1.5 * size}).build()
    assert "do not fit in remote.cache_gib=" in caplog.text


def test_only_the_server_can_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not whoever takes the bytes, which may wait for room in the cache."""
    now, taken, blocks = [0.0], b"", [b"1", b"2", b"3", b""]
    monkeypatch.setattr(transfer, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for block in transfer._check_blocks(lambda: blocks.pop(0), None, "https://host/0.tar", 5.0, Deadline(30.0)):
        now[0] += 10.0
        taken += block
    assert taken == b"123"


def evict(cache: Path) -> None:
    shutil.rmtree(cache / "chunks", ignore_errors=True)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_change_or_failure_at_a_url_ends_the_run_and_replaces_nothing(server, tmp_path, cache, pauses, workers):
    """Unlike a change of a local shard: which samples it would strike hangs on what the cache holds."""
    url = server.add(caption_shards(tmp_path / "a", (4,)))
    source = CaptionShardsConfig(path=f"{url}/00000.tar", remote=OPTIONS)
    data = DataConfig(sources=(source,), workers=workers, max_bad_fraction=0.9).build(SIZE, tokenize, 4, 0)
    evict(cache)
    server.files["/00000.tar"] = server.files["/00000.tar"].replace(b"caption", b"CAPTION")
    with pytest.raises(StorageError, match=rf"{url}/00000.tar: changed since they were indexed"):
        next(data.batches(0, 1))
    evict(cache)
    evaluated = EvalSet(data.samples.sources[0], EvalTransformConfig().build(SIZE), max_bad_fraction=0.9)
    with pytest.raises(StorageError, match=rf"{url}/00000.tar: changed since they were indexed"):
        list(evaluated)
    assert data.replaced == 0
    assert len(source.build()) == 4  # the next start takes what is there
    data = DataConfig(sources=(source,), workers=0, max_bad_fraction=0.9).build(SIZE, tokenize, 4, 0)
    evict(cache)
    server.for_ever["/00000.tar"] = status(503)
    for read in (lambda: next(data.batches(0, 1)), lambda: list(evaluated)):
        with pytest.raises(StorageError, match=rf"^{url}/00000.tar: cannot be fetched: HTTP 503 .*total_s=30$"):
            read()
    assert data.replaced == 0


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (None, "cannot be fetched: not found (404)"),
        (b"0", "got '0'; expected the number of shards"),
        (b"100001", "got '100001'; expected the number of shards, at most 100000"),
        (b"1".ljust(65), "has 65 bytes; at most 64 are read"),
        (b"\xff", "not UTF-8: invalid start byte at byte 0"),
    ],
)
def test_class_folders_without_a_number_of_shards(server, tmp_path, count, message):
    url = server.add(class_folder(tmp_path))
    server.files.pop("/train/nshards.txt")
    server.files |= {} if count is None else {"/train/nshards.txt": count}
    with pytest.raises(DataError) as error:
        ClassShardsConfig(path=f"{url}/?sig=s3cr3t", split="train").build()
    where = display_url(f"{url}/train/nshards.txt?sig=s3cr3t")
    assert str(error.value).startswith(f"{where}: {message}")
    assert "s3cr3t" not in where


def test_a_run_keeps_no_credentials(server, tmp_path, capfd, caplog):
    """Neither in its folder, checkpoints included, nor in what it says; of a bad sample, and of a mistake."""
    members = caption_members(0, 11) | {"bad.jpg": b"x", "bad.txt": b"x"}
    server.files["/0.tar"] = write_tar(tmp_path / "0.tar", members).read_bytes()
    url = f"{server.url}/0.tar?X-Amz-Signature=s3cr3t-s3cr3t&b=1".replace("http://", "http://me:hunter22@")
    tree = run_tree(tmp_path / "runs", tmp_path, train__steps=4)
    tree["data"]["sources"] = [{"kind": "shards", "path": url}]
    (tmp_path / "config.json").write_text(json.dumps(tree))
    assert main(["train", "--config", str(tmp_path / "config.json")]) == 0
    assert main(["train", "--config", str(tmp_path / "config.json"), f"data.sources[0].pth={url}"]) == 2
    files = {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    assert {"config.yaml", "summary.json", "bad_samples.jsonl", "metrics.jsonl"} <= {path.name for path in files}
    files[Path("output")] = "".join((*capfd.readouterr(), caplog.text)).encode()
    for path, data in files.items():
        assert not any(secret in data for secret in (b"s3cr3t", b"hunter22")), path
    masked = f"{server.url}/0.tar?..."
    for name in ("config.yaml", "bad_samples.jsonl", "output"):
        assert any(path.name == name and masked.encode() in data for path, data in files.items()), name


@pytest.mark.parametrize("file", ["classnames.txt", "zeroshot_classification_templates.txt"])
@pytest.mark.parametrize("fault", [serving.answer, serving.unannounced])
def test_texts_at_urls_have_the_limits_of_local_ones(server, tmp_path, file, fault):
    url = server.add(class_folder(tmp_path))
    server.files["/train/nshards.txt"] = b"1"
    server.files[f"/{file}"] += b"\n" * ((4 << 20) + 1 - len(server.files[f"/{file}"]))
    server.for_ever[f"/{file}"] = fault
    with pytest.raises(DataError, match=rf"{url}/{file}: has (more than 4194304|4194305) bytes"):
        ClassShardsConfig(path=url, split="train").build()


FETCHING = """
import sys
from vqclip.data.remote.retry import RemoteConfig
from vqclip.data.remote.files import fetch_bytes
from vqclip.errors import StorageError
for url in sys.argv[1:]:
    try:
        print(fetch_bytes(url, RemoteConfig(tries=3, total_s=200.0), 100).decode())
    except StorageError as error:
        print(error)
"""


def test_a_redirect_from_https_to_http_is_refused(server: FaultyServer, tmp_path: Path) -> None:
    """Whoever is on the way could put another shard there; at last https again, or not."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the command openssl, to make a certificate")
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=here -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with serving.serving(context) as safe:
        safe.files["/0.tar"] = b"from https"
        server.files["/0.tar"] = b"from http"
        safe.for_ever["/within.tar"] = status(302, Location=f"{safe.url}/0.tar")
        safe.for_ever["/down.tar"] = status(302, Location=f"{server.url}/0.tar")
        safe.for_ever["/through.tar"] = status(302, Location=f"{server.url}/back.tar")
        server.for_ever["/back.tar"] = status(302, Location=f"{safe.url}/0.tar")
        server.for_ever["/up.tar"] = status(302, Location=f"{safe.url}/0.tar")
        names = ("0", "within", "down", "through")
        urls = [*(f"{safe.url}/{name}.tar" for name in names), f"{server.url}/up.tar"]
        trusting = os.environ | {"SSL_CERT_FILE": certificate}
        told = subprocess.run(
            [sys.executable, "-c", FETCHING, *urls], env=trusting, check=True, capture_output=True, text=True
        ).stdout.splitlines()
        assert told[:2] == ["from https"] * 2
        for url, line in zip(urls[2:4], told[2:4], strict=True):
            refused = "redirected from https to http, where anybody on the way can change the content; this is not "
            assert line.startswith(f"{url}: cannot be fetched: {refused}tried again. Tries: 1 of")
        assert told[4:] == ["from https"]
        assert "CERTIFICATE_VERIFY_FAILED" in (text := refusal(f"{urls[0]}?again"))  # whom this process does not know
        assert "; this is not tried again" in text
