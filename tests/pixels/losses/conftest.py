"""Small networks with random weights in files, which stand for pretrained ones."""

from pathlib import Path

import pytest
import torch

from tests.models import tiny_model
from tests.pixels.losses.test_contract import TIMM
from vqclip.io.tensors import save_tensors
from vqclip.tokenizer import ImageTokenizerConfig
from vqclip.towers.image import TimmTowerConfig


@pytest.fixture(scope="package", autouse=True)
def networks(tmp_path_factory):
    """The files that TOKENIZER and TIMM name, in the working folder."""
    folder = tmp_path_factory.mktemp("networks")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        torch.manual_seed(0)
        tower = {"kind": "convolutional", "image_size": 16, "channels": [8, 8], "channels_per_group": 4}
        image = tiny_model().image.model_dump() | {"tower": tower}
        ImageTokenizerConfig.model_validate(image).build(16).save_pretrained("tokenizer")
        vit = TimmTowerConfig.model_validate(TIMM | {"checkpoint": None}).build().backbone.model
        save_tensors(vit.state_dict(), Path("vit.safetensors"))
        yield folder
