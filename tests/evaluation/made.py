"""Small made data and models for the tests of evaluation."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from tests.data.making import write_tar
from tests.models import FSQ, IDENTITY, LFQ, tiny_model
from vqclip.model import CLIP
from vqclip.quantizers import Prefix, Stats
from vqclip.tokenizer import TokenizerOutput

PRODUCT = {"kind": "product", "layer": {"kind": "fsq", "levels": [3, 3]}, "codebooks": 3}
QUANTIZERS = {"fsq": FSQ, "lfq": LFQ, "product": PRODUCT, "identity": IDENTITY}

SIZE = 16
COLOURS = ("red", "green", "blue", "white")


def tiny_clip(quantizer: Mapping = FSQ, text_quantizer: Mapping | None = None, seed: int = 0) -> CLIP:
    """An untrained model with dropout, for images of SIZE pixels; in training mode."""
    config = tiny_model(quantizer, text_quantizer or quantizer)
    config.image.tower.args["drop_rate"] = 0.1
    torch.manual_seed(seed)
    return config.build()


class PlainTokenizer(nn.Module):
    """A tokenizer whose one code is the input's first number, and whose embedding is a one-hot of the code.

    `continuous` embeds everything alike.
    """

    num_tokens = 1
    has_shapes = False

    def __init__(self, modality: str, codes: int):
        super().__init__()
        self.modality = modality
        self.codebook_sizes = (codes,)
        self.embed_dim = codes
        self.weight = nn.Parameter(torch.ones(codes))
        self.reduce = None
        self.quantizer = SimpleNamespace(extent=Prefix(1, 1), places=((0, 0),))
        self.device = torch.device("cpu")

    class transform:
        size = 1

        def __new__(cls, image: Tensor) -> Tensor:
            return image

    class preprocess:
        context_length = 1

        """A caption's code is the number in it."""

        @staticmethod
        def with_lengths(captions: Sequence[str]) -> tuple[Tensor, list[int]]:
            numbers = [[int("".join(filter(str.isdigit, caption)))] for caption in captions]
            return torch.tensor(numbers), [1] * len(numbers)

    def with_continuous(self, inputs: Tensor) -> tuple[TokenizerOutput, Tensor]:
        ids = inputs.flatten(1)[:, :1, None].long()
        continuous = F.normalize(torch.ones(len(ids), self.embed_dim), dim=-1)
        return TokenizerOutput(self.embed(ids), ids, Stats()), continuous

    def embed(self, ids: Tensor, precision: str = "fp32") -> Tensor:
        return F.one_hot(ids[:, 0, 0], self.embed_dim) * self.weight


class PlainModel(nn.Module):
    """Two of them: an image of colour (n, n, n) and a caption with the number n are alike."""

    def __init__(self, codes: int):
        super().__init__()
        self.image = PlainTokenizer("image", codes)
        self.text = PlainTokenizer("text", codes)


def png(colour: tuple[int, int, int] | int, seed: int | None = None) -> bytes:
    """An image of one colour, or with a seed: of noise around it."""
    pixels = np.broadcast_to(np.array(colour), (SIZE, SIZE, 3)).astype(np.int64)
    if seed is not None:
        pixels = pixels + np.random.default_rng(seed).integers(-60, 60, pixels.shape)
    buffer = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def colour_of(label: int) -> tuple[int, int, int]:
    return ((220, 30, 30), (30, 220, 30), (30, 30, 220), (250, 250, 250))[label]


def class_shards(folder: Path, count: int = 22) -> Path:
    """clip_benchmark layout, in two tars: noisy pictures of four colours in turn."""
    samples = [(f"s{i:07d}", png(colour_of(i % 4), seed=i), str(i % 4).encode()) for i in range(count)]
    for number, part in enumerate((samples[: count // 2], samples[count // 2 :])):
        members = {f"{key}.{end}": data for key, image, label in part for end, data in (("png", image), ("cls", label))}
        write_tar(folder / "test" / f"{number}.tar", members)
    (folder / "classnames.txt").write_text("".join(f"{name}\n" for name in COLOURS))
    (folder / "zeroshot_classification_templates.txt").write_text("a {c} picture\n{c}\n")
    return folder


def caption_shards(folder: Path, captions: list[list[str]]) -> Path:
    """img2dataset layout with one caption a line, and noisy pictures."""
    members = {}
    for i, lines in enumerate(captions):
        members[f"{i:09d}.png"] = png(colour_of(i % 4), seed=i)
        members[f"{i:09d}.txt"] = "\n".join(lines).encode()
    write_tar(folder / "00000.tar", members)
    return folder


def image_folder(folder: Path, per_class: int = 2) -> Path:
    for label, name in enumerate(("dark_red", "green")):
        (folder / name).mkdir(parents=True)
        for i in range(per_class):
            (folder / name / f"{i}.png").write_bytes(png(colour_of(label), seed=i))
    return folder
