from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.making import caption_members, caption_shards, write_tar
from tests.data.sources.test_sources import refusal
from vqclip.data import CaptionShardsConfig
from vqclip.data.sources.paths import expand_braces, find_shards


def test_shards_whose_names_break_lines(tmp_path: Path) -> None:
    write_tar(tmp_path / "a\nstep 1: forged.tar", caption_members(0, 1))
    message = refusal(CaptionShardsConfig(path=str(tmp_path)).build)
    assert message == f"'{tmp_path}/a\\nstep 1: forged.tar': a line break in the name of a shard; rename it"


def test_braces() -> None:
    assert expand_braces("a/{08..11}.tar") == ["a/08.tar", "a/09.tar", "a/10.tar", "a/11.tar"]
    assert expand_braces("{a,b}{1..2}") == ["a1", "a2", "b1", "b2"]
    assert expand_braces("{3..1}") == ["3", "2", "1"]
    assert expand_braces("plain") == ["plain"]
    assert "at most 10000000" in refusal(expand_braces, "{0..9999}{0..9999}{0..9999}")
    assert "more than 10000000" in refusal(expand_braces, "{0..99999999999999}")


def test_what_paths_stand_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = caption_shards(tmp_path / "data", (1, 1, 1))
    shards = [folder / f"{number:05d}.tar" for number in range(3)]
    (folder / "00000_stats.json").touch()
    assert find_shards([folder]) == shards
    assert find_shards([f"{folder}/{{00000..00002}}.tar"]) == shards
    assert find_shards([f"{folder}/*.tar"]) == shards
    assert find_shards([shards[2], shards[0]]) == [shards[2], shards[0]]
    monkeypatch.chdir(tmp_path)
    assert find_shards(["data/00001.tar"]) == shards[1:2]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_shards(["~/data"]) == shards


def test_paths_that_stand_for_nothing(tmp_path: Path) -> None:
    folder = caption_shards(tmp_path / "data" / "train", (1, 1))
    (tmp_path / "empty").mkdir()
    for path, message in {
        tmp_path / "none": "no such file or folder; expected a tar, a folder of tars",
        tmp_path / "empty": "no *.tar, *.tar.gz, *.tgz in this folder (it is empty)",
        folder.parent: "found some in train: did you mean",
        f"{folder}/{{00000..00003}}.tar": f"2 of 4 shards are missing: {folder}/00002.tar, {folder}/00003.tar",
        f"{folder}/{{10..13}}.tar": "matches no file",
        f"{folder}/*.tgz": "matches no file",
    }.items():
        message_got = refusal(find_shards, [path])
        assert message in message_got
        assert str(path) in message_got
    assert "listed twice" in refusal(find_shards, [folder, folder / "00000.tar"])
