import pytest
import torch
from torch import nn

from tests.models import FSQ, RESIDUAL, tiny_model
from vqclip.errors import ConfigError, ShapeError
from vqclip.lm_vocabulary import Vocabulary, mean_rows, projected_rows, resize


def table():
    return nn.Embedding(50, 32, padding_idx=3, _weight=0.02 * torch.randn(50, 32, generator=torch.manual_seed(0)))


class LanguageModel(nn.Module):
    """What `resize` uses of a Hugging Face model, with an output layer of its own or a tied one."""

    def __init__(self, tied):
        super().__init__()
        self.inputs, self.output, self.tied = table(), nn.Linear(32, 50, bias=False), tied
        self.tie()

    def tie(self):
        if self.tied:
            self.output.weight = self.inputs.weight

    def get_input_embeddings(self):
        return self.inputs

    def get_output_embeddings(self):
        return self.output

    def resize_token_embeddings(self, rows, pad_to_multiple_of=None, mean_resizing=True):
        assert not mean_resizing  # new rows are written over
        self.inputs, self.output = nn.Embedding(rows, 32), nn.Linear(32, rows, bias=False)
        self.tie()


def test_a_table_keeps_its_rows_and_gets_new_ones():
    old = table()
    rows = mean_rows(old.weight, 7, seed=1)
    new = resize(old, 50, rows)
    assert new.weight.shape == (57, 32)
    assert torch.equal(new.weight[:50], old.weight)
    assert torch.equal(new.weight[50:], rows)
    assert (new.padding_idx, new.weight.requires_grad) == (3, True)
    assert len(resize(old, 48, rows).weight) == 55  # over rows that nobody had a use for


@pytest.mark.parametrize("tied", [True, False])
def test_a_language_model_gets_the_same_rows_on_both_ends(tied):
    rows = torch.randn(7, 32)
    model = LanguageModel(tied)
    assert resize(model, 50, rows) is model
    for weight in (model.inputs.weight, model.output.weight):
        assert weight.shape == (57, 32)
        assert torch.equal(weight[50:], rows)


def test_rows_are_drawn_by_their_seed_and_of_the_tables_size():
    weight = torch.randn(1000, 64, dtype=torch.bfloat16) * 0.02 + 1
    codes = torch.randn(500, 6) * 30 + 7
    for make in (
        lambda seed: mean_rows(weight, 500, seed, spread=1.0),
        lambda seed: projected_rows(weight, codes, seed),
    ):
        state = torch.random.get_rng_state()
        rows = make(0)
        assert torch.equal(torch.random.get_rng_state(), state)
        assert (rows.dtype, rows.shape) == (torch.bfloat16, (500, 64))
        assert torch.equal(rows, make(0))
        assert not torch.equal(rows, make(1))
        assert rows.double().mean().item() == pytest.approx(1, abs=0.01)
        assert (rows.double() - rows.double().mean(0)).std().item() == pytest.approx(0.02, rel=0.35)


def test_codes_that_are_alike_begin_alike():
    codes = torch.tensor([[0.0, 0, 0, 0], [0.1, 0, 0, 0], [1, -1, 1, 1]])
    rows = projected_rows(torch.randn(100, 256), codes, seed=0)
    assert (rows[0] - rows[1]).norm() < 0.2 * (rows[0] - rows[2]).norm()
    ratio = (rows[0] - rows[2]).norm() / (rows[0] - rows[1]).norm()
    assert ratio.item() == pytest.approx(20, rel=0.3)


def test_a_tokenizers_codebooks_start_a_vocabulary():
    model = tiny_model(RESIDUAL, FSQ).build().eval()
    vocabulary = Vocabulary(model.image.codebook_sizes, model.text.codebook_sizes, offset=50)
    codebooks = {"image": [model.image.codebook(c) for c in range(3)]}
    rows = vocabulary.rows(table().weight, seed=0, codebooks=codebooks)
    assert rows.shape == (vocabulary.size, 32) == (5 + 3 * 16 + 64, 32)
    assert len(rows.unique(dim=0)) == len(rows)
    grown = resize(table(), vocabulary.offset, rows)
    ids = vocabulary.to_vocabulary(model.image.encode(torch.zeros(2, 3, 16, 16, dtype=torch.uint8)), "image")
    assert grown(ids).shape == (2, 4 * 3 + 2, 32)
    with pytest.raises(ShapeError, match=r"codebooks of image: got shapes .*\(16, 6\)\], expected \(K, d\) with K of"):
        vocabulary.rows(table().weight, 0, {"image": codebooks["image"][:2]})


def test_what_cannot_be_resized_is_refused():
    with pytest.raises(ConfigError, match="got modality 'text', expected image"):
        Vocabulary((4,)).rows(table().weight, 0, {"text": [torch.zeros(4, 2)]})
    rows = torch.zeros(3, 32)
    with pytest.raises(ShapeError, match="got a Linear, expected an nn.Embedding or a model with resize_token"):
        resize(nn.Linear(3, 3), 0, rows)
    with pytest.raises(ShapeError, match=r"rows: got shape \(3, 31\), expected \(count, 32\)"):
        resize(table(), 50, rows[:, :31])
    with pytest.raises(ShapeError, match=r"rows: got 1099511627826 in all, expected at most 4194304; a Product"):
        resize(table(), 50, torch.zeros(1, 32).expand(2**40, 32))
    with pytest.raises(ShapeError, match="rows: got 1099511627781 in all, expected at most 4194304; a Product"):
        Vocabulary(image=(2**40,)).rows(table().weight, seed=0)
    for module in (table(), LanguageModel(tied=True)):
        with pytest.raises(ShapeError, match=r"start: got 40 for 3 rows in a table of 50, .* 7 rows would be lost"):
            resize(module, 40, rows)
    with pytest.raises(ShapeError, match=r"codebook: got shape \(3,\)"):
        projected_rows(table().weight, torch.zeros(3), 0)
