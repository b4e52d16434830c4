from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from tests.data.making import caption_members, caption_shards, class_folder, encode, pixels, write_tar
from vqclip import dist
from vqclip.data import Batch, CaptionShardsConfig, ClassShardsConfig, DataConfig, TrainData
from vqclip.data.decode import decode_image
from vqclip.errors import DataError

SIZE = 16
G = 10


def tokenize(captions: list[str]) -> torch.Tensor:
    """Bytes of the caption, (B, 40) int64, 0-padded."""
    rows = torch.zeros(len(captions), 40, dtype=torch.int64)
    for row, caption in zip(rows, captions, strict=True):
        data = torch.tensor(list(caption.encode()), dtype=torch.int64)
        row[: len(data)] = data
    return rows


def text(row: torch.Tensor) -> str:
    return bytes(row[row > 0].tolist()).decode()


def open_data(folder: Path, seed: int = 0, batch_size: int = G, **options) -> TrainData:
    """Two caption sources and one of classes."""
    sources = options.pop("sources", None) or (
        CaptionShardsConfig(path=str(folder / "a")),
        CaptionShardsConfig(path=str(folder / "b"), weight=0.5, captions="json", json_keys=("many",)),
        ClassShardsConfig(path=folder / "c"),
    )
    config = DataConfig(sources=sources, **{"workers": 0, **options})
    return config.build(image_size=SIZE, tokenize=tokenize, batch_size=batch_size, seed=seed)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    caption_shards(tmp_path / "a", (9, 8))
    caption_shards(tmp_path / "b", (12,), first=100)
    class_folder(tmp_path / "c", 6)
    return tmp_path


def global_batch(parts: list[Batch]) -> tuple[torch.Tensor, ...]:
    """The global batch that ranks' parts make: sample i is on rank i mod W."""
    assert len({(part.step, part.epoch) for part in parts}) == 1
    total = sum(len(part) for part in parts)
    result = []
    for name in ("sample_ids", "images", "texts", "labels"):
        tensors = [getattr(part, name) for part in parts]
        whole = torch.empty(total, *tensors[0].shape[1:], dtype=tensors[0].dtype)
        for rank, tensor in enumerate(tensors):
            whole[rank :: len(parts)] = tensor
        result.append(whole)
    return tuple(result)


def global_batches(data: TrainData, start: int, stop: int, world_size: int) -> list[tuple[torch.Tensor, ...]]:
    ranks = [list(data.batches(start, stop, rank, world_size)) for rank in range(world_size)]
    return [global_batch(list(parts)) for parts in zip(*ranks, strict=True)]


def same(one: list[tuple[torch.Tensor, ...]], other: list[tuple[torch.Tensor, ...]]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2, 4, 16])
def test_global_batches_do_not_depend_on_ranks_and_workers(folder: Path, world_size: int, workers: int) -> None:
    expected = global_batches(open_data(folder), 0, 7, 1)  # 70 samples, more than two epochs of 29
    data = open_data(folder, workers=workers)
    assert same(global_batches(data, 0, 7, world_size), expected)
    assert same(global_batches(data, 4, 7, world_size), expected[4:])  # in the middle of an epoch


def test_batches_are_what_they_say(folder: Path) -> None:
    data = open_data(folder)
    assert len(data) == 17 + 12 + 6
    assert data.epoch_size == 17 + 6 + 6
    for batch in data.batches(0, 12):
        assert batch.images.shape == (G, 3, SIZE, SIZE)
        assert batch.images.dtype == torch.uint8
        assert batch.texts.shape == (G, 40)
        for row, sample_id in enumerate(batch.sample_ids.tolist()):
            caption = text(batch.texts[row])
            key = data.sample_name(sample_id).rpartition("sample ")[2]
            if sample_id < 17:
                assert caption == f"caption {sample_id}"
                number = sample_id
            elif sample_id < 29:
                number = sample_id - 17 + 100
                assert caption in (f"a{number}", f"b{number}")
            else:
                number = sample_id - 29
                names = ["cat", "dog", "red panda"]
                assert batch.labels[row] == number % 3
                assert caption in (f"a photo of a {names[number % 3]}", f"the {names[number % 3]}")
            assert int(key.lstrip("s")) == number
            # A mild crop: close to the picture itself in its mean colour.
            mean = decode_image(encode(pixels(number))).float().mean((1, 2))
            assert (batch.images[row].float().mean((1, 2)) - mean).abs().max() < 25


def test_every_sample_once_an_epoch_and_draws_change_with_it(folder: Path) -> None:
    data = open_data(
        folder, sources=(CaptionShardsConfig(path=str(folder / "b"), captions="json", json_keys=("many",)),)
    )
    shown = {}
    for batch in data.batches(0, 12):  # ten epochs of 12
        for row, sample_id in enumerate(batch.sample_ids.tolist()):
            shown.setdefault(sample_id, []).append((text(batch.texts[row]), batch.images[row]))
    assert sorted(shown) == list(range(12))
    assert all(len(views) == 10 for views in shown.values())
    captions = {caption for views in shown.values() for caption, _ in views}
    assert len(captions) == 24  # both captions of all samples come up
    images = torch.stack([image for views in shown.values() for _, image in views]).flatten(1)
    assert len(torch.unique(images, dim=0)) > 60  # of 120; crops of so small a picture may coincide


def test_seeds_differ_in_order_captions_and_crops(folder: Path) -> None:
    one, other = (global_batches(open_data(folder, seed=seed), 0, 3, 1) for seed in (0, 1))
    assert not torch.equal(one[0][0], other[0][0])
    assert same(one, global_batches(open_data(folder, seed=0), 0, 3, 1))


def test_the_global_generators_are_left_alone(folder: Path) -> None:
    state = torch.get_rng_state()
    next(iter(open_data(folder).batches(0, 1)))
    next(iter(open_data(folder, workers=1).batches(0, 1)))
    assert torch.equal(state, torch.get_rng_state())


def test_more_ranks_than_samples(folder: Path) -> None:
    data = open_data(folder, batch_size=2)
    (batch,) = data.batches(3, 4, rank=5, world_size=8)
    assert batch.images.shape == (0, 3, SIZE, SIZE)
    assert batch.texts.shape == (0, 40)
    assert batch.sample_ids.dtype == torch.int64
    assert len(batch.split(4)) == 1


def test_micro_batches(folder: Path) -> None:
    (batch,) = open_data(folder).batches(0, 1)
    parts = batch.split(4)
    assert [len(part) for part in parts] == [4, 4, 2]
    assert torch.equal(torch.cat([part.images for part in parts]), batch.images)
    assert torch.equal(torch.cat([part.texts for part in parts]), batch.texts)
    assert {part.step for part in parts} == {0}


def test_coverage(folder: Path) -> None:
    data = open_data(folder)
    half = data.coverage(1)
    assert (half.shown, half.available) == (10, 35)
    many = data.coverage(29)
    assert (many.shown, many.distinct, many.epochs) == (290, 35, 10.0)
    assert str(many) == "290 samples shown in 10.00 epochs: 35 of 35 at least once (100.0%)"
    single = open_data(folder, sources=(CaptionShardsConfig(path=str(folder / "a")),))
    distinct = {int(i) for batch in single.batches(0, 1) for i in batch.sample_ids}
    assert single.coverage(1).distinct == len(distinct) == 10


def test_fingerprint(folder: Path) -> None:
    first = open_data(folder).fingerprint
    assert json.loads(json.dumps(first)) == first
    assert open_data(folder, workers=1, prefetch=9).fingerprint == first
    write_tar(folder / "b" / "00000.tar", caption_members(200, 12))
    changed = open_data(folder).fingerprint
    assert changed["sha256"] != first["sha256"]
    assert [a == b for a, b in zip(first["sources"], changed["sources"], strict=True)] == [True, False, True]


# ---- bad samples


@pytest.fixture
def spoilt(tmp_path: Path) -> Path:
    """20 samples, of which 3, 4 and 5 are bad."""
    members = caption_members(0, 20)
    members["000000003.jpg"] = members["000000003.jpg"][:200]
    del members["000000004.txt"]
    members["000000005.jpg"] = b"\x80\x04not an image"
    write_tar(tmp_path / "00000.tar", members)
    return tmp_path


def spoilt_data(folder: Path, **options) -> TrainData:
    options = {"max_bad_fraction": 0.1, **options}
    return open_data(folder, sources=(CaptionShardsConfig(path=str(folder)),), **options)


def test_bad_samples_are_replaced_counted_and_named(spoilt: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = spoilt_data(spoilt)
    with caplog.at_level(logging.WARNING, "vqclip.data"):
        batches = list(data.batches(0, 4))  # two epochs
    # Twice each, and perhaps as a substitute that was drawn for another one.
    assert {bad.sample_id for bad in data.replaced} == {3, 4, 5}
    assert min(Counter(bad.sample_id for bad in data.replaced).values()) >= 2
    shown = torch.cat([batch.sample_ids for batch in batches]).tolist()
    assert len(shown) == 40
    assert not {3, 4, 5} & set(shown)
    reasons = {bad.sample_id: bad.reason for bad in data.replaced}
    shard = spoilt / "00000.tar"
    assert reasons[3].startswith(f"{shard}: sample 000000003: jpeg image cannot be decoded")
    assert reasons[4] == f"{shard}: sample 000000004: has no .txt"
    assert reasons[5].startswith(f"{shard}: sample 000000005: not a JPEG, PNG or WebP image")
    for bad in data.replaced:
        assert f"sample {bad.sample_id} replaced by {bad.substitute_id}: {bad.reason}" in caplog.text


@pytest.mark.parametrize("workers", [0, 2])
def test_substitutes_do_not_depend_on_ranks_and_workers(spoilt: Path, workers: int) -> None:
    expected = global_batches(spoilt_data(spoilt), 0, 6, 1)
    data = spoilt_data(spoilt, workers=workers)
    for world_size in (1, 2, 4):
        assert same(global_batches(data, 0, 6, world_size), expected)
        assert same(global_batches(data, 3, 6, world_size), expected[3:])


def test_too_many_bad_samples_stop_the_run(spoilt: Path) -> None:
    data = spoilt_data(spoilt, max_bad_fraction=0.002)
    with pytest.raises(
        DataError, match=r"\d bad samples among \d+: more than data.max_bad_fraction=0.002 allows"
    ) as error:
        list(data.batches(0, 100))
    assert "sample 000000004: has no .txt" in str(error.value)
    with pytest.raises(DataError, match="1 bad samples"):
        list(spoilt_data(spoilt, max_bad_fraction=0.0, batch_size=1).batches(0, 100))


def test_nothing_but_bad_samples(tmp_path: Path) -> None:
    members = {f"{n}.{kind}": b"x" for n in range(5) for kind in ("jpg", "txt")}
    write_tar(tmp_path / "0.tar", members)
    with pytest.raises(DataError, match="31 substitutes for it cannot be used either"):
        list(spoilt_data(tmp_path).batches(0, 1))


# ---- failures of the machinery


def explode(captions: list[str]) -> torch.Tensor:
    raise KeyError("boom")


def die(captions: list[str]) -> torch.Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def sleep(captions: list[str]) -> torch.Tensor:
    time.sleep(30)
    raise AssertionError


def failing(folder: Path, function, **options) -> TrainData:
    config = DataConfig(sources=(CaptionShardsConfig(path=str(folder / "a")),), workers=1, **options)
    return config.build(image_size=SIZE, tokenize=function, batch_size=4, seed=0)


def test_errors_in_workers_keep_their_traceback(folder: Path) -> None:
    with pytest.raises(DataError, match=r"(?s)KeyError: 'boom'.*in explode"):
        next(failing(folder, explode).batches(0, 1))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_dead_worker_is_explained(folder: Path) -> None:
    with pytest.raises(DataError, match=r"a data worker died \(.*killed for memory\? Fewer data.workers"):
        next(failing(folder, die).batches(0, 1))


def test_a_stuck_worker_is_explained(folder: Path) -> None:
    start = time.monotonic()
    with pytest.raises(DataError, match=r"no batch came from the data workers for 1 s"):
        next(failing(folder, sleep, timeout_s=1.0).batches(0, 1))
    assert time.monotonic() - start < 20


def test_workers_outlive_stop_signals(folder: Path) -> None:
    batches = open_data(folder, workers=2).batches(0, 30)
    next(batches)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    assert len(children) >= 2
    for child in children:
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(int(child), number)
    assert len(list(batches)) == 29


# ---- several ranks


def build_on_ranks(folder: str) -> tuple[list[int], int, list[str] | None]:
    indexed: list[str] = []
    import vqclip.data.index as index

    make = index._make
    index._make = lambda path: indexed.append(path.name) or make(path)
    try:
        data = open_data(Path(folder), sources=(CaptionShardsConfig(path=folder),))
        (batch,) = data.batches(2, 3)
    finally:
        index._make = make
    return batch.sample_ids.tolist(), len(batch), sorted(indexed)


def test_ranks_index_together_and_take_their_share(tmp_path: Path, ranks, cache: Path) -> None:
    folder = caption_shards(tmp_path / "d", (4, 4, 4, 4, 4))
    results = ranks(2, with_cache, str(cache), build_on_ranks, str(folder))
    (expected,) = open_data(folder, sources=(CaptionShardsConfig(path=str(folder)),)).batches(2, 3)
    for rank, (ids, _, indexed) in enumerate(results):
        assert ids == expected.sample_ids[rank::2].tolist()
        assert indexed == [f"{number:05d}.tar" for number in range(5)][rank::2]


def with_cache(cache: str, function, *args):
    os.environ["VQCLIP_CACHE"] = cache
    return function(*args)


def error_on_ranks(folder: str) -> str:
    with pytest.raises(DataError) as error:
        open_data(Path(folder), sources=(CaptionShardsConfig(path=folder),))
    return f"{dist.rank()}: {error.value}"


def test_one_ranks_error_is_everyones(tmp_path: Path, ranks, cache: Path) -> None:
    folder = caption_shards(tmp_path / "d", (2, 2))
    os.truncate(folder / "00001.tar", 700)  # rank 1's share
    results = ranks(2, with_cache, str(cache), error_on_ranks, str(folder))
    assert [result[:2] for result in results] == ["0:", "1:"]
    assert all("00001.tar: truncated: member" in result for result in results)


# ---- configuration


@pytest.mark.parametrize("change", [{"sources": []}, {"workers": -1}, {"max_bad_fraction": 1.0}, {"worker": 2}])
def test_wrong_configuration(change: dict) -> None:
    with pytest.raises(ValidationError):
        DataConfig(**{"sources": [{"kind": "shards", "path": "x"}], **change})


def test_batches_are_immutable(folder: Path) -> None:
    (batch,) = open_data(folder).batches(0, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.step = 3
