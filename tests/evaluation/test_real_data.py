"""Real folders, named by the environment variable VQCLIP_DATA."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.evaluation.made import tiny_clip
from vqclip.data import CaptionShardsConfig, ClassShardsConfig
from vqclip.evaluation import RetrievalConfig, ZeroShotConfig, evaluate

pytestmark = pytest.mark.skipif(not os.environ.get("VQCLIP_DATA"), reason="VQCLIP_DATA names no folder of real data")


def test_an_untrained_model_is_near_chance_on_eurosat():
    data = ClassShardsConfig(path=Path(os.environ["VQCLIP_DATA"]) / "cls_eurosat")
    (result,) = evaluate(tiny_clip(), [ZeroShotConfig(data=data)])
    assert (result.samples, result.classes) == (1000, 10)
    assert result.chance == {"top1": 0.1, "top5": 0.5, "mean_per_class": 0.1}
    for figures in result.figures.values():
        assert 0.02 <= figures["top1"] <= 0.25
        assert 0.3 <= figures["top5"] <= 0.7


def test_an_untrained_model_is_near_chance_on_emoji():
    data = CaptionShardsConfig(path=str(Path(os.environ["VQCLIP_DATA"]) / "captions_noto_emoji" / "val"))
    (result,) = evaluate(tiny_clip(), [RetrievalConfig(data=data)])
    assert (result.samples, result.captions) == (400, 400)
    for figures in result.figures.values():
        assert figures["i2t_r10"] < 0.1
        assert figures["t2i_r10"] < 0.1
