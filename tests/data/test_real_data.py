"""Real shards, read completely; needs VQCLIP_DATA."""

import io
import os
import tarfile
from pathlib import Path

import pytest
import torch
from PIL import Image

from vqclip.data import CaptionShardsConfig, ClassShardsConfig, EvalSet, EvalTransformConfig, pil_to_uint8

DATA = Path(os.environ.get("VQCLIP_DATA", ""))
CAPTIONS = {"captions_noto_emoji/val": 400, "captions_pomological/val": 300}

pytestmark = pytest.mark.skipif(not os.environ.get("VQCLIP_DATA"), reason="needs real data: set VQCLIP_DATA")


@pytest.mark.parametrize("name", CAPTIONS)
def test_captions_are_read_completely(name: str) -> None:
    source = CaptionShardsConfig(path=str(DATA / name)).build()
    transform = EvalTransformConfig().build(64)
    batches = list(EvalSet(source, transform, workers=1))
    assert not any(batch.bad for batch in batches)
    assert all(captions[0] for batch in batches for captions in batch.captions)
    assert sum(map(len, batches)) == CAPTIONS[name]
    # The first samples, read by other code.
    with tarfile.open(DATA / name / "00000.tar") as tar:
        members = {member.name: tar.extractfile(member) for member in tar if member.isfile()}
        keys = list(dict.fromkeys(member.partition(".")[0] for member in members))[:20]
        for row, key in enumerate(keys):
            assert batches[0].captions[row][0].encode() == members[f"{key}.txt"].read().strip()
            data = (members.get(f"{key}.png") or members[f"{key}.jpg"]).read()
            theirs = transform(pil_to_uint8(Image.open(io.BytesIO(data))))
            assert (batches[0].images[row].int() - theirs.int()).abs().max() <= 4


def test_eurosat_is_read_completely() -> None:
    source = ClassShardsConfig(path=DATA / "cls_eurosat", split="test").build()
    assert len(source.classnames) == 10
    labels = torch.cat([batch.labels for batch in EvalSet(source, EvalTransformConfig().build(64), workers=1)])
    assert labels.bincount().tolist() == [100] * 10
