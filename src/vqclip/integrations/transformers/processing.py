"""Inputs of the models: PIL images to pixels, captions to token numbers, with the bits of `tokenizer.preprocess`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError
from torch import Tensor
from transformers import BatchEncoding, BatchFeature
from transformers.image_processing_utils import BaseImageProcessor

import vqclip
from vqclip.data.decode import pil_to_uint8
from vqclip.data.transforms import EvalTransform, EvalTransformConfig
from vqclip.errors import ConfigError, ShapeError
from vqclip.integrations.transformers.models import local_folder, require_no_options
from vqclip.nn.inputs import require_images
from vqclip.tokenizer.folder import CONFIG_FILE, PROCESSOR_FILE, TokenizerFolder
from vqclip.tokenizer.loading import read_tokenizer_config

if TYPE_CHECKING:
    from vqclip.tokenizer import ImageTokenizer
    from vqclip.towers.vocabulary import Vocabulary

_MAX_SIZE = 4096


class VqclipImageProcessor(BaseImageProcessor):
    """PIL images → ``pixel_values`` ``(B, 3, H, W)`` uint8, bit for bit those of `ImageTokenizer.preprocess`.

    Pixels stay bytes: the tower normalises them on the device. ``image_size`` is height and width in pixels; for the
    other arguments see `EvalTransformConfig`.

    Raises:
        ConfigError: a wrong value.
    """

    model_input_names = ["pixel_values"]

    def __init__(
        self, image_size: int = 224, mode: str = "crop", interpolation: str = "bicubic", **options: Any
    ):  # transformers adds options of its own
        super().__init__(**options)
        self.image_size, self.mode, self.interpolation = image_size, mode, interpolation
        self._transform()

    def _transform(self) -> EvalTransform:
        if type(self.image_size) is not int or not 1 <= self.image_size <= _MAX_SIZE:
            raise ConfigError(f"image_size: got {self.image_size!r}, expected 1 to {_MAX_SIZE}")
        settings: Any = {"mode": self.mode, "interpolation": self.interpolation}
        try:
            return EvalTransformConfig.model_validate(settings).build(self.image_size)
        except ValidationError as error:
            raise ConfigError(
                f"got {settings}; expected mode crop or squash, and interpolation bicubic or bilinear"
            ) from error

    @classmethod
    def of(cls, tokenizer: ImageTokenizer) -> VqclipImageProcessor:
        """Return the processor of a tokenizer."""
        settings = tokenizer.config.preprocess
        return cls(tokenizer.tower.image_size, settings.mode, settings.interpolation)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, pretrained_model_name_or_path: str | os.PathLike[str], revision: str | None = None, **options: Any
    ) -> VqclipImageProcessor:
        """Load from a tokenizer folder or hub name, or from a folder with ``preprocessor_config.json`` alone."""
        folder = local_folder(pretrained_model_name_or_path, revision)
        if (folder / PROCESSOR_FILE).is_file() and not (folder / CONFIG_FILE).is_file():
            loaded: VqclipImageProcessor = super().from_pretrained(folder, **options)
            return loaded
        require_no_options(f"{cls.__name__}.from_pretrained", options)
        section = TokenizerFolder.open(folder).section("image")
        if isinstance(size := section.tower.get("image_size"), int):
            settings = EvalTransformConfig.model_validate(section.preprocess or {})
            return cls(size, settings.mode, settings.interpolation)
        return cls.of(vqclip.load_tokenizer(folder, "image"))  # only the network knows its size

    def preprocess(self, images: Any, return_tensors: str | None = "pt", **options: Any) -> BatchFeature:
        """Prepare one PIL image or a list of them, of any mode and size; transparent ones are put on white.

        ``return_tensors`` is ``"pt"`` or ``"np"``.

        Raises:
            ShapeError: anything but PIL images.
            ConfigError: an option of other processors, or another type of tensors.
        """
        require_no_options("VqclipImageProcessor", options)
        transform = self._transform()
        pixels = [transform(pil_to_uint8(image)) for image in require_images(images)]
        batch = torch.stack(pixels) if pixels else torch.empty(0, 3, self.image_size, self.image_size).byte()
        return BatchFeature({"pixel_values": _as_tensors(batch, return_tensors)})


class VqclipVocabulary:
    """Captions → ``input_ids`` and ``attention_mask`` ``(B, N)``, bit for bit those of `TextTokenizer.preprocess`.

    Takes the place of a tokenizer of transformers, in pipelines too. Rows always have the N positions of the text
    tower, whatever ``padding`` says, so that ids do not depend on the other captions of a batch; longer captions are
    cut.

    """

    model_input_names = ["input_ids", "attention_mask"]
    padding_side = "right"

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        self.model_max_length, self.vocab_size = vocabulary.context_length, vocabulary.size
        self.pad_token_id = int(vocabulary([""])[0, -1])

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], revision: str | None = None, **options: Any
    ) -> VqclipVocabulary:
        """Load from a tokenizer folder or hub name; errors as of `FolderModel.from_pretrained`."""
        require_no_options(f"{cls.__name__}.from_pretrained", options)
        folder = TokenizerFolder.open(local_folder(pretrained_model_name_or_path, revision))
        return cls(read_tokenizer_config(folder, "text").tower.vocabulary())

    def save_pretrained(self, save_directory: str | os.PathLike[str], **_: Any) -> tuple[str, ...]:
        """Return no files, after a check that the folder, which the model writes, contains this vocabulary.

        Raises:
            CheckpointError: the folder contains no text tokenizer, or is damaged.
            ConfigError: it has another vocabulary.
        """
        found = type(self).from_pretrained(save_directory).vocabulary
        if (found.files(), found.context_length) != (self.vocabulary.files(), self.vocabulary.context_length):
            raise ConfigError(f"{save_directory}: its vocabulary differs; save the model that this one belongs to")
        return ()

    def __call__(
        self,
        text: str | list[str],
        return_tensors: str | None = None,
        padding: bool | str = "max_length",
        truncation: bool | str | None = True,
        max_length: int | None = None,
        **options: Any,
    ) -> BatchEncoding:
        """Tokenize a caption or a list of them; a single one gives a row without the axis B if it is a list.

        ``return_tensors`` is ``"pt"``, ``"np"``, or None for lists, ``max_length`` None or N; ``padding`` and
        ``truncation`` have no effect.

        Raises:
            ShapeError: anything but captions.
            ConfigError: an option of other tokenizers.
        """
        require_no_options("VqclipVocabulary", options)
        if max_length not in (None, self.model_max_length):
            raise ConfigError(f"max_length: got {max_length}, expected {self.model_max_length}, the tower's length")
        single = isinstance(text, str)
        tokens = self.vocabulary([text] if isinstance(text, str) else text)
        rows = {"input_ids": tokens, "attention_mask": self.vocabulary.mask(tokens).long()}
        if return_tensors is None:
            lists = {name: row.tolist() for name, row in rows.items()}
            return BatchEncoding({name: row[0] if single else row for name, row in lists.items()})
        return BatchEncoding({name: _as_tensors(row, return_tensors) for name, row in rows.items()})


class VqclipProcessor:
    """Captions, PIL images or both → the inputs of a `VqclipModel`, called as the ``CLIPProcessor`` of transformers."""

    def __init__(self, image_processor: VqclipImageProcessor, tokenizer: VqclipVocabulary):
        self.image_processor, self.tokenizer = image_processor, tokenizer
        self.model_input_names = [*tokenizer.model_input_names, *image_processor.model_input_names]
        self.save_pretrained = tokenizer.save_pretrained

    @classmethod
    def from_pretrained(cls, name: str | os.PathLike[str], **options: Any) -> VqclipProcessor:
        """Load from a folder or hub name with both tokenizers; see `VqclipVocabulary.from_pretrained`."""
        return cls(
            VqclipImageProcessor.from_pretrained(name, **options), VqclipVocabulary.from_pretrained(name, **options)
        )

    def __call__(
        self, *, text: str | list[str] | None = None, images: Any = None, return_tensors: str = "pt", **options: Any
    ) -> BatchEncoding:
        """Prepare a caption or a list of them, a PIL image or a list of them, or both.

        ``return_tensors`` is ``"pt"`` or ``"np"``; ``options``, and what is refused, are those of `VqclipVocabulary`.
        """
        if text is None and images is None:
            raise ShapeError("VqclipProcessor: got neither text nor images, expected text=[...], images=[...] or both")
        found = self.tokenizer([] if text is None else text, return_tensors=return_tensors, **options)
        if text is None:
            found.clear()
        return found if images is None else BatchEncoding({**found, **self.image_processor(images, return_tensors)})


def _as_tensors(values: Tensor, kind: str | None) -> Any:
    if kind not in ("pt", "np"):
        raise ConfigError(f"return_tensors: got {kind!r}, expected 'pt' or 'np'")
    return values if kind == "pt" else values.numpy()
