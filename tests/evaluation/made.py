"""Small made data and models for the tests of evaluation."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.data.making import encode, write_tar
from tests.models import FSQ, IDENTITY, LFQ, tiny_model
from vqclip.model import CLIP
from vqclip.quantizers import Prefix, Stats
from vqclip.tokenizer import TokenizerOutput

PRODUCT = {"kind": "product", "layer": {"kind": "fsq", "levels": [3, 3]}, "codebooks": 3}
QUANTIZERS = {"fsq": FSQ, "lfq": LFQ, "product": PRODUCT, "identity": IDENTITY}

SIZE = 16
CAPTIONS = [[f"number {i} of them", f"picture {i}"][: 1 + i % 2] for i in range(9)]
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
    return encode(pixels.clip(0, 255).astype(np.uint8), "PNG")


def colour_of(label: int) -> tuple[int, int, int]:
    return ((220, 30, 30), (30, 220, 30), (30, 30, 220), (250, 250, 250))[label]


def class_tar(path: Path, images: Iterable[bytes], labels: Iterable[int], first: int = 0) -> Path:
    """Labelled images in a tar."""
    members = {}
    for i, (image, label) in enumerate(zip(images, labels, strict=True), first):
        members |= {f"s{i:07d}.png": image, f"s{i:07d}.cls": str(label).encode()}
    return write_tar(path, members)


def caption_tar(path: Path, images: Iterable[bytes], captions: Iterable[Sequence[str]]) -> Path:
    """Images in a tar with one caption a line."""
    members = {}
    for i, (image, lines) in enumerate(zip(images, captions, strict=True)):
        members |= {f"{i:09d}.png": image, f"{i:09d}.txt": "\n".join(lines).encode()}
    return write_tar(path, members)


def name_classes(folder: Path, names: Iterable[object], templates: Sequence[str]) -> Path:
    """Write the files of classes and templates, as clip_benchmark has them."""
    (folder / "classnames.txt").write_text("".join(f"{name}\n" for name in names))
    (folder / "zeroshot_classification_templates.txt").write_text("\n".join(templates))
    return folder


def noisy(count: int, damaged: Collection[int] = ()) -> list[bytes]:
    """Noisy images of four colours in turn, and no images in place of some."""
    return [b"no image" if i in damaged else png(colour_of(i % 4), seed=i) for i in range(count)]


def class_shards(folder: Path, count: int = 22, damaged: Collection[int] = ()) -> Path:
    """clip_benchmark layout, in two tars: noisy images of four colours in turn, some damaged."""
    images, labels, half = noisy(count, damaged), [i % 4 for i in range(count)], count // 2
    class_tar(folder / "test" / "0.tar", images[:half], labels[:half])
    class_tar(folder / "test" / "1.tar", images[half:], labels[half:], first=half)
    return name_classes(folder, COLOURS, ("a {c} picture", "{c}"))


def number_shards(
    folder: Path, labels: Sequence[int], classes: int, templates: Sequence[str] = ("number {c}",)
) -> Path:
    """Images of colour (n, n, n) labelled n, classes "0", "1", ..."""
    class_tar(folder / "test" / "0.tar", map(png, labels), labels)
    return name_classes(folder, range(classes), templates)


def caption_shards(folder: Path, captions: Sequence[Sequence[str]], damaged: Collection[int] = ()) -> Path:
    """img2dataset layout with one caption a line, and noisy images, some damaged."""
    caption_tar(folder / "00000.tar", noisy(len(captions), damaged), captions)
    return folder


def image_folder(folder: Path, per_class: int = 2) -> Path:
    for label, name in enumerate(("dark_red", "green")):
        (folder / name).mkdir(parents=True)
        for i in range(per_class):
            (folder / name / f"{i}.png").write_bytes(png(colour_of(label), seed=i))
    return folder
