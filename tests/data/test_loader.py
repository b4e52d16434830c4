import json
import os
import sys
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter

from tests.data.loading import SIZE, G, global_batches, open_data, same, text, tokenize
from tests.data.making import caption_members, caption_shards, encode, pixels, write_parquet, write_tar
from vqclip.config import load_config
from vqclip.data import CaptionShardsConfig, DataConfig, SourceConfig, batch_maker
from vqclip.data.decode import decode_image
from vqclip.errors import DataError

WINDOWED = {"kind": "windowed", "chunk": 3, "window": 2}


@pytest.mark.parametrize(
    ("world_size", "workers", "order", "method"),
    [
        *((1, 0, "full", None), (1, 2, "full", None), (2, 2, "full", None), (16, 0, "full", None)),
        (3, 2, WINDOWED, None),
        *(pytest.param(*case, "full", None, marks=pytest.mark.slow) for case in ((2, 0), (4, 0), (4, 2), (16, 2))),
        *(
            pytest.param(2, 2, order, method, marks=pytest.mark.slow)
            for order in ("full", WINDOWED)
            for method in ("fork", "forkserver", "spawn")
        ),
    ],
)
def test_global_batches_do_not_depend_on_ranks_and_workers_and_how_they_start(
    folder: Path, world_size, workers, order, method, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_maker, "SLICE_ROWS", 2)  # so that workers share a batch
    options = {"order": order, "weight": 0.55}  # 6.6 samples of the second source an epoch: 6, 7, ...
    expected = global_batches(open_data(folder, **options), 0, 7, 1)  # 70 samples, more than epochs of 29 and 30
    assert all(len(sample_ids.unique()) == G for sample_ids, *_ in expected)
    data = open_data(folder, workers=workers, start_method=method, **options)
    assert same(global_batches(data, 0, 7, world_size), expected)
    assert same(global_batches(data, 4, 7, world_size), expected[4:])  # in the middle of an epoch
    nodes = [rank * 3 // world_size for rank in range(world_size)]
    assert same(global_batches(data, 4, 7, world_size, nodes), expected[4:])


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
            # A mild crop: close to the picture itself in its mean colour.
            mean = decode_image(encode(pixels(number))).float().mean((1, 2))
            assert (batch.images[row].float().mean((1, 2)) - mean).abs().max() < 25


def test_every_sample_once_an_epoch_and_draws_change_with_it(folder: Path) -> None:
    source = CaptionShardsConfig(path=str(folder / "b"), captions="json", json_keys=("many",))
    data = open_data(folder, sources=(source,))
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


@pytest.mark.parametrize("kind", ["shards", "folder", "csv", "parquet"])
def test_captions_are_drawn_by_the_weights_of_their_keys(tmp_path: Path, kind: str) -> None:
    """The same captions from every kind of source; sample 3 has no short one."""
    rows = [{"short": f"s{n}" if n != 3 else "", "long": [f"l{n}", f"m{n}"]} for n in range(12)]
    images = [encode(pixels(number)) for number in range(12)]
    (tmp_path / "data").mkdir()
    for number, (image, row) in enumerate(zip(images, rows, strict=True)):
        (tmp_path / "data" / f"{number:02}.jpg").write_bytes(image)
        (tmp_path / "data" / f"{number:02}.json").write_text(json.dumps(row))
    names, weights = [f"data/{number:02}.jpg" for number in range(12)], {"short": 0.7, "long": 0.3}
    by_key = {"captions": "json", "json_keys": weights}
    given: dict = {"kind": kind, "path": str(tmp_path / kind), "captions": weights}
    if kind == "shards":
        members = {path.name: path.read_bytes() for path in sorted((tmp_path / "data").iterdir())}
        given |= {"path": str(write_tar(tmp_path / "0.tar", members)), **by_key}
    elif kind == "folder":
        given |= {"path": str(tmp_path / "data"), **by_key}
    elif kind == "csv":
        lines = [f'{name},{row["short"]},"{row["long"]}"' for name, row in zip(names, rows, strict=True)]
        (tmp_path / kind).write_text("\n".join(["filepath,short,long", *lines]))
    else:
        write_parquet(tmp_path / kind, {"image": images, **{key: [row[key] for row in rows] for key in weights}})
    data = open_data(tmp_path, sources=(TypeAdapter(SourceConfig).validate_python(given),))
    epochs = 200 if kind == "shards" else 5
    drawn = [text(row) for batch in data.batches(0, epochs * 12 // G) for row in batch.texts]
    assert {each[0] for each in drawn if each[1:] == "3"} == {"l", "m"}
    assert " ".join(drawn[:12]) == "s2 s0 s1 s5 s6 m4 m7 s8 s10 s9 l3 s11"
    if kind == "shards":
        shares = [sum(each[0] == letter for each in drawn if each[1:] != "3") / 2200 for letter in "slm"]
        assert shares == [pytest.approx(wanted, abs=0.03) for wanted in (0.7, 0.15, 0.15)]
    other = open_data(tmp_path, sources=(TypeAdapter(SourceConfig).validate_python(given | CHANGED[kind]),))
    assert other.fingerprint != data.fingerprint


CHANGED = {kind: {"captions": {"short": 1.0, "long": 1.0}} for kind in ("csv", "parquet")}
CHANGED |= {kind: {"json_keys": {"short": 1.0, "long": 1.0}} for kind in ("shards", "folder")}


def test_the_global_generators_are_left_alone(folder: Path) -> None:
    state = torch.get_rng_state()
    next(iter(open_data(folder).batches(0, 1)))
    next(iter(open_data(folder, workers=1).batches(0, 1)))
    assert torch.equal(state, torch.get_rng_state())


def test_ranks_of_a_node_read_what_it_owns(folder: Path) -> None:
    data = open_data(folder, order=WINDOWED)
    dealt = data.order.deal(3, 1, (0, 1))[1].tolist()
    assert dealt != list(range(1, G, 2))
    (part,) = data.batches(3, 4, rank=1, nodes=(0, 1))
    assert part.places.tolist() == dealt
    data.nodes = (0, 1)  # of the job
    (part,) = data.batches(3, 4, rank=1)
    assert part.places.tolist() == dealt


def test_coverage(folder: Path) -> None:
    data = open_data(folder)
    assert data.coverage(1).startswith("10 samples shown in 0.34 epochs: ")
    assert data.coverage(29) == "290 samples shown in 10.00 epochs: 35 of 35 at least once (100.0%)"
    single = open_data(folder, sources=(CaptionShardsConfig(path=str(folder / "a")),))
    distinct = {int(i) for batch in single.batches(0, 1) for i in batch.sample_ids}
    assert len(distinct) == 10
    assert single.coverage(1).endswith(" 10 of 17 at least once (58.8%)")


def test_fingerprint(folder: Path) -> None:
    first = open_data(folder).fingerprint
    assert json.loads(json.dumps(first)) == first
    assert open_data(folder, workers=1, prefetch=9).fingerprint == first
    write_tar(folder / "b" / "00000.tar", caption_members(200, 12))
    changed = open_data(folder).fingerprint
    assert changed["sha256"] != first["sha256"]
    assert [a == b for a, b in zip(first["sources"], changed["sources"], strict=True)] == [True, False, True]
    # Fractions of a slot were rounded once: such a run does not continue in another order.
    weighted = open_data(folder, weight=0.55).fingerprint["sources"]
    assert [source.get("slots") for source in weighted] == [None, "33/5", None]


@pytest.mark.parametrize("order", ["full", "windowed"])
def test_a_sample_passes_seven_calls_to_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    """The path in the docstring of `vqclip.data`, `fill` and `os.pread` included."""
    source = CaptionShardsConfig(path=str(caption_shards(tmp_path, (4,))))
    data = DataConfig(sources=(source,), order=order, workers=0).build(SIZE, tokenize, 4, 0)
    paths: set[tuple[str, ...]] = set()
    read = os.pread

    def count(*arguments: int) -> bytes:
        frame, names = sys._getframe(1), ["pread"]
        while frame is not None and names[-1] != "fill":
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        paths.add(tuple(reversed(names)))
        return read(*arguments)

    monkeypatch.setattr(os, "pread", count)
    next(data.batches(0, 1))
    assert paths == {("fill", "make", "_make", "read", "read", "read", "pread")}


def test_errors_name_the_key_path(tmp_path: Path) -> None:
    shards = {"kind": "shards", "path": str(caption_shards(tmp_path / "shards", (3,)))}
    source = {"kind": "torchvision", "name": "MNIST", "root": str(tmp_path)}
    config = load_config(DataConfig, {"sources": [shards, source], "workers": 0})
    with pytest.raises(DataError, match=r"^data\.sources\[1\]\.root: got "):
        config.build(8, tokenize, 2, 0)
