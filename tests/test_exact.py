"""Ids that rounding does not decide."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.models import FSQ, IDENTITY, LFQ, RESIDUAL_FSQ, WIDE_LFQ, put_on_the_border, tiny_model
from vqclip import exact
from vqclip.errors import ConfigError, ShapeError
from vqclip.exact import TOLERANCE, Doubting, ExactEncoder, settled
from vqclip.export import OnnxTokenizer, export_onnx, verify, verify_program

CHANNELWISE = {
    "fsq": FSQ,
    "lfq": LFQ,
    "bsq": {"kind": "bsq", "bits": 6},
    "product": {"kind": "product", "layer": LFQ, "codebooks": 2},
    "residual": RESIDUAL_FSQ,
}
CONVOLUTIONAL = {"kind": "convolutional", "image_size": 16, "channels": [8, 8, 16, 16], "channels_per_group": 4}
CAPTIONS = ["a red star", "two small blue circles on a grey background", "x", "", "seven", "one of the many", "7", "#"]


def tokenizers(quantizer):
    """Both, and inputs of each."""
    torch.manual_seed(0)
    model = tiny_model(quantizer, quantizer).build().eval()
    pixels = torch.randint(0, 256, (8, 3, 16, 16), dtype=torch.uint8)
    return [(model.image, pixels), (model.text, model.text.preprocess(CAPTIONS))]


@pytest.mark.parametrize("family", CHANNELWISE)
def test_an_error_below_the_tolerance_changes_no_id(family, monkeypatch):
    """With a tolerance so large that errors as large change many ids."""
    monkeypatch.setattr(exact, "TOLERANCE", 0.1)
    generator = torch.Generator().manual_seed(0)
    for tokenizer, batch in tokenizers(CHANNELWISE[family]):
        encoder = ExactEncoder(tokenizer)
        expected, plain = encoder.float64.encode(batch), tokenizer.features

        def off(batch, plain=plain):
            features, mask = plain(batch)
            noise = torch.rand(features.shape, generator=generator) * 2 - 1
            real = features if mask is None else features * mask.unsqueeze(-1)
            return features + 0.095 * noise * real.abs().amax(dim=(1, 2), keepdim=True), mask

        monkeypatch.setattr(tokenizer, "features", off)
        changed = 0
        for _ in range(40):
            changed += int((tokenizer.encode(batch) != expected).sum())
            assert torch.equal(encoder.encode(batch), expected)
        assert changed > 10


def test_ids_on_the_border_are_those_of_float64_in_every_batch():
    for tokenizer, batch in tokenizers(WIDE_LFQ):
        put_on_the_border(tokenizer, batch)
        encoder = ExactEncoder(tokenizer)
        expected = encoder.float64.encode(batch)
        assert not torch.equal(tokenizer.encode(batch), expected)
        for size in (1, 3, 8):
            assert torch.equal(torch.cat([encoder.encode(some) for some in batch.split(size)]), expected)
            with torch.backends.mkldnn.flags(enabled=False):
                assert torch.equal(torch.cat([encoder.encode(some) for some in batch.split(size)]), expected)


def test_only_samples_in_doubt_are_encoded_again(monkeypatch):
    tokenizer, batch = tokenizers(LFQ)[0]

    def encoded_again():
        encoder, rows = ExactEncoder(tokenizer), []
        plain = encoder.float64.features
        monkeypatch.setattr(encoder.float64, "features", lambda batch: (rows.append(len(batch)), plain(batch))[1])
        encoder.encode(batch)
        return rows

    assert encoded_again() == []  # 8 samples of 24 channels; one in some thousand is in doubt
    with torch.no_grad():
        tokenizer.project_in[1].bias[2] -= tokenizer.features(batch)[0][5, 1, 2]
    assert encoded_again() == [1]


def test_vectors_of_a_codebook_are_in_doubt_on_a_border_of_any_direction():
    """A border may run along one of the shifts, as it does between two codes on the diagonal."""
    tokenizer, batch = tokenizers({"kind": "vq", "dim": 4, "codebook_size": 2})[0]
    doubting = Doubting(tokenizer)
    for first, second in (((1, 1, 1, 1), (1, -1, 1, -1)), ((1, 0, 0, 0), (0, 1, 0, 0)), ((1, 2, 3, 4), (4, 3, 2, 1))):
        codes = torch.tensor([first, second], dtype=torch.float32)
        with torch.no_grad():
            tokenizer.quantizer.codebook.copy_(codes.reshape(tokenizer.quantizer.codebook.shape))
        middle = codes.mean(dim=0)
        for away, doubtful in ((0.0, True), (100 * TOLERANCE, False)):
            features = (middle + away * (codes[0] - codes[1])).expand(1, 4, 4)
            tokenizer.features = lambda _, features=features: (features, None)
            assert bool(doubting(batch[:1])[1]) is doubtful
    del tokenizer.features


def test_padding_is_in_no_doubt():
    tokenizer, tokens = tokenizers(LFQ)[1]
    doubting = Doubting(tokenizer)
    plain = tokenizer.features

    def off(batch):
        features, mask = plain(batch)
        return features.masked_fill(~mask.unsqueeze(-1), float("nan")), mask

    ids, doubtful = doubting(tokens)
    tokenizer.features = off
    assert torch.equal(doubting(tokens)[0], ids)
    assert torch.equal(doubting(tokens)[1], doubtful)


@pytest.mark.parametrize("error", [1e-3, float("nan")])
def test_a_narrower_type_is_noticed(error, monkeypatch):
    tokenizer, batch = tokenizers(WIDE_LFQ)[0]
    put_on_the_border(tokenizer, batch)
    encoder, plain = ExactEncoder(tokenizer), tokenizer.features

    def off(batch):
        features, mask = plain(batch)
        features[:, 0, 0] += error
        return features, mask

    monkeypatch.setattr(tokenizer, "features", off)
    with pytest.raises(ConfigError, match=r"exact ids: got features in float32 .* times the tolerance away"):
        encoder.encode(batch)


def test_autocast_and_tf32_are_off_within_and_as_before_after():
    tokenizer, batch = tokenizers(LFQ)[0]
    encoder, expected = ExactEncoder(tokenizer), []
    plain = tokenizer.features

    def seen(batch):
        expected.append((torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32))
        return plain(batch)

    tokenizer.features = seen
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            ids = encoder.encode(batch)
            assert torch.is_autocast_enabled("cpu")
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(ids, encoder.float64.encode(batch))
    assert expected == [("highest", False)]
    assert torch.backends.cudnn.allow_tf32


def test_what_cannot_be_exact_is_refused():
    image = tokenizers(LFQ)[0][0]
    with pytest.raises(ConfigError, match=r"exact ids: got weights in torch.bfloat16 on cpu, expected float32"):
        ExactEncoder(image.bfloat16())
    with pytest.raises(ConfigError, match=r"exact ids: the image tokenizer's quantizer has no codes"):
        ExactEncoder(tokenizers(IDENTITY)[0][0])
    with pytest.raises(ShapeError, match="images: got"):
        ExactEncoder(tokenizers(LFQ)[0][0]).encode(torch.zeros(1, 3, 8, 8))


def test_an_empty_batch_has_no_ids():
    for tokenizer, batch in tokenizers(LFQ):
        assert ExactEncoder(tokenizer).encode(batch[:0]).shape == tokenizer.encode(batch[:0]).shape


@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_settled_takes_tensors_and_arrays(kind):
    asked = []

    def second(batch):
        asked.append(batch.tolist())
        return batch * 10

    ids = settled(lambda batch: (batch + 1, batch > 2), second, kind([1, 3, 2, 4]))
    assert ids.tolist() == [2, 30, 3, 40]
    assert settled(lambda batch: (batch + 1, batch > 9), second, kind([1, 3])).tolist() == [2, 4]
    assert asked == [[3, 4]]


def with_tower(tower):
    """A tokenizer of 32 bits, and inputs that lie on its borders."""
    (vit, pixels), (text, tokens) = tokenizers(WIDE_LFQ)
    tokenizer, batch = {"vit": (vit, pixels), "text": (text, tokens), "convolutional": (convolutional(), pixels)}[tower]
    put_on_the_border(tokenizer, batch)
    return tokenizer, batch


def convolutional():
    torch.manual_seed(0)
    image = tiny_model(WIDE_LFQ).image
    return type(image).model_validate({**image.model_dump(), "tower": CONVOLUTIONAL}).build(16).eval()


def test_onnx_gives_the_same_ids_on_the_border(tmp_path):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    tokenizer, batch = with_tower("convolutional")
    expected = ExactEncoder(tokenizer).float64.encode(batch)
    assert not torch.equal(tokenizer.encode(batch), expected)
    folder = export_onnx(tokenizer, tmp_path / "onnx", exact=True)
    runtime = OnnxTokenizer(folder)
    assert runtime.exact
    assert {path.stem for path in folder.glob("*.onnx")} == {"encode_doubting", "encode_float64", "decode", "embed"}
    assert np.array_equal(runtime.encode(batch.numpy()), expected.numpy())


@pytest.mark.slow
@pytest.mark.parametrize("tower", ["convolutional", "vit", "text"])
def test_every_runtime_agrees_on_the_border(tower, tmp_path):
    tokenizer, batch = with_tower(tower)
    plain = OnnxTokenizer(export_onnx(tokenizer, tmp_path / "plain"))
    expected = ExactEncoder(tokenizer).float64.encode(batch)
    assert not np.array_equal(plain.encode(batch.numpy()), expected.numpy())
    found = verify(export_onnx(tokenizer, tmp_path / "exact", exact=True), tokenizer, batch.split(3))
    assert (found.differing_ids, found.between_batches) == (0, 0)
    assert verify_program(tokenizer, batch.split(3), exact=True).differing_ids == 0
