"""Ids that rounding does not decide."""

from __future__ import annotations

import copy
from threading import Lock

import numpy as np
import pytest
import torch
from torch import nn

from tests.models import FSQ, IDENTITY, LFQ, RESIDUAL_FSQ, VQ, WIDE_LFQ, put_on_the_border, tiny_model
from vqclip.errors import ConfigError
from vqclip.exact import Doubting, exactness, in_float64, is_exact, require_exact, settled
from vqclip.export import OnnxTokenizer, export_onnx, verify, verify_program
from vqclip.export.to_onnx import VERSIONS
from vqclip.quantizers.residual import at_depth
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


def plain(tokenizer, batch):
    """Its ids without exactness."""
    with exactness(tokenizer, False):
        return tokenizer.encode(batch)


def patched(monkeypatch, tokenizer, change):
    """Let ``change(values, mask)`` make of float32's features, before they are normalized, what it gives."""
    projected = type(tokenizer).projected

    def changed(self, batch):
        values, mask = projected(self, batch)
        return values if values.dtype == torch.float64 else change(values, mask), mask

    monkeypatch.setattr(type(tokenizer), "projected", changed)


@pytest.mark.parametrize(
    ("family", "normalize", "tolerance"),
    [
        *((family, "none", 0.1) for family in CHANNELWISE),
        ("fsq", "layer", 0.02),
        ("fsq", "l2", 0.02),
        ("lfq", "layer", 0.02),
    ],
)
def test_an_error_below_the_tolerance_changes_no_id(family, normalize, tolerance, monkeypatch):
    """With a tolerance so large that errors as large change many ids."""
    generator = torch.Generator().manual_seed(0)

    def off(values, mask):
        noise = torch.rand(values.shape, generator=generator) * 2 - 1
        real = values if mask is None else values * mask.unsqueeze(-1)
        return values + 0.9 * tolerance * noise * real.abs().amax(dim=(1, 2), keepdim=True)

    for tokenizer, batch in tokenizers(CHANNELWISE[family]):
        tokenizer.normalize = normalize
        monkeypatch.setattr(tokenizer.tolerance, "of", lambda _: tolerance)
        expected, changed = in_float64(tokenizer).encode(batch), 0
        with monkeypatch.context() as patch:
            patched(patch, tokenizer, off)
            for _ in range(40):
                changed += int((plain(tokenizer, batch) != expected).sum())
                assert torch.equal(tokenizer.encode(batch), expected)
                assert torch.equal(tokenizer(batch).ids, expected)
        assert changed > 0


def test_where_the_tolerance_is_seen_not_to_hold_all_is_computed_again(monkeypatch):
    tokenizer, batch = tokenizers(WIDE_LFQ)[0]
    put_on_the_border(tokenizer, batch)
    expected = in_float64(tokenizer).encode(batch)
    monkeypatch.setattr(tokenizer.tolerance, "of", lambda _: 1e-8)
    rows = Doubting(tokenizer)(batch)[1]
    assert 0 < rows.sum() < len(batch)
    assert not torch.equal(plain(tokenizer, batch)[~rows], expected[~rows])
    assert torch.equal(tokenizer.encode(batch), expected)


def test_ids_on_the_border_are_those_of_float64_in_every_batch():
    for tokenizer, batch in tokenizers(WIDE_LFQ):
        put_on_the_border(tokenizer, batch)
        expected = in_float64(tokenizer).encode(batch)
        assert not torch.equal(plain(tokenizer, batch), expected)
        for size in (1, 3, 8):
            assert torch.equal(torch.cat([tokenizer.encode(some) for some in batch.split(size)]), expected)
            with torch.backends.mkldnn.flags(enabled=False):
                assert torch.equal(torch.cat([tokenizer.encode(some) for some in batch.split(size)]), expected)


def test_the_training_path_in_evaluation_mode_has_the_same_ids_and_embeds_them():
    for tokenizer, batch in tokenizers(WIDE_LFQ):
        put_on_the_border(tokenizer, batch)
        ids, raw = tokenizer.encode(batch), plain(tokenizer, batch)
        out, continuous = tokenizer.with_continuous(batch)
        assert torch.equal(out.ids, ids)
        assert not torch.equal(raw, ids)
        assert torch.equal(out.embedding, tokenizer.embed(ids))
        assert torch.equal(continuous, tokenizer.continuous(batch))
        assert (out.embedding.dtype, continuous.dtype) == (torch.float32, torch.float32)


def test_gradients_in_evaluation_mode_are_those_of_the_features():
    """A sample in doubt differs in the last bits only: here none has an id that float64 changes."""
    for tokenizer, batch in tokenizers(LFQ):
        grads = []
        for tolerance in (0.0, 0.1):  # none in doubt, all
            tokenizer.zero_grad()
            tokenizer.tolerance.of = lambda _, tolerance=tolerance: tolerance
            tokenizer(batch).embedding[:, 0].sum().backward()
            grads.append([p.grad for p in tokenizer.parameters() if p.grad is not None])
        assert len(grads[0]) > 10
        torch.testing.assert_close(grads[0], grads[1], atol=1e-6, rtol=1e-4)


def test_only_samples_in_doubt_are_computed_again(monkeypatch):
    tokenizer, batch = tokenizers(LFQ)[0]
    rows, projected = [], type(tokenizer).projected

    def counted(self, batch):
        found, mask = projected(self, batch)
        if found.dtype == torch.float64:
            rows.append(len(batch))
        return found, mask

    tokenizer.tolerance.of(tokenizer)
    monkeypatch.setattr(type(tokenizer), "projected", counted)
    tokenizer.encode(batch)
    assert rows == []  # 8 samples of 24 channels; one in some thousand is in doubt
    with torch.no_grad():
        tokenizer.project_in[1].bias[2] -= tokenizer.features(batch)[0][5, 1, 2]
    tokenizer.tolerance.of(tokenizer)
    assert rows == [4]  # samples that are drawn, once after every change of weights
    tokenizer.encode(batch)
    assert rows == [4, 1]


@pytest.mark.parametrize("family", ["fsq", "lfq", "product"])
def test_the_quantizer_computes_in_float64(family, monkeypatch):
    for tokenizer, batch in tokenizers(CHANNELWISE[family]):
        given, nearest = [], type(tokenizer.quantizer)._nearest
        monkeypatch.setattr(
            type(tokenizer.quantizer),
            "_nearest",
            lambda self, x, given=given, nearest=nearest: (given.append(x.dtype), nearest(self, x))[1],
        )
        tokenizer.encode(batch)
        tokenizer(batch)
        assert set(given) == {torch.float64}
        monkeypatch.undo()


def fused(tokenizer):
    torch.optim.AdamW(tokenizer.parameters(), 0.1, fused=True).step()


def behind_its_back(tokenizer):
    for weight in tokenizer.tower.parameters():
        weight.data.mul_(1.5)


@pytest.mark.parametrize("write", [fused, behind_its_back])
def test_weights_that_change_unnoticed_are_those_that_count(write):
    tokenizer, batch = tokenizers(WIDE_LFQ)[0]
    tokenizer.encode(batch)
    tokenizer(batch).embedding[:, 0].sum().backward()
    write(tokenizer)
    put_on_the_border(tokenizer, batch)
    tokenizer.encode(batch)
    write(tokenizer)
    assert torch.equal(tokenizer.encode(batch), in_float64(tokenizer).encode(batch))
    assert torch.equal(tokenizer.encode(batch), copy.deepcopy(tokenizer).encode(batch))


def test_vectors_of_a_codebook_are_in_doubt_on_a_border_of_any_direction():
    """A border may run along one of the shifts, as it does between two codes on the diagonal."""
    tokenizer, batch = tokenizers({"kind": "vq", "dim": 4, "codebook_size": 2})[0]
    doubting = Doubting(tokenizer)
    for first, second in (((1, 1, 1, 1), (1, -1, 1, -1)), ((1, 0, 0, 0), (0, 1, 0, 0)), ((1, 1, 0, 0), (0, 0, 1, 1))):
        codes = torch.tensor([first, second], dtype=torch.float32)
        with torch.no_grad():
            tokenizer.quantizer.codebook.copy_(codes.reshape(tokenizer.quantizer.codebook.shape))
        middle = codes.mean(dim=0)
        for away, doubtful in ((0.0, True), (1e-3, False)):
            features = (middle + away * (codes[0] - codes[1])).expand(1, 4, 4)
            tokenizer.projected = lambda _, features=features: (features, None)
            assert bool(doubting(batch[:1])[1]) is doubtful


def test_padding_is_in_no_doubt():
    tokenizer, tokens = tokenizers(LFQ)[1]
    doubting, projected = Doubting(tokenizer), tokenizer.projected

    def off(batch):
        found, mask = projected(batch)
        return found.masked_fill(~mask.unsqueeze(-1), float("nan")), mask

    ids, doubtful = doubting(tokens)
    tokenizer.projected = off
    assert torch.equal(doubting(tokens)[0], ids)
    assert torch.equal(doubting(tokens)[1], doubtful)


def test_weights_that_are_no_numbers_raise_nothing_here():
    """What they mean is told where embeddings are looked at."""
    for tokenizer, batch in tokenizers(FSQ):
        with torch.no_grad():
            tokenizer.project_in[1].bias[0] = float("nan")
        out = tokenizer(batch)
        assert out.embedding.isnan().any()
        assert torch.equal(out.ids, tokenizer.encode(batch))
        assert not Doubting(tokenizer)(batch)[1].any()
        assert tokenizer.tolerance.of(tokenizer) == 48 * 2**-23


def test_the_tolerance_is_that_of_the_tower_and_of_its_weights(monkeypatch):
    tokenizer = tokenizers(LFQ)[0][0]
    before = tokenizer.tolerance.of(tokenizer)
    assert 48 * 2**-23 <= before < 1e-5
    patched(monkeypatch, tokenizer, lambda values, _: values * (1 + 1e-5))
    assert tokenizer.tolerance.of(tokenizer) == before
    with torch.no_grad():
        next(tokenizer.tower.parameters()).add_(0.1)
    assert 3e-6 < tokenizer.tolerance.of(tokenizer) / 48 < 1e-5


@pytest.mark.parametrize(
    ("error", "least", "most"), [(0.0, 48 * 2**-23, 48 * 2**-23), (1e-4, 48 * 0.9e-4, 48 * 1.1e-4)]
)
def test_the_tolerance_is_48_times_the_mean_error_of_real_tokens(error, least, most, monkeypatch):
    tokenizer = tokenizers(LFQ)[1][0]

    def off(values, mask):
        wide = in_float64(tokenizer).projected(tokenizer.drawn_inputs(4))[0]
        largest = wide.masked_fill(~mask.unsqueeze(-1), 0).abs().amax(dim=(1, 2), keepdim=True)
        return (wide + error * largest).masked_fill(~mask.unsqueeze(-1), 7.0)

    patched(monkeypatch, tokenizer, off)
    assert least <= tokenizer.tolerance.of(tokenizer) <= most


def test_a_tower_that_cannot_be_copied_is_told():
    tokenizer, batch = tokenizers(LFQ)[0]
    tokenizer.tower.lock = Lock()
    with pytest.raises(
        ConfigError, match=r"exact ids: got a tower that cannot be copied.*lock.*tokenizer.exact = False"
    ):
        tokenizer.encode(batch)
    plain(tokenizer, batch)


def test_a_copy_in_float64_shares_what_comes_after_the_features():
    for tokenizer, batch in tokenizers(LFQ):
        wide, whole = in_float64(tokenizer), copy.deepcopy(tokenizer).double()
        mask = tokenizer.mask(batch)
        real = slice(None) if mask is None else mask
        assert torch.equal(wide.features(batch)[0][real], whole.features(batch)[0][real])
        assert wide.quantizer is tokenizer.quantizer
        assert {p.dtype for p in tokenizer.parameters()} == {torch.float32}
        assert {p.dtype for p in wide.project_in.parameters()} == {torch.float64}
        assert wide.tower is not tokenizer.tower


def test_a_table_that_is_also_multiplied_by_is_widened():
    tokenizer, tokens = tokenizers(LFQ)[1]
    text = tokenizer.tower.transformer
    table = text.token_embedding.weight
    assert in_float64(tokenizer).tower.transformer.token_embedding.weight is table
    text.ln_final = nn.Sequential(text.ln_final, nn.Linear(16, len(table), bias=False), nn.Linear(len(table), 16))
    text.ln_final[1].weight = table
    wide, whole = in_float64(tokenizer), copy.deepcopy(tokenizer).double()
    assert wide.tower.transformer.ln_final[1].weight.dtype == torch.float64
    real = tokenizer.mask(tokens)
    assert torch.equal(wide.features(tokens)[0][real], whole.features(tokens)[0][real])


def test_depth_is_heeded():
    tokenizer, batch = tokenizers(RESIDUAL_FSQ)[0]
    with torch.no_grad():
        tokenizer.project_in[1].bias[2] -= tokenizer.features(batch)[0][5, 1, 2]  # 0 lies between two levels of four
    with at_depth(tokenizer, 1):
        assert bool(Doubting(tokenizer)(batch)[1][5])
        assert bool((tokenizer.encode(batch)[..., 1:] == -1).all())


def test_tf32_is_off_within(monkeypatch):
    tokenizer, batch = tokenizers(LFQ)[0]
    matmul, tower, seen = torch.backends.mkldnn.matmul, type(tokenizer.tower).forward, []
    monkeypatch.setattr(
        type(tokenizer.tower),
        "forward",
        lambda self, batch: (seen.append(matmul.fp32_precision), tower(self, batch))[1],
    )
    matmul.fp32_precision = "bf16"
    try:
        ids = tokenizer.encode(batch)
        assert set(seen) == {"ieee"}
        plain(tokenizer, batch)
        assert seen[-1] == matmul.fp32_precision == "bf16"
    finally:
        matmul.fp32_precision = "none"
    assert torch.equal(ids, in_float64(tokenizer).encode(batch))


def test_where_another_arithmetic_is_asked_for_ids_are_those_of_it():
    tokenizer, batch = tokenizers(LFQ)[0]
    assert is_exact(tokenizer)
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_exact(tokenizer)
        assert torch.equal(tokenizer.encode(batch), plain(tokenizer, batch))
    with exactness(tokenizer, False):
        assert not is_exact(tokenizer)
    assert is_exact(tokenizer)
    next(iter(tokenizer.tower.children())).train()  # dropout, say
    assert not is_exact(tokenizer)
    for changed in (copy.deepcopy(tokenizer).eval().bfloat16(), copy.deepcopy(tokenizer).eval().double()):
        assert not is_exact(changed)
        assert torch.equal(changed.encode(batch), plain(changed, batch))
    assert not is_exact(copy.deepcopy(tokenizer).eval().to("meta"))
    assert not is_exact(tokenizers(IDENTITY)[0][0])


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:FutureWarning")
def test_graphs_are_plain():
    tokenizer, batch = tokenizers(WIDE_LFQ)[0]
    put_on_the_border(tokenizer, batch)
    compiled = torch.compile(lambda x: tokenizer(x).ids, backend="eager", fullgraph=True)
    assert torch.equal(compiled(batch), plain(tokenizer, batch))
    found = []
    torch.jit.trace(lambda x: (found.append(is_exact(tokenizer)), x)[1], torch.zeros(1), check_trace=False)
    assert found == [False]


def test_tensors_of_inference_mode_have_exact_ids():
    tokenizer, batch = tokenizers(LFQ)[0]
    with torch.inference_mode():
        copied = copy.deepcopy(tokenizer)
        assert next(copied.parameters()).is_inference()
        assert torch.equal(copied.encode(batch), tokenizer.encode(batch))


def test_what_cannot_be_exact_is_refused():
    image = tokenizers(LFQ)[0][0]
    image.exact = False
    require_exact(image)
    with pytest.raises(ConfigError, match=r"exact ids: got weights in torch.bfloat16 on cpu, expected float32"):
        require_exact(copy.deepcopy(image).bfloat16())
    with pytest.raises(ConfigError, match=r"exact ids: got weights in torch.float32 on meta, expected float32 on a"):
        require_exact(copy.deepcopy(image).to("meta"))
    with pytest.raises(ConfigError, match=r"exact ids: got a tokenizer in training mode, at least in part"):
        Doubting(image.train())
    with pytest.raises(ConfigError, match=r"exact ids: the image tokenizer's quantizer has no codes"):
        require_exact(tokenizers(IDENTITY)[0][0])


def test_an_empty_batch_has_no_ids():
    for tokenizer, batch in tokenizers(LFQ):
        assert tokenizer.encode(batch[:0]).shape == plain(tokenizer, batch[:0]).shape
        assert tokenizer(batch[:0]).embedding.shape == (0, 16)


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
    expected = in_float64(tokenizer).encode(batch)
    assert not torch.equal(plain(tokenizer, batch), expected)
    folder = export_onnx(tokenizer, tmp_path / "onnx")
    runtime = OnnxTokenizer(folder)
    assert runtime.exact
    assert {path.stem for path in folder.glob("*.onnx")} == {"encode_doubting", "encode_float64", "decode", "embed"}
    assert np.array_equal(runtime.encode(batch.numpy()), expected.numpy())


@pytest.mark.slow
@pytest.mark.parametrize("tower", ["convolutional", "vit", "text"])
def test_every_runtime_agrees_on_the_border(tower, tmp_path):
    tokenizer, batch = with_tower(tower)
    rounded = OnnxTokenizer(export_onnx(tokenizer, tmp_path / "plain", exact=False))
    expected = in_float64(tokenizer).encode(batch)
    assert not np.array_equal(rounded.encode(batch.numpy()), expected.numpy())
    found = verify(export_onnx(tokenizer, tmp_path / "exact"), tokenizer, batch.split(3))
    assert (found.differing_ids, found.between_batches) == (0, 0)
    assert verify_program(tokenizer, batch.split(3)).differing_ids == 0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["fsq", "bsq", "residual", "vq"])
def test_every_family_has_exact_files(family, tmp_path):
    for tokenizer, batch in tokenizers(CHANNELWISE.get(family, VQ)):
        folder = export_onnx(tokenizer, tmp_path / tokenizer.modality)
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
