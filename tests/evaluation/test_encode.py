import math
import random
from collections import Counter

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.evaluation.made import LFQ, QUANTIZERS, SIZE, tiny_clip
from tests.ranks import for_each
from vqclip.errors import CheckpointError, NonFiniteError, ShapeError
from vqclip.evaluation.encode import (
    Encoder,
    RankPartition,
    code_usage,
    count_codes,
    id_dtype,
    load_ids,
    save_ids,
)
from vqclip.nn.precision import evaluation_mode

CAPTIONS = ["red", "a small green star", "two words", "", "a long caption that goes on and on beyond the end of it all"]


def images(count=13, seed=0):
    return torch.randint(0, 256, (count, 3, SIZE, SIZE), generator=torch.Generator().manual_seed(seed)).byte()


def encode_both(model, folder, batch_size, precision="fp32"):
    run = Encoder(RankPartition(), precision, folder)
    with evaluation_mode(model):
        image = run(model.image, images().split(batch_size), "image")
        text = run.captions(model.text, CAPTIONS * 3, batch_size, "text")
    return image, text


@pytest.mark.parametrize(("name", "dtype"), [("fsq", "float32"), ("lfq", "float64"), ("product", "float32")])
def test_codes_only_equals_quantized_bit_for_bit_and_continuous_differs(tmp_path, name, dtype):
    dtype = getattr(torch, dtype)
    precision = "fp64" if dtype == torch.float64 else "fp32"
    for encoded in encode_both(tiny_clip(QUANTIZERS[name]).to(dtype), tmp_path, 5, precision):
        modes = encoded.embeddings
        assert torch.equal(modes["quantized"], modes["codes_only"])
        assert modes["quantized"].dtype == dtype
        assert not torch.allclose(modes["quantized"], modes["continuous"], atol=1e-3)
        assert torch.allclose(modes["continuous"].norm(dim=1), torch.ones(len(modes["continuous"]), dtype=dtype))


def test_modes_are_what_the_tokenizer_gives_by_itself(tmp_path):
    model = tiny_clip().eval()
    image, text = encode_both(model, tmp_path, 13)
    pixels, tokens = images(), model.text.preprocess(CAPTIONS * 3)
    with torch.no_grad():
        for encoded, tokenizer, inputs in ((image, model.image, pixels), (text, model.text, tokens)):
            ids = tokenizer.encode(inputs)
            expected = {
                "continuous": tokenizer.continuous(inputs),
                "quantized": tokenizer(inputs).embedding,
                "codes_only": tokenizer.embed(ids),
            }
            assert encoded.embeddings.keys() == expected.keys()
            for mode, embedding in expected.items():
                torch.testing.assert_close(encoded.embeddings[mode], embedding, atol=1e-5, rtol=0)
            stored = load_ids(tmp_path / f"{tokenizer.modality}-0.safetensors", tokenizer.codebook_sizes)
            assert torch.equal(stored.long(), ids)
            assert encoded.usage.tokens == int((ids >= 0).sum())


def test_codes_only_sees_nothing_but_the_file(tmp_path, monkeypatch):
    model = tiny_clip()
    before, _ = encode_both(model, tmp_path, 5)
    monkeypatch.setattr("vqclip.evaluation.encode.load_ids", lambda path, sizes: load_ids(path, sizes).flip(0))
    after, _ = encode_both(model, tmp_path, 13)
    assert torch.allclose(after.embeddings["codes_only"], before.embeddings["quantized"].flip(0), atol=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_near_and_codes_only_still_equal(tmp_path, precision):
    model = tiny_clip(LFQ)
    half, full = encode_both(model, tmp_path, 13, precision)[0], encode_both(model, tmp_path, 13)[0]
    assert torch.equal(half.embeddings["quantized"], half.embeddings["codes_only"])
    assert not torch.equal(half.embeddings["continuous"], full.embeddings["continuous"])
    assert torch.allclose(half.embeddings["continuous"], full.embeddings["continuous"], atol=0.05)


def test_everything_is_left_as_it_was_and_nan_is_an_error(tmp_path):
    model = tiny_clip()
    model.train()
    model.text.tower.eval()  # a locked tower
    before = {name: part.training for name, part in model.named_modules()}
    torch.manual_seed(1)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    image, _ = encode_both(model, tmp_path, 5)
    assert {name: part.training for name, part in model.named_modules()} == before
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
    assert not image.embeddings["quantized"].requires_grad
    assert torch.is_grad_enabled()
    model.image.project_in[1].bias.data[0] = torch.nan
    with pytest.raises(NonFiniteError, match="13 of 13 continuous image embeddings are NaN"):
        encode_both(model, tmp_path, 5)


@pytest.mark.parametrize(
    ("size", "dtype"), [(2, torch.int8), (129, torch.int16), (2**15 + 1, torch.int32), (2**31 + 1, torch.int64)]
)
def test_ids_come_back_from_the_smallest_type_that_holds_them(tmp_path, size, dtype):
    ids = torch.tensor([size - 1, 0, -1])[None, :, None]
    assert id_dtype((size,)) == dtype
    save_ids(tmp_path / "ids", ids, (size,))
    assert load_file(tmp_path / "ids")["ids"].dtype == dtype
    assert torch.equal(load_ids(tmp_path / "ids", (size,)).long(), ids)


def test_ids_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(ShapeError, match=r"got shape \(1, 2, 3\), expected \(B, N, 2\)"):
        save_ids(tmp_path / "ids", torch.zeros(1, 2, 3, dtype=torch.int64), (4, 4))
    save_ids(tmp_path / "ids", torch.zeros(1, 2, 1, dtype=torch.int64), (8,))
    with pytest.raises(CheckpointError, match=r"sizes \[8\], expected \[9\]"):
        load_ids(tmp_path / "ids", (9,))
    (tmp_path / "ids").write_bytes((tmp_path / "ids").read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="ids cannot be read"):
        load_ids(tmp_path / "ids", (8,))
    with pytest.raises(CheckpointError, match="ids cannot be read"):
        load_ids(tmp_path / "none", (8,))


def test_usage_equals_counting_by_hand():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 6, (9, 4, 2), generator=generator)
    ids[:, 3] = -1
    others = [torch.unique(ids[5:, :3, column], return_counts=True) for column in (0, 1)]
    rows = iter([each for pair in others for each in pair])
    counts = count_codes(ids[:5], lambda mine: torch.cat([mine, next(rows)]))  # of two ranks
    usage = code_usage(counts, (8, 2**40), samples=9)
    bits = 0.0
    for codebook, size in enumerate((8, 2**40)):
        seen = Counter(ids[:, :3, codebook].flatten().tolist())
        entropy = -sum(n / 27 * math.log(n / 27) for n in seen.values())
        assert usage.codes_used[codebook] == len(seen)
        assert usage.usage[codebook] == len(seen) / size
        assert usage.perplexity[codebook] == pytest.approx(math.exp(entropy))
        bits += entropy / math.log(2)
    assert usage.bits_used_per_token == pytest.approx(bits)
    assert (usage.samples, usage.tokens, usage.tokens_per_sample) == (9, 27, 3)
    assert (usage.bits_per_token, usage.bits_per_sample) == (43, 129)


# ---- Rows of several ranks.


def some_left_out(left_out):
    partition = RankPartition.create(distributed=True)
    mine = [item for item in partition.indices(9) if item not in left_out]
    rows = partition.gather_rows(torch.tensor(mine, dtype=torch.float32)[:, None])
    return rows[:, 0].tolist(), partition.gather_items(mine)


def test_rows_and_items_agree_where_some_are_left_out(ranks):
    cases = [(), (0,), (1, 4), (0, 3, 6), tuple(range(1, 9)), tuple(range(9))]
    for found in ranks(3, for_each, some_left_out, [(left_out,) for left_out in cases]):
        for left_out, (rows, items) in zip(cases, found, strict=True):
            assert rows == items
            assert items == list(range(9)) or left_out
            assert sorted(items) == [item for item in range(9) if item not in left_out]
