from __future__ import annotations

import pytest
import torch

from vqclip.config import load_config
from vqclip.errors import ConfigError
from vqclip.towers.image import ConvolutionalTowerConfig

CONFIG = ConvolutionalTowerConfig(image_size=32, channels=[8, 16, 24])


@pytest.fixture
def tower():
    torch.manual_seed(0)
    return CONFIG.build()


def test_each_stage_halves_the_picture(tower):
    assert (tower.num_tokens, tower.width) == (16, 24)
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    assert tower(images).shape == (2, 16, 24)
    assert tower(images[:0]).shape == (0, 16, 24)


def test_no_sample_sees_another(tower):
    images = torch.rand(3, 3, 32, 32)
    torch.testing.assert_close(tower(images)[:1], tower(images[:1]))


def test_the_scale_of_a_convolutions_weights_means_nothing(tower):
    images = torch.rand(2, 3, 32, 32)
    before = tower(images)
    for name, weight in tower.named_parameters():
        if weight.ndim == 4:
            weight.data.mul_(3).add_(1)
        assert weight.requires_grad, name
    torch.testing.assert_close(tower(images), before, atol=1e-4, rtol=1e-4)


def test_groups_that_do_not_divide_the_channels_are_refused():
    with pytest.raises(ValueError, match=r"got channels \[8, 18\] and channels_per_group 4; expected channels that"):
        ConvolutionalTowerConfig(image_size=32, channels=[8, 18])


@pytest.mark.parametrize(("size", "multiple"), [(60, 64), (36, 32), (8, 16)])
def test_a_picture_that_the_stages_do_not_halve_is_refused(size, multiple):
    """It would have other tokens than the (image_size / 2^stages)² that are promised."""
    message = f"got image_size {size} and 4 stages in channels; expected .* multiple of 2\\^4, such as {multiple}"
    with pytest.raises(ValueError, match=message):
        ConvolutionalTowerConfig(image_size=size, channels=[8] * 4)


def test_a_group_of_one_number_is_refused():
    with pytest.raises(ValueError, match="got channels_per_group 1 with a single token.*expected channels_per_group 2"):
        ConvolutionalTowerConfig(image_size=16, channels=[8] * 4, channels_per_group=1)
    for size, per_group in ((16, 2), (32, 1)):
        config = ConvolutionalTowerConfig(image_size=size, channels=[8] * 4, channels_per_group=per_group)
        assert config.build().num_tokens == (size // 16) ** 2


def test_a_stage_has_a_channel_at_least():
    with pytest.raises(ConfigError, match=r"channels\[1\]: got 0 \(int\); expected an integer >= 1"):
        load_config(ConvolutionalTowerConfig, overrides=["image_size=32", "channels=[8, 0]"])
