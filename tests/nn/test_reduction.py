"""Reductions of tokens: padding changes nothing, shapes, and tokenizers with them."""

from __future__ import annotations

import json

import pytest
import torch

from vqclip import load_tokenizer
from vqclip.errors import ConfigError
from vqclip.io.json_files import read_json
from vqclip.nn.reduction import MeanReductionConfig, QueryReductionConfig
from vqclip.tokenizer import ImageTokenizerConfig, TextTokenizerConfig
from vqclip.tokenizer.stored import fingerprint

CONFIGS = [MeanReductionConfig(), QueryReductionConfig(count=3, heads=2)]
IMAGE = {"tower": {"kind": "convolutional", "image_size": 32, "channels": [8, 16]}, "width": 16, "heads": 2}
TEXT = {"tower": {"kind": "transformer", "context_length": 12, "width": 16, "heads": 2, "layers": 1}, "width": 16}
FSQ = {"kind": "fsq", "levels": [5, 5]}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_padding_changes_nothing(config):
    module = config.build(8).double()
    x, mask = torch.randn(2, 5, 8, dtype=torch.float64), torch.arange(5) < torch.tensor([[3], [5]])
    out = module(x, mask)
    assert out.shape == (2, module.num_tokens, 8)
    torch.testing.assert_close(out[:1], module(x[:1, :3], None))
    torch.testing.assert_close(out[1:], module(x[1:], None))
    poisoned = x.masked_fill(~mask.unsqueeze(-1), torch.nan)  # features of padding are undefined
    assert module(poisoned, mask).equal(out)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_no_tokens_and_no_samples(config):
    module = config.build(8)
    assert module(torch.randn(2, 5, 8), torch.zeros(2, 5, dtype=torch.bool)).isfinite().all()
    assert module(torch.randn(0, 5, 8), None).shape == (0, module.num_tokens, 8)


def test_heads_must_divide_the_width():
    with pytest.raises(ConfigError, match=r"reduce\.heads: got 3; expected a divisor of the tower's width 8"):
        QueryReductionConfig(heads=3).build(8)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_tokenizers_with_fewer_tokens(config, tmp_path):
    reduce = config.model_dump()
    image = ImageTokenizerConfig.model_validate(IMAGE | {"quantizer": FSQ, "reduce": reduce}).build(8).eval()
    text = TextTokenizerConfig.model_validate(TEXT | {"quantizer": FSQ, "reduce": reduce}).build(8).eval()
    tokens = text.preprocess(["a cat", "a dog on the grass"])
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    count = 1 if config.kind == "mean" else 3
    for tokenizer, inputs in ((image, images), (text, tokens)):
        with torch.no_grad():
            out = tokenizer(inputs)
            assert tokenizer.num_tokens == tokenizer.fewest_tokens == count
            assert out.ids.shape == (2, count, 1)
            assert (out.ids >= 0).all()
            assert tokenizer.embed(tokenizer.encode(inputs)).equal(out.embedding)
        folder = tmp_path / tokenizer.modality
        tokenizer.save_pretrained(folder)
        loaded = load_tokenizer(folder, tokenizer.modality)
        assert fingerprint(loaded) == fingerprint(tokenizer)
        assert loaded.encode(inputs).equal(out.ids)
        assert load_tokenizer(folder, tokenizer.modality, encode=False).embed(out.ids).equal(out.embedding)
    assert text.needed_tokens(tokens) == 8
    assert text(tokens[:, :8]).ids.equal(text(tokens).ids)


def test_without_a_reduction_folders_are_as_before(tmp_path):
    """The setting is absent, so that fingerprints and indexes from before it stay valid."""
    ImageTokenizerConfig.model_validate(IMAGE | {"quantizer": FSQ}).build(8).save_pretrained(tmp_path / "folder")
    stored, _ = read_json(tmp_path / "folder" / "config.json")
    assert "reduce" not in stored["image"]
    assert "reduce" not in json.dumps(stored)
