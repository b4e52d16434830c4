"""Tokenizer folders: what is loaded is what was saved, and what does not fit is refused, however it is loaded."""

import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import vqclip
from tests.data.hostile import marking_pickle
from tests.models import FSQ, NESTED, RESIDUAL, VQ, built, reseal, tiny_model
from tests.pixels.test_decoder import CONFIGS
from vqclip.errors import CheckpointError
from vqclip.io import tensors
from vqclip.model import CLIP
from vqclip.pixels import PixelDecoder, attach
from vqclip.tokenizer import decoder

BIAS = "image.project_out.0.bias"
LOADERS = {
    "whole": lambda folder: vqclip.load_tokenizer(folder, "image"),
    "reader": lambda folder: vqclip.load_tokenizer(folder, "image", encode=False),
    "model": CLIP.from_pretrained,
}


def edited(change):
    """A damage that changes the configuration, with the hashes that belong to it."""
    return lambda folder: reseal(folder, change)


def rewritten(change, file="model.safetensors"):
    """A damage that changes the tensors; whoever made it gave the hashes that belong to it."""

    def damage(folder):
        state = load_file(folder / file)
        change(state)
        save_file(state, folder / file)
        reseal(folder)

    return damage


def of_file(name, change):
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def flip_last(data):
    return data[:-1] + bytes([data[-1] ^ 1])


def flip_in_tower(data):
    """One bit of the tower, whose weights a reader does not use."""
    changed, start = bytearray(data), 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    name = next(name for name in header if name.startswith("image.tower."))
    changed[start + header[name]["data_offsets"][0]] ^= 1
    return bytes(changed)


def set_each(**values):
    """A damage to the sections of both modalities."""
    return edited(lambda config: [config[name].update(values) for name in ("image", "text")])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("quantizer", [FSQ, VQ | {"learning": "gradient"}], ids=["fsq", "vq"])
def test_weights_keep_their_type(tmp_path, dtype, quantizer):
    """Codebooks stay in float32 under bfloat16, whichever tensor comes first."""
    model = tiny_model(quantizer, quantizer).build().eval().to(dtype)
    model.save_pretrained(tmp_path)
    for name, load in LOADERS.items():
        theirs, loaded = (model if name == "model" else model.image).state_dict(), load(tmp_path).state_dict()
        assert name == "reader" or loaded.keys() == theirs.keys()
        assert all(theirs[k].dtype == v.dtype and torch.equal(theirs[k], v) for k, v in loaded.items())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (rewritten(lambda state: state.pop(BIAS)), "missing image.project_out.0.bias"),
        (rewritten(lambda state: state.update({"image.surplus": torch.zeros(1)})), "unexpected image.surplus"),
        (rewritten(lambda state: state.update({BIAS: torch.zeros(3)})), r"bias: got shape \(3,\), expected \(16,\)"),
        (rewritten(lambda s: s.update({BIAS: torch.zeros(16).half()})), f"{BIAS}: got dtype .*float16, expected .*32"),
        (of_file("model.safetensors", flip_in_tower), "SHA-256"),
        (of_file("model.safetensors", lambda data: data[: len(data) // 2]), "damaged or cut short"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no such file"),
        (of_file("config.json", lambda data: data.replace(b'"width": 16', b'"width": 32', 1)), "or was edited"),
        (
            of_file("config.json", lambda data: json.dumps(json.loads(data) | {"format_version": 1}).encode()),
            "format_version is 1, this vqclip reads 3; expected a folder that save_pretrained",
        ),
        (edited(lambda c: c.update(id_layout=99)), "id_layout is 99, this vqclip reads 1"),
        (edited(lambda c: c["image"].update(widht=3)), "config.json: image.widht: got 3; Extra inputs"),
        (edited(lambda c: c["text"].update(embed_dim=32)), "got embed_dim 16 for image and 32 for text"),
        (edited(lambda c: c["text"].update(preprocess={})), "text.preprocess: got a section; expected none"),
        (edited(lambda c: c.pop("image")), "got a temperature with fewer than two tokenizers"),
        (set_each(num_tokens=10**12), "num_tokens: got -?\\d+; Input should be less than or equal to 1048576"),
        (set_each(quantizer=RESIDUAL | {"depth": 10**9}), "residual.depth: got .*less than or equal to 256"),
        (set_each(fewest_tokens=13), "got num_tokens (4|12) and fewest_tokens 13; expected fewest_tokens <= num"),
    ],
)
def test_a_folder_is_judged_alike_whatever_is_loaded_from_it(saved, damage, message):
    damage(saved[1])
    loads = [*LOADERS.values()]
    if not message.startswith(("unexpected image.", f"{BIAS}: got dtype")):
        loads.append(lambda folder: vqclip.load_tokenizer(folder, "text", encode=False))
    for load in loads:
        with pytest.raises(CheckpointError, match=message):
            load(saved[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["image"]["tower"]["args"].update(pretrained_cfg={"file": "x"}), "got 'pretrained_cfg'"),
        (lambda c: c["image"]["tower"]["args"].update(num_heads=3), "config.json: image.tower.args: timm model"),
        (lambda c: c["image"].update(fewest_tokens=2), r"config.json: image.fewest_tokens: got 2; this tower has 4"),
    ],
)
def test_a_tower_that_does_not_fit_is_refused_where_it_is_built(saved, change, message):
    edited(change)(saved[1])
    for name in ("whole", "model"):
        with pytest.raises(CheckpointError, match=message):
            LOADERS[name](saved[1])
    LOADERS["reader"](saved[1])


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


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_tokens": 2**20}, r"image.pool.position: got shape \(4, 16\), expected \(1048576, 16\)"),
        ({"width": 2**16}, r"image.project_out.0.weight: got shape \(16, 6\), expected \(65536, 6\)"),
        ({"quantizer": VQ | {"codebook_size": 2**20, "dim": 2**16}}, r"missing image.quantizer.codebook; "),
        ({"quantizer": NESTED}, r"config.json: image: Product: got 4294967296 codebooks"),
    ],
)
def test_sizes_are_compared_with_the_weights_before_memory_is_taken(saved, monkeypatch, values, message):
    set_each(**values)(saved[1])
    made = decoder.PooledEmbedding

    def make(*sizes):
        pool = made(*sizes)
        assert pool.position.is_meta
        return pool

    monkeypatch.setattr(decoder, "PooledEmbedding", make)
    for load in LOADERS.values():
        with pytest.raises(CheckpointError, match=message):
            load(saved[1])


@pytest.mark.parametrize("is_disguised", [True, False])
def test_no_pickle_is_read(saved, tmp_path, is_disguised):
    folder, evil = saved[1], marking_pickle(tmp_path / "was here")
    (folder / "pytorch_model.bin").write_bytes(evil)
    if is_disguised:
        (folder / "model.safetensors").write_bytes(evil)
        reseal(folder)
    else:
        (folder / "model.safetensors").unlink()
    message = "cannot be read, damaged" if is_disguised else "no such file; pickled files are never opened, .*: pytorch"
    for load in LOADERS.values():
        with pytest.raises(CheckpointError, match=message):
            load(folder)
    assert not (tmp_path / "was here").exists()
    pickle.loads(evil)
    assert (tmp_path / "was here").exists()  # it would have run


def test_tensors_of_the_modality_that_is_not_there_are_strays(saved, tmp_path):
    model, _ = saved
    model.text.save_pretrained(tmp_path / "text")
    for load in LOADERS.values():
        with pytest.raises(CheckpointError, match="contains text tokenizer; expected one of modality 'image'"):
            load(tmp_path / "text")
    surplus = {"image.x": torch.zeros(1), "logit_scale": torch.zeros(())}
    rewritten(lambda state: state.update(surplus))(tmp_path / "text")
    for encode in (True, False):
        with pytest.raises(CheckpointError, match="unexpected image.x; unexpected logit_scale"):
            vqclip.load_tokenizer(tmp_path / "text", "text", encode=encode)


def test_a_missing_folder_and_a_wrong_modality_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere: no such folder; expected a folder that save_pretrained wrote"):
        vqclip.load_tokenizer(tmp_path / "nowhere", modality="image")
    with pytest.raises(ValueError, match='expected "image" or "text"'):
        vqclip.load_tokenizer(tmp_path, modality="audio")


# Folders with a pixel decoder.

POSITION = "image.pixels.layers.position"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    model = built().eval()
    folder = tmp_path_factory.mktemp("made")
    attach(model.image, CONFIGS["transformer"].build(3, 4, 16))
    model.save_pretrained(folder / "one")
    return folder


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made / "one", tmp_path / "tokenizer")


def of_pixels(change):
    return rewritten(change, "pixels.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "pixels.safetensors").unlink(), r"pixels.safetensors: no such file"),
        (of_file("pixels.safetensors", flip_last), r"pixels.safetensors: SHA-256 .*config.json says"),
        (of_pixels(lambda state: state.pop(POSITION)), f"pixels.safetensors does not fit .*missing {POSITION}"),
        (of_pixels(lambda s: s[POSITION].fill_(torch.nan)), f"pixels.safetensors: .*NaN or infinity: {POSITION}"),
        (rewritten(lambda s: s.update({POSITION: torch.zeros(4, 16)})), f"model.safetensors .*unexpected {POSITION}"),
        (edited(lambda c: c["pixels"]["decoder"].update(width=2**10)), r"position: got shape .*expected \(4, 1024\)"),
        (edited(lambda c: c["pixels"].update(image_size=2**40)), "pixels.image_size: got 1099511627776; .* less than"),
    ],
)
def test_a_damaged_decoder_is_refused_before_memory_is_taken(folder, damage, message, monkeypatch):
    damage(folder)
    built = PixelDecoder.__init__

    def small(self, *args):
        built(self, *args)
        assert all(each.is_meta or each.numel() < 10**5 for each in self.parameters())

    monkeypatch.setattr(PixelDecoder, "__init__", small)
    for load in LOADERS.values():
        with pytest.raises(CheckpointError, match=message):
            load(folder)


def test_a_text_tokenizer_needs_the_decoder_intact_and_its_image_tokenizer(folder):
    vqclip.load_tokenizer(folder, "text")
    for damage, message in (
        (of_file("pixels.safetensors", flip_last), "pixels.safetensors: SHA-256"),
        (edited(lambda c: [c.pop("image"), c.pop("temperature")]), "pixels: got a section without an image tokenizer"),
    ):
        damage(folder)
        with pytest.raises(CheckpointError, match=message):
            vqclip.load_tokenizer(folder, "text")
