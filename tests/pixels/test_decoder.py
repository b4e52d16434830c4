"""Pixel decoders by themselves."""

import pytest
import torch
from pydantic import ValidationError

from tests.models import FSQ, RESIDUAL_FSQ, tiny_model
from vqclip.errors import ConfigError, ShapeError
from vqclip.pixels import ConvolutionalPixelsConfig, DetailConfig, PixelsConfig, TransformerPixelsConfig, attach

CONFIGS = {
    "transformer": TransformerPixelsConfig(width=16, heads=2, depth=1, channels=4),
    "convolutional": ConvolutionalPixelsConfig(channels=4, max_channels=8, channels_per_group=2),
}


@pytest.fixture(params=CONFIGS)
def config(request):
    torch.manual_seed(0)
    return CONFIGS[request.param]


@pytest.mark.parametrize(("tokens", "size"), [(4, 16), (4, 28), (16, 16), (9, 33), (1, 8)])
def test_images_have_their_size_for_any_grid(config, tokens, size):
    decoder = config.build(3, tokens, size)
    images = decoder(torch.randn(2, tokens, 3))
    assert images.shape == (2, 3, size, size)
    assert decoder(torch.randn(0, tokens, 3)).shape == (0, 3, size, size)
    assert (decoder.dim, decoder.num_tokens, decoder.image_size) == (3, tokens, size)
    images.sum().backward()
    assert [name for name, weight in decoder.named_parameters() if weight.grad is None] == []


def test_a_rank_without_samples_has_gradients_of_zero(config):
    """DDP waits for the gradients of every rank."""
    detail = DetailConfig(quantizer=FSQ, stages=2, channels=8, max_channels=16)
    for chosen in (None, detail):
        decoder = PixelsConfig(decoder=config, image_size=16, detail=chosen).build(3, 4)
        images, places = torch.zeros(0, 3, 16, 16, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64)
        decoder.reconstruct(torch.zeros(0, 4, 3), images, places, 0)[0].sum().backward()
        assert [name for name, weight in decoder.named_parameters() if weight.grad is None] == []


def test_an_image_depends_on_its_batch_by_rounding_alone(config):
    decoder = config.build(3, 16, 32).eval()
    vectors = torch.randn(64, 16, 3)
    with torch.no_grad():
        whole = decoder(vectors)
        for size in (1, 7):
            parts = torch.cat([decoder(part) for part in vectors.split(size)])
            torch.testing.assert_close(parts, whole, rtol=0, atol=1e-5)


def test_tokens_at_other_places_give_another_image(config):
    """With equal vectors everywhere only the position is left to tell the tokens apart."""
    decoder = config.build(3, 16, 32)
    patches = decoder(torch.ones(1, 16, 3)).unfold(2, 8, 8).unfold(3, 8, 8).flatten(2, 3)[0, :, [5, 6, 9, 10]]
    assert (patches[:, 1:] - patches[:, :1]).abs().amax(dim=(0, 2, 3)).min() > 1e-3


def test_a_decoder_compiles_to_one_graph():
    decoder, vectors = CONFIGS["transformer"].build(3, 4, 16), torch.randn(2, 4, 3)
    assert torch.compile(decoder, fullgraph=True, backend="eager")(vectors).equal(decoder(vectors))


def test_pixels_are_float32_under_autocast(config):
    decoder = config.build(3, 4, 16)
    vectors = torch.randn(2, 4, 3)
    with torch.autocast("cpu", torch.bfloat16):
        images = decoder(vectors)
    assert images.dtype == torch.float32
    assert 0 < (images - decoder(vectors)).abs().mean() < 0.01
    assert decoder.double()(vectors).dtype == torch.float64


def test_wrong_settings_are_refused():
    with pytest.raises(ValidationError, match="got width 30 and heads 4; expected heads that divide"):
        TransformerPixelsConfig(width=30, heads=4)
    with pytest.raises(ValidationError, match="expected channels that are multiples of channels_per_group"):
        ConvolutionalPixelsConfig(channels=12)


def test_wrong_sizes_are_named(config):
    for shape in ((2, 5, 3), (2, 4, 4), (4, 3), (2, 3, 4, 1)):
        with pytest.raises(ShapeError, match=r"vectors: got shape .*, expected \(B, 4, 3\), as tokenizer.quantizer"):
            config.build(3, 4, 16)(torch.zeros(shape))
    for tokens, size in ((5, 16), (9, 16), (4, 17)):
        with pytest.raises(ConfigError, match=f"pixels: got {tokens} tokens for images of {size} x {size} pixels; exp"):
            config.build(3, tokens, size)
    with pytest.raises(ConfigError, match=r"image_size: got 4 \(int\); expected an integer >= 8 and <= 4096"):
        config.build(3, 4, 4)


def test_a_decoder_of_other_sizes_is_not_attached(config):
    model = tiny_model(FSQ).build()
    attach(model.image, config.build(3, 4, 16))
    deeper = config.model_copy(update={"stages": 4}).build(3, 4, 16)
    residual = tiny_model(RESIDUAL_FSQ).build().image
    for tokenizer, decoder, message in (
        (model.image, config.build(6, 4, 16), "decoder of 4 tokens with 6 channels for a tokenizer of 4 tokens with 3"),
        (model.text, config.build(3, 4, 16), "modality 'text', expected a tokenizer of images"),
        (model, config.build(3, 4, 16), "got a CLIP, expected a tokenizer of images, such as model.image"),
        (model.image, torch.nn.Linear(3, 3), "got a Linear, expected a PixelDecoder"),
        (model.image, deeper, r"pixels\.decoder\.stages: got 4 for a FSQ of one stage; expected null"),
        (residual, deeper, r"pixels\.decoder\.stages: got 4, expected 1 to 3"),
    ):
        with pytest.raises(ConfigError, match=message):
            attach(tokenizer, decoder)
