"""Use a vqclip model in code that was written for open_clip.

    model, preprocess, tokenizer = load("runs/base/tokenizer", mode="codes")      # the vqclip embedding
    export_towers("runs/base/tokenizer", "laion2b_s34b_b88k", Path("out"))        # the towers, in an open_clip model

The vqclip embedding itself cannot be written as an open_clip model. open_clip builds a model from a configuration, in
which a tower ends with a pooling and one projection; what vqclip adds (projection to the quantizer, quantizer,
positions, attention pooling) has no name there, not even with the quantizer bypassed. `load` therefore returns a module
with open_clip's methods around the vqclip model.

What open_clip can hold is the towers. `export_towers` writes them back into the open_clip checkpoint that they came
from, whose projections, pooling and temperature stay. Towers that were not trained give its embeddings again. Towers
that were trained have drifted from the old projections, which vqclip's losses do not see: such a model is a start for
fine-tuning in open_clip, or a source of features, rather than a finished CLIP.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from vqclip.errors import ConfigError
from vqclip.io.atomic import replace_folder, require_replaceable
from vqclip.io.tensors import first_names, save_tensors, shape_differences
from vqclip.model import CLIP
from vqclip.tokenizer import ImageTokenizer, TextTokenizer
from vqclip.towers.open_clip import create_open_clip

if TYPE_CHECKING:
    from PIL.Image import Image

    from vqclip.data.transforms import EvalTransform
    from vqclip.towers.vocabulary import Vocabulary

Mode = Literal["continuous", "codes"]
"""Path of an embedding: with the quantizers bypassed, or from the ids alone."""
CONFIG_FILE = "open_clip_config.json"
"""Name of open_clip's configuration in a folder."""
WEIGHTS_FILE = "open_clip_model.safetensors"
"""Name of the weights in a folder, the first that open_clip looks for."""
_IMAGE_PREFIXES = {"backbone.visual.": "visual.", "backbone.model.": "visual.trunk."}
_TEXT_PREFIXES = {"transformer.": "text."}
_PREPROCESS = ("mean", "std", "interpolation", "resize_mode")


class OpenCLIPModel(NamedTuple):
    """Parts that open_clip's ``create_model_from_pretrained`` and ``get_tokenizer`` return."""

    model: OpenCLIPWrapper
    """Module with ``encode_image`` and ``encode_text``, in evaluation mode."""
    preprocess: Preprocess
    """PIL image → ``(3, H, W)`` float in 0..1."""
    tokenizer: Tokenize
    """Captions → ``(B, N)`` int64."""


def load(folder: str | Path, mode: Mode = "continuous", device: str | torch.device = "cpu") -> OpenCLIPModel:
    """Load a vqclip folder with both tokenizers as a model with open_clip's methods.

    Args:
        folder: folder that `CLIP.save_pretrained` or a run wrote, or a hub name ``owner/name``.
        mode: ``continuous``: embeddings with the quantizers bypassed; ``codes``: from the ids alone, as stored ones.
        device: of the model.

    Raises:
        CheckpointError: the folder is missing or damaged, or contains only one modality.
        ConfigError: unknown mode.
    """
    if mode not in ("continuous", "codes"):
        raise ConfigError(f"mode: got {mode!r}, expected 'continuous' or 'codes'")
    clip = CLIP.from_pretrained(folder).to(device)
    return OpenCLIPModel(
        OpenCLIPWrapper(clip, mode).eval(), Preprocess(clip.image.transform), Tokenize(clip.text.preprocess)
    )


class OpenCLIPWrapper(nn.Module):
    """A vqclip model with the methods and attributes of an ``open_clip.CLIP``.

    Args:
        clip: the model.
        mode: see `load`.
    """

    def __init__(self, clip: CLIP, mode: Mode):
        super().__init__()
        self.clip, self.mode = clip, mode
        self.context_length = clip.text.tower.context_length
        self.vocab_size = clip.text.preprocess.size

    @property
    def visual(self) -> nn.Module:
        """The image tower, with ``image_size``."""
        return self.clip.image.tower

    @property
    def logit_scale(self) -> Tensor:
        """() logarithm of the scale."""
        return self.clip.logit_scale

    @property
    def logit_bias(self) -> Tensor | None:
        """() bias of the logits, or None."""
        return self.clip.logit_bias

    def encode_image(self, image: Tensor, normalize: bool = False) -> Tensor:
        """Embed ``(B, 3, H, W)`` in 0..1, as `Preprocess` makes it, or uint8 → ``(B, E)``.

        Embeddings have unit norm whatever ``normalize`` is.

        Raises:
            ShapeError: another shape, or pixels outside 0..1: the model normalises them itself.
        """
        return self._embed(self.clip.image, self.clip.image.batch(image))

    def encode_text(self, text: Tensor, normalize: bool = False) -> Tensor:
        """Embed ``(B, N)`` token numbers of `Tokenize` → ``(B, E)``, unit-norm whatever ``normalize`` is."""
        return self._embed(self.clip.text, self.clip.text.batch(text))

    def get_logits(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits ``(B, T)`` of images over texts, and their transpose."""
        logits = self.logit_scale.exp() * self.encode_image(image) @ self.encode_text(text).T
        if self.logit_bias is not None:
            logits = logits + self.logit_bias
        return logits, logits.T

    def forward(self, image: Tensor | None = None, text: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """Return the embeddings of images and texts, None for a missing one, the scale, and the bias if any."""
        images = None if image is None else self.encode_image(image)
        texts = None if text is None else self.encode_text(text)
        found = (images, texts, self.logit_scale.exp())
        return found if self.logit_bias is None else (*found, self.logit_bias)

    def _embed(self, tokenizer: ImageTokenizer | TextTokenizer, inputs: Tensor) -> Tensor:
        if self.mode == "continuous":
            return tokenizer.continuous(inputs)
        return tokenizer.embed(tokenizer.encode(inputs))


class Preprocess:
    """PIL image → ``(3, H, W)`` float32 in 0..1: the tokenizer's own transform. Light enough for loader workers."""

    def __init__(self, transform: EvalTransform):
        self.transform = transform

    def __call__(self, image: Image) -> Tensor:
        """Prepare one image of any mode and size."""
        from vqclip.data.decode import pil_to_uint8

        return self.transform(pil_to_uint8(image)).float().div_(255)


class Tokenize:
    """Captions → ``(B, N)`` int64, as open_clip's tokenizers."""

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        self.context_length = vocabulary.context_length

    def __call__(self, texts: str | Sequence[str], context_length: int | None = None) -> Tensor:
        """Tokenize one caption or several.

        Raises:
            ConfigError: another context length than the model's.
        """
        if context_length not in (None, self.context_length):
            raise ConfigError(f"context_length: got {context_length}, expected {self.context_length}, the model's")
        return self.vocabulary([texts] if isinstance(texts, str) else list(texts))


@dataclass(frozen=True)
class ExportedTowers:
    """Result of `export_towers`."""

    folder: Path
    """Folder that open_clip loads as ``local-dir:FOLDER``."""
    written: tuple[str, ...]
    """Names, in open_clip, of the tensors of the vqclip towers."""
    kept: tuple[str, ...]
    """Names of those of the base checkpoint: projections, pooling, heads, temperature."""

    def describe(self) -> str:
        """Return a summary for a person."""
        return (
            f"{self.folder}: {len(self.written)} tensors of the towers, {len(self.kept)} of the base checkpoint "
            f"({first_names(self.kept)}); open_clip loads it as local-dir:{self.folder}"
        )


def export_towers(folder: str | Path, base: str, out: Path) -> ExportedTowers:
    """Write the towers of a vqclip folder into the open_clip model that they came from.

    Args:
        folder: folder that `CLIP.save_pretrained` or a run wrote; both towers are those of one open_clip model.
        base: tag or file of the pretrained weights that the towers started from.
        out: folder to write: ``open_clip_config.json`` and ``open_clip_model.safetensors``.

    Raises:
        CheckpointError: ``folder`` is missing or damaged, or contains only one modality.
        ConfigError: its towers are not those of one open_clip model, ``base`` does not fit, or ``out`` contains other
            files.
    """
    import open_clip

    require_replaceable(out, CONFIG_FILE)
    clip = CLIP.from_pretrained(folder)
    name = _open_clip_name(clip, folder)
    try:
        model = create_open_clip(name, base)
    except ConfigError as error:
        raise ConfigError(f"--base: {str(error).removeprefix('tower.pretrained: ')}") from error
    towers = _rename(clip.image.tower, _IMAGE_PREFIXES) | _rename(clip.text.tower, _TEXT_PREFIXES)
    state = model.state_dict()
    shapes = {key: tuple(tensor.shape) for key, tensor in towers.items()}
    expected = {key: tuple(state[key].shape) for key in shapes if key in state}
    if problems := shape_differences(expected, shapes):
        raise ConfigError(f"{folder}: its towers do not fit {name}: {'; '.join(problems[:5])}")
    config = deepcopy(open_clip.get_model_config(name))
    state |= towers
    if not (config.get("custom_text") or "hf_model_name" in config["text_cfg"]):
        state = {key.removeprefix("text."): tensor for key, tensor in state.items()}  # as open_clip.CLIP names them

    def fill(aside: Path) -> None:
        preprocess = {key: value for key, value in model.visual.preprocess_cfg.items() if key in _PREPROCESS}
        (aside / CONFIG_FILE).write_text(json.dumps({"model_cfg": config, "preprocess_cfg": preprocess}, indent=2))
        save_tensors({key: each.detach().contiguous().clone() for key, each in state.items()}, aside / WEIGHTS_FILE)

    replace_folder(out, fill)
    return ExportedTowers(out, tuple(towers), tuple(key for key in model.state_dict() if key not in towers))


def _open_clip_name(clip: CLIP, folder: str | Path) -> str:
    towers: dict[str, Any] = {"image": clip.config.image.tower, "text": clip.config.text.tower}
    found = {name: f"{tower.kind} {getattr(tower, 'model', '')}".strip() for name, tower in towers.items()}
    if any(tower.kind != "open_clip" for tower in towers.values()) or found["image"] != found["text"]:
        raise ConfigError(
            f"{folder}: got the towers {found['image']} and {found['text']}; expected both of one open_clip model "
            "(model.towers: {kind: open_clip, ...}). open_clip has no place for other towers, nor for what vqclip adds "
            "to them; vqclip.export.open_clip.load gives any folder the methods of an open_clip model"
        )
    return str(towers["image"].model)


def _rename(tower: nn.Module, prefixes: dict[str, str]) -> dict[str, Tensor]:
    """Return a tower's tensors under open_clip's names."""
    renamed = {}
    for name, tensor in tower.state_dict().items():
        for own, theirs in prefixes.items():
            if name.startswith(own):
                renamed[theirs + name.removeprefix(own)] = tensor
    assert len(renamed) == len(tower.state_dict())
    return renamed
