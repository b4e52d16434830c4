"""Text towers over open_clip's byte pairs."""

from __future__ import annotations

import pytest
import torch

from vqclip.errors import ConfigError, ShapeError
from vqclip.towers.open_clip import OpenCLIPTextTowerConfig
from vqclip.towers.text import TransformerTowerConfig
from vqclip.towers.vocabulary import BPE

SMALL = {"context_length": 12, "width": 16, "heads": 2, "layers": 1}


@pytest.fixture(params=[True, False], ids=["causal", "bidirectional"])
def tower(request):
    torch.manual_seed(0)
    return TransformerTowerConfig(**SMALL, causal=request.param).build().eval()


def test_tokens_are_real_up_to_the_first_end_mark(tower):
    """The number of padding is also that of "!" inside a word."""
    tokens = BPE(12)(["#!/bin a", "a" + " b" * 20, "", "a b c d"])
    tokens[3, 2] = BPE.end_of_text
    assert tokens[0].tolist()[1:3] == [2, 0]
    mask = tower.mask(tokens)
    assert mask[0].tolist() == [True] * 7 + [False] * 5
    assert mask.sum(1).tolist() == [7, 12, 2, 3]
    assert tower.mask(torch.zeros(2, 12, dtype=torch.int64)).sum() == 0
    assert tower.mask(tokens[:0]).shape == (0, 12)


def test_padding_is_not_seen_and_a_token_with_its_number_is(tower):
    tokens = BPE(12)(["#!/bin a", "a red star", "a"])
    mask = tower.mask(tokens)
    assert mask.sum(1).tolist() == [7, 5, 3]
    with torch.no_grad():
        before = tower(tokens)
        tower.transformer.token_embedding.weight[0] = 7.0  # what padding looks like
        after = tower(tokens)
    assert not torch.allclose(after[0, 3:7], before[0, 3:7])
    torch.testing.assert_close(after[1:][mask[1:]], before[1:][mask[1:]])


def test_a_row_without_an_end_mark_is_no_nan(tower):
    tokens = BPE(12)(["a red star", "x"])
    tokens[1] = 0
    features = tower(tokens)
    assert features.isfinite().all()
    features[tower.mask(tokens)].sum().backward()
    assert all(p.grad.isfinite().all() for p in tower.parameters())
    hidden = tower.attention_mask(tower.mask(tokens), torch.float32)
    assert (hidden.amax(dim=-1) == 0).all()  # not every device's attention gives zeros for a row of -inf


def test_no_rows_give_no_rows_and_every_weight_its_gradient(tower):
    features = tower(torch.zeros(0, 12, dtype=torch.int64))
    assert features.shape == (0, 12, 16)
    features.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in tower.parameters())


def test_features_are_those_of_open_clips_own_forward_compiled_too(tower):
    tokens = BPE(12)(["a red star", "two small blue circles", "", "#!/bin a"])
    torch.testing.assert_close(tower(tokens[:3]), tower.transformer(tokens[:3]))
    compiled = torch.compile(lambda x: (tower(x), tower.mask(x)), fullgraph=True, backend="eager")
    features, mask = compiled(tokens)
    torch.testing.assert_close(features, tower(tokens))
    assert torch.equal(mask, tower.mask(tokens))


def test_bidirectional_tokens_see_what_follows_and_causal_ones_do_not(tower):
    one, other = tower(BPE(12)(["a red star", "a red heart"]))
    assert torch.allclose(one[:3], other[:3]) == (tower.transformer.attn_mask is not None)


def test_wrong_tokens_and_settings_are_refused():
    tower = TransformerTowerConfig(**SMALL).build()
    with pytest.raises(ShapeError, match=r"got shape \(2, 13\).*expected \(B, 1 to 12\) int64"):
        tower(torch.ones(2, 13, dtype=torch.int64))
    with pytest.raises(ShapeError, match=r"torch.int32"):
        tower(torch.ones(2, 12, dtype=torch.int32))
    with pytest.raises(ValueError, match="heads that divide width"):
        TransformerTowerConfig(context_length=12, width=10, heads=4, layers=1)
    with pytest.raises(ConfigError, match="another vocabulary"), torch.device("meta"):
        OpenCLIPTextTowerConfig(model="ViT-B-16-SigLIP").build()


@pytest.mark.parametrize("std", [0.02, 1.0])
def test_token_embeddings_start_with_the_deviation_asked_for(std):
    tower = TransformerTowerConfig(context_length=8, width=8, heads=2, layers=1, token_std=std).build()
    assert tower.transformer.token_embedding.weight.std().item() == pytest.approx(std, rel=0.01)  # of 395,264 numbers
