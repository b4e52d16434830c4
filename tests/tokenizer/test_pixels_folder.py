"""Folders whose pixel decoder is damaged, missing, of another folder, or made to do harm."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import vqclip
from tests.models import FSQ, tiny_model
from tests.pixels.test_decoder import CONFIGS
from vqclip.errors import CheckpointError
from vqclip.io.atomic import digest_file
from vqclip.io.json_files import add_checksum
from vqclip.model import CLIP
from vqclip.pixels import PixelDecoder, attach

POSITION = "image.pixels.layers.position"
LOADERS = {
    "image": lambda folder: vqclip.load_tokenizer(folder, "image"),
    "reader": lambda folder: vqclip.load_tokenizer(folder, "image", encode=False),
    "model": CLIP.from_pretrained,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    torch.manual_seed(0)
    model = tiny_model(FSQ, FSQ).build().eval()
    folder = tmp_path_factory.mktemp("made")
    attach(model.image, CONFIGS["transformer"].build(3, 4, 16))
    model.save_pretrained(folder / "one")
    return folder


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made / "one", tmp_path / "tokenizer")


def honest(folder, change=lambda config: None):
    """Change the configuration, and give it the digests that belong to it, as its maker can."""
    config = json.loads((folder / "config.json").read_text())
    del config["sha256"]
    config["pixels"]["weights"] = digest_file(folder / "pixels.safetensors").model_dump()
    config["weights"] = digest_file(folder / "model.safetensors").model_dump()
    change(config)
    (folder / "config.json").write_bytes(add_checksum(config))


def edited(**values):
    return lambda folder: honest(folder, lambda config: config["pixels"].update(values))


def layers(**values):
    return lambda folder: honest(folder, lambda config: config["pixels"]["decoder"].update(values))


def rewritten(change, file="pixels.safetensors"):
    def damage(folder):
        state = load_file(folder / file)
        change(state)
        save_file(state, folder / file)
        honest(folder)

    return damage


def flipped(folder):
    path = folder / "pixels.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "missing": (lambda folder: (folder / "pixels.safetensors").unlink(), r"pixels.safetensors: no such file"),
    "flipped": (flipped, r"pixels.safetensors: SHA-256 .*config.json says"),
    "lacks": (rewritten(lambda state: state.pop(POSITION)), f"pixels.safetensors does not fit .*missing {POSITION}"),
    "nan": (
        rewritten(lambda state: state[POSITION].fill_(torch.nan)),
        "pixels.safetensors: these tensors contain NaN or infinity: image.pixels.layers.position",
    ),
    "types": (
        rewritten(lambda state: state.update({POSITION: state[POSITION].half()})),
        f"{POSITION}: got dtype torch.float16, expected torch.float32",
    ),
    "in the model": (
        rewritten(lambda state: state.update({POSITION: torch.zeros(4, 16)}), "model.safetensors"),
        f"model.safetensors does not fit .*unexpected {POSITION}",
    ),
    "width": (layers(width=2**10), r"position: got shape \(4, 16\), expected \(4, 1024\)"),
    "huge": (edited(image_size=2**40), "pixels.image_size: got 1099511627776; Input should be less than or equal to"),
    "unknown": (edited(scale=2), "pixels.scale: got 2; Extra inputs are not permitted"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_decoder_is_refused_before_memory_is_taken(folder, damage, monkeypatch):
    change, message = DAMAGES[damage]
    change(folder)
    built = PixelDecoder.__init__

    def small(self, *args):
        built(self, *args)
        assert all(each.is_meta or each.numel() < 10**5 for each in self.parameters())

    monkeypatch.setattr(PixelDecoder, "__init__", small)
    for load in LOADERS.values() if damage in ("flipped", "width") else [LOADERS["reader"]]:
        with pytest.raises(CheckpointError, match=message):
            load(folder)


def test_a_decoder_without_an_image_tokenizer_is_refused(folder):
    honest(folder, lambda config: [config.pop("image"), config.pop("temperature")])
    with pytest.raises(CheckpointError, match="pixels: got a section without an image tokenizer"):
        vqclip.load_tokenizer(folder, "text")


def test_a_text_tokenizer_needs_the_decoder_intact(folder):
    vqclip.load_tokenizer(folder, "text")
    flipped(folder)
    with pytest.raises(CheckpointError, match="pixels.safetensors: SHA-256"):
        vqclip.load_tokenizer(folder, "text")
