"""A residual tokenizer at every number of stages."""

from __future__ import annotations

import torch

from tests.evaluation.made import class_shards
from tests.models import VQ, tiny_model
from vqclip.data import ClassShardsConfig
from vqclip.evaluation import ZeroShotConfig, evaluate, evaluate_depths, format_depths
from vqclip.quantizers import at_depth, depth_of

RESIDUAL = {"kind": "residual", "layer": VQ, "depth": 3}


def model(image=RESIDUAL, text=VQ):
    torch.manual_seed(0)
    return tiny_model({"kind": "product", "layer": image, "codebooks": 2}, text).build()


def test_every_depth_costs_and_finds_its_own(tmp_path):
    class_shards(tmp_path / "classes")
    whole = model()
    task = ZeroShotConfig(name="colours", data=ClassShardsConfig(path=tmp_path / "classes"), batch_size=4)
    found = evaluate_depths(whole, [task])
    assert list(found) == [1, 2, 3]
    # 4 patches, 2 codebooks a stage, 4 bits each; the text tokenizer has no stages.
    assert [result.usage["image"].bits_per_sample for (result,) in found.values()] == [32, 64, 96]
    assert len({result.usage["text"].bits_per_sample for (result,) in found.values()}) == 1
    assert all(result.figures["codes_only"] == result.figures["quantized"] for (result,) in found.values())
    assert found[3] == evaluate(whole, [task])
    lines = format_depths(found).splitlines()
    assert lines[0].split() == ["codes", "only,", "%", "stages", "bits/image", "bits/text", "rate", "chance"]
    assert [line.split()[-5:-3] for line in lines[2:5]] == [["1", "32"], ["2", "64"], ["3", "96"]]


def test_limited_stages_have_no_ids_and_add_nothing():
    tokenizer = model().image.eval()
    images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    whole = tokenizer.encode(images)
    with at_depth(tokenizer, 2):
        ids, out = tokenizer.encode(images), tokenizer(images)
    assert torch.equal(ids, out.ids)
    assert torch.equal(ids[..., [0, 1, 3, 4]], whole[..., [0, 1, 3, 4]])
    assert (ids[..., [2, 5]] == -1).all()
    assert torch.equal(tokenizer.embed(ids), out.embedding)
    assert torch.equal(tokenizer.encode(images), whole)


def test_depth_of_a_model():
    assert depth_of(model()) == 3
    assert depth_of(model(VQ, VQ)) == 1
