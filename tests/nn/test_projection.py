"""Into the bottleneck and back, in every kind."""

from __future__ import annotations

import pytest
import torch

from tests.models import FSQ, tiny_model
from vqclip import load_tokenizer
from vqclip.errors import ConfigError
from vqclip.model import CLIP, ModelConfig
from vqclip.nn.projection import AttentionProjectionConfig, MLPProjectionConfig, normalize_channels

KINDS = {"linear": {"kind": "linear"}, "mlp": {"kind": "mlp"}, "attention": {"kind": "attention", "heads": 2}}
CAPTIONS = ["a red star", "two small blue circles on a grey background", "x"]


def built(into: str, back: str, normalize: str = "none") -> CLIP:
    torch.manual_seed(0)
    tree = tiny_model(FSQ, FSQ).model_dump()
    for part in (tree["image"], tree["text"]):
        part |= {"project_in": KINDS[into], "project_out": KINDS[back], "normalize": normalize}
    return ModelConfig.model_validate(tree).build()


@pytest.mark.parametrize("normalize", ["none", "layer", "l2"])
@pytest.mark.parametrize(("into", "back"), [("mlp", "linear"), ("linear", "attention"), ("attention", "mlp")])
def test_stored_ids_give_the_training_embedding(into: str, back: str, normalize: str, tmp_path) -> None:
    model = built(into, back, normalize)
    images = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    model.save_pretrained(tmp_path)
    for tokenizer, inputs in ((model.image, images), (model.text, model.text.preprocess(CAPTIONS))):
        out = tokenizer(inputs)
        loaded = load_tokenizer(tmp_path, tokenizer.modality)
        ids = loaded._encode(inputs, "fp32")
        assert torch.equal(ids, out.ids)
        assert torch.equal(loaded.embed(ids), out.embedding)
        (out.embedding * torch.randn(16)).sum().backward()
        for part in (tokenizer.project_in, tokenizer.project_out):
            assert all(parameter.grad.any() for parameter in part.parameters() if parameter.ndim > 1)


def test_attention_mixes_tokens_but_not_padding() -> None:
    project = built("attention", "attention").text.project_in
    x, other = torch.randn(2, 1, 5, 16)
    mask = torch.tensor([[True, True, True, False, False]])
    of_padding, of_a_token = x.clone(), x.clone()
    of_padding[:, 3:] = other[:, 3:]
    of_a_token[:, 2] = other[:, 2]
    assert torch.equal(project(x, mask)[:, :3], project(of_padding, mask)[:, :3])
    assert not torch.allclose(project(x, mask)[:, :2], project(of_a_token, mask)[:, :2])


def test_normalization() -> None:
    x = 3 * torch.randn(4, 7, 16) + 1
    torch.testing.assert_close(normalize_channels(x, "l2").norm(dim=-1), torch.full((4, 7), 4.0))
    layer = normalize_channels(x, "layer")
    torch.testing.assert_close(layer.mean(-1), torch.zeros(4, 7), atol=1e-5, rtol=0)
    torch.testing.assert_close(layer.std(-1, unbiased=False), torch.ones(4, 7), atol=1e-3, rtol=0)
    assert normalize_channels(x, "none") is x
    assert normalize_channels(x.bfloat16(), "l2").dtype == torch.float32


def test_widths() -> None:
    assert [layer.weight.shape for layer in MLPProjectionConfig(expansion=0.5).layers(12, 4)[::2]] == [(6, 12), (4, 6)]
    with pytest.raises(ConfigError, match=r"widths 12 and 4: got heads 5; expected a divisor of 12"):
        AttentionProjectionConfig(heads=5).layers(12, 4)
