"""Image towers of transformers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, PrivateAttr, model_validator
from torch import Tensor, nn

from vqclip.errors import ConfigError
from vqclip.io.tensors import first_names
from vqclip.towers.huggingface.folder import EncoderFolder, find_folder
from vqclip.towers.huggingface.network import build_network, network_settings
from vqclip.towers.image import ImageTower
from vqclip.towers.pixels import OPENAI_MEAN, OPENAI_STD, Normalize
from vqclip.towers.training import TowerConfig, set_training

_Channels = tuple[float, float, float]
_PREFIX = "backbone.network."


class TransformersFeatures(nn.Module):
    """The last features of an encoder of transformers as ``(B, N, D)``, without prefix (class, register) tokens.

    Args:
        network: the encoder.
        image_size: height and width in pixels.
        native_size: size of its position embeddings, if it has one.
    """

    def __init__(self, network: Any, image_size: int, native_size: int | None):
        super().__init__()
        self.network = network
        takes = inspect.signature(network.forward).parameters
        resized = native_size is not None and image_size != native_size
        self.arguments: dict[str, Any] = {"return_dict": True}
        if resized and "interpolate_pos_encoding" in takes:
            self.arguments["interpolate_pos_encoding"] = True
        with torch.no_grad():
            out = network.eval()(torch.zeros(1, 3, image_size, image_size), **self.arguments).last_hidden_state
        self.prefix = 0 if out.ndim == 4 else _count_prefix(network.config, out.shape[1], image_size)

    def forward(self, pixels: Tensor) -> Tensor:
        """Map normalised pixels ``(B, 3, H, W)`` to features ``(B, N, D)``."""
        features: Tensor = self.network(pixels, **self.arguments).last_hidden_state
        if features.ndim == 4:
            return features.flatten(2).transpose(1, 2)
        return features[:, self.prefix :]


class TransformersImageTowerConfig(TowerConfig):
    """An image encoder of transformers (extra ``transformers``)."""

    random_weights: ClassVar[dict[str, Any]] = {"name": None, "revision": None, "pretrained": False}
    """Settings to change to build the same network without pretrained weights, once `resolve` has filled the others."""

    kind: Literal["transformers"] = "transformers"
    name: str | None = None
    """Folder that transformers wrote, or name ``owner/name`` of a model on the hub."""
    revision: str | None = None
    """Branch, tag or commit on the hub; null for the newest."""
    pretrained: bool = True
    """Load the weights (model.safetensors); false: random weights of the same network."""
    image_size: int | None = Field(None, ge=8, le=4096)
    """Height and width of the input in pixels; null for the network's own. Another size needs a network that
    interpolates its position embeddings, or one without any."""
    mean: _Channels | None = None
    """Mean of the pixels in 0..1 per channel; null for that of preprocessor_config.json."""
    std: _Channels | None = None
    """Deviation of the pixels in 0..1 per channel; null for that of preprocessor_config.json."""
    dropout: bool = False
    """Keep the network's dropout and stochastic depth in training. They depend on the number of processes."""
    network: dict[str, Any] | None = None
    """The network's own settings (config.json of transformers); set in tokenizer folders, in place of `name`."""

    _shapes: dict[str, tuple[int, ...]] | None = PrivateAttr(None)

    @property
    def is_pretrained(self) -> bool:
        """Return whether the tower starts from weights that were trained before."""
        return self.pretrained

    @model_validator(mode="after")
    def _one_source(self) -> TransformersImageTowerConfig:
        if (self.name is None) == (self.network is None):
            given = "both name and network" if self.name is not None else "neither name nor network"
            raise ValueError(f"got {given}; expected name")
        if self.network is not None and self.pretrained:
            raise ValueError("got network with pretrained true, which has no weights; expected pretrained false")
        if self.std is not None and min(self.std) <= 0:
            raise ValueError(f"got std {self.std}; expected numbers above 0")
        return self

    def resolve(self) -> TransformersImageTowerConfig:
        """Return a copy with the network's settings, the image size and the normalisation read from the folder.

        Raises:
            ConfigError: a folder that is missing or incomplete, or a model other than an encoder of images.
        """
        settings, mean, std = self.network, self.mean, self.std
        if settings is None:
            folder = self._folder()
            settings = network_settings(folder.network(), "vision")
            if mean is None or std is None:
                found = _statistics(folder, self.pretrained)
                mean, std = mean or found[0], std or found[1]
        size = self.image_size or _native_size(settings)
        if size is None:
            raise ConfigError("tower.image_size: got null; expected a size, for the network's settings have none")
        update = {
            "network": network_settings(settings, "vision"),
            "image_size": size,
            "mean": mean or OPENAI_MEAN,
            "std": std or OPENAI_STD,
        }
        return self.model_copy(update=update)

    def with_stored(
        self, files: Mapping[str, bytes], shapes: Mapping[str, tuple[int, ...]]
    ) -> TransformersImageTowerConfig:
        """Return a copy for a tokenizer folder, with the shapes of the tower's weights."""
        if self.network is None:
            raise ConfigError("tower.network: missing; expected the network's settings in this folder")
        found = self.model_copy()
        found._shapes = {name.removeprefix(_PREFIX): shape for name, shape in shapes.items()}
        return found

    @torch.inference_mode(False)  # weights made in inference mode could neither be probed nor trained
    def build(self) -> ImageTower:
        """Make the tower.

        Raises:
            ConfigError: a folder that is missing or incomplete, a model other than an encoder of images, an image size
                that it cannot read, or weights that do not fit.
        """
        resolved = self.resolve()
        settings, size = resolved.network, resolved.image_size
        mean, std = resolved.mean or OPENAI_MEAN, resolved.std or OPENAI_STD  # never absent once resolved
        assert settings is not None
        assert size is not None
        folder = resolved._folder() if resolved.pretrained else None
        if folder is not None:
            folder.require_weights()
        weights = folder.path if folder is not None else None
        network, missing = build_network(settings, "vision", weights, dropout=self.dropout, shapes=resolved._shapes)
        tower = _make_tower(network, size, _native_size(settings), Normalize(size, mean, std))
        needed = {name for name, weight in network.named_parameters() if weight.requires_grad}
        if lacking := sorted(needed.intersection(missing)):
            raise ConfigError(
                f"tower.name: the weights lack {first_names(lacking)}; expected those of the whole encoder, or "
                "pretrained: false"
            )
        return set_training(tower, self.train)

    def _folder(self) -> EncoderFolder:
        assert self.name is not None
        return EncoderFolder.open(find_folder(self.name, self.revision))


def _make_tower(network: Any, size: int, native: int | None, normalize: Normalize) -> ImageTower:
    try:
        return ImageTower(TransformersFeatures(network, size, native), normalize)
    except ConfigError:
        raise
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError) as error:
        own = f" (its own is {native})" if native else ""
        reason = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"tower.image_size: the network cannot read images of {size} pixels{own}: {type(error).__name__}: {reason}"
        ) from error


def _native_size(settings: Mapping[str, Any]) -> int | None:
    size = settings.get("image_size")
    if isinstance(size, list) and len(size) == 2 and size[0] == size[1]:
        size = size[0]
    return size if isinstance(size, int) and not isinstance(size, bool) else None


def _statistics(folder: EncoderFolder, pretrained: bool) -> tuple[_Channels, _Channels]:
    """Return mean and deviation of the pixels that the network was trained on."""
    settings = folder.preprocessor()
    if settings is None:
        if not pretrained:
            return OPENAI_MEAN, OPENAI_STD  # any will do without weights
        raise ConfigError(
            f"tower.mean: {folder.path} has no preprocessor_config.json; expected mean and std of the pixels that the "
            "weights were trained on, such as [0.5, 0.5, 0.5]"
        )
    factor = settings.get("rescale_factor", 1 / 255)
    usual = isinstance(factor, int | float) and abs(factor * 255 - 1) <= 1e-3
    if settings.get("do_rescale") is False or not usual:
        raise ConfigError(
            f"tower.mean: preprocessor_config.json in {folder.path} scales pixels by {factor!r} (do_rescale "
            f"{settings.get('do_rescale')!r}); expected 1/255, or mean and std of pixels in 0..1 beside name"
        )
    if settings.get("do_normalize") is False:
        return (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    mean, std = _channels(settings.get("image_mean")), _channels(settings.get("image_std"))
    if mean is not None and std is not None and min(std) > 0:
        return mean, std
    raise ConfigError(
        f"tower.mean: preprocessor_config.json in {folder.path} lacks image_mean or image_std; expected three "
        "finite numbers each, or mean and std beside name"
    )


def _channels(value: Any) -> _Channels | None:
    if not isinstance(value, list) or len(value) != 3:
        return None
    if not all(isinstance(each, int | float) and math.isfinite(each) for each in value):
        return None
    red, green, blue = value
    return float(red), float(green), float(blue)


def _count_prefix(config: Any, tokens: int, image_size: int) -> int:
    """Return the number of class and register tokens before the patches."""
    patch = getattr(config, "patch_size", None)
    side = patch[0] if isinstance(patch, list | tuple) else patch
    if isinstance(side, int) and side > 0:
        extra = tokens - (image_size // side) ** 2
        if extra in (0, 1, 2, 1 + int(getattr(config, "num_register_tokens", 0) or 0)):
            if image_size % side:
                raise ConfigError(
                    f"tower.image_size: got {image_size} with patches of {side} pixels, which would ignore the last "
                    f"{image_size % side} rows and columns; expected a multiple of {side}"
                )
            return extra
    if round(tokens**0.5) ** 2 == tokens and hasattr(config, "depths"):  # stages of windows, as in Swin
        return 0
    raise ConfigError(
        f"tower.name: the network gives {tokens} tokens for {image_size} pixels and patches of {patch}; expected one "
        "for each patch after class and register tokens, or a feature map"
    )
