"""Ids that rounding does not decide."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.models import FSQ, IDENTITY, LFQ, RESIDUAL_FSQ, VQ, WIDE_LFQ, put_on_the_border, tiny_model
from vqclip import exact
from vqclip.errors import ConfigError, NonFiniteError, ShapeError
from vqclip.exact import ExactEncoder, settled
from vqclip.export import OnnxTokenizer, export_onnx, verify, verify_program
from vqclip.export.to_onnx import VERSIONS
from vqclip.quantizers.residual import at_depth
from vqclip.reader import CodeReader, ReadingConfig
from vqclip.sealed import seal

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
    monkeypatch.setattr(exact, "_tolerance", lambda *_: 0.1)
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
    doubting = ExactEncoder(tokenizer).doubting
    for first, second in (((1, 1, 1, 1), (1, -1, 1, -1)), ((1, 0, 0, 0), (0, 1, 0, 0)), ((1, 2, 3, 4), (4, 3, 2, 1))):
        codes = torch.tensor([first, second], dtype=torch.float32)
        with torch.no_grad():
            tokenizer.quantizer.codebook.copy_(codes.reshape(tokenizer.quantizer.codebook.shape))
        middle = codes.mean(dim=0)
        for away, doubtful in ((0.0, True), (1e-3, False)):
            features = (middle + away * (codes[0] - codes[1])).expand(1, 4, 4)
            tokenizer.features = lambda _, features=features: (features, None)
            assert bool(doubting(batch[:1])[1]) is doubtful
    del tokenizer.features


def test_padding_is_in_no_doubt():
    tokenizer, tokens = tokenizers(LFQ)[1]
    doubting = ExactEncoder(tokenizer).doubting
    plain = tokenizer.features

    def off(batch):
        features, mask = plain(batch)
        return features.masked_fill(~mask.unsqueeze(-1), float("nan")), mask

    ids, doubtful = doubting(tokens)
    tokenizer.features = off
    assert torch.equal(doubting(tokens)[0], ids)
    assert torch.equal(doubting(tokens)[1], doubtful)


@pytest.mark.parametrize(("error", "raised"), [(1e-3, ConfigError), (float("nan"), NonFiniteError)])
def test_features_that_no_rounding_explains_are_told(error, raised, monkeypatch):
    tokenizer, batch = tokenizers(WIDE_LFQ)[0]
    put_on_the_border(tokenizer, batch)
    encoder, plain = ExactEncoder(tokenizer), tokenizer.features

    def off(batch):
        features, mask = plain(batch)
        features[:, 0, 0] += error
        return features, mask

    monkeypatch.setattr(tokenizer, "features", off)
    with pytest.raises(raised, match=r"exact ids: got a feature"):
        encoder.encode(batch)


def test_a_coarse_tower_has_a_larger_tolerance_and_a_narrow_one_is_refused(monkeypatch):
    tokenizer, _ = tokenizers(LFQ)[0]
    fine, plain = ExactEncoder(tokenizer), tokenizer.features
    assert fine.doubting.tolerance == pytest.approx(32 * 2**-23, rel=0.5)
    monkeypatch.setattr(exact, "in_float64", lambda _: fine.float64)
    monkeypatch.setattr(tokenizer, "features", lambda batch: (plain(batch)[0] * (1 + 1e-5), None))
    assert 3e-6 < ExactEncoder(tokenizer).doubting.tolerance / 32 < 1e-5
    monkeypatch.setattr(tokenizer, "features", lambda batch: (plain(batch)[0].bfloat16().float(), None))
    with pytest.raises(ConfigError, match="does the tower compute part of them in a narrower type"):
        ExactEncoder(tokenizer)


def test_depth_is_heeded():
    tokenizer, batch = tokenizers(RESIDUAL_FSQ)[0]
    with torch.no_grad():
        tokenizer.project_in[1].bias[2] -= tokenizer.features(batch)[0][5, 1, 2] - 0.5  # between two levels of four
    encoder = ExactEncoder(tokenizer)
    with at_depth(tokenizer, 1):
        assert torch.equal(encoder.encode(batch), tokenizer.encode(batch))
        assert bool((encoder._settle(batch)[..., 1:] == -1).all())


def precisions():
    backends = torch.backends
    owners = (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv)
    return [owner.fp32_precision for owner in owners]


@pytest.mark.parametrize("legacy", [True, False])
def test_autocast_and_tf32_are_off_within_and_as_before_after(legacy):
    tokenizer, batch = tokenizers(LFQ)[0]
    encoder, seen, before = ExactEncoder(tokenizer), [], precisions()
    plain = tokenizer.features
    tokenizer.features = lambda batch: (seen.append(precisions()), plain(batch))[1]
    try:
        if legacy:
            torch.set_float32_matmul_precision("medium")
        else:
            torch.backends.cuda.matmul.fp32_precision = "tf32"
            torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        changed = precisions()
        with torch.autocast("cpu", torch.bfloat16):
            ids = encoder.encode(batch)
            assert torch.is_autocast_enabled("cpu")
        assert precisions() == changed != before
    finally:
        torch.backends.cuda.matmul.fp32_precision, _, torch.backends.mkldnn.matmul.fp32_precision, _ = before
    assert torch.equal(ids, encoder.float64.encode(batch))
    assert seen == [["ieee"] * 4]


def test_what_cannot_be_exact_is_refused():
    image = tokenizers(LFQ)[0][0]
    with pytest.raises(ConfigError, match=r"exact ids: got weights in torch.bfloat16 on cpu, expected float32"):
        ExactEncoder(image.bfloat16())
    encoder = ExactEncoder(tokenizers(LFQ)[0][0])
    encoder.tokenizer.bfloat16()
    with pytest.raises(ConfigError, match=r"exact ids: got weights in torch.bfloat16"):
        encoder.encode(torch.zeros(1, 3, 16, 16))
    encoder = ExactEncoder(tokenizers(LFQ)[0][0])
    encoder.tokenizer.to("meta")
    with pytest.raises(ConfigError, match=r"exact ids: got a tokenizer on meta, expected cpu"):
        encoder.encode(torch.zeros(1, 3, 16, 16))
    reader = CodeReader("image", ReadingConfig.model_validate({"quantizer": LFQ, "width": 16}), 4, 4, 16)
    with pytest.raises(ConfigError, match=r"exact ids: got a CodeReader, expected a tokenizer that encodes"):
        ExactEncoder(reader)
    with pytest.raises(ConfigError, match=r"exact ids: got a tokenizer in training mode"):
        ExactEncoder(tokenizers(LFQ)[0][0].train())
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


@pytest.mark.slow
@pytest.mark.parametrize("family", ["fsq", "bsq", "residual", "vq"])
def test_every_family_has_exact_files(family, tmp_path):
    for tokenizer, batch in tokenizers(CHANNELWISE.get(family, VQ)):
        folder = export_onnx(tokenizer, tmp_path / tokenizer.modality, exact=True)
        assert verify(folder, tokenizer, batch.split(3)).differing_ids == 0


def test_exact_files_are_for_the_cpu(tmp_path):
    pytest.importorskip("onnxruntime")
    (tmp_path / "export.json").write_bytes(seal({**VERSIONS, "parts": {"encode_doubting": {}}}))
    with pytest.raises(ConfigError, match="got AzureExecutionProvider, expected CPUExecutionProvider alone"):
        OnnxTokenizer(tmp_path, providers=("AzureExecutionProvider",))
    with pytest.raises(ConfigError, match="providers: got Nope, expected some of .*CPUExecutionProvider"):
        OnnxTokenizer(tmp_path, providers=("Nope",))
    with pytest.raises(ConfigError, match="threads: got 0, expected at least 1"):
        OnnxTokenizer(tmp_path, threads=0)
