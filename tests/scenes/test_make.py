from __future__ import annotations

import io
import json
import multiprocessing
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from tests.commands import command
from tests.scenes.parser import parse, untrue
from vqclip.errors import DataError
from vqclip.scenes import HELD_OUT, ScenesConfig, ScenesPaths, make, make_scenes

main = command("data")

SMALL = ScenesConfig(train=40, val=20, test=22, heldout=22, image_size=48, shard_size=16)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def paths(cache: Path) -> ScenesPaths:
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


def test_same_seed_same_bytes_other_seed_other_bytes(paths: ScenesPaths, tmp_path: Path) -> None:
    again = make_scenes(tmp_path, SMALL)
    assert contents(again.root) == contents(paths.root)
    other = make_scenes(tmp_path, ScenesConfig.model_validate(SMALL.model_dump() | {"seed": 1}))
    assert other.root != again.root
    assert (other.train / "00000.tar").read_bytes() != (again.train / "00000.tar").read_bytes()


@pytest.mark.parametrize(("split", "count", "shards"), [("train", 40, 3), ("val", 20, 2)])
def test_caption_shards_have_img2dataset_layout(paths: ScenesPaths, split: str, count: int, shards: int) -> None:
    folder = getattr(paths, split)
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
def test_labelled_shards_have_clip_benchmark_layout(paths: ScenesPaths, split: str) -> None:
    folder = getattr(paths, split)
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
        Image.open(io.BytesIO(found[name.replace(".cls", ".jpg")])).load()


def test_second_call_draws_nothing(paths: ScenesPaths, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {p: p.stat().st_mtime_ns for p in paths.root.rglob("*")}
    monkeypatch.setattr(make, "_draw", lambda *_: pytest.fail("drew again"))
    assert make_scenes(cache, SMALL) == paths
    assert {p: p.stat().st_mtime_ns for p in paths.root.rglob("*")} == before


def test_several_processes_at_once_end_with_one_whole_data_set(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=make_scenes, args=(tmp_path, SMALL)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert [path for path in tmp_path.iterdir() if path.suffix != ".lock"] == [make_scenes(tmp_path, SMALL).root]


def test_damage_is_named(tmp_path: Path) -> None:
    paths = make_scenes(tmp_path, SMALL)
    shard = paths.train / "00001.tar"
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(DataError, match=r"train/00001\.tar: has 100 bytes, expected \d+; delete this folder"):
        make_scenes(tmp_path, SMALL)
    shard.unlink()
    with pytest.raises(DataError, match=r"train/00001\.tar: has 0 bytes, expected \d+; delete this folder"):
        make_scenes(tmp_path, SMALL)
    (paths.root / make.STAMP).write_text("{}")
    with pytest.raises(DataError, match=r"not complete .*delete this folder"):
        make_scenes(tmp_path, SMALL)


def test_unwritable_cache_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(DataError, match="VQCLIP_CACHE"):
        make_scenes(blocked, SMALL)


def test_default_place_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VQCLIP_CACHE", str(tmp_path))
    assert make_scenes(config=SMALL).root.parent == tmp_path


def test_the_command_draws(paths: ScenesPaths, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [f"{key}={value}" for key, value in SMALL.model_dump().items()]
    assert main(["draw", "--out", str(cache), *overrides]) == 0
    assert str(paths.train) in capsys.readouterr().out
    assert main(["draw", "--out", str(cache), "train=0"]) == 2
    assert "train" in capsys.readouterr().err
