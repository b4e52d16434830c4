"""Answers to a visitor's image, caption and classes.

Every function depends on its arguments alone, so that visitors never see each other's input.

Shapes: N tokens, C codebooks, E width of the embedding.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vqclip.data import ShardedSource
from vqclip.data.decode import decode_image
from vqclip.errors import CheckpointError, ConfigError, DataError
from vqclip.search.index import CodeIndex
from vqclip.search.scan import CodeSearch, Hit, find_hits, open_indexed
from vqclip.tokenizer import ImageTokenizer, TextTokenizer, Tokenizer
from vqclip.tokenizer.folder import CONFIG_FILE, TokenizerFolder, find_folder
from vqclip.tokenizer.loading import load_tokenizer
from vqclip.train.export import load_model

MAX_TEXT = 20_000
"""Longest caption or list of classes in characters; towers read far less."""
MAX_CLASSES = 1000
"""Largest number of classes in a request."""


class Coded(NamedTuple):
    """One sample through its tokenizer."""

    ids: Tensor
    """``(N, C)`` int64 on the CPU: the tokens that are there."""
    continuous: Tensor
    """``(E,)`` unit-norm, the quantizer bypassed."""
    codes_only: Tensor
    """``(E,)`` unit-norm, from the ids."""

    def to_json(self) -> str:
        """Return the ids as JSON, a line a token; ``tokenizer.embed(torch.tensor([ids]))`` takes them."""
        return "[" + ",\n ".join(json.dumps(row) for row in self.ids.tolist()) + "]"


@dataclass(frozen=True)
class Answers:
    """The tokenizers of a folder and an index, and what they answer. `load` makes one."""

    image: ImageTokenizer | None
    """None if the folder contains no image tokenizer."""
    text: TextTokenizer | None
    """None if the folder contains no text tokenizer."""
    scale: float | None
    """Factor of the logits, the inverse temperature; None without both tokenizers."""
    search: CodeSearch | None = None
    """The index; None if none is given."""
    source: ShardedSource | None = None
    """Images that the index was built from; None if they are not shown."""

    @staticmethod
    def load(
        folder: str,
        index: Path | None = None,
        images: Sequence[str] = (),
        keys: Sequence[str] = (),
        device: torch.device | str = "cpu",
    ) -> Answers:
        """Load a folder, and an index of its codes.

        Args:
            folder: a run, a checkpoint, or a tokenizer folder, also with one modality alone; or a hub name.
            index: folder of the index.
            images: paths of the images that the index was built from; none to show names alone.
            keys: ``key=value`` of their kind.
            device: device of the tokenizers.

        Raises:
            CheckpointError: a folder is damaged, or the index is of another tokenizer.
            ConfigError: images without an index, or a tokenizer without codes or of images of any shape.
            DataError: the images are not those that the index was built from.
        """
        if images and index is None:
            raise ConfigError("--data: got images without --index; expected the index that was built from them")
        path, held = Path(folder).expanduser(), list[str]()
        if any((each / CONFIG_FILE).is_file() for each in (path, path / "tokenizer")):
            held = list(TokenizerFolder.open(find_folder(path)).config.modalities)
        image, text, scale = None, None, None
        if held == ["text"]:
            text = load_tokenizer(path, "text").to(device)
        else:
            model = load_model(folder, images_alone=True).model.to(device)
            image, text = model.image, getattr(model, "text", None)
            scale = None if text is None else float(model.logit_scale.detach().exp())
        for tokenizer in filter(None, (image, text)):
            tokenizer.require_image_size("the demo")
            tokenizer.require_codes(f"{folder}:")
        if index is None:
            return Answers(image, text, scale)
        loaded = CodeIndex.load(index)
        own = image if loaded.modality == "image" else text
        if own is None:
            raise CheckpointError(f"--index: {index} is of {loaded.modality} codes; {folder} has no such tokenizer")
        try:
            search = CodeSearch(loaded, own, keep=True)
        except CheckpointError as error:
            raise CheckpointError(f"--index: {index}: {error}, or build another index (vqclip search build)") from None
        return Answers(image, text, scale, search, open_indexed(loaded, images, keys) if images else None)

    @torch.no_grad()
    def of_image(self, data: bytes) -> tuple[Coded, Tensor]:
        """Encode an image file; return also its pixels ``(3, H, W)`` uint8, resized and cropped: what the model sees.

        Raises:
            DataError: it is damaged, too large, or of a format that is not read.
        """
        assert self.image is not None
        pixels = self.image.transform(decode_image(data))
        return _encode(self.image, pixels[None])[0], pixels

    @torch.no_grad()
    def of_caption(self, caption: str) -> tuple[Coded, list[str]]:
        """Encode a caption; return also the text of each token, or its number where tokens and ids do not correspond.

        Raises:
            DataError: it is too long.
        """
        assert self.text is not None
        _require_short("caption", caption)
        coded = _encode(self.text, self.text.preprocess([caption]))[0]
        pieces, most = self.text.preprocess.pieces(caption)
        marked = ["<start>", *pieces[:most], "<end>"]
        if self.text.reduce is not None or len(marked) != len(coded.ids):
            marked = [str(number) for number in range(1, len(coded.ids) + 1)]
        return coded, marked

    @torch.no_grad()
    def classify(self, image: Coded, classes: str, template: str) -> tuple[dict[str, float], dict[str, float]]:
        """Return the probability of each class, from continuous embeddings and from codes.

        It is the softmax over the given classes of the cosines, times the model's scale.

        Args:
            image: an image.
            classes: names, one a line or between commas.
            template: prompt with ``{c}`` for the name of the class.

        Raises:
            DataError: there are no names or too many, or the template has no ``{c}``.
        """
        assert self.text is not None
        assert self.scale is not None
        _require_short("classes", classes)
        _require_short("prompt", template)
        lines = classes.strip().splitlines() if "\n" in classes.strip() else classes.split(",")
        names = list(dict.fromkeys(name.strip() for name in lines if name.strip()))
        if not 0 < len(names) <= MAX_CLASSES:
            raise DataError(f"classes: got {len(names):,}; expected 1 to {MAX_CLASSES:,}, one a line or between commas")
        if "{c}" not in template:
            raise DataError(f"prompt: got {template!r}; expected {{c}} in it, where the name of the class goes")
        prompts = self.text.preprocess([template.replace("{c}", name) for name in names])
        rows = [row for part in prompts.split(64) for row in _encode(self.text, part)]
        logits = [
            [float(row.continuous @ image.continuous) for row in rows],
            [float(row.codes_only @ image.codes_only) for row in rows],
        ]
        found = torch.softmax(self.scale * torch.tensor(logits, dtype=torch.float64), dim=1).tolist()
        return dict(zip(names, found[0], strict=True)), dict(zip(names, found[1], strict=True))

    def nearest(self, coded: Coded, count: int) -> list[Hit]:
        """Return the nearest items of the index to a sample's codes; none without an index."""
        if self.search is None:
            return []
        found = self.search.search(coded.codes_only[None], count)
        return find_hits(self.search.index, found, self.source, lambda error: None)


def _require_short(what: str, text: str) -> None:
    if len(text) > MAX_TEXT:
        raise DataError(f"{what}: got {len(text):,} characters; expected at most {MAX_TEXT:,}")


def _encode(tokenizer: Tokenizer, inputs: Tensor) -> Sequence[Coded]:
    """Encode a batch as `Tokenizer.batch` takes it."""
    out, continuous = tokenizer.with_continuous(inputs.to(tokenizer.device))
    codes_only = tokenizer.embed(out.ids)
    rows = zip(out.ids.cpu(), continuous.float().cpu(), codes_only.float().cpu(), strict=True)
    return [Coded(ids[(ids >= 0).any(dim=-1)], *embeddings) for ids, *embeddings in rows]
