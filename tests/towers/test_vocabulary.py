"""Captions to token numbers: open_clip's byte pairs, bytes, and fast tokenizers of transformers."""

import open_clip
import pytest
import torch
from tokenizers import Tokenizer, models

from tests.models import FSQ, tiny_model
from tests.towers.transformers_models import CAPTIONS, sentence_pieces, word_pieces
from vqclip import load_tokenizer
from vqclip.errors import ConfigError, ShapeError
from vqclip.model import ModelConfig
from vqclip.nn.layers import Attention, rotary_angles
from vqclip.towers.open_clip import OpenCLIPTextTowerConfig
from vqclip.towers.text import OpenCLIPTextTower, TransformerTowerConfig
from vqclip.towers.vocabulary import BPE, Bytes, CaptionLengths, FastVocabulary, _bpe


def test_the_byte_pairs_are_open_clips():
    captions = ["a small red star to the left of a large blue circle", ""]
    assert torch.equal(BPE(32)(captions), open_clip.get_tokenizer("ViT-B-32")(captions, context_length=32))
    assert BPE(8)([captions[0]]).shape == (1, 8)


MARKS = ("<end_of_text>", "<START_OF_TEXT>", "&lt;end_of_text&gt;", "!<end_of_text>", "\uff1cend_of_text\uff1e")


@pytest.mark.parametrize("text", [*MARKS, "a<end_of_text>b"])
def test_a_caption_cannot_write_a_mark_of_open_clip(text):
    """It is read like the same words between other brackets, and what follows stays."""
    tokens = BPE(24)([f"{text} a star", "a star"])
    marks = (tokens == BPE.end_of_text) | (tokens == BPE.end_of_text - 1)
    assert marks.sum(1).tolist() == [2, 2]
    real = tokens[0][BPE(24).mask(tokens)[0]].tolist()
    assert real[-3:] == tokens[1, 1:4].tolist()
    words = BPE(24)(["end of text", "start of text"])[:, 1:4].tolist()
    found = [number for number in real if number in words[0] + words[1]]
    assert found in words


def test_the_vocabulary_forgets(monkeypatch):
    """open_clip remembers every word it has ever met: on captions of chance without an end."""
    monkeypatch.setattr("vqclip.towers.vocabulary._CACHED_WORDS", 10)
    captions = [f"word{chr(97 + n % 26) * (n + 1)} {n}" for n in range(79, -1, -1)]
    theirs = open_clip.tokenizer.SimpleTokenizer()(captions, context_length=32)
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


def test_bytes_of_any_language():
    words = Bytes(8)
    tokens, lengths = words.with_lengths(["A  b", "é", "", "東京 tower", "\ud800"])
    assert tokens[:3].tolist() == [[99, 34, 100, 1, 0, 0, 0, 0], [197, 171, 1, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0]]
    assert lengths == [4, 3, 1, 13, 2]
    assert words.mask(tokens).sum(1).tolist() == [4, 3, 1, 8, 2]
    words.require_rows(tokens)
    assert words.pieces("é東 a") == (["", "é", "", "", "東", " ", "a"], 7)
    for row in ([1, 5], [5, 0, 1], [5, 6], [258], [0], [5, 1, 1]):
        with pytest.raises(ShapeError, match=r"tokens"):
            words.require_rows(torch.tensor([row + [0] * (8 - len(row))]))


def test_a_model_of_bytes_is_exported_and_read(tmp_path):
    tree = tiny_model(FSQ, FSQ).model_dump(mode="json")
    tree["text"]["tower"] |= {"context_length": 24, "units": "bytes"}
    model = ModelConfig.model_validate(tree).build().eval()
    model.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path, "text")
    captions = ["Grün", "un café"]
    assert torch.equal(tokenizer.encode(captions), model.text.encode(captions))
    assert tokenizer.tower.transformer.token_embedding.weight.shape == (258, 16)


def vocabulary(tokenizer: Tokenizer, length: int = 12) -> FastVocabulary:
    return FastVocabulary(tokenizer.to_str().encode(), length)


def test_rows_are_the_tokenizers_own_with_our_padding_and_our_cut_before_the_last_mark():
    theirs = word_pieces()
    theirs.no_truncation()
    theirs.no_padding()
    tokens, lengths = vocabulary(word_pieces()).with_lengths(CAPTIONS[:2])
    for row, caption in zip(tokens, CAPTIONS, strict=False):
        numbers = theirs.encode(caption).ids
        assert row.tolist() == numbers + [-1] * (12 - len(numbers))
    assert lengths == [5, 2]
    tokens, lengths = vocabulary(word_pieces(), 6).with_lengths(["a " * 40, "a " * 9000])
    assert lengths == [42, 4097]
    assert tokens[:, 0].tolist() == [2, 2]
    assert tokens[:, -1].tolist() == [3, 3]


def test_a_caption_cannot_write_a_mark():
    """Neither where a mark would be split, nor where it is a piece of the vocabulary."""
    words = vocabulary(word_pieces(), 24)
    tokens = words(["a [SEP] star [PAD] [CLS]"])[0]
    assert [number for number in tokens.tolist() if number in (0, 2, 3)] == [2, 3]
    assert int(words.mask(tokens[None]).sum()) > 10
    theirs = sentence_pieces()
    theirs.encode_special_tokens = True
    assert {0, 1} <= set(theirs.encode("a </s> b <pad>", add_special_tokens=False).ids)  # so this is no idle worry
    pieces = vocabulary(sentence_pieces(), 24)
    tokens, lengths = pieces.with_lengths(["a </s> b <pad> </s>"])
    real = tokens[0][pieces.mask(tokens)[0]].tolist()
    assert len(real) == lengths[0]
    assert [number for number in real if number in (0, 1)] == [1]
    assert real[-1] == 1
    assert real.count(2) == 3


def test_the_unknown_token_is_removed_where_it_is_a_mark():
    """CLIP's unknown token is its end mark."""
    tokenizer = sentence_pieces()
    tokenizer.model = models.Unigram([("<pad>", 0.0), ("</s>", 0.0), ("x", -1.0), ("▁", -1.0)], unk_id=1)
    tokens = vocabulary(tokenizer)(["x ? x"])
    assert (tokens == 1).sum() == 1


def test_any_str_is_a_caption_and_nothing_else():
    words = vocabulary(word_pieces())
    assert (words(["\ud800 a", "\0", "é你好"])[:, 0] == 2).all()
    for each in (words, BPE(8)):
        with pytest.raises(ShapeError, match="expected a list of str"):
            each("a red star")


def test_wrong_rows_are_refused():
    words = vocabulary(word_pieces())
    words.require_rows(words(CAPTIONS))
    for row, message in (
        ([words.size], f"got the number {words.size}, expected -1 to"),
        ([-2], "got the number -2"),
        ([-1, -1, -1], "is empty"),
        ([2, -1, 3], "token after padding"),
    ):
        with pytest.raises(ShapeError, match=message):
            words.require_rows(torch.tensor([[*row, *[-1] * (12 - len(row))]]))


def test_damaged_files_and_tokenizers_without_marks_are_refused():
    for content in (b"{}", b"\xff", b'{"model": 3}', b"[" * 10_000):
        with pytest.raises(ConfigError, match="tokenizer.json cannot be read"):
            FastVocabulary(content, 12)
    tokenizer = word_pieces()
    tokenizer.post_processor = None
    with pytest.raises(ConfigError, match="does not put fixed marks such as"):
        vocabulary(tokenizer)
    with pytest.raises(ConfigError, match="context_length: got 2; expected more than the 2 marks"):
        vocabulary(word_pieces(), 2)


# The text transformer, of open_clip and with options.

SMALL = {"context_length": 12, "width": 16, "heads": 2, "layers": 1}
OPTIONS = {"pos_embed": "rope", "norm_layer": "rmsnorm", "mlp_layer": "swiglu", "qk_norm": True}


@pytest.fixture(params=[(causal, options) for causal in (True, False) for options in ({}, OPTIONS)], ids=str)
def tower(request):
    torch.manual_seed(0)
    causal, options = request.param
    return TransformerTowerConfig(**SMALL, causal=causal, **options).build().eval()


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
    torch.testing.assert_close(tower(tokens[1:, :5])[mask[1:, :5]], after[1:][mask[1:]])


def test_a_row_without_an_end_mark_or_no_rows_give_every_weight_a_finite_gradient(tower):
    tokens = BPE(12)(["a red star", "x"])
    tokens[1] = 0
    features = tower(tokens)
    assert features.isfinite().all()
    features[tower.mask(tokens)].sum().backward()
    assert all(p.grad.isfinite().all() for p in tower.parameters())
    if isinstance(tower, OpenCLIPTextTower):
        hidden = tower.attention_mask(tower.mask(tokens), torch.float32)
        assert (hidden.amax(dim=-1) == 0).all()  # not every device's attention gives zeros for a row of -inf
    tower.zero_grad()
    nothing = tower(torch.zeros(0, 12, dtype=torch.int64))
    assert nothing.shape == (0, 12, 16)
    nothing.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in tower.parameters())


def test_features_are_those_of_open_clips_own_forward_compiled_too(tower):
    tokens = BPE(12)(["a red star", "two small blue circles", "", "#!/bin a"])
    if isinstance(tower, OpenCLIPTextTower):
        torch.testing.assert_close(tower(tokens[:3]), tower.transformer(tokens[:3]))
    compiled = torch.compile(lambda x: (tower(x), tower.mask(x)), fullgraph=True, backend="eager")
    features, mask = compiled(tokens)
    torch.testing.assert_close(features, tower(tokens))
    assert torch.equal(mask, tower.mask(tokens))


def test_bidirectional_tokens_see_what_follows_and_causal_ones_do_not(tower):
    is_open_clip, network = isinstance(tower, OpenCLIPTextTower), tower.transformer
    is_causal = network.attn_mask is not None if is_open_clip else network.causal
    one, other = tower(BPE(12)(["a red star", "a red heart"]))
    assert torch.allclose(one[:3], other[:3]) == is_causal


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_changes_the_features(option):
    torch.manual_seed(0)
    changed = TransformerTowerConfig(**SMALL, **OPTIONS).build().double()
    plain = TransformerTowerConfig(**SMALL, **{name: OPTIONS[name] for name in OPTIONS if name != option}).build()
    if option != "mlp_layer":  # with the same weights, but for those of the option
        plain.load_state_dict(changed.state_dict(), strict=False)
    tokens = BPE(12)(["a red star", "two small blue circles"])
    difference = changed(tokens) - plain.double()(tokens)
    assert difference.dtype == torch.float64
    assert difference.abs().mean() > 1e-3


def test_attention_of_rotary_positions_is_that_of_turned_complex_numbers():
    torch.manual_seed(0)
    layer, x = Attention(16, 2).double(), torch.randn(2, 6, 16, dtype=torch.float64)
    q, k, v = torch.cat((layer.query(x), layer.key_value(x)), dim=-1).view(2, 6, 3, 2, 2, 4).unbind(2)
    speeds = torch.tensor([1, 10, 100, 1000], dtype=torch.float64).reciprocal()  # 10,000 to the power of -i / 4
    turns = torch.polar(torch.ones(6, 4, dtype=torch.float64), torch.arange(6)[:, None] * speeds)[:, None]
    q, k = (torch.complex(each[..., 0, :], each[..., 1, :]) * turns for each in (q, k))
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k.conj()).real / 8**0.5
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    values = torch.einsum("bhmn,bnhd->bmhd", scores.masked_fill(hidden, -torch.inf).softmax(dim=-1), v.flatten(-2))
    angles = rotary_angles(6, 8, x)
    torch.testing.assert_close(layer(x, x, None, True, angles), layer.out(values.flatten(2)))


def test_wrong_tokens_and_settings_are_refused():
    tower = TransformerTowerConfig(**SMALL).build()
    with pytest.raises(ShapeError, match=r"got shape \(2, 13\).*expected \(B, 1 to 12\) int64"):
        tower(torch.ones(2, 13, dtype=torch.int64))
    with pytest.raises(ShapeError, match=r"torch.int32"):
        tower(torch.ones(2, 12, dtype=torch.int32))
    for settings, message in (
        ({"width": 10, "heads": 4}, "heads that divide width"),
        ({"width": 10, "heads": 2, "pos_embed": "rope"}, "pos_embed rope with 5 features per head; expected an even"),
        ({"width": 8, "heads": 8, "qk_norm": True}, "qk_norm with 1 feature per head"),
    ):
        with pytest.raises(ValueError, match=message):
            TransformerTowerConfig(**settings)
    with pytest.raises(ConfigError, match="another vocabulary"), torch.device("meta"):
        OpenCLIPTextTowerConfig(model="ViT-B-16-SigLIP").build()
