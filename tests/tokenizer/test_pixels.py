"""Pixel decoders as a part of tokenizers and of their folders."""

import copy

import pytest
import torch

import vqclip
from tests.models import FSQ, RESIDUAL, RESIDUAL_FSQ, VQ, built
from tests.pixels.test_decoder import CONFIGS
from vqclip.data.decode import pil_to_uint8
from vqclip.data.transforms import EvalTransformConfig
from vqclip.errors import ConfigError, NonFiniteError, ShapeError
from vqclip.model import CLIP
from vqclip.pixels import attach
from vqclip.tokenizer.decoder import TokenizerDecoder
from vqclip.tokenizer.saving import write_weights


@pytest.fixture
def folders(request, tmp_path):
    """One model, saved without and with a pixel decoder."""
    model = built(RESIDUAL_FSQ, FSQ).eval()
    model.save_pretrained(tmp_path / "without")
    decoder = CONFIGS[getattr(request, "param", "transformer")]
    attach(model.image, decoder.build(model.image.quantizer.dim, 4, 16).eval())
    model.save_pretrained(tmp_path / "with")
    return model, tmp_path / "without", tmp_path / "with"


def images():
    return torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("folders", CONFIGS, indirect=True)
def test_every_way_to_load_a_folder_gives_the_decoder(folders):
    model, _, folder = folders
    ids = model.image.encode(images())
    expected = model.image.decode_pixels(ids)
    assert expected.shape == (3, 3, 16, 16)
    assert expected.dtype == torch.float32
    readers = [vqclip.load_tokenizer(folder, "image", encode=encode) for encode in (True, False)]
    for loaded in (*readers, CLIP.from_pretrained(folder).image):
        assert not loaded.pixels.training
        assert loaded.decode_pixels(ids.int()).equal(expected)
    assert vqclip.load_tokenizer(folder, "text").pixels is None


def test_a_tokenizer_saves_the_decoder_that_it_was_loaded_with(folders, tmp_path):
    _, _, folder = folders
    vqclip.load_tokenizer(folder, "image").save_pretrained(tmp_path / "image")
    again = vqclip.load_tokenizer(tmp_path / "image", "image")
    assert (tmp_path / "image" / "pixels.safetensors").read_bytes() == (folder / "pixels.safetensors").read_bytes()
    again.save_pretrained(tmp_path / "image")  # replaces it
    again.pixels = None
    with pytest.raises(ConfigError, match="contains a pixel decoder, which would be lost; name another folder"):
        again.save_pretrained(tmp_path / "image")


def test_stages_and_codebooks_of_the_ids_can_be_left_out(folders):
    tokenizer = folders[0].image
    ids = tokenizer.encode(images())
    one = tokenizer.decode_pixels(ids, stages=1)
    assert one.equal(tokenizer.decode_pixels(tokenizer.truncate(ids, stages=1)))
    assert not one.equal(tokenizer.decode_pixels(ids))
    assert tokenizer.decode_pixels(ids, stages=3, codebooks=1).equal(tokenizer.decode_pixels(ids))
    with pytest.raises(ConfigError, match="stages: got 4, expected 1 to 3"):
        tokenizer.decode_pixels(ids, stages=4)


def test_pixels_come_from_the_first_stages_and_the_embedding_from_all(tmp_path):
    model = built(RESIDUAL | {"layer": VQ | {"learning": "diveq"}}, FSQ)
    tokenizer, decoder = model.image, CONFIGS["transformer"].model_copy(update={"stages": 2})
    attach(tokenizer, decoder.build(6, 4, 16))
    out, codebooks = tokenizer(images()), [stage.codebook for stage in tokenizer.quantizer.stages]
    made = tokenizer.pixels_of(out.vectors)
    *first, last = torch.autograd.grad(made.square().sum(), codebooks, retain_graph=True, allow_unused=True)
    assert all(each.abs().sum() > 0 for each in first)
    assert last is None
    every = torch.autograd.grad(out.embedding.cumsum(0).square().sum(), codebooks)
    assert all(each.abs().sum() > 0 for each in every)

    model.eval().save_pretrained(tmp_path / "model")
    tokenizer = vqclip.load_tokenizer(tmp_path / "model", "image")
    ids = tokenizer.encode(images())
    other = torch.cat([ids[..., :2], (ids[..., 2:] + 1) % 16], dim=-1)
    assert tokenizer.decode_pixels(other).equal(tokenizer.decode_pixels(ids, stages=2))
    assert tokenizer.decode_pixels(ids).equal(made.clamp(0, 1))
    assert not tokenizer.embed(other).equal(tokenizer.embed(ids))
    assert not tokenizer.decode_pixels(ids, stages=1).equal(tokenizer.decode_pixels(ids))
    with pytest.raises(ConfigError, match="stages: got 3, expected 1 to 2, the stages that pixels come from"):
        tokenizer.decode_pixels(ids, stages=3)


def test_nothing_is_written_for_a_decoder_with_nan(folders, tmp_path):
    model = copy.deepcopy(folders[0])
    with torch.no_grad():
        model.image.pixels.layers.position[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"NaN or infinity: image.pixels.layers.position"):
        model.save_pretrained(tmp_path / "nan")
    assert not (tmp_path / "nan").exists()
    with pytest.raises(NonFiniteError):
        write_weights(tmp_path / "nan", model.state_dict())
    assert not (tmp_path / "nan").exists()


def test_images_can_be_shown():
    to_pil, preprocess = TokenizerDecoder.to_pil, EvalTransformConfig().build(16)
    shown = to_pil(torch.rand(3, 3, 16, 16))
    assert [(each.mode, each.size) for each in shown] == [("RGB", (16, 16))] * 3
    for pixels in (images(), images() / 255):
        assert preprocess(pil_to_uint8(to_pil(pixels)[1])).equal(images()[1])
    for wrong, message in (
        (torch.zeros(3, 4, 4), r"got shape \(3, 4, 4\), expected \(B, 3, H, W\)"),
        (torch.full((1, 3, 4, 4), torch.nan), "got NaN or numbers outside of 0 to 1"),
        (torch.full((1, 3, 4, 4), 1.1), "got NaN or numbers outside of 0 to 1"),
        (torch.zeros(1, 3, 4, 4, dtype=torch.int64), "got dtype torch.int64, expected floating point"),
    ):
        with pytest.raises(ShapeError, match=message):
            to_pil(wrong)
