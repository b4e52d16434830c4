"""Real shards, read completely; needs VQCLIP_DATA."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
import torch
from PIL import Image

from vqclip.data import CaptionShardsConfig, ClassShardsConfig, DataConfig, EvalSet, EvalTransformConfig, pil_to_uint8

CAPTIONS = {
    "captions_noto_emoji/train": 3120,
    "captions_noto_emoji/val": 400,
    "captions_pomological/train": 2594,
    "captions_pomological/val": 300,
}


@pytest.mark.parametrize("name", CAPTIONS)
def test_captions_are_read_completely(real_data: Path, name: str) -> None:
    source = CaptionShardsConfig(path=str(real_data / name)).build()
    transform = EvalTransformConfig().build(64)
    count, first = 0, None
    for batch in EvalSet(source, transform, workers=1):
        assert not batch.bad
        assert all(captions[0] for captions in batch.captions)
        first = batch if first is None else first
        count += len(batch)
    assert count == CAPTIONS[name]

    # The first samples, read by other code.
    assert first is not None
    with tarfile.open(real_data / name / "00000.tar") as tar:
        members = {member.name: tar.extractfile(member) for member in tar if member.isfile()}
        keys = list(dict.fromkeys(member.partition(".")[0] for member in members))[:20]
        for row, key in enumerate(keys):
            assert first.captions[row][0].encode() == members[f"{key}.txt"].read().strip()
            data = (members.get(f"{key}.png") or members[f"{key}.jpg"]).read()
            theirs = transform(pil_to_uint8(Image.open(io.BytesIO(data))))
            assert (first.images[row].int() - theirs.int()).abs().max() <= 4


@pytest.mark.parametrize(("split", "count"), [("train", 2500), ("test", 1000)])
def test_eurosat_is_read_completely(real_data: Path, split: str, count: int) -> None:
    source = ClassShardsConfig(path=real_data / "cls_eurosat", split=split).build()
    assert len(source.classnames) == 10
    labels = torch.cat([batch.labels for batch in EvalSet(source, EvalTransformConfig().build(64), workers=1)])
    assert labels.bincount().tolist() == [count // 10] * 10


def test_an_epoch_of_three_real_sources(real_data: Path) -> None:
    sources = (
        CaptionShardsConfig(path=str(real_data / "captions_noto_emoji/train/{00000..00003}.tar")),
        CaptionShardsConfig(
            path=str(real_data / "captions_pomological/train"), captions="json", json_keys=("title", "common_name")
        ),
        ClassShardsConfig(path=real_data / "cls_eurosat"),
    )
    config = DataConfig(sources=sources, workers=2, max_bad_fraction=0.0)
    data = config.build(
        32, lambda captions: (torch.zeros(len(captions), 1, dtype=torch.int64), [1] * len(captions)), 256, seed=0
    )
    ids = torch.cat([batch.sample_ids for batch in data.batches(0, -(-data.epoch_size // 256))])
    assert torch.equal(ids[: data.epoch_size].sort().values, torch.arange(3120 + 2594 + 2500))
