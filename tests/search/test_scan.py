from __future__ import annotations

import pytest
import torch

from tests.models import FSQ, RESIDUAL
from tests.search.making import built, drawn, queries, reference
from vqclip.errors import CheckpointError, ConfigError, ShapeError
from vqclip.search import CodeIndex, CodeSearch, FaissSearch, embeddings


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("repeat", [False, True])
def test_search_is_exact_whatever_is_kept(keep, repeat, monkeypatch):
    monkeypatch.setattr("vqclip.search.scan._CHUNK", 70)
    tokenizer, ids = built().image, drawn()
    if repeat:
        ids = ids[torch.arange(300) % 111]
    with torch.no_grad():
        embeddings = tokenizer.embed(drawn()[:111])[torch.arange(300) % 111] if repeat else tokenizer.embed(ids)
        scores, items = reference(embeddings, queries(), 10)
    found = CodeSearch(CodeIndex.build(tokenizer, ids), tokenizer, keep).search(queries(), 10)
    torch.testing.assert_close(found.scores, scores, atol=1e-6, rtol=0)
    # Scores are equal, or further apart than rounding: so the order of the items is determined.
    steps = scores[:, :-1] - scores[:, 1:]
    assert ((steps == 0) | (steps > 1e-5)).all()
    assert torch.equal(found.items, items)
    for row, (score, item) in enumerate(zip(found.scores, found.items, strict=True)):
        same = score[:-1] == score[1:]
        assert (item[:-1] < item[1:])[same].all(), row
        assert repeat == bool(same.any())


def test_equal_codes_have_equal_scores_and_are_kept_once():
    tokenizer = built().image
    ids = drawn(7)[torch.tensor([3, 0, 3, 1, 3, 0])]
    index = CodeIndex.build(tokenizer, ids)
    assert len(index) == 6
    assert len(index.codes) == 3
    assert torch.equal(index.ids(torch.arange(6)), ids)
    found = CodeSearch(index, tokenizer).search(tokenizer.embed(ids[:1]).detach(), 99)
    assert found.items[0, :3].tolist() == [0, 2, 4]
    assert found.scores[0, :3].unique().numel() == 1
    assert sorted(found.items[0].tolist()) == list(range(6))


def test_absent_tokens_and_stages_are_kept():
    model = built(RESIDUAL)
    text = model.text.encode(["a red star", "x", "two small blue circles on a grey background"])
    ids = model.image.encode(torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8))
    ids[2, :, 1:] = -1
    for tokenizer, each in ((model.text, text), (model.image, ids)):
        index = CodeIndex.build(tokenizer, each)
        assert torch.equal(index.ids(torch.arange(len(each))), each)
        found = CodeSearch(index, tokenizer).search(tokenizer.embed(each).detach(), 1)
        assert found.items.flatten().tolist() == list(range(len(each)))


def test_an_empty_index_finds_nothing():
    tokenizer = built().image
    for keep in (False, True):
        found = CodeSearch(CodeIndex.build(tokenizer, drawn(0)), tokenizer, keep).search(queries(), 3)
        assert found.items.shape == found.scores.shape == (5, 0)


def test_the_code_search_of_a_codebook_of_few_bits_is_small():
    tokenizer = built(FSQ).image
    index = CodeIndex.build(tokenizer, torch.arange(64)[:, None, None].expand(64, 4, 1))
    assert index.nbytes == 64 * 3
    assert CodeSearch(index, tokenizer).nbytes == 64 * 3
    assert CodeSearch(index, tokenizer, keep=True).nbytes == 64 * (3 + 4 * 16)


@pytest.mark.parametrize(
    ("asked", "k", "message"),
    [
        (torch.zeros(16), 1, r"queries: got \(16,\) torch.float32, expected \(Q, 16\)"),
        (torch.zeros(1, 15), 1, r"\(1, 15\)"),
        (torch.full((1, 16), torch.nan), 1, "NaN"),
        (torch.zeros(1, 16), 0, "k: got 0"),
    ],
)
def test_wrong_queries_are_refused(asked, k, message):
    tokenizer = built().image
    with pytest.raises(ShapeError, match=message):
        CodeSearch(CodeIndex.build(tokenizer, drawn(3)), tokenizer).search(asked, k)


def test_another_tokenizer_is_refused():
    model = built()
    index = CodeIndex.build(model.image, drawn(3))
    with pytest.raises(CheckpointError, match="made by the image tokenizer .* got the text tokenizer"):
        CodeSearch(index, model.text)
    with pytest.raises(CheckpointError, match="made by the image tokenizer .* got the text tokenizer"):
        embeddings(index, model.text)


def test_embeddings_and_faiss_find_what_search_finds():
    pytest.importorskip("faiss", reason="pip install 'vqclip[search]'")
    tokenizer, ids = built().image, drawn()[torch.arange(300) % 111]
    index = CodeIndex.build(tokenizer, ids)
    vectors = embeddings(index, tokenizer)
    torch.testing.assert_close(vectors, tokenizer.embed(ids).detach(), atol=1e-6, rtol=0)
    flat, exact = FaissSearch(index, tokenizer), CodeSearch(index, tokenizer)
    assert flat.nbytes > 300 * 4 * 16
    torch.testing.assert_close(flat.search(queries(), 7).scores, exact.search(queries(), 7).scores, atol=1e-6, rtol=0)
    with pytest.raises(ConfigError, match="factory: got 'Nonsense'"):
        FaissSearch(index, tokenizer, "Nonsense")


def test_scores_of_any_sign_are_in_order_and_ties_by_number():
    index = CodeIndex.build(built().image, drawn(6))
    scores = torch.tensor([[0.5, -0.0, 0.0, -2.0, -0.5, 0.5]])
    keys = CodeSearch(index, built().image)._keys(scores, torch.arange(6))
    assert keys[0].argsort(descending=True).tolist() == [0, 5, 1, 2, 4, 3]
