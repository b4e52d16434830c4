"""vqclip models in code written for open_clip."""

import pickle

import pytest
import torch
from PIL import Image

from tests.models import FSQ, IDENTITY, tiny_model
from vqclip.errors import CheckpointError, ConfigError
from vqclip.integrations.open_clip import Preprocess, load
from vqclip.model import CLIP

CAPTIONS = ["a cat", "two red dogs on a very long road", ""]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(4)
    path = tmp_path_factory.mktemp("wrapped") / "run" / "tokenizer"
    tiny_model().build().save_pretrained(path)
    return path


@pytest.mark.parametrize("mode", ["continuous", "quantized", "codes_only"])
def test_the_methods_of_an_open_clip_model(folder, mode):
    clip = CLIP.from_pretrained(folder)
    model, preprocess, tokenizer = load(folder.parent, mode)
    images = [Image.effect_noise((30, 20 + 5 * number), 80).convert("RGB") for number in range(3)]
    pixels = torch.stack([pickle.loads(pickle.dumps(preprocess))(image) for image in images])
    tokens = pickle.loads(pickle.dumps(tokenizer))(CAPTIONS)
    assert pixels.dtype == torch.float32
    assert tokens.dtype == torch.int64
    with torch.no_grad():
        found = model.encode_image(pixels, normalize=True), model.encode_text(tokens)
        if mode == "codes_only":
            expected = clip.image.embed(clip.image.encode(images)), clip.text.embed(clip.text.encode(CAPTIONS))
        elif mode == "quantized":
            expected = clip.image(clip.image.batch(images)).embedding, clip.text(tokens).embedding
        else:
            expected = clip.image.continuous(clip.image.batch(images)), clip.text.continuous(tokens)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        assert all(torch.equal(*pair) for pair in zip(model(pixels, tokens)[:2], expected, strict=True))
        assert torch.equal(model.visual(pixels), expected[0])
        logits = model.get_logits(pixels, tokens)[0]
        torch.testing.assert_close(logits, clip.logit_scale.exp() * expected[0] @ expected[1].T)
    assert tokenizer("a cat").shape == (1, 12)
    assert (tokenizer.context_length, model.context_length) == (12, 12)
    assert not model.training
    assert (model.visual.image_size, model.visual.output_dim) == (16, 16)
    assert model.logit_scale is model.clip.logit_scale
    assert all(name.startswith("clip.") for name in model.state_dict())


def test_bytes_and_floats_give_equal_embeddings_in_any_autocast(folder):
    model, preprocess, tokenizer = load(folder, "continuous")
    half = load(folder, "continuous", precision="bf16").model
    small = Preprocess(preprocess.transform, torch.uint8)
    images = [Image.effect_noise((40, 30), 90).convert("RGB") for _ in range(4)]
    floats, whole = (torch.stack([each(image) for image in images]) for each in (preprocess, small))
    tokens = tokenizer(CAPTIONS)
    with torch.no_grad():
        expected, texts = model.encode_image(floats), model.encode_text(tokens)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(model.encode_image(whole), expected)
            assert torch.equal(model.encode_text(tokens), texts)
            assert model.get_logits(whole, tokens)[0].dtype == torch.float32
            inside = half.encode_image(whole)
        assert torch.equal(half.encode_image(whole), inside)
    assert whole.dtype == torch.uint8
    assert 0 < (inside - expected).abs().max() < 0.1


def test_wrong_settings(folder, tmp_path):
    with pytest.raises(ConfigError, match="context_length: got 77, expected 12"):
        load(folder).tokenizer(["a"], 77)
    with pytest.raises(ConfigError, match="mode: got 'ids', expected one of continuous, quantized, codes_only"):
        load(folder, "ids")
    with pytest.raises(ConfigError, match="precision: got 'half', expected one of fp32, bf16, fp16"):
        load(folder, precision="half")
    tiny_model(FSQ, IDENTITY).build().save_pretrained(tmp_path / "half")
    with pytest.raises(ConfigError, match=r"half: mode: got 'codes_only', but the text quantizer has no codes"):
        load(tmp_path / "half")
    assert load(tmp_path / "half", "quantized").model.mode == "quantized"
    with pytest.raises(CheckpointError, match="no model here; expected config.json, tokenizer/"):
        load(tmp_path)
