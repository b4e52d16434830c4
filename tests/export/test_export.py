"""Exported tokenizers against the ones they were made from.

The default tests export tiny tokenizers of some families; `-m slow` exports every family of both modalities.
"""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from unittest import mock

import open_clip
import pytest
import torch
from PIL import Image

from tests.commands import command
from tests.models import FSQ, IDENTITY, LFQ, PRODUCT, RESIDUAL, RESIDUAL_FSQ, SIMVQ, VQ, tiny_model
from tests.open_clip_models import TRUNK, both_towers, save_open_clip
from vqclip.config import to_yaml
from vqclip.errors import BackendError, CheckpointError, ConfigError, DataError, NonFiniteError, ShapeError
from vqclip.export import OnnxTokenizer, export_onnx, export_program, verify, verify_program
from vqclip.export.open_clip import export_towers
from vqclip.io.atomic import digest_file
from vqclip.io.json_files import add_checksum
from vqclip.model import CLIP, ModelConfig
from vqclip.nn.layers import QueryReductionConfig
from vqclip.pixels import ConvolutionalPixelsConfig, DetailConfig, PixelsConfig, attach
from vqclip.tokenizer.stored import fingerprint
from vqclip.train import TrainConfig

main = command("export")

FAMILIES = {
    "fsq": FSQ,
    "lfq": LFQ,
    "bsq": {"kind": "bsq", "bits": 6},
    "vq": VQ,
    "simvq": SIMVQ,
    "product": PRODUCT,
    "product-vq": {"kind": "product", "layer": VQ, "codebooks": 2},
    "residual-vq": RESIDUAL,
    "residual-fsq": RESIDUAL_FSQ,
    # Ids beyond what float32 or float64 can count.
    "fsq-2^53": {"kind": "fsq", "levels": [100] * 8},
    "lfq-2^60": {"kind": "lfq", "bits": 60, "loss_weights": {"codebook_entropy_gap": 0}},
}
CAPTIONS = ["a red star", "two small blue circles on a grey background, and more than fits", "x", ""]


def built(quantizer) -> CLIP:
    torch.manual_seed(0)
    return tiny_model(quantizer, quantizer).build().eval()


def batches(model, modality, sizes=(1, 3, 8)):
    """Another batch for every size."""
    generator = torch.Generator().manual_seed(1)
    if modality == "image":
        return [torch.randint(0, 256, (b, 3, 16, 16), dtype=torch.uint8, generator=generator) for b in sizes]
    words = [*CAPTIONS, "one", "of", "the", "many", "#7"]
    return [model.text.preprocess([words[n % 9] for n in range(b, 2 * b)]) for b in sizes]


def test_a_program_is_stored_and_loaded_and_leaves_the_tokenizer_as_it_was():
    tokenizer, file = built(PRODUCT).text.train(), io.BytesIO()
    before = fingerprint(tokenizer)
    tokenizer.quantizer.eval()
    torch.export.save(export_program(tokenizer, "embed"), file)
    assert tokenizer.training
    assert not tokenizer.quantizer.training
    assert fingerprint(tokenizer) == before
    file.seek(0)
    tokenizer.eval()
    ids = tokenizer.encode(CAPTIONS)
    torch.testing.assert_close(torch.export.load(file).module()(ids), tokenizer.embed(ids), atol=1e-6, rtol=0)


@pytest.fixture(scope="module")
def onnx_packages():
    """What ONNX files are written and run with."""
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def onnx(tmp_path_factory, onnx_packages):
    """A text tokenizer and its ONNX files, with weights in files of their own, as torch writes more than 1.5 GiB."""
    from torch.onnx._internal.exporter import _onnx_program

    tokenizer = built(LFQ).text
    with mock.patch.object(_onnx_program, "_LARGE_MODEL_THRESHOLD", 0):
        return tokenizer, export_onnx(tokenizer, tmp_path_factory.mktemp("onnx") / "text")


def check(tokenizer, folder, inputs):
    found = verify(folder, tokenizer, inputs)
    assert found.samples == sum(len(batch) for batch in inputs)
    assert found.ids > 0
    assert found.differing_ids == 0
    assert found.vectors < 1e-5
    assert found.embeddings < 1e-5


def test_onnx_equals_the_tokenizer(onnx):
    tokenizer, folder = onnx
    model = built(LFQ)
    check(tokenizer, folder, batches(model, "text"))
    files = {f"{part}.onnx{end}" for part in ("decode", "embed", "encode") for end in ("", ".data")}
    assert {path.name for path in folder.iterdir()} == {"export.json", "README.md"} | files
    assert "The text half of a tokenizer made with vqclip" in (folder / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
def test_onnx_of_a_text_transformer_with_options(causal, tmp_path, onnx_packages):
    config = tiny_model(LFQ, LFQ)
    options = {"causal": causal, "pos_embed": "rope", "norm_layer": "rmsnorm", "mlp_layer": "swiglu", "qk_norm": True}
    text = {"tower": config.text.tower.model_copy(update=options), "reduce": QueryReductionConfig(count=2)}
    model = config.model_copy(update={"text": config.text.model_copy(update=text)}).build().eval()
    check(model.text, export_onnx(model.text, tmp_path / "onnx"), batches(model, "text"))


@pytest.mark.slow
def test_images_of_detail_ids_from_programs_and_onnx(tmp_path, onnx_packages):
    image = built(FSQ).image
    detail = DetailConfig(quantizer={"kind": "fsq", "levels": [4, 3]}, stages=2, channels=8, max_channels=8)
    config = PixelsConfig(decoder=ConvolutionalPixelsConfig(channels=8), image_size=16, detail=detail)
    attach(image, config.build(3, 4).eval())
    images = torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8)
    ids = image.encode_pixels(images)
    run = export_program(image, "decode_pixels").module()
    for stages in (0, 1, 2):
        left_out = torch.where(torch.arange(3) <= stages, ids, -1)
        torch.testing.assert_close(run(left_out), image.decode_pixels(ids, detail=stages), rtol=0, atol=1e-6)
    folder = export_onnx(image, tmp_path / "onnx")
    found = verify(folder, image, [images])
    assert found.pixels < 1e-5
    assert "pixels by" in str(found)
    assert OnnxTokenizer(folder).decode_pixels(ids.numpy()).shape == (5, 3, 16, 16)
    with torch.no_grad():
        next(image.pixels.parameters()).add_(1)
    with pytest.raises(CheckpointError, match="made from the pixel decoder"):
        verify(folder, image, [images])


def test_a_tokenizer_without_a_decoder_gives_no_images(onnx):
    tokenizer, folder = onnx
    with pytest.raises(ConfigError, match="got files of a tokenizer without a pixel decoder"):
        OnnxTokenizer(folder).decode_pixels(tokenizer.encode(CAPTIONS).numpy())
    with pytest.raises(ConfigError, match="part: got 'decode_pixels', expected one of encode, decode, embed, the "):
        export_program(tokenizer, "decode_pixels")


def test_what_export_json_says_is_so(onnx):
    tokenizer, folder = onnx
    runtime = OnnxTokenizer(folder)
    tokens = tokenizer.preprocess(CAPTIONS).numpy()
    ids = runtime.encode(tokens)
    for part, given in (("encode", tokens), ("decode", ids), ("embed", ids)):
        for side, array in (("inputs", given), ("outputs", getattr(runtime, part)(given))):
            (stated,) = getattr(runtime.info.parts[part], side).values()
            assert stated.model_dump() == {"dtype": str(array.dtype), "shape": [None, *array.shape[1:]]}
    assert runtime.info.tokenizer_sha256 == fingerprint(tokenizer)
    assert runtime.info.preprocess["context_length"] == tokenizer.tower.num_tokens
    assert runtime.info.codebook_sizes == list(tokenizer.codebook_sizes)


def test_wrong_inputs_are_refused(onnx):
    tokenizer, folder = onnx
    runtime = OnnxTokenizer(folder)
    with pytest.raises(ShapeError, match=r"inputs of encode: got shape \(2, 11\) and dtype int64, expected \(B, 12\)"):
        runtime.encode(tokenizer.preprocess(CAPTIONS[:2])[:, :11].numpy())
    with pytest.raises(ShapeError, match="ids of embed: .*float32"):
        runtime.embed(tokenizer.encode(CAPTIONS).float().numpy())
    with pytest.raises(ShapeError, match=r"inputs of encode: got a Tensor, expected a numpy array \(B, 12\) int64"):
        runtime.encode(tokenizer.preprocess(CAPTIONS))
    with pytest.raises(ShapeError, match="inputs of encode: got no sample"):
        runtime.encode(tokenizer.preprocess(CAPTIONS)[:0].numpy())
    ids = tokenizer.encode(CAPTIONS).numpy()
    for bad in (-2, 64):
        ids[1, 0, 0] = bad
        with pytest.raises(ShapeError, match=rf"ids of embed: got {bad}, expected ids from 0 .* \[64\], or -1"):
            runtime.embed(ids)


def test_an_honest_hash_of_nonsense_is_refused(onnx, tmp_path):
    """Whoever makes a file can make its hash, too."""
    folder = Path(shutil.copytree(onnx[1], tmp_path / "forged"))
    body = json.loads((folder / "export.json").read_bytes())
    del body["sha256"]

    def forge(part, **change):
        parts = {**body["parts"], part: {**body["parts"][part], **change}}
        (folder / "export.json").write_bytes(add_checksum({**body, "parts": parts}))

    for inputs in ({}, [], {"ids": {}}, {"ids": {"dtype": "int64", "shape": "no"}}):
        forge("decode", inputs=inputs)
        with pytest.raises(CheckpointError, match=r"export.json: parts.decode.inputs"):
            OnnxTokenizer(folder)
    (folder / "decode.onnx").write_bytes(b"no graph")
    forge("decode", file=digest_file(folder / "decode.onnx").model_dump())
    with pytest.raises(CheckpointError, match=r"decode.onnx: onnxruntime cannot load it"):
        OnnxTokenizer(folder)


def test_what_onnxruntime_raises_is_translated(onnx, monkeypatch):
    tokenizer, folder = onnx
    for options, message in (
        ({"providers": ("Nope",)}, "providers: got Nope, expected some of .*CPUExecutionProvider"),
        ({"threads": 0}, "threads: got 0, expected at least 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            OnnxTokenizer(folder, **options)
    runtime = OnnxTokenizer(folder)
    with pytest.raises(BackendError, match=r"encode.onnx: onnxruntime failed on inputs of shape \(1, 12\).*out of"):
        runtime.encode(torch.full((1, 12), 10**6).numpy())  # a number beyond the vocabulary
    monkeypatch.setitem(runtime._sessions, "decode", None)
    with pytest.raises(BackendError, match="decode.onnx: onnxruntime failed on ids of shape"):
        runtime.decode(tokenizer.encode(CAPTIONS).numpy())


def test_the_command_prints_no_credentials(onnx, monkeypatch, capsys):
    tokenizer, folder = onnx
    monkeypatch.setattr("vqclip.tokenizer.loading.load_tokenizer", lambda *_: tokenizer)
    monkeypatch.setattr("vqclip.data.prepare.open_images", lambda *_: None)
    monkeypatch.setattr("vqclip.export.to_onnx.export_onnx", lambda *_: None)
    url = "https://user:secret@example.org/{0..1}.tar?token=hidden"
    assert main(["t", "--modality", "text", "--data", url, "--out", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "compared on: https://" in printed
    assert "secret" not in printed
    assert "hidden" not in printed


def test_verify_counts_what_differs(onnx):
    """With weights changed a little, and the hash made to fit, a few ids differ and are counted."""
    tokenizer, folder = onnx
    other = built(LFQ).text
    with torch.no_grad():
        other.project_in[1].bias.add_(0.05)
    inputs = batches(built(LFQ), "text")
    with pytest.raises(CheckpointError, match="made from the tokenizer"):
        verify(folder, other, inputs)
    with pytest.raises(DataError, match="no inputs"):
        verify(folder, tokenizer, [])
    runtime = OnnxTokenizer(folder)
    theirs = torch.cat([torch.from_numpy(runtime.encode(batch.numpy())) for batch in inputs])
    ours = torch.cat([other.encode(batch) for batch in inputs])
    assert 0 < int((theirs != ours).sum()) < ours.numel()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vqclip.export.runtime.fingerprint", lambda _: fingerprint(tokenizer))
        found = verify(folder, other, inputs)
    assert found.differing_ids == int((theirs != ours).sum())
    assert found.differing_samples == int((theirs != ours).flatten(1).any(1).sum())
    assert found.rate == 1 - found.differing_ids / int((ours >= 0).sum())


@pytest.mark.parametrize(("part", "bad"), [("decode", float("nan")), ("embed", float("inf"))])
def test_an_export_that_gives_nan_is_an_error(onnx, monkeypatch, part, bad):
    run = getattr(OnnxTokenizer, part)
    monkeypatch.setattr(OnnxTokenizer, part, lambda self, ids: run(self, ids) * 0 + bad)
    with pytest.raises(NonFiniteError, match=rf"{part}: got (\d+) of \1 numbers NaN or infinite .* 0 from the tok"):
        verify(onnx[1], onnx[0], batches(built(LFQ), "text"))


def test_damage_of_any_file_is_noticed(onnx, tmp_path):
    folder = shutil.copytree(onnx[1], tmp_path / "onnx")
    for name in ("encode.onnx.data", "encode.onnx", "export.json"):
        path = folder / name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        for damage in (lambda: path.write_bytes(data), path.unlink):  # noqa: B023
            damage()
            with pytest.raises(CheckpointError, match=rf"{name}: .*(SHA-256|no such file|No such file|damaged|edited)"):
                OnnxTokenizer(folder)
        shutil.copy(onnx[1] / name, path)
    body = json.loads((folder / "export.json").read_bytes())
    del body["sha256"]
    parts = {name: {key: value for key, value in part.items() if key != "data"} for name, part in body["parts"].items()}
    (folder / "export.json").write_bytes(add_checksum({**body, "parts": parts}))
    with pytest.raises(CheckpointError, match=r"export.json: contains no digest of decode\.onnx\.data; export it ag"):
        OnnxTokenizer(folder)


def test_what_cannot_be_exported_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="export: the image quantizer has no codes"):
        export_program(built(IDENTITY).image, "encode")
    with pytest.raises(ConfigError, match="part: got 'draw', expected one of encode, decode, embed"):
        export_program(built(FSQ).image, "draw")
    pytest.importorskip("onnxscript")
    with pytest.raises(ConfigError, match="weights in torch.bfloat16 on cpu, expected float32 on the CPU"):
        export_onnx(built(FSQ).image.bfloat16(), tmp_path / "onnx")
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match="would be replaced, and contains thesis.tex"):
        export_onnx(built(FSQ).image, tmp_path)
    assert (tmp_path / "thesis.tex").exists()


@pytest.mark.slow
def test_programs_of_narrow_weights_are_compared():
    model = built(LFQ).bfloat16()
    assert verify_program(model.text, batches(model, "text")).differing_ids == 0


@pytest.mark.slow
@pytest.mark.parametrize("modality", ["image", "text"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_as_onnx(family, modality, tmp_path, onnx_packages):
    """python -m pytest -m slow tests/export: about five minutes."""
    model = built(FAMILIES[family])
    tokenizer = getattr(model, modality)
    inputs = batches(model, modality)
    check(tokenizer, export_onnx(tokenizer, tmp_path / "onnx"), inputs)
    found = verify_program(tokenizer, inputs)
    assert found.differing_ids == 0
    assert found.embeddings < 1e-5


# Towers of vqclip models in open_clip models.

THREE = ["a cat", "two red dogs on a very long road", ""]


def embeddings(model, size):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(3, 3, size, size, generator=generator)
    with torch.no_grad():
        return model.encode_image(pixels), model.encode_text(open_clip.get_tokenizer("ViT-B-32")(THREE, 12))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("vqclip-back", {}),
        ("vqclip-back-custom", {"custom_text": True}),
        ("vqclip-back-trunk", {"vision_cfg": TRUNK, "init_logit_bias": -3.0}),
    ],
)
def test_towers_that_were_not_trained_give_the_original_embeddings(tmp_path, name, changes):
    theirs, weights = save_open_clip(tmp_path, name, **changes)
    ModelConfig.model_validate(both_towers(name, weights)).build().save_pretrained(tmp_path / "folder")
    _, found = export_towers(tmp_path / "folder", weights, tmp_path / "out")
    kept = {"text.text_projection", "logit_scale", *(("logit_bias",) if "trunk" in name else ())}
    assert set(found) - {"visual.proj", "visual.head.proj.weight"} == kept
    back, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'out'}")
    size = 224 if "trunk" in name else 32
    for mine, original in zip(embeddings(back.eval(), size), embeddings(theirs, size), strict=True):
        torch.testing.assert_close(mine, original, rtol=0, atol=1e-5)
    assert back.logit_scale.item() == theirs.logit_scale.item()
    assert type(back) is type(theirs)
    assert preprocess(Image.new("RGB", (9, 7))).shape == (3, size, size)
    assert open_clip.get_tokenizer(f"local-dir:{tmp_path / 'out'}")(THREE).shape == (3, 12)
    plain = open_clip.create_model(name, pretrained=str(tmp_path / "out" / "open_clip_model.safetensors"))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), back.parameters(), strict=True))


def test_trained_towers_are_written_and_the_rest_is_kept(tmp_path):
    theirs, weights = save_open_clip(tmp_path, "vqclip-trained")
    model = ModelConfig.model_validate(both_towers("vqclip-trained", weights)).build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    model.save_pretrained(tmp_path / "folder")
    export_towers(tmp_path / "folder", weights, tmp_path / "out")
    back = open_clip.create_model(f"local-dir:{tmp_path / 'out'}")
    assert torch.equal(back.visual.proj, theirs.visual.proj)
    assert torch.equal(back.token_embedding.weight, theirs.token_embedding.weight + 0.01)
    pixels = torch.rand(2, 3, 32, 32)
    features = back.eval().visual.forward_intermediates(
        model.image.tower.normalize(pixels), indices=1, normalize_intermediates=True, output_fmt="NLC"
    )
    torch.testing.assert_close(features["image_intermediates"][-1], model.image.tower.eval()(pixels))


def test_the_command_finds_the_base_of_a_run(tmp_path, capsys, refused):
    theirs, weights = save_open_clip(tmp_path, "vqclip-run")
    section = both_towers("vqclip-run", weights)
    model, run, out = ModelConfig.model_validate(section), tmp_path / "run", tmp_path / "out"
    model.build().save_pretrained(run / "tokenizer")
    assert "--base: got none, and no" in refused(main([str(run), "--open-clip", "--out", str(out)]))
    tree = {"data": {"sources": [{"kind": "shards", "path": "x"}]}, "loss": {"kind": "contrastive"}, "model": section}
    (run / "config.yaml").write_text(to_yaml(TrainConfig.model_validate(tree)))
    for folder in (run, run / "tokenizer"):
        assert main([str(folder), "--open-clip", "--out", str(out)]) == 0
        assert "3 of the base checkpoint (logit_scale, visual.proj, text.text_projection)" in capsys.readouterr().out
    back = open_clip.create_model(f"local-dir:{out}").eval()
    torch.testing.assert_close(embeddings(back, 32), embeddings(theirs, 32), rtol=0, atol=1e-5)


def test_options_that_do_not_go_together_are_refused(refused):
    for arguments, message in [
        (["x", "--out", "o"], "--modality: got none"),
        (["x", "--out", "o", "--modality", "image", "--limit", "3"], "--limit: got it without --data"),
        (["x", "--out", "o", "--modality", "image", "--base", "b"], "--base: got it without --open-clip"),
        (["x", "--out", "o", "--modality", "image", "--open-clip"], "--modality: got it with --open-clip"),
    ]:
        assert message in refused(main(arguments))


def test_what_open_clip_cannot_hold_is_refused(tmp_path):
    _, weights = save_open_clip(tmp_path, "vqclip-held")
    tiny_model().build().save_pretrained(tmp_path / "tiny")
    with pytest.raises(ConfigError, match=r"got the towers timm and transformer; expected both of one open_clip model"):
        export_towers(tmp_path / "tiny", weights, tmp_path / "out")
    ModelConfig.model_validate(both_towers("vqclip-held", weights)).build().save_pretrained(tmp_path / "folder")
    with pytest.raises(ConfigError, match=r"^--base: got 'gone', which is neither a file nor one of the tags"):
        export_towers(tmp_path / "folder", "gone", tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("")
    with pytest.raises(ConfigError, match="would be replaced, and contains thesis.txt"):
        export_towers(tmp_path / "folder", weights, tmp_path / "mine")
    assert not (tmp_path / "out").exists()
