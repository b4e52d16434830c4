from __future__ import annotations

import pytest
import torch
from torch import nn

from vqclip.errors import ConfigError
from vqclip.towers.image import TimmTowerConfig

ARGS = {"channels": [16, 16, 32, 48], "stem_width": 16}


def test_group_norm_takes_the_place_of_batch_norm():
    tower = TimmTowerConfig(name="resnet10t", image_size=32, group_norm=8, args=ARGS).build()
    norms = [module for module in tower.modules() if isinstance(module, nn.GroupNorm)]
    assert {norm.num_channels // norm.num_groups for norm in norms} <= {8, 12}  # 12: a stem layer of 12 channels
    images = torch.rand(3, 3, 32, 32)
    torch.testing.assert_close(tower(images)[:1], tower(images[:1]))  # no sample sees another


def test_groups_that_do_not_divide_a_layer_are_refused():
    with pytest.raises(ConfigError, match="got 5 channels a group, which do not divide a layer of"):
        TimmTowerConfig(name="resnet10t", image_size=32, group_norm=5, args=ARGS).build()
