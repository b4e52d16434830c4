import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vqclip.errors import ConfigError, ShapeError
from vqclip.lm_vocabulary import DelayedCodes, FlatCodes, Vocabulary

SIZES = st.lists(st.one_of(st.integers(1, 9), st.just(2**18), st.just(2**40)), min_size=1, max_size=5)
FLAT, DELAYED = FlatCodes((4, 5), offset=10), DelayedCodes((4, 5))


@st.composite
def samples(draw):
    """Codebook sizes and ids ``(B, N, C)`` with -1 anywhere."""
    sizes = draw(SIZES)
    shape = draw(st.integers(0, 3)), draw(st.integers(0, 5)), len(sizes)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    columns = [torch.randint(-1, size, shape[:2], generator=generator) for size in sizes]
    return sizes, torch.stack(columns, dim=-1)


@settings(max_examples=60, deadline=None)
@given(samples(), st.integers(0, 2**50), st.booleans())
def test_flat_ids_come_back(sample, offset, padded):
    sizes, ids = sample
    flat = FlatCodes(sizes, offset, pad=offset + sum(sizes) if padded else -1)
    out = flat.to_vocabulary(ids)
    assert out.shape == (ids.shape[0], ids.shape[1] * len(sizes))
    codes = out[out != flat.pad]
    assert ((codes >= offset) & (codes < flat.stop)).all()
    assert torch.equal(flat.from_vocabulary(out), ids)
    # An id says which codebook it is of.
    of = torch.arange(out.shape[1]).remainder(len(sizes)).expand_as(out)[out != flat.pad]
    starts = torch.tensor(flat.starts)
    assert torch.equal(torch.searchsorted(starts, codes, right=True) - 1, of)


@settings(max_examples=60, deadline=None)
@given(samples())
def test_delayed_ids_come_back(sample):
    sizes, ids = sample
    delayed = DelayedCodes(sizes)
    out = delayed.to_vocabulary(ids)
    tokens, codebooks = ids.shape[1:]
    assert out.shape == (len(ids), tokens + codebooks - 1, codebooks)
    assert ((out >= 0) & (out < delayed.size)).all()
    assert torch.equal(delayed.from_vocabulary(out), ids)


@settings(max_examples=60, deadline=None)
@given(samples(), samples(), st.integers(0, 2**40))
def test_ids_of_both_modalities_come_back(image, text, offset):
    vocabulary = Vocabulary(image[0], text[0], offset)
    seen = []
    for modality, (_, ids) in (("image", image), ("text", text)):
        rows = vocabulary.to_vocabulary(ids, modality)
        assert rows.shape == (len(ids), ids.shape[1] * ids.shape[2] + 2)
        assert ((rows >= offset) & (rows < vocabulary.stop)).all()
        assert torch.equal(vocabulary.from_vocabulary(rows, modality), ids)
        seen.append(set(rows.flatten().tolist()) - {vocabulary.pad})
    assert not seen[0] & seen[1]


def test_the_three_layouts_by_hand():
    ids = torch.tensor([[[1, 0], [2, 3], [-1, -1]]])
    assert FlatCodes((4, 5), offset=100).to_vocabulary(ids).tolist() == [[101, 104, 102, 107, -1, -1]]
    assert DelayedCodes((4, 5)).to_vocabulary(ids).tolist() == [[[1, 5], [2, 0], [5, 3], [5, 5]]]
    vocabulary = Vocabulary(text=(4, 5), offset=100)
    assert vocabulary.special == {
        "pad": 100, "begin_image": 101, "end_image": 102, "begin_text": 103, "end_text": 104,
    }  # fmt: skip
    assert vocabulary.to_vocabulary(ids, "text").tolist() == [[103, 106, 109, 107, 112, 104, 100, 100]]
    assert (vocabulary.size, vocabulary.stop) == (14, 114)


@pytest.mark.parametrize("layout", [FlatCodes((4, 5)), DelayedCodes((4, 5))])
@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([[[0, 0], [4, 0]]]), r"ids\[0, 1, 0\]: got id 4, expected codebook 0: 0 to 3, or -1 for none"),
        (torch.tensor([[[0, -2]]]), r"ids\[0, 0, 1\]: got id -2, expected codebook 1: 0 to 4"),
        (torch.zeros(1, 2, 3, dtype=torch.int64), r"got shape \(1, 2, 3\), expected \(B, N, 2\): one id per codebook"),
        (torch.zeros(1, 2, 2), "dtype torch.float32, expected integers"),  # even where their values would do
        (torch.zeros(1, 2, 2, dtype=torch.bool), "dtype torch.bool, expected integers"),
        (torch.zeros(2, 2, dtype=torch.int64), r"got shape \(2, 2\)"),
        ([[[0, 0]]], r"ids: got .*\(list\), expected an int64 tensor.*torch.tensor\(ids\) makes one"),
    ],
)
def test_ids_that_are_no_codes_are_refused(layout, ids, message):
    with pytest.raises(ShapeError, match=message):
        layout.to_vocabulary(ids)


@pytest.mark.parametrize(
    ("layout", "given", "message"),
    [
        (FLAT, [[10, 14, 14, 11]], r"vocabulary ids\[0, 1, 0\]: got id 14, expected codebook 0: 10 to 13"),
        (FLAT, [[10, 19]], r"vocabulary ids\[0, 0, 1\]: got id 19, expected codebook 1: 14 to 18, or -1"),
        (FLAT, [[10, 14, 10]], r"got shape \(1, 3\), expected a multiple of 2 ids a sample"),
        (FLAT, [[[0, 0], [0, 0]]], r"got shape \(1, 2, 2\)"),
        (DELAYED, [[[0, 0], [1, 1], [5, 2]]], r"ids\[0, 0, 1\]: got id 0, expected codebook 1: 0 to 4, or 5 for none"),
        (DELAYED, [[[0, 5], [1, 1], [3, 2]]], r"ids\[0, 2, 0\]: got id 3"),
        (DELAYED, [[[4, 5], [1, 1], [5, 2]]], r"ids\[0, 0, 0\]: got id 4, expected codebook 0: 0 to 3"),
        (DELAYED, [[[0, 5, 5]]], r"got shape \(1, 1, 3\), expected \(B, N \+ 1, 2\)"),
    ],
)
def test_ids_of_a_language_model_that_are_no_codes_are_refused(layout, given, message):
    with pytest.raises(ShapeError, match=message):
        layout.from_vocabulary(torch.tensor(given))


def test_rows_without_their_marks_are_refused():
    vocabulary = Vocabulary(text=(4, 5), offset=100)
    vocabulary.from_vocabulary(torch.tensor([[103, 106, 110, 104]]), "text")
    for row in (
        [104, 106, 110, 104],  # no begin
        [103, 106, 110, 100],  # no end
        [103, 104, 106, 110],  # codes after the end
        [103, 106, 104, 104],  # two ends
        [101, 106, 110, 102],  # marks of the other modality
    ):
        with pytest.raises(ShapeError, match=r"vocabulary ids\[1\]: expected 103 \(begin_text\), codes, one 104"):
            vocabulary.from_vocabulary(torch.tensor([[103, 106, 110, 104], row]), "text")
    with pytest.raises(ShapeError, match=r"got shape \(1, 5\), expected marks .* a multiple of 2 ids between them"):
        vocabulary.from_vocabulary(torch.tensor([[103, 106, 110, 104, 104]]), "text")


def test_vocabularies_that_cannot_be_are_refused():
    ids = torch.zeros(1, 1, 1, dtype=torch.int64)
    for make, message in (
        (lambda: FlatCodes((2**63, 1)), "2 codebooks of together 9223372036854775809 codes from id 0 do not fit"),
        (lambda: DelayedCodes((2**63,)), "leaves no int64 id for padding"),
        (lambda: FlatCodes(()), r"codebook sizes: got \(\), expected at least one"),
        (lambda: FlatCodes((4,), offset=10, pad=12), "pad: got 12, which is a code"),
        (lambda: FlatCodes((4,), offset=-1), "offset: got -1"),
        (Vocabulary, "got neither image nor text"),
        (lambda: Vocabulary(image=(4,)).to_vocabulary(ids, "text"), "got modality 'text', expected image"),
    ):
        with pytest.raises(ConfigError, match=message):
            make()


def test_the_last_id_that_int64_can_count():
    flat = FlatCodes((2**63 - 8,), offset=8)
    ids = torch.tensor([[[2**63 - 9], [-1], [0]]])
    assert flat.to_vocabulary(ids).tolist() == [[2**63 - 1, -1, 8]]
    assert torch.equal(flat.from_vocabulary(flat.to_vocabulary(ids)), ids)
