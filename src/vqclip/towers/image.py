"""Image towers: pixels to a grid of features. Any timm model, and a small stack of convolutions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn
from typing_extensions import Self

from vqclip.config.bounds import MAX_WIDTH
from vqclip.errors import ConfigError, ShapeError
from vqclip.nn.dropout import PatchDropout
from vqclip.nn.shapes import PatchBudget
from vqclip.towers.base import FromStep, Tower, TowerConfig, freeze_unused, set_training
from vqclip.towers.weights import EFFICIENTNET_NAME, load_checkpoint, load_efficientnet

OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
"""Mean of the pixels of CLIP's training images, per channel in 0..1."""
OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)
"""Deviation of these pixels."""
_NOT_ARGS = (
    *("img_size", "num_classes", "global_pool", "in_chans", "device", "dtype"),  # the tower sets these itself
    *("pretrained", "checkpoint", "cache_dir", "model_", "feature", "out_indices", "pruned", "kwargs_filter"),
    *("scriptable", "exportable", "no_jit"),
)
"""Prefixes of arguments of ``timm.create_model`` that do not describe the network."""


class ImageTower(Tower):
    """A backbone that turns pixels into patch features.

    Args:
        backbone: module ``(B, 3, H, W) -> (B, N, D)``.
        normalize: normalisation of the pixels.

    Attributes:
        num_tokens: N, patches per image.
        width: D, features per patch.
        unused: names of weights that do not affect the features, such as a head's norm.
    """

    normalize: Any

    def __init__(self, backbone: nn.Module, normalize: nn.Module):
        super().__init__()
        self.normalize = normalize
        self.backbone = backbone
        with torch.enable_grad():
            features = self.eval()(self.example())
            self.unused = freeze_unused(self, features)
        self.train()
        self.num_tokens, self.width = features.shape[1], features.shape[2]

    @property
    def image_size(self) -> int:
        """Height and width in pixels."""
        return int(self.normalize.image_size)

    @property
    def size(self) -> int | PatchBudget:
        """Size of images, for transforms."""
        return self.image_size

    @property
    def fewest_tokens(self) -> int:
        """Smallest number of tokens in a batch."""
        return self.num_tokens

    def mask(self, images: Tensor) -> Tensor | None:
        """Return None: every patch is real; in training with `patch_dropout` ``(B, N)`` bool, those that stay."""
        dropout: PatchDropout | None = getattr(self.backbone, "patch_dropout", None)
        return None if dropout is None else dropout.mask()

    def forward(self, images: Tensor) -> Tensor:
        """``(B, 3, H, W)`` uint8 or 0..1 → patch features ``(B, N, D)``."""
        # Some backbones cannot reshape an empty batch, and all weights need a (zero) gradient.
        if images.shape[0] == 0:
            return self.backbone(self.normalize(images.new_zeros(1, *images.shape[1:])))[:0]
        return self.backbone(self.normalize(images))

    def example(self) -> Tensor:
        """Return a black image ``(1, 3, H, W)``."""
        blank: Tensor = self.normalize.mean.new_zeros(1, 3, self.image_size, self.image_size)
        return blank


class Normalize(nn.Module):
    """Checks pixels and normalises each channel to zero mean and unit deviation.

    Args:
        image_size: height and width that the tower expects, in pixels.
        mean, std: per-channel mean and deviation of pixels in 0..1.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, image_size: int, mean: Sequence[float] = OPENAI_MEAN, std: Sequence[float] = OPENAI_STD):
        super().__init__()
        self.image_size = image_size
        # Constants of the architecture, not weights: not in the state dict.
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(3, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Map ``(B, 3, H, W)``, uint8 in 0..255 or floating point in 0..1, to the dtype of the tower's weights.

        Raises:
            ShapeError: wrong shape or dtype.
        """
        size = self.image_size
        if images.ndim != 4 or tuple(images.shape[1:]) != (3, size, size):
            raise ShapeError(
                f"images: got shape {tuple(images.shape)}, expected (B, 3, {size}, {size}); "
                "tokenizer.preprocess makes such a tensor from a PIL image"
            )
        if images.dtype == torch.uint8:
            # In place on the new tensor: three times as fast.
            return images.to(self.mean.dtype).div_(255).sub_(self.mean).div_(self.std)
        if not images.is_floating_point():
            raise ShapeError(f"images: got dtype {images.dtype}, expected uint8 (0..255) or floating point (0..1)")
        return (images.to(self.mean.dtype) - self.mean) / self.std


class TimmFeatures(nn.Module):
    """A timm model's last feature map as ``(B, N, D)``, without prefix (class, register) tokens.

    Args:
        model: the timm model.
        inner_layers: layers whose maps are averaged to the last one's size and follow it, channel after channel;
            numbers as in timm's ``forward_intermediates``.
        patch_dropout: dropout of patches in the model, whose masks the features need.
    """

    def __init__(self, model: nn.Module, inner_layers: Sequence[int] = (), patch_dropout: PatchDropout | None = None):
        super().__init__()
        self.model, self.inner_layers, self.patch_dropout = model, list(inner_layers), patch_dropout
        self.prefix = int(getattr(model, "num_prefix_tokens", 0))
        self.channels_last = getattr(model, "output_fmt", "NCHW") == "NHWC"

    def forward(self, pixels: Tensor) -> Tensor:
        """Map normalised pixels ``(B, 3, H, W)`` to features ``(B, N, D)``."""
        if not self.inner_layers:
            return self._tokens(self.model.forward_features(pixels))  # type: ignore[operator]
        features, maps = self.model.forward_intermediates(pixels, indices=self.inner_layers)  # type: ignore[operator]
        if features.ndim == 3:  # a transformer, whose maps have one size
            size = maps[0].shape[2:]
        else:
            size = features.shape[1:3] if self.channels_last else features.shape[2:]
        same_size = [F.adaptive_avg_pool2d(each, tuple(size)).flatten(2).transpose(1, 2) for each in maps]
        return torch.cat([self._tokens(features), *same_size], dim=-1)

    def _tokens(self, features: Tensor) -> Tensor:
        if features.ndim == 3:
            features = features[:, self.prefix :]
            return features if self.patch_dropout is None else self.patch_dropout.restore(features)
        return features.flatten(1, 2) if self.channels_last else features.flatten(2).transpose(1, 2)


class TimmConfig(TowerConfig):
    """Common keys of towers that timm makes."""

    random_weights: ClassVar[dict[str, Any]] = {"pretrained": False, "checkpoint": None}
    """Settings to change to build the same network without pretrained weights."""

    name: str
    """Name of the timm model, such as `vit_base_patch16_224` or `convnext_atto`."""
    pretrained: bool = False
    """Load timm's pretrained weights (needs the network or timm's cache)."""
    checkpoint: Path | None = None
    """Local file of pretrained weights (safetensors, or a weights-only PyTorch file)."""
    args: dict[str, Any] = {}
    """Further arguments of the model, such as `patch_size`, `embed_dim`, `depth`, `num_heads`, `depths`, `dims`.
    Arguments that name weights or files are not allowed."""

    @field_validator("args")
    @classmethod
    def _args_are_the_networks(cls, args: dict[str, Any]) -> dict[str, Any]:
        for name in args:
            if name.startswith(_NOT_ARGS):
                raise ValueError(
                    f"got {name!r}, which does not describe the network; expected arguments of the model's class. "
                    "Set the size of images, and weights with `pretrained` or `checkpoint`, beside args: a tower has "
                    "three channels and no classifier or pooling, and is built in fp32"
                )
        return args

    @model_validator(mode="after")
    def _one_source_of_weights(self) -> Self:
        if self.pretrained and self.checkpoint is not None:
            raise ValueError(
                f"got pretrained true and checkpoint {self.checkpoint}, which would replace timm's weights; expected "
                "one of the two"
            )
        return self

    @contextmanager
    def name_errors(self, how: str) -> Iterator[None]:
        """Name the settings in the errors of the making of the tower; ``how`` tells what timm was asked for."""
        import timm

        if not timm.is_model(self.name):
            raise unknown_model_error("tower.name", "timm", self.name, timm.list_models())
        try:
            yield
        except ConfigError:
            raise
        except OSError as error:
            if not self.pretrained:
                raise
            raise ConfigError(
                f"tower.pretrained: the weights of {self.name!r} are not in timm's cache and cannot be downloaded: "
                f"{type(error).__name__}: {error}; download them on a machine with network access (the cache is "
                "that of huggingface_hub), give a local file as tower.checkpoint, or start from random weights "
                "(pretrained: false)"
            ) from error
        except (TypeError, ValueError, AssertionError, RuntimeError, AttributeError, LookupError, ArithmeticError) as e:
            raise ConfigError(
                f"tower.args: timm model {self.name!r} refuses {self.args} {how}"
                f"{' with pretrained weights' if self.pretrained else ''}: {type(e).__name__}: {e}"
            ) from e

    def load_weights(self, model: Any) -> tuple[Sequence[float], Sequence[float]]:
        """Load `checkpoint` into a timm model; return mean and deviation of the pixels that the model expects."""
        defaults: Any = model.pretrained_cfg or {}
        if self.checkpoint is not None:
            classifier = defaults.get("classifier") or ()
            load_checkpoint(model, self.checkpoint, [classifier] if isinstance(classifier, str) else classifier)
        # timm's statistics fit its pretrained weights; without these any will do.
        return defaults.get("mean", OPENAI_MEAN), defaults.get("std", OPENAI_STD)


class TimmTowerConfig(TimmConfig):
    """An image tower made by ``timm.create_model``."""

    random_weights: ClassVar[dict[str, Any]] = TimmConfig.random_weights | {"package": None}
    """Settings to change to build the same network without pretrained weights."""

    kind: Literal["timm"] = "timm"
    image_size: int = Field(ge=8, le=4096)
    """Height and width of the input in pixels."""
    package: Literal["efficientnet-lite0"] | None = None
    """Weights that come as a Python package (extra `small-towers`); `name` may then be left out."""
    patch_dropout: float = Field(0.0, ge=0, lt=1)
    """Share of the patches of a ViT that each training step leaves out, others for each image: they have no features
    and no codes then. Masks are keyed by seed, step and place of the sample. For towers that train as a whole."""
    group_norm: int | None = Field(None, ge=1)
    """Channels per group: replaces the model's `norm_layer` by group normalisation; null keeps it."""
    inner_layers: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Layers whose features, averaged to the size of the last map, follow the last layer's; numbers from 0, as in
    `forward_intermediates` of timm. Frozen towers tell more with them: last layers have lost colour and texture."""
    channels_last: bool = False
    """Use the channels-last memory format: faster for convolutions, no effect on the speed of a ViT."""

    @model_validator(mode="before")
    @classmethod
    def _name_of_package(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("package") is not None:
            return {"name": EFFICIENTNET_NAME} | data
        return data

    @model_validator(mode="after")
    def _keys_fit(self) -> TimmTowerConfig:
        if self.package is not None:
            if self.pretrained or self.checkpoint is not None or self.name != EFFICIENTNET_NAME:
                raise ValueError(
                    f"got package {self.package} with another name or other weights; expected name {EFFICIENTNET_NAME} "
                    "(or none), and neither pretrained nor checkpoint"
                )
            if self.args or self.group_norm is not None:
                raise ValueError(f"got package {self.package} with args or group_norm, which its weights do not fit")
        if self.patch_dropout and self.inner_layers:
            raise ValueError(
                "got patch_dropout with inner_layers, whose maps need every patch; expected one of the two"
            )
        if self.patch_dropout and self.train != "all" and not isinstance(self.train, FromStep):
            raise ValueError(
                f"got patch_dropout {self.patch_dropout:g} for a tower that is frozen in whole or in part; expected "
                "train: all or {from_step: 0}, or patch_dropout: 0"
            )
        return self

    @torch.inference_mode(False)  # weights made in inference mode could neither be probed nor trained
    def build(self) -> ImageTower:
        """Make the tower.

        Raises:
            ConfigError: a name or arguments that timm refuses, trainable batch normalisation, or a checkpoint that
                does not fit.
        """
        inner = f" with inner_layers {[*self.inner_layers]}" if self.inner_layers else ""
        with self.name_errors(f"at image_size {self.image_size}{inner}"):
            model = self._create()
            _require_whole_patches(model, self.image_size)
            mean, std = self.load_weights(model)
            if self.package is not None:
                load_efficientnet(model)
            if self.channels_last:
                model = model.to(memory_format=torch.channels_last)
            dropout = self._add_patch_dropout(model) if self.patch_dropout else None
            features = TimmFeatures(model, self.inner_layers, dropout)
            tower = ImageTower(features, Normalize(self.image_size, mean, std))
        return set_training(tower, self.train)

    def _add_patch_dropout(self, model: Any) -> PatchDropout:
        """Put a `PatchDropout` into a ViT of timm."""
        from timm.models import VisionTransformer

        if not isinstance(model, VisionTransformer) or not isinstance(model.patch_drop, nn.Identity):
            raise ConfigError(
                f"tower.patch_dropout: got {self.patch_dropout:g} for {self.name!r}; expected a VisionTransformer of "
                "timm without patch_drop_rate in args, or 0"
            )
        dropout = PatchDropout(self.patch_dropout, model.patch_embed.num_patches, model.num_prefix_tokens)
        model.add_module("patch_drop", dropout)
        return dropout

    def _create(self) -> Any:
        """Make the timm model, without ``img_size`` if it refuses that: convolutional ones take any size."""
        from timm import create_model

        args = {"pretrained": self.pretrained, "num_classes": 0, "global_pool": "", **self.args}
        if self.group_norm is not None:
            if "norm_layer" in args:
                raise ConfigError("tower.group_norm: got args.norm_layer too; expected one of the two")
            args["norm_layer"] = partial(_group_norm, channels_per_group=self.group_norm)
        try:
            return create_model(self.name, img_size=self.image_size, **args)
        except TypeError as error:
            if "unexpected keyword argument 'img_size'" not in str(error):
                raise
        return create_model(self.name, **args)


def unknown_model_error(key: str, library: str, name: str, known: Sequence[str]) -> ConfigError:
    """Return the error for a model that `library` does not have; `key` is the setting, `known` the valid names."""
    close = get_close_matches(name, known, n=5)
    hint = f"did you mean one of: {', '.join(close)}?" if close else f"{library}.list_models() gives the names"
    return ConfigError(f"{key}: {library} has no model {name!r}; {hint}")


def _require_whole_patches(model: Any, image_size: int) -> None:
    """Check that patches cover the whole image; timm would ignore the last rows and columns."""
    from timm.layers import PatchEmbed

    patches = getattr(model, "patch_embed", None)
    if not isinstance(patches, PatchEmbed) or patches.dynamic_img_pad:
        return
    patch = max(patches.patch_size)
    if any(image_size % side for side in patches.patch_size):
        near = sorted({max(1, image_size // patch) * patch, (image_size // patch + 1) * patch})
        raise ConfigError(
            f"tower.image_size: got {image_size} with patches of {patch} pixels, which would ignore the last "
            f"{image_size % patch} rows and columns; expected a multiple of {patch}, such as "
            f"{' or '.join(map(str, near))}, or another patch_size in args"
        )


def _group_norm(channels: int, channels_per_group: int, **factory: Any) -> nn.GroupNorm:
    """Make group normalisation (Wu & He 2018) with about ``channels_per_group`` channels per group."""
    groups = max(1, channels // channels_per_group)
    if channels % groups:
        raise ConfigError(
            f"tower.group_norm: got {channels_per_group} channels per group, which do not divide a layer of {channels}"
        )
    return nn.GroupNorm(groups, channels, **factory)


class _Convolutions(nn.Module):
    """Strided 3×3 convolutions, each with group normalisation and ReLU: ``(B, 3, H, W) → (B, N, D)``.

    Standardised weights (Qiao et al. 2019; BiT, Kolesnikov et al. 2020) let group normalisation train as fast as batch
    normalisation, whose statistics would tie a sample to the others of its rank.
    """

    def __init__(self, channels: list[int], channels_per_group: int):
        super().__init__()
        from timm.layers import StdConv2d

        self.stages = nn.ModuleList(
            nn.Sequential(
                StdConv2d(before, after, 3, stride=2, padding=1),
                nn.GroupNorm(after // channels_per_group, after),
                nn.ReLU(),
            )
            for before, after in zip([3, *channels], channels, strict=False)
        )

    def forward(self, pixels: Tensor) -> Tensor:
        x = pixels
        for stage in self.stages:
            x = stage(x)
        return x.flatten(2).transpose(1, 2)


class ConvolutionalTowerConfig(TowerConfig):
    """A plain stack of strided convolutions: each stage halves the image, the last one's cells are the tokens."""

    kind: Literal["convolutional"] = "convolutional"
    image_size: int = Field(ge=8, le=4096)
    """Height and width of the input in pixels; a multiple of 2^stages."""
    channels: list[Annotated[int, Field(ge=1, le=MAX_WIDTH)]] = Field([32, 64, 128, 192], min_length=1, max_length=8)
    """Channels of each stage; there are (image_size / 2^stages)² tokens."""
    channels_per_group: int = Field(4, ge=1)
    """Number of channels that are normalised together; must divide every entry of `channels`."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> ConvolutionalTowerConfig:
        if any(width % self.channels_per_group for width in self.channels):
            raise ValueError(
                f"got channels {self.channels} and channels_per_group {self.channels_per_group}; expected channels "
                "that are multiples of channels_per_group"
            )
        cell = 2 ** len(self.channels)
        if self.image_size % cell:
            raise ValueError(
                f"got image_size {self.image_size} and {len(self.channels)} stages in channels; expected an image_size "
                f"that is a multiple of 2^{len(self.channels)}, such as {max(1, round(self.image_size / cell)) * cell}"
            )
        if self.image_size == cell and self.channels_per_group == 1:
            raise ValueError(
                "got channels_per_group 1 with a single token: each group is one number, which is normalised "
                "to 0; expected channels_per_group 2 or more, a larger image_size or fewer stages in channels"
            )
        return self

    @torch.inference_mode(False)
    def build(self) -> ImageTower:
        """Make the tower with random weights (torch's global generator), channels last in memory."""
        network = _Convolutions(self.channels, self.channels_per_group).to(memory_format=torch.channels_last)
        return set_training(ImageTower(network, Normalize(self.image_size)), self.train)
