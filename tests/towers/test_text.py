from __future__ import annotations

import pytest
import torch

from vqclip.errors import ConfigError, ShapeError
from vqclip.towers.open_clip import OpenCLIPTextTowerConfig
from vqclip.towers.text import TransformerTowerConfig
from vqclip.towers.vocabulary import BPE, CaptionLengths, _bpe

SMALL = {"context_length": 12, "width": 16, "heads": 2, "layers": 1}


def test_tokens_are_real_up_to_the_first_end_mark():
    """The number of padding is also that of "!" inside a word."""
    tower = TransformerTowerConfig(**SMALL).build()
    tokens = BPE(12)(["#!/bin a", "a" + " b" * 20, "", "a b c d"])
    tokens[3, 2] = BPE.end_of_text
    assert tokens[0].tolist()[1:3] == [2, 0]
    mask = tower.mask(tokens)
    assert mask[0].tolist() == [True] * 7 + [False] * 5
    assert mask.sum(1).tolist() == [7, 12, 2, 3]
    assert tower.mask(torch.zeros(2, 12, dtype=torch.int64)).sum() == 0
    assert tower.mask(tokens[:0]).shape == (0, 12)


@pytest.mark.parametrize("causal", [True, False])
def test_a_token_with_the_number_of_padding_is_seen(causal):
    torch.manual_seed(0)
    tower = TransformerTowerConfig(**SMALL, causal=causal).build().eval()
    tokens = BPE(12)(["#!/bin a"])
    with torch.no_grad():
        before = tower(tokens)[0, 3:7]
        tower.transformer.token_embedding.weight[0] = 7.0
        assert not torch.allclose(tower(tokens)[0, 3:7], before)


@pytest.mark.parametrize("causal", [True, False])
def test_a_row_without_an_end_mark_is_no_nan(causal):
    tower = TransformerTowerConfig(**SMALL, causal=causal).build()
    tokens = BPE(12)(["a red star", "x"])
    tokens[1] = 0
    features = tower(tokens)
    assert features.isfinite().all()
    features[tower.mask(tokens)].sum().backward()
    assert all(p.grad.isfinite().all() for p in tower.parameters())
    hidden = tower.attention_mask(tower.mask(tokens), torch.float32)
    assert (hidden.amax(dim=-1) == 0).all()  # not every device's attention gives zeros for a row of -inf


@pytest.mark.parametrize("causal", [True, False])
def test_no_rows_give_no_rows_and_every_weight_its_gradient(causal):
    tower = TransformerTowerConfig(**SMALL, causal=causal).build()
    features = tower(torch.zeros(0, 12, dtype=torch.int64))
    assert features.shape == (0, 12, 16)
    features.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in tower.parameters())


@pytest.mark.parametrize("causal", [True, False])
def test_features_are_those_of_open_clips_own_forward(causal):
    torch.manual_seed(0)
    tower = TransformerTowerConfig(**SMALL, causal=causal).build().eval()
    tokens = BPE(12)(["a red star", "two small blue circles", ""])
    torch.testing.assert_close(tower(tokens), tower.transformer(tokens))


@pytest.mark.parametrize("causal", [True, False])
def test_the_tower_compiles_without_a_break(causal):
    tower = TransformerTowerConfig(**SMALL, causal=causal).build().eval()
    tokens = BPE(12)(["a red star", "#!/bin a"])
    compiled = torch.compile(lambda x: (tower(x), tower.mask(x)), fullgraph=True, backend="eager")
    features, mask = compiled(tokens)
    torch.testing.assert_close(features, tower(tokens))
    assert torch.equal(mask, tower.mask(tokens))


@pytest.mark.parametrize("causal", [True, False])
def test_features_of_real_tokens_do_not_depend_on_the_padding(causal):
    torch.manual_seed(0)
    tower = TransformerTowerConfig(**SMALL, causal=causal).build().eval()
    tokens = BPE(12)(["a red star", "a"])
    mask = tower.mask(tokens)
    assert mask.sum(1).tolist() == [5, 3]
    other = tokens.clone()
    with torch.no_grad():
        tower.transformer.token_embedding.weight[0] = 7.0  # what padding looks like
        changed = tower(other)
        tower.transformer.token_embedding.weight[0] = 0.0
        torch.testing.assert_close(tower(tokens)[mask], changed[mask])


def test_bidirectional_tokens_see_what_follows_and_causal_ones_do_not():
    tokens = BPE(12)(["a red star", "a red heart"])
    for causal in (True, False):
        torch.manual_seed(0)
        tower = TransformerTowerConfig(**SMALL, causal=causal).build().eval()
        one, other = tower(tokens)
        assert torch.allclose(one[:3], other[:3]) == causal


def test_the_vocabulary_is_open_clips():
    import open_clip

    captions = ["a small red star to the left of a large blue circle", ""]
    assert torch.equal(BPE(32)(captions), open_clip.get_tokenizer("ViT-B-32")(captions, context_length=32))
    assert BPE(8)([captions[0]]).shape == (1, 8)
    with pytest.raises(ShapeError, match="expected a list of str"):
        BPE(8)("a red star")


@pytest.mark.parametrize(
    "text",
    [
        "<end_of_text>",
        "<START_OF_TEXT>",
        "&lt;end_of_text&gt;",
        "!<end_of_text>",
        "\uff1cend_of_text\uff1e",
        "a<end_of_text>b",
    ],
)
def test_a_caption_cannot_write_a_mark(text):
    """It is read like the same words between other brackets, and what follows stays."""
    tower = TransformerTowerConfig(**SMALL | {"context_length": 24}).build()
    tokens = BPE(24)([f"{text} a star", "a star"])
    marks = (tokens == BPE.end_of_text) | (tokens == BPE.end_of_text - 1)
    assert marks.sum(1).tolist() == [2, 2]
    real = tokens[0][tower.mask(tokens)[0]].tolist()
    assert real[-3:] == tokens[1, 1:4].tolist()
    words = BPE(24)(["end of text", "start of text"])[:, 1:4].tolist()
    found = [number for number in real if number in words[0] + words[1]]
    assert found in words


def test_wrong_tokens_are_refused():
    tower = TransformerTowerConfig(**SMALL).build()
    with pytest.raises(ShapeError, match=r"got shape \(2, 13\).*expected \(B, 1 to 12\) int64"):
        tower(torch.ones(2, 13, dtype=torch.int64))
    with pytest.raises(ShapeError, match=r"torch.int32"):
        tower(torch.ones(2, 12, dtype=torch.int32))


def test_heads_must_divide_width():
    with pytest.raises(ValueError, match="heads that divide width"):
        TransformerTowerConfig(context_length=12, width=10, heads=4, layers=1)


def test_text_towers_of_another_vocabulary_are_refused():
    with pytest.raises(ConfigError, match="another vocabulary"):
        OpenCLIPTextTowerConfig(model="ViT-B-16-SigLIP").build()


@pytest.mark.parametrize("std", [0.02, 1.0])
def test_token_embeddings_start_with_the_deviation_asked_for(std):
    tower = TransformerTowerConfig(context_length=8, width=8, heads=2, layers=1, token_std=std).build()
    assert tower.transformer.token_embedding.weight.std().item() == pytest.approx(std, rel=0.01)  # of 395,264 numbers


def test_the_vocabulary_forgets(monkeypatch):
    """open_clip remembers every word it has ever met: on captions of chance without an end."""
    from open_clip.tokenizer import SimpleTokenizer

    monkeypatch.setattr("vqclip.towers.vocabulary._CACHED_WORDS", 10)
    captions = [f"word{chr(97 + n % 26) * (n + 1)} {n}" for n in range(79, -1, -1)]
    theirs = SimpleTokenizer()(captions, context_length=32)
    assert torch.equal(BPE(32)(captions), theirs)
    assert len(_bpe().cache) <= 10
    assert max(map(len, _bpe().cache)) <= 64


def test_captions_that_are_cut_are_counted_and_told():
    captions = ["a b", "a b c d", "a " * 9, "word " * 5000, "a b"]
    tokens, lengths = BPE(6).with_lengths(captions)
    assert lengths == [4, 6, 11, 4097, 4]
    assert torch.equal(tokens, BPE(6)(captions))
    assert tokens[:, -1].tolist() == [0, 49407, 49407, 49407, 0]
    counts = CaptionLengths({4: 900, 6: 60, 11: 38, 4097: 2})
    assert [counts.length_for(percent) for percent in (90, 95, 99, 100)] == [4, 6, 11, 4097]
    assert counts.describe_cuts(6, "model.text.tower.context_length") == (
        "4.0 % of captions (40 of 1,000) are longer than model.text.tower.context_length 6 and were cut; "
        "11 would hold 99 % and more than 4096 would hold 100 % of them"
    )
    assert "10.0 % of captions (100 of 1,000)" in counts.describe_cuts(5)
    assert "and were cut; 6 would hold 95 % and 11 would hold 99 % of them" in counts.describe_cuts(5)
    assert counts.describe_cuts(4097) is None
    assert CaptionLengths().describe_cuts(4) is None
