from __future__ import annotations

import json

import pytest
import torch

import vqclip
from tests.models import FSQ, NESTED, RESIDUAL, VQ, tiny_model
from tests.test_model import edited, rewritten
from vqclip.errors import CheckpointError
from vqclip.io import tensors
from vqclip.model import CLIP

BIAS = "image.project_out.0.bias"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("quantizer", [FSQ, VQ | {"learning": "gradient"}], ids=["fsq", "vq"])
def test_weights_keep_their_type(tmp_path, dtype, quantizer):
    """Codebooks stay in float32 under bfloat16, whichever tensor comes first."""
    model = tiny_model(quantizer).build().eval().to(dtype)
    model.save_pretrained(tmp_path)
    reader = vqclip.load_tokenizer(tmp_path, "image", encode=False)
    theirs = model.image.state_dict()
    assert all(theirs[k].dtype == v.dtype and torch.equal(theirs[k], v) for k, v in reader.state_dict().items())


def flip_in_tower(folder):
    """One bit of the tower, whose weights a reader does not use."""
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    name = next(name for name in header if name.startswith("image.tower."))
    data[8 + int.from_bytes(data[:8], "little") + header[name]["data_offsets"][0]] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (rewritten(lambda state: state.pop(BIAS)), "missing image.project_out.0.bias"),
        (rewritten(lambda state: state.update({"image.surplus": torch.zeros(1)})), "unexpected image.surplus"),
        (rewritten(lambda state: state.update({"image.towers": torch.zeros(1)})), "unexpected image.towers"),
        (rewritten(lambda state: state.update({BIAS: torch.zeros(3)})), r"bias: got shape \(3,\), expected \(16,\)"),
        (flip_in_tower, "SHA-256"),
        (edited(lambda c: c["image"].update(num_tokens=5)), r"pool.position: got shape \(4, 16\), expected \(5, 16\)"),
        (edited(lambda c: c["image"].update(widht=3)), "config.json: image.widht: got 3; Extra inputs"),
        (edited(lambda c: c["image"].pop("quantizer")), "config.json: image.quantizer: Field required"),
        (
            edited(lambda c: c["image"].update(fewest_tokens="4")),
            "image.fewest_tokens: got .4.; Input should be a valid int",
        ),
        (edited(lambda c: c.update(surplus=1)), "config.json: surplus: got 1; Extra inputs"),
        (edited(lambda c: c.update(image=3)), "config.json: image: got 3; Input should be a valid dict"),
        (edited(lambda c: c.pop("image")), "got a temperature with fewer than two tokenizers"),
        (
            edited(lambda c: c["image"].update(project_out={"kind": "attention", "heads": 5})),
            "config.json: image: projection between widths",
        ),
    ],
)
def test_a_reader_is_loaded_strictly(saved, damage, message):
    _, folder = saved
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        vqclip.load_tokenizer(folder, "image", encode=False)


@pytest.mark.parametrize("encode", [True, False])
def test_the_weights_are_opened_once_and_what_was_verified_is_read(saved, monkeypatch, encode):
    model, folder = saved
    verify = tensors.verify_open_file

    def verify_and_replace(file, path, *digest):
        verify(file, path, *digest)
        (folder / "other").write_bytes(b"another file")
        (folder / "other").replace(path)

    monkeypatch.setattr(tensors, "verify_open_file", verify_and_replace)
    theirs = model.image.state_dict()
    for name, tensor in vqclip.load_tokenizer(folder, "image", encode=encode).state_dict().items():
        assert torch.equal(theirs[name], tensor)
    assert (folder / "model.safetensors").read_bytes() == b"another file"


def set_each(**values):
    """A damage to the sections of both modalities."""
    return edited(lambda config: [config[name].update(values) for name in ("image", "text")])


@pytest.mark.parametrize("modality", ["image", "text"])
@pytest.mark.parametrize("encode", [True, False])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            rewritten(lambda state: state.update(stray=torch.zeros(1))),
            "does not fit its config.json: unexpected stray$",
        ),
        (rewritten(lambda state: state.update({"imagery.x": torch.zeros(1)})), "unexpected imagery.x$"),
        (rewritten(lambda state: state.update({"logit_scale.x": torch.zeros(1)})), "unexpected logit_scale.x$"),
        (set_each(num_tokens=10**12), "num_tokens: got -?\\d+; Input should be less than or equal to 1048576"),
        (set_each(embed_dim=10**9), "embed_dim: got -?\\d+; Input should be less than or equal to 65536"),
        (set_each(width=2**17), "width: got -?\\d+; Input should be less than or equal to 65536"),
        (set_each(depth=2**20), "depth: got -?\\d+; Input should be less than or equal to 1024"),
        (set_each(quantizer=VQ | {"dim": 10**9}), "vq.dim: got -?\\d+; Input should be less than or equal to 65536"),
        (
            set_each(quantizer=RESIDUAL | {"depth": 10**9}),
            "residual.depth: got -?\\d+; Input should be less than or equal to 256",
        ),
        (set_each(fewest_tokens=13), "got num_tokens (4|12) and fewest_tokens 13; expected fewest_tokens <= num"),
        (edited(lambda c: c["text"].update(preprocess={})), "text.preprocess: got a section; expected none"),
        (set_each(fewest_tokens=0), "fewest_tokens: got -?\\d+; Input should be greater than or equal to 1"),
        (set_each(num_tokens=None), "config.json: image.num_tokens: got None; Input should be a valid integer"),
        (edited(lambda c: c["text"].pop("fewest_tokens")), "config.json: text.fewest_tokens: Field required"),
    ],
)
def test_a_folder_is_judged_alike_whatever_is_loaded_from_it(saved, damage, message, modality, encode):
    _, folder = saved
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        vqclip.load_tokenizer(folder, modality, encode=encode)


@pytest.mark.parametrize("encode", [True, False])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_tokens": 2**20}, r"image.pool.position: got shape \(4, 16\), expected \(1048576, 16\)"),
        ({"embed_dim": 2**16}, r"image.pool.head.weight: got shape \(16, 16\), expected \(65536, 16\)"),
        ({"width": 2**16}, r"image.pool.attention.query.weight: got shape \(16, 16\), expected \(65536, 65536\)"),
        ({"depth": 2**10}, r"missing image.pool.blocks.1.mlp.0.weight"),
        ({"quantizer": VQ | {"codebook_size": 2**20, "dim": 2**16}}, r"missing image.quantizer.codebook; "),
        ({"quantizer": NESTED}, r"config.json: image.quantizer: Product: got 4294967296 codebooks"),
        (
            {"quantizer": NESTED | {"layer": {"kind": "identity", "dim": 2**16}}},
            "config.json: image.quantizer: Product: got 0 codebooks and 4294967296 channels",
        ),
    ],
)
def test_sizes_are_compared_with_the_weights_before_anything_is_built(saved, monkeypatch, encode, values, message):
    """Or memory is taken for whatever the configuration asks for."""
    _, folder = saved
    set_each(**values)(folder)
    monkeypatch.setattr("vqclip.tokenizer.decoder.PooledEmbedding", lambda *sizes: pytest.fail(f"built: {sizes}"))
    monkeypatch.setattr("vqclip.tokenizer.base.Tokenizer.__init__", lambda *_: pytest.fail("built"))
    with pytest.raises(CheckpointError, match=message):
        vqclip.load_tokenizer(folder, "image", encode=encode)


def test_tensors_of_the_modality_that_is_not_there_are_strays(saved, tmp_path):
    model, _ = saved
    model.text.save_pretrained(tmp_path / "text")
    for encode in (True, False):
        with pytest.raises(CheckpointError, match="contains text tokenizer; expected one of modality 'image'"):
            vqclip.load_tokenizer(tmp_path / "text", "image", encode=encode)
    rewritten(lambda state: state.update({"image.x": torch.zeros(1), "logit_scale": torch.zeros(())}))(
        tmp_path / "text"
    )
    for encode in (True, False):
        with pytest.raises(CheckpointError, match="unexpected image.x; unexpected logit_scale"):
            vqclip.load_tokenizer(tmp_path / "text", "text", encode=encode)


def test_stored_numbers_of_tokens_are_those_of_the_tower(saved):
    _, folder = saved
    edited(lambda c: c["text"].update(fewest_tokens=2))(folder)
    for load in (lambda: vqclip.load_tokenizer(folder, "text"), lambda: CLIP.from_pretrained(folder)):
        with pytest.raises(CheckpointError, match=r"config.json: text.fewest_tokens: got 2; this tower has 1"):
            load()
