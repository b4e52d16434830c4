"""Scenes are drawn from their keys, look like their words, and have captions that are true of them alone."""

import dataclasses
import io
import itertools
import json
import multiprocessing
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.commands import command
from tests.scenes.parser import parse, untrue
from vqclip.errors import DataError
from vqclip.scenes import HELD_OUT, TRAINED, ScenesConfig, make, make_scenes
from vqclip.scenes import scene as drawn
from vqclip.scenes.captions import Meaning, Phrase, describe, groups
from vqclip.scenes.drawing import SHAPES, draw_scene
from vqclip.scenes.scene import BACKGROUNDS, COLOURS, SIZES, Draws, Scene, SceneObject, backgrounds_for, sample_scene
from vqclip.scenes.splits import val_samples


def test_objects_lie_inside_and_apart() -> None:
    for index in range(500):
        scene = sample_scene(Draws(7, index), TRAINED[index % len(TRAINED)], TRAINED)
        for thing in scene.objects:
            low, high = SIZES[thing.size]
            assert low - 1e-3 < thing.radius < high + 1e-3
            assert thing.radius < min(thing.x, thing.y, 1 - thing.x, 1 - thing.y)
        for a, b in itertools.combinations(scene.objects, 2):
            assert np.hypot(a.x - b.x, a.y - b.y) > a.radius + b.radius
            assert a.combination != b.combination or a.size == b.size
        assert scene.background in backgrounds_for(frozenset(t.colour for t in scene.objects))
        stored = dataclasses.asdict(scene)  # as in the .json of a sample
        assert Scene(tuple(SceneObject(**each) for each in stored["objects"]), stored["background"]) == scene


@pytest.mark.parametrize("size", [64, 97])
def test_drawing_shows_the_colour_where_the_object_is(size: int) -> None:
    for colour, background in itertools.product(COLOURS, BACKGROUNDS):
        if background not in backgrounds_for(frozenset([colour])):
            continue
        thing = SceneObject(colour, "square", "large", 0.35, 0.6, 0.3, 5.0)
        pixels = draw_scene(Scene((thing,), background), size, Draws(3))
        assert pixels.shape == (size, size, 3)
        assert pixels.dtype == np.uint8
        middle = tuple(pixels[int(0.6 * size), int(0.35 * size)].tolist())
        assert min(COLOURS, key=lambda c: drawn.difference(COLOURS[c], middle)) == colour
        corner = tuple(pixels[2, -3].tolist())
        nearest = min(drawn.difference(end, corner) for end in BACKGROUNDS[background])
        assert nearest < 25


@pytest.mark.parametrize("detail", [0.0, 0.5, 1.0])
def test_every_caption_reads_back_as_claims_that_are_true(detail: float) -> None:
    seen = Counter()
    for index in range(1500 if detail == 0.5 else 300):
        draws = Draws(1, index)
        scene = sample_scene(draws, TRAINED[index % len(TRAINED)], TRAINED)
        caption, meaning = describe(scene, draws, detail)
        claims = parse(caption)
        assert untrue(claims, dataclasses.asdict(scene)) == [], (caption, scene)
        assert claims.background == meaning.background
        assert [t[:2] for t in claims.things] == [(p.count, p.size) for p in meaning.phrases], caption
        for kind in ("relation", "line", "horizontal", "vertical", "background"):
            seen[getattr(claims, kind)] += 1
    if detail == 0.5:
        expected = {"left", "right", "above", "below", "between", "side by side", "in a row", "one above the other"}
        assert expected | {"in a column", "middle", "top", "bottom"} <= set(seen)


def test_held_out_combinations_are_balanced() -> None:
    assert len(set(HELD_OUT) | set(TRAINED)) == len(HELD_OUT) + len(TRAINED) == len(COLOURS) * len(SHAPES) == 121
    assert set(Counter(c for c, _ in HELD_OUT).values()) == {2}
    assert set(Counter(s for _, s in HELD_OUT).values()) == {2}
    assert {c for c, _ in HELD_OUT} == set(COLOURS)
    assert {s for _, s in HELD_OUT} == set(SHAPES)


def test_val_captions_are_true_of_their_own_picture_alone() -> None:
    samples = list(val_samples(0, 100, 32))
    for i, sample in enumerate(samples):
        claims = parse(sample.caption or "")
        scenes = [dataclasses.asdict(other.scene) for other in samples]
        fits = [j for j, scene in enumerate(scenes) if not untrue_or_wrong_shape(claims, scene)]
        assert fits == [i], sample.caption
    assert len({s.caption for s in samples}) == len(samples)


def untrue_or_wrong_shape(claims, scene) -> bool:
    """As `untrue`, for scenes that have quite other objects (where places and relations cannot be asked)."""
    if {t[2:] for t in claims.things} != {(o["colour"], o["shape"]) for o in scene["objects"]}:
        return True
    counts = Counter((o["colour"], o["shape"]) for o in scene["objects"])
    return any(counts[t[2:]] != t[0] for t in claims.things) or bool(untrue(claims, scene))


def test_val_asking_for_more_than_can_be_told_apart_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def describe_tersely(scene, draws, detail):
        return "terse", Meaning(tuple(Phrase(len(m), m[0].colour, m[0].shape) for m in groups(scene)))

    monkeypatch.setattr("vqclip.scenes.splits.describe", describe_tersely)
    with pytest.raises(DataError, match=r"val image \d+ .* ask for fewer"):
        list(val_samples(0, 40_000, 32, attempts=3))


main = command("data")

SMALL = ScenesConfig(train=40, val=20, test=22, heldout=22, image_size=48, shard_size=16)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def scenes(cache: Path) -> Path:
    return make_scenes(cache, SMALL)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def members(shards: list[Path]) -> dict[str, bytes]:
    found = {}
    for shard in shards:
        with tarfile.open(shard) as tar:
            for member in tar:
                assert (member.mtime, member.uid, member.gid) == (0, 0, 0)
                found[member.name] = tar.extractfile(member).read()  # type: ignore[union-attr]
    return found


def test_same_seed_same_bytes_other_seed_other_bytes(scenes: Path, tmp_path: Path) -> None:
    again = make_scenes(tmp_path, SMALL)
    assert contents(again) == contents(scenes)
    other = make_scenes(tmp_path, ScenesConfig.model_validate(SMALL.model_dump() | {"seed": 1}))
    assert other != again
    assert (other / "train" / "00000.tar").read_bytes() != (again / "train" / "00000.tar").read_bytes()


@pytest.mark.parametrize(("split", "count", "shards"), [("train", 40, 3), ("val", 20, 2)])
def test_caption_shards_have_img2dataset_layout(scenes: Path, split: str, count: int, shards: int) -> None:
    folder = scenes / split
    tars = sorted(folder.glob("*.tar"))
    assert [t.name for t in tars] == [f"{i:05d}.tar" for i in range(shards)]
    found = members(tars)
    keys = [name[:-4] for name in found if name.endswith(".jpg")]
    assert len(keys) == len(set(keys)) == count
    assert list(found)[:3] == ["000000000.jpg", "000000000.json", "000000000.txt"]
    assert sum(json.loads(p.read_text())["count"] for p in folder.glob("*_stats.json")) == count
    for key in keys:
        picture = Image.open(io.BytesIO(found[key + ".jpg"]))
        assert (picture.size, picture.mode) == ((48, 48), "RGB")
        facts = json.loads(found[key + ".json"])
        caption = found[key + ".txt"].decode()
        assert facts["key"] == key
        assert facts["caption"] == caption
        assert untrue(parse(caption), facts["scene"]) == []
        shown = {(o["colour"], o["shape"]) for o in facts["scene"]["objects"]}
        assert shown <= set(HELD_OUT) if split == "val" else not shown & set(HELD_OUT)


@pytest.mark.parametrize("split", ["test", "heldout"])
def test_labelled_shards_have_clip_benchmark_layout(scenes: Path, split: str) -> None:
    folder = scenes / split
    names = (folder / "classnames.txt").read_text().splitlines()
    assert all("{c}" in line for line in (folder / "zeroshot_classification_templates.txt").read_text().splitlines())
    tars = [folder / "test" / f"{i}.tar" for i in range(int((folder / "test" / "nshards.txt").read_text()))]
    assert tars == sorted((folder / "test").glob("*.tar"))
    found = members(tars)
    labels = {name: int(data) for name, data in found.items() if name.endswith(".cls")}
    assert len(labels) == 22
    for name, label in labels.items():
        facts = json.loads(found[name.replace(".cls", ".json")])
        (thing,) = facts["scene"]["objects"]
        assert names[label] == facts["class"] == f"{thing['colour']} {thing['shape']}"
        assert ((thing["colour"], thing["shape"]) in HELD_OUT) == (split == "heldout")
        Image.open(io.BytesIO(found[name.replace(".cls", ".jpg")])).load()


def test_second_call_draws_nothing(scenes: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {p: p.stat().st_mtime_ns for p in scenes.rglob("*")}
    monkeypatch.setattr(make, "_draw", lambda *_: pytest.fail("drew again"))
    assert make_scenes(cache, SMALL) == scenes
    assert {p: p.stat().st_mtime_ns for p in scenes.rglob("*")} == before


def test_several_processes_at_once_end_with_one_whole_data_set(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=make_scenes, args=(tmp_path, SMALL)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert [path for path in tmp_path.iterdir() if path.suffix != ".lock"] == [make_scenes(tmp_path, SMALL)]


def test_damage_is_named(tmp_path: Path) -> None:
    scenes = make_scenes(tmp_path, SMALL)
    shard = scenes / "train" / "00001.tar"
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(DataError, match=r"train/00001\.tar: has 100 bytes, expected \d+; delete this folder"):
        make_scenes(tmp_path, SMALL)
    shard.unlink()
    with pytest.raises(DataError, match=r"train/00001\.tar: has 0 bytes, expected \d+; delete this folder"):
        make_scenes(tmp_path, SMALL)
    (scenes / make.STAMP).write_text("{}")
    with pytest.raises(DataError, match=r"not complete .*delete this folder"):
        make_scenes(tmp_path, SMALL)
    with pytest.raises(DataError, match="VQCLIP_CACHE"):
        make_scenes(shard.with_name("00000.tar"), SMALL)  # which is no folder


def test_the_command_draws(scenes, cache, capsys, refused):
    overrides = [f"{key}={value}" for key, value in SMALL.model_dump().items()]
    assert main(["draw", "--out", str(cache), *overrides]) == 0
    assert str(scenes / "train") in capsys.readouterr().out
    assert "train" in refused(main(["draw", "--out", str(cache), "train=0"]))
