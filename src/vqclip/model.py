"""The CLIP model: two tokenizers and a temperature."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import model_validator
from torch import Tensor, nn

from vqclip.config import Config
from vqclip.config.bounds import EmbedDim
from vqclip.nn.temperature import DEFAULT_SCALE, TemperatureConfig
from vqclip.quantizers import Quantizer
from vqclip.tokenizer import ImageTokenizer, ImageTokenizerConfig, TextTokenizerConfig, TokenizerOutput
from vqclip.tokenizer.folder import TokenizerFolder, find_folder
from vqclip.tokenizer.loading import load_whole, read_tokenizer_config
from vqclip.tokenizer.saving import save_and_push, save_folder
from vqclip.tokenizer.stored import merged_state
from vqclip.towers.base import rename_tower_errors
from vqclip.towers.open_clip import OpenCLIPConfig, describe_inherited, share_models


class ModelConfig(Config):
    """Two tokenizers that share a joint embedding."""

    towers: OpenCLIPConfig | None = None
    """Both towers from one model; leave `image.tower` and `text.tower` out, but for their `train`."""
    embed_dim: EmbedDim = 256
    """E, width of the joint embedding."""
    image: ImageTokenizerConfig
    """Image tokenizer."""
    text: TextTokenizerConfig
    """Text tokenizer."""
    temperature: TemperatureConfig = TemperatureConfig()
    """Scale and bias of the logits."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        """Copy `towers` to `image.tower` and `text.tower`, which may set `train` alone; fill in `temperature.init`.

        Where pretrained weights have a temperature, it stays open.
        """
        if not isinstance(data, dict):
            return data
        filled, both = dict(data), data.get("towers")
        for name in ("image", "text"):
            part = data.get(name)
            own = part.get("tower", {}) if isinstance(part, dict) else None
            if isinstance(both, dict) and isinstance(part, dict) and isinstance(own, dict) and own.keys() <= {"train"}:
                filled[name] = part | {"tower": {"kind": "open_clip"} | both | own}
        pretrained = both.get("pretrained") if isinstance(both, dict) else getattr(both, "pretrained", None)
        temperature = data.get("temperature", {})
        if pretrained is None and isinstance(temperature, dict) and temperature.get("init") is None:
            filled["temperature"] = temperature | {"init": DEFAULT_SCALE}
        return filled

    @model_validator(mode="after")
    def _check_towers_agree(self) -> ModelConfig:
        for name, part in (("image", self.image), ("text", self.text)):
            if self.towers is not None and part.tower.model_dump(exclude={"train"}) != self.towers.model_dump():
                raise ValueError(f"got both towers and {name}.tower, which differ; expected one of the two")
        return self

    @torch.inference_mode(False)
    def build(self) -> CLIP:
        """Build the model; weights that are not pretrained are drawn from torch's global generator."""
        return CLIP(self)


class CLIPOutput(NamedTuple):
    """Output of the model in training."""

    image: TokenizerOutput
    text: TokenizerOutput
    scale: Tensor
    """() positive, factor of the logits."""
    bias: Tensor | None
    """() added to the logits, or None."""
    image_features: Tensor | None = None
    """``(B, N, D)`` of the image tower, where they were given or asked for."""
    text_features: Tensor | None = None
    """``(B, N, D)`` of the text tower, where they were given or asked for."""


class CLIP(nn.Module):
    """Contrastive language-image pretraining (Radford et al. 2021) through discrete tokens.

    Args:
        config: configuration of all parts.
        section: key path of `config` for error messages; "" if it is the root.

    Attributes:
        inherited: description of what was taken from the weights that `config.towers` names; "" without any.
    """

    def __init__(self, config: ModelConfig, section: str = "model."):
        super().__init__()
        with share_models() as shared:
            with rename_tower_errors(section + ("image.tower" if config.towers is None else "towers")):
                self.image = config.image.build(config.embed_dim)
            with rename_tower_errors(section + ("text.tower" if config.towers is None else "towers")):
                self.text = config.text.build(config.embed_dim)
        self.inherited = ""
        both = config.towers
        tensors = shared[both.model, both.pretrained][1] if both is not None and both.pretrained is not None else {}
        start = config.temperature.start(tensors)
        if both is not None and tensors:
            towers = (self.image.tower, self.text.tower)
            self.inherited = describe_inherited(f"{both.model} ({both.pretrained})", tensors, towers, start)
        self.config = config.model_copy(update={"temperature": start.config})
        self.logit_scale = nn.Parameter(torch.tensor(start.log_scale))
        bias: Any = start.config.bias  # a number by now, if any
        self.logit_bias = None if bias is None else nn.Parameter(torch.tensor(float(bias)))

    def forward(
        self,
        images: Tensor,
        tokens: Tensor,
        image_features: Tensor | None = None,
        text_features: Tensor | None = None,
        keep_features: bool = False,
    ) -> CLIPOutput:
        """Run the training path of both tokenizers.

        Args:
            images: ``(B, 3, H, W)`` uint8; not read if their features are given.
            tokens: ``(B, N)`` int64, as `TextTokenizer.preprocess` makes them.
            image_features: ``(B, N, D)`` from `Tokenizer.tower_features`; the image tower is then not run.
            text_features: ``(B, N, D)`` from `Tokenizer.tower_features`; the text tower is then not run.
            keep_features: return the features of both towers as well.
        """
        if keep_features:
            image_features = self.image.tower_features(images) if image_features is None else image_features
            text_features = self.text.tower_features(tokens) if text_features is None else text_features
        image, text = self.image(images, image_features), self.text(tokens, text_features)
        return CLIPOutput(image, text, *self.temperature(), image_features, text_features)

    def temperature(self) -> tuple[Tensor, Tensor | None]:
        """Return the () scale of the logits, and their () bias or None."""
        # `* 1` makes the bias a part of this forward's graph, where DDP looks for used parameters.
        return self.logit_scale.exp(), None if self.logit_bias is None else self.logit_bias * 1

    def quantizers(self) -> dict[str, Quantizer]:
        """Return the two quantizers, as ``image`` and ``text``."""
        return {"image": self.image.quantizer, "text": self.text.quantizer}

    @torch.no_grad()
    def clamp_temperature(self) -> None:
        """Clamp the scale to its maximum; called after an optimizer step."""
        self.logit_scale.clamp_(max=math.log(self.config.temperature.max))

    def save_pretrained(self, folder: str | Path) -> None:
        """Write both tokenizers and the temperature to a folder that `load_tokenizer` and `from_pretrained` read.

        A tokenizer in this folder is replaced atomically, with its card.

        Raises:
            ConfigError: the folder contains another model, or a tokenizer beside other files, which would be lost.
        """
        save_folder(folder, self.section(), merged_state(self), self.files())

    def push_to_hub(
        self, name: str, card: str | None = None, *, private: bool | None = None, revision: str | None = None
    ) -> str:
        """Write both tokenizers and the temperature to the hub; see `Tokenizer.push_to_hub`."""
        return save_and_push(self.save_pretrained, name, card, private=private, revision=revision)

    def files(self) -> dict[str, bytes]:
        """Return the further files of the folder by their names."""
        return self.image.files() | self.text.files()

    def section(self) -> dict[str, Any]:
        """Return the content of ``config.json``."""
        temperature = self.config.temperature.model_dump(mode="json")
        return {"image": self.image.section(), "text": self.text.section(), "temperature": temperature} | (
            self.image.pixels_section()
        )

    @staticmethod
    def from_pretrained(folder: str | Path, revision: str | None = None) -> CLIP:
        """Load both tokenizers of a folder or hub name; a missing or unexpected key is an error.

        The model is in evaluation mode, and its weights require no gradient: ``model.train().requires_grad_()`` asks
        for training.

        Args:
            folder: folder of a run, or written by `save_pretrained`; or a hub name ``owner/name``.
            revision: branch, tag or commit of a hub name; None for the newest.

        Raises:
            CheckpointError: the folder is missing or damaged, or contains only one modality.
        """
        return _load_both(TokenizerFolder.open(find_folder(folder, revision)))


class ImageModel(nn.Module):
    """A model of an image tokenizer alone; `load_pretrained` returns one.

    Args:
        image: the tokenizer.
    """

    def __init__(self, image: ImageTokenizer):
        super().__init__()
        self.image = image

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the image tokenizer; see `CLIP.save_pretrained`."""
        self.image.save_pretrained(folder)


def load_pretrained(folder: str | Path) -> CLIP | ImageModel:
    """Load the tokenizers of a folder, as `CLIP.from_pretrained` does: both, or that of images alone.

    Raises:
        CheckpointError: the folder is missing or damaged, or contains a text tokenizer alone.
    """
    opened = TokenizerFolder.open(find_folder(folder))
    if opened.config.modalities != ["image"]:
        return _load_both(opened)
    image = load_whole(opened, "image")
    assert isinstance(image, ImageTokenizer)
    return ImageModel(image)


def _load_both(opened: TokenizerFolder) -> CLIP:
    config = ModelConfig(
        embed_dim=opened.section("image").embed_dim,
        image=read_tokenizer_config(opened, "image"),
        text=read_tokenizer_config(opened, "text"),
        temperature=opened.config.temperature or TemperatureConfig(),  # never absent beside two tokenizers
    )
    return opened.load(lambda: CLIP(config, section=""))
