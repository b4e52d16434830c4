import csv
from pathlib import Path

import pytest

from tests.data.making import caption_shards, encode, make_files, pixels
from tests.training import run_tree
from vqclip.data import DataConfig, open_source, parse_source
from vqclip.data.held_out import PartOfSource
from vqclip.errors import ConfigError, DataError
from vqclip.evaluation import KnnConfig, RetrievalConfig
from vqclip.evaluation.encode import RankPartition
from vqclip.evaluation.images import open_data
from vqclip.train.tasks.kinds import load_task_config

WORDS = ("cat", "dog")


def places(source: PartOfSource) -> list[str]:
    return [source.place(index) for index in range(len(source))]


def class_folders(folder: Path, count: int) -> Path:
    for number in range(count):
        make_files(folder, f"{WORDS[number % 2]}/{number}.jpg", encode(pixels(number)))
    return folder


def test_each_sample_has_its_side_whatever_else_there_is(tmp_path: Path) -> None:
    held: list[set[str]] = []
    for count in (40, 80):
        source = open_source(parse_source(class_folders(tmp_path / "images", count)))
        sides = [PartOfSource(source, 0.3, held_out=side) for side in (True, False)]
        one, other = ({*places(side)} for side in sides)
        assert not one & other
        assert len(one) + len(other) == count
        held.append(one)
        assert {*places(PartOfSource(source, 0.2, held_out=True))} < one
    assert held[0] < held[1]
    assert 0.15 < len(held[1]) / 80 < 0.45
    first = sides[0].read(0)
    assert first.image == (tmp_path / "images" / sides[0].place(0)).read_bytes()
    assert sides[0].fingerprint != sides[1].fingerprint != source.fingerprint


def test_rows_of_one_image_are_on_one_side(tmp_path: Path) -> None:
    class_folders(tmp_path / "images", 20)
    rows = [(f"images/{WORDS[number % 2]}/{number}.jpg", word) for word in ("a", "b") for number in range(20)]
    with (tmp_path / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("image", "label"), *rows])
    source = open_source(parse_source(tmp_path / "table.csv"))
    assert len(source) == 40
    held = places(PartOfSource(source, 0.5, held_out=True))
    images = [place.partition(" ")[0] for place in held]
    assert len(images) == 2 * len({*images})


def test_training_leaves_out_what_the_evaluation_reads(tmp_path: Path) -> None:
    shards, alone = str(caption_shards(tmp_path / "shards", (30, 20))), RankPartition.create(False)
    config = DataConfig(sources=shards, held_out=0.2, workers=0)
    data = config.build(16, lambda texts: pytest.fail("no batch is made"), 8, seed=0)
    trained = {data.samples.read_captions(index) for index in range(len(data))}
    task = RetrievalConfig(data=shards, held_out=0.2)
    held = task.open(alone)
    assert trained | {held.read(index).captions for index in range(len(held))} == {(f"caption {n}",) for n in range(50)}
    assert len(data) + len(held) == 50
    images = class_folders(tmp_path / "images", 30)
    probe = KnnConfig(data=images, train=images, held_out=0.2)
    assert len(probe.open(alone)) + len(open_data(probe.train, alone, True, "train", probe.held_out)) == 30


def test_what_cannot_be_held_out(tmp_path: Path) -> None:
    shards = str(caption_shards(tmp_path / "shards", (2,)))
    config = DataConfig(sources=[shards], held_out=0.5, order={"kind": "windowed"})
    with pytest.raises(ConfigError, match=r"data.held_out: got 0.5 with data.order.kind windowed"):
        config.build(16, lambda texts: pytest.fail("no batch is made"), 1, seed=0)
    source = open_source(parse_source(shards))
    assert len(PartOfSource(source, 1e-6, held_out=True)) == len(PartOfSource(source, 1e-6, held_out=False)) == 1
    with pytest.raises(DataError, match="all of the 2 samples are held out; expected more samples.* --val"):
        PartOfSource(source, 1 - 1e-9, held_out=False)


def test_a_part_knows_its_rows_and_the_weights_of_captions(tmp_path: Path) -> None:
    """Tars are known by their content: with other names they are the same data, and other samples are held out."""
    for name in ("one", "other"):
        caption_shards(tmp_path / name, (40,))
    (tmp_path / "other" / "00000.tar").rename(tmp_path / "other" / "renamed.tar")
    one, other = (open_source(parse_source(tmp_path / name)) for name in ("one", "other"))
    assert one.fingerprint == other.fingerprint
    parts = [PartOfSource(source, 0.3, held_out=False) for source in (one, other)]
    assert parts[0].fingerprint != parts[1].fingerprint
    config = parse_source(tmp_path / "one", ["captions=json", "json_keys={short: 0.7, long: 0.3}"])
    assert config.json_keys == {"long": 0.3, "short": 0.7}, "in one order, as caches number the keys"
    assert PartOfSource(open_source(config), 0.3, held_out=False).config.caption_weights == (0.3, 0.7)
    with pytest.raises(ConfigError, match="json_keys: got weights with captions 'txt'; expected captions: json"):
        parse_source(tmp_path / "one", ["json_keys={short: 0.7, long: 0.3}"])


def test_an_evaluation_of_what_is_trained_on_is_refused(tmp_path: Path) -> None:
    shards = caption_shards(tmp_path / "shards", (20,))
    tree = run_tree(tmp_path, shards, data__held_out=0.1)
    tree["evaluation"] = [{"kind": "retrieval", "data": str(shards), "held_out": 0.2}]
    with pytest.raises(ConfigError, match=r"evaluation\[0\].held_out: got 0.2 of data that the run trains on"):
        load_task_config(tree)
    tree["data"]["held_out"] = 0.2
    load_task_config(tree)
