"""Data ten times as large as the cache: each byte is fetched about once an epoch."""

import pytest
import torch

from tests.data.loading import global_batch, open_data, same
from tests.data.making import caption_shards, make_index
from vqclip import dist
from vqclip.data import CaptionShardsConfig
from vqclip.data.remote import cache as cache_module
from vqclip.data.tars.open import index_name

pytestmark = pytest.mark.slow

SHARDS, SAMPLES, CHUNK, G = 20, 64, 8, 8
TOTAL = SHARDS * SAMPLES
STEPS = 2 * TOTAL // G  # two epochs


@pytest.fixture(autouse=True)
def exact_times(monkeypatch):
    """A round of a window takes a moment here, and seconds elsewhere."""
    monkeypatch.setattr(cache_module, "_USED_S", 0.0)


@pytest.fixture
def shards(tmp_path):
    """A folder of shards and their index."""
    folder = caption_shards(tmp_path / "data", (SAMPLES,) * SHARDS)
    tars = sorted(folder.glob("*.tar"))
    make_index(tars, folder / index_name(tars), CHUNK)
    return folder


def size_of(shards):
    return sum(path.stat().st_size for path in shards.glob("*.tar"))


def open_shards(shards, window, url="", **options):
    """The data in a folder, or at a URL with a cache for a tenth of them."""
    path = f"{url or shards}/{{00000..{SHARDS - 1:05d}}}.tar"
    remote = {"tries": 4, "timeout_s": 5.0, "total_s": 60.0, "cache_gib": size_of(shards) / 10 / 2**30}
    order = {"kind": "windowed", "chunk": CHUNK, "window": window}
    source = CaptionShardsConfig(path=path, remote=remote)
    return open_data(shards, sources=(source,), order=order, batch_size=G, **options)


def require_all(found, data):
    """Every sample twice, in the batches of the same data on this disk."""
    assert torch.cat([batch[0] for batch in found]).bincount().tolist() == [2] * TOTAL
    assert same(found, [global_batch([batch]) for batch in data.batches(0, STEPS, 0, (0,))])


@pytest.mark.parametrize("workers", [0, 2])
def test_one_machine(shards, server, cache, workers):
    data = open_shards(shards, 6, server.add(shards, "/data"), workers=workers)
    server.sent = 0
    found = [global_batch([batch]) for batch in data.batches(0, STEPS)]
    require_all(found, open_shards(shards, 6))
    ratio = server.sent / (2 * size_of(shards))
    print(f"{workers} workers: {ratio:.3f} bytes fetched for each byte of data")
    assert 0.9 <= ratio <= 1.1
    assert sum(path.stat().st_size for path in (cache / "chunks").iterdir()) <= 0.1 * size_of(shards) + 4096


def test_four_machines_with_caches_of_their_own(shards, server, tmp_path, monkeypatch):
    parts, sent, nodes = [], [], (0, 1, 2, 3)
    monkeypatch.setattr(dist, "nodes", lambda: nodes)
    for node in nodes:
        monkeypatch.setenv("VQCLIP_CACHE", str(tmp_path / f"cache {node}"))
        data = open_shards(shards, 32, server.add(shards, "/data"))
        before = server.sent
        parts.append(list(data.batches(0, STEPS, node, nodes)))
        sent.append(server.sent - before)
    ratio = sum(sent) / (2 * size_of(shards))
    print(f"4 nodes: {ratio:.3f} bytes fetched for each byte of data; {[round(each / sum(sent), 2) for each in sent]}")
    assert 0.9 <= ratio <= 1.2
    require_all([global_batch(list(each)) for each in zip(*parts, strict=True)], open_shards(shards, 32))
