from __future__ import annotations

import pytest
import torch

from tests.evaluation.made import IDENTITY, PlainModel, caption_shards, png, tiny_clip, write_tar
from vqclip.data import CaptionShardsConfig
from vqclip.evaluation import RetrievalConfig, evaluate
from vqclip.evaluation.retrieval import both_ranks, chance, recalls


def test_the_same_embedding_for_everything_scores_chance():
    counts = torch.tensor([1, 5, 2, 3, 1, 1, 4, 2, 2, 1, 7, 1])
    images, captions = torch.ones(12, 3), torch.ones(30, 3)
    assert recalls(both_ranks(images, captions, counts)) == pytest.approx(chance(counts))
    assert chance(counts)["t2i_r5"] == pytest.approx(5 / 12)
    assert chance(counts)["i2t_r1"] == pytest.approx(2.5 / 30)


def test_perfect_codes_score_100_percent(tmp_path):
    members = {}
    for i in range(20):
        members |= {f"{i:05d}.png": png(i), f"{i:05d}.txt": f"a {i}\nthe {i}\n{i}".encode()}
    write_tar(tmp_path / "0.tar", members)
    data = CaptionShardsConfig(path=str(tmp_path), captions="txt_lines")
    (result,) = evaluate(PlainModel(20), [RetrievalConfig(name="numbers", data=data, batch_size=7)])
    assert set(result.figures["codes_only"].values()) == {1.0}
    assert result.figures["continuous"] == pytest.approx(result.chance)
    assert (result.samples, result.captions, result.classes) == (20, 60, None)


def test_equal_captions_of_different_images_share_their_place(tmp_path):
    members = {}
    for i in range(4):  # two images each of numbers 0 and 1
        members |= {f"{i}.png": png(i % 2), f"{i}.txt": str(i % 2).encode()}
    write_tar(tmp_path / "0.tar", members)
    (result,) = evaluate(PlainModel(2), [RetrievalConfig(data=CaptionShardsConfig(path=str(tmp_path)))])
    assert result.figures["codes_only"] == {"i2t_r1": 0.5, "t2i_r1": 0.5} | dict.fromkeys(
        ("i2t_r5", "i2t_r10", "t2i_r5", "t2i_r10"), 1.0
    )


def test_identity_says_why_codes_are_missing(tmp_path):
    caption_shards(tmp_path, [["a"], ["b"], ["c"]])
    (result,) = evaluate(tiny_clip(IDENTITY), [RetrievalConfig(data=CaptionShardsConfig(path=str(tmp_path)))])
    assert result.figures["codes_only"] is None
    assert result.figures["continuous"] == result.figures["quantized"]
    assert result.usage == {"image": None, "text": None}
    assert result.notes == ["no codes-only figures: the image and the text quantizer has no codebook (Identity)"]
