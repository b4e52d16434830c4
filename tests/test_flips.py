"""One flipped bit in a checkpoint or in an exported tokenizer is noticed when it is loaded, whichever it is.

Flips are keyed by the seed and their number: first the file is drawn, so that small ones get as many, then the byte and
the bit. The card of an exported folder (README.md) is for people, who edit it; it is not loaded.
"""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import vqclip
from tests.checkpoint.making import save_checkpoint
from tests.models import FSQ, VQ, tiny_model
from vqclip import checkpoint
from vqclip.errors import CheckpointError
from vqclip.model import CLIP
from vqclip.pixels import TransformerPixelsConfig, attach
from vqclip.tokenizer.folder import CARD_FILE, PROCESSOR_FILE

SEED = 0
FEW, ALL = 25, 1000


def a_checkpoint(folder: Path) -> tuple[Path, list[Callable[[Path], object]]]:
    model = tiny_model(VQ, FSQ).build()
    optimizer = torch.optim.AdamW(model.named_parameters())
    images, tokens = torch.zeros(1, 3, 16, 16, dtype=torch.uint8), model.text.preprocess(["a"])
    out = model(images, tokens)
    (out.image.embedding.sum() + out.text.embedding.sum()).backward()
    optimizer.step()
    state = {"identity": {"run.seed": 0}, "replaced": {"damaged image": 3}}
    path = save_checkpoint(folder, 7, optimizer, model.save_pretrained, state)
    return path, [checkpoint.load]


def a_tokenizer(folder: Path) -> tuple[Path, list[Callable[[Path], object]]]:
    model = tiny_model(VQ, FSQ).build()
    attach(model.image, TransformerPixelsConfig(width=8, heads=1, depth=1, channels=1).build(6, 4, 16))
    model.save_pretrained(folder)
    (folder / "README.md").write_text("# a card\n")
    return folder, [
        lambda path: vqclip.load_tokenizer(path, modality="image"),
        lambda path: vqclip.load_tokenizer(path, modality="text"),
        CLIP.from_pretrained,
    ]


def flip(file: Path, place: int, bit: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(place)
        (byte,) = stream.read(1)
        stream.seek(place)
        stream.write(bytes([byte ^ 1 << bit]))


@pytest.mark.parametrize("made", [a_checkpoint, a_tokenizer])
@pytest.mark.parametrize("flips", [FEW, pytest.param(ALL, marks=pytest.mark.faults)])
def test_any_flipped_bit_is_detected(tmp_path: Path, made: Callable, flips: int) -> None:
    folder, loaders = made(tmp_path)
    unread = (CARD_FILE,) if made is a_checkpoint else (CARD_FILE, PROCESSOR_FILE)  # neither is read here
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in unread)
    assert len(files) == (7 if made is a_checkpoint else 3)
    met = set()
    for number in range(flips):
        draw = random.Random(f"{SEED}-{number}")
        file = draw.choice(files)
        place, bit = draw.randrange(file.stat().st_size), draw.randrange(8)
        met.add(file)
        flip(file, place, bit)
        try:
            with pytest.raises(CheckpointError, match=file.name):
                loaders[number % len(loaders)](folder)
        finally:
            flip(file, place, bit)
    assert met == set(files)
    for load in loaders:
        load(folder)
